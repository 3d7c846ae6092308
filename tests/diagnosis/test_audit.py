"""The audit as users call it: each fault planted on a small classifier of colours, and a healthy one without a word."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import dubito
from dubito.data import ArrayImages, Labelled
from dubito.diagnosis.audit import Audit, _classifier, audit
from dubito.errors import ModelError, ValueRangeError

HALF = dubito.Preprocess((8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
NORMALISED = "wrong normalisation or channel order"
COUNT = 120


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


class Colours(nn.Module):
    """Eight classes, whether red, green and blue are above one half: 4 r + 2 g + b. Inputs (v - 0.5) / 0.5."""

    def __init__(self, sharpness: float = 6.0, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.middle = middle or nn.Identity()
        self.fc = nn.Linear(3, 8)
        bits = torch.tensor([[k >> 2 & 1, k >> 1 & 1, k & 1] for k in range(8)])
        with torch.no_grad():
            self.fc.weight.copy_(sharpness * (2.0 * bits - 1))
            self.fc.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.middle(x.mean((2, 3))))


def pictures(n: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 8, 8, 3) around 0.4 or 0.6 in each colour, with much noise from pixel to pixel; and the classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, n)
    bits = np.stack([labels >> 2 & 1, labels >> 1 & 1, labels & 1], -1)
    colour = 0.4 + 0.2 * bits + 0.04 * rng.standard_normal((n, 3))
    pixels = colour[:, None, None] + 0.15 * rng.uniform(-1, 1, (n, 8, 8, 3))
    return (255 * pixels.clip(0, 1)).round().astype(np.uint8), labels


PIXELS, LABELS = pictures()


def look(module: nn.Module, images=PIXELS, labels=LABELS, transform=HALF, **options) -> Audit:
    model = dubito.wrap(module.eval() if options.pop("eval", True) else module, transform=transform, name="colours")
    return audit(model, images, labels=labels, workers=0, progress=False, **options)


def only(found: Audit):
    """The one finding."""
    assert len(found.findings) == 1, str(found)
    return found.findings[0]


@pytest.fixture(scope="module")
def healthy() -> Audit:
    return look(Colours(), against=pictures(50, seed=1)[0])


def test_a_healthy_set_up_has_no_finding(healthy):
    found = healthy
    assert found.findings == []
    assert found.ok
    assert found.figures["accuracy"] > 0.9
    text = str(found)
    assert text.startswith("colours on 120 of 120 images of ")
    assert f"(accuracy {100 * found.figures['accuracy']:.1f} %): nothing wrong was found. Looked for: unread" in text
    for fault in ("train mode", "labels off by one", NORMALISED, "duplicates across the sets", "dead features"):
        assert fault in found.checked
    assert found.unchecked == {}


def test_without_labels_it_says_what_it_could_not_look_for():
    found = look(Colours(), labels=None)
    assert found.findings == []
    assert found.figures["accuracy"] is None
    assert found.unchecked["labels off by one"] == "no labels came"
    assert found.unchecked["duplicates across the sets"] == "no second set came; give against="
    assert "Not looked for: class names" in str(found)


def test_json_is_plain():
    found = look(Colours(), labels=LABELS + 1)
    again = json.loads(json.dumps(found.to_json()))
    assert again["ok"] is False
    assert again["findings"][0]["evidence"]["shift"] == -1
    assert again["rows"] == again["of"] == COUNT


@pytest.mark.parametrize(
    "given",
    [
        dubito.Preprocess((8, 8)),
        dubito.Preprocess((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3),
        dubito.Preprocess((8, 8), mean=(0.0,) * 3, std=(1 / 255,) * 3),
        lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
    ],
    ids=["imagenet", "0..1", "0..255", "a function to 0..1"],
)
def test_wrong_normalisation(given, healthy):
    found = look(Colours(), transform=given)
    # Both are right here: 127 / 255 is nearly one half.
    best = next(finding for finding in found.findings if finding.check == NORMALISED)
    assert best.severity == "wrong"
    assert best.evidence["better"] in ("mean 0.5 and std 0.5", "(x - 127) / 128")
    assert best.evidence["accuracy_then"] == pytest.approx(healthy.figures["accuracy"], abs=0.02)
    assert best.evidence["accuracy"] == found.figures["accuracy"] < best.evidence["accuracy_then"] - 0.04
    assert "accuracy is 9" in best.what
    assert "McNemar's exact test, p < 1e-" in best.what
    assert "transform=dubito.Preprocess(..., mean=(0." in best.repair
    assert set(best.evidence["alternatives"]) >= {"its own transform", "its own, red and blue swapped"}


def test_channel_order():
    finding = only(
        look(Colours(), transform=dubito.Preprocess((8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, channels="BGR"))
    )
    assert finding.check == NORMALISED
    assert finding.evidence["better"] == "its own, red and blue swapped"
    assert 'channels="RGB" in dubito.Preprocess' in finding.repair


def test_ready_inputs_that_look_like_pixels():
    ready = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
    finding = next(entry for entry in look(Colours(), images=ready).findings if entry.check == NORMALISED)
    assert finding.evidence["better"] in ("mean 0.5 and std 0.5", "(x - 127) / 128")
    found = look(Colours(), images=2 * ready - 1)
    assert found.findings == []
    assert found.unchecked["other normalisations"] == "the scale of the inputs is not known"


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, z: Tensor) -> Tensor:
        return self.drop(self.norm(z))


def test_train_mode_is_measured_and_nothing_changes():
    module = Colours(middle=Batched()).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    found = look(module, eval=False)
    finding = only(found)
    assert (finding.check, finding.severity) == ("train mode", "wrong")
    assert finding.evidence["names"] == ["middle.norm", "middle.drop"]
    assert finding.evidence["change_from_eval"] > 0.1
    assert finding.evidence["change_between_passes"] > 0.1
    assert "2 layers (middle.norm, middle.drop) that behave otherwise there" in finding.what
    assert "module.eval()" in finding.repair
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_train_mode_without_layers_that_mind_is_no_fault():
    assert look(Colours().train(), eval=False).findings == []


def test_one_layer_left_in_train_mode():
    module = Colours(middle=Batched()).eval()
    module.middle.drop.train()
    assert only(look(module, eval=False)).evidence["names"] == ["middle.drop"]


class AlwaysDropped(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.2)


def test_dropout_that_is_always_on():
    finding = look(Colours(middle=AlwaysDropped()), labels=None).findings[0]
    assert (finding.check, finding.severity) == ("answers that change by themselves", "wrong")
    assert "training=self.training" in finding.repair


def test_batch_norm_without_running_statistics():
    module = Colours(middle=nn.BatchNorm1d(3, track_running_stats=False))
    finding = next(entry for entry in look(module).findings if entry.check == "answers that change by themselves")
    assert "depend on the others in its batch" in finding.what
    assert finding.evidence["change_between_passes"] == 0


@pytest.mark.parametrize(
    ("last", "form"), [(nn.Softmax(-1), "probabilities"), (nn.LogSoftmax(-1), "log_probabilities")]
)
def test_outputs_that_are_no_logits(last, form):
    finding = only(look(nn.Sequential(Colours(), last)))
    assert (finding.check, finding.severity) == ("probabilities in place of logits", "wrong")
    assert finding.evidence["form"] == form
    assert f'output="{form}"' in finding.repair
    repaired = dubito.wrap(nn.Sequential(Colours(), last).eval(), transform=HALF, output=form)
    assert audit(repaired, PIXELS, labels=LABELS, workers=0, progress=False).findings == []


def test_a_model_that_cannot_be_understood_for_another_reason_still_says_so():
    with pytest.raises(ModelError, match="differ from those of its last linear layer"):
        look(nn.Sequential(Colours(), nn.Tanh()))


def test_saturated_softmax():
    finding = only(look(Colours(sharpness=400)))
    assert (finding.check, finding.severity) == ("saturated softmax", "wrong")
    assert finding.evidence["exactly_one"] > 0.5
    assert "exactly 1 in float32" in finding.what
    assert "dubito.Cool, Energy, MaxLogit" in finding.repair


class Padded(nn.Module):
    """Three living features among `dead` zeros and one constant."""

    def __init__(self, dead: int) -> None:
        super().__init__()
        self.colours, self.fc = Colours(), nn.Linear(4 + dead, 8)
        with torch.no_grad():
            self.fc.weight[:, :3] = self.colours.fc.weight
            self.fc.bias.zero_()
            self.fc.weight[:, 3:] = 1

    def forward(self, x: Tensor) -> Tensor:
        z = x.mean((2, 3))
        rest = torch.zeros(len(z), self.fc.in_features - 3, dtype=z.dtype)
        rest[:, 0] = 7
        return self.fc(torch.cat([z, rest], 1))


@pytest.mark.parametrize(("dead", "severity"), [(1, "suspicious"), (5, "wrong")])
def test_dead_features(dead, severity):
    finding = only(look(Padded(dead)))
    assert (finding.check, finding.severity) == ("dead features", severity if dead > 1 else finding.severity)
    assert finding.evidence == {
        "constant": dead + 1,
        "zero": dead,
        "features": 4 + dead,
        "share": (dead + 1) / (4 + dead),
        "columns": list(range(3, 4 + dead)),
    }
    assert finding.severity == severity


@pytest.mark.parametrize("by", [1, 2])
def test_labels_that_do_not_count_from_zero(by, healthy):
    finding = only(look(Colours(), labels=LABELS + by))
    assert finding.check == "labels off by one"
    assert finding.evidence["shift"] == -by
    assert finding.evidence["accuracy_then"] == pytest.approx(healthy.figures["accuracy"])
    assert f"every label minus {by}" in finding.repair
    assert ("Labels seem to count from one" in finding.what) == (by == 1)


def test_labels_of_one_class_fewer_for_a_model_with_a_background_class():
    module = Colours()
    head = nn.Linear(3, 9)
    with torch.no_grad():
        head.weight.copy_(torch.cat([torch.zeros(1, 3), module.fc.weight]))
        head.bias.copy_(torch.tensor([-9.0, *module.fc.bias.tolist()]))
    module.fc = head
    finding = only(look(module))
    assert finding.evidence["shift"] == 1
    assert "The model has 9 outputs; its class 0 may be a background class." in finding.what


def test_classes_in_another_order():
    order = torch.tensor([3, 1, 0, 2, 4, 7, 6, 5])
    finding = only(look(Colours(), labels=order[torch.from_numpy(LABELS)]))
    assert finding.check == "classes in another order"
    assert finding.evidence["order"] == {"0": 2, "2": 3, "3": 0, "5": 7, "7": 5}
    assert "Label -> class: 0 -> 2, 2 -> 3" in finding.what


def test_folders_sorted_as_text(tmp_path):
    """Twelve folders "0" .. "11" are sorted 0, 1, 10, 11, 2 ...: labels are places in that order."""
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        folder = tmp_path / str(label + 4)
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    module, head = Colours(), nn.Linear(3, 12)
    with torch.no_grad():
        head.weight.copy_(torch.cat([torch.zeros(4, 3), module.fc.weight]))
        head.bias.copy_(torch.tensor([-9.0] * 4 + [0.0] * 8))
    module.fc = head
    finding = only(look(module, images=tmp_path, labels=None, label_space="model"))
    assert finding.check == "classes in another order"
    assert "class folders are sorted as text (10 before 2)" in finding.what
    assert finding.evidence["folder_numbers"]


def test_answers_that_have_nothing_to_do_with_the_labels():
    mixed = np.random.default_rng(3).permutation(LABELS)
    finding = only(look(Colours(), labels=mixed))
    assert (finding.check, finding.severity) == ("accuracy at chance", "wrong")
    assert finding.evidence["by_chance"] == pytest.approx(1 / 8, abs=0.02)


def test_one_answer_for_all():
    module = Colours()
    with torch.no_grad():
        module.fc.bias[5] = 100
    found = look(module)
    finding = next(entry for entry in found.findings if entry.check == "one answer for all")
    assert finding.severity == "wrong"
    assert finding.what == "All 120 images are put into class 5."
    one = LABELS == 5
    assert "one answer for all" not in [f.check for f in look(Colours(), PIXELS[one], LABELS[one]).findings]


def test_nan_names_its_images():
    """Also where the very first image is the bad one, before the model has been understood."""
    ready = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 127.5 - 1
    ready[0] = float("nan")
    ready[7, 0, 3, 3] = float("inf")
    finding = only(look(Colours(), images=ready))
    assert (finding.check, finding.severity) == ("NaN and infinity", "wrong")
    assert finding.evidence["ids"] == ["000000", "000007"]


def test_nan_weights_end_the_audit_early():
    module = Colours()
    with torch.no_grad():
        module.fc.weight[0, 0] = float("nan")
        module.fc.bias[:] = float("nan")
    finding = only(look(module))
    assert finding.evidence["weights"] == ["fc.weight", "fc.bias"]
    assert "It is in 2 weight tensors already: fc.weight, fc.bias." in finding.what


def test_duplicates_within_and_across():
    twice = np.concatenate([PIXELS, PIXELS[:6]])
    found = look(Colours(), twice, np.concatenate([LABELS, (LABELS[:6] + 1) % 8]))
    finding = only(found)
    assert (finding.check, finding.severity) == ("duplicates within the set", "suspicious")
    assert finding.evidence["exact"] == 6
    assert finding.evidence["different_labels"] == 6
    assert finding.evidence["pairs"]["exact"][0] == ["000000", "000120"]
    assert "6 (6 exact) of 126 images have a twin" in finding.what
    other = np.concatenate([pictures(30, seed=5)[0], PIXELS[10:14]])
    finding = only(look(Colours(), against=other))
    assert (finding.check, finding.severity) == ("duplicates across the sets", "wrong")
    assert finding.evidence["pairs"] == {"exact": [[f"{10 + i:06}", f"{30 + i:06}"] for i in range(4)]}
    assert finding.evidence["compared_with"] == 34


def test_near_duplicates_are_found_after_jpeg_and_resizing(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(12):
        picture = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((64, 64))
        (tmp_path / "one").mkdir(exist_ok=True)
        picture.save(tmp_path / "one" / f"{number}.png")
        if number == 4:
            (tmp_path / "other").mkdir()
            picture.resize((48, 48)).save(tmp_path / "other" / "copy.jpg", quality=80)
    transform = dubito.Preprocess((8, 8), 8, mean=(0.5,) * 3, std=(0.5,) * 3)
    found = look(Colours(), tmp_path / "one", None, transform, against=tmp_path / "other")
    assert found.findings[0].evidence["pairs"] == {"near": [["4.png", "copy.jpg"]]}


def test_images_that_cannot_be_read_are_counted_and_left_out(tmp_path):
    for number, pixels in enumerate(PIXELS[:40]):
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
    (tmp_path / "05.png").write_bytes(b"no picture")
    finding = only(look(Colours(), tmp_path, {f"{i:02}.png": int(label) for i, label in enumerate(LABELS[:40])}))
    assert (finding.check, finding.severity) == ("unreadable images", "suspicious")
    assert finding.evidence == {"unreadable": 1, "images": 40, "ids": ["05.png"]}
    for path in tmp_path.iterdir():
        path.write_bytes(b"no picture")
    found = look(Colours(), tmp_path, None)
    assert only(found).evidence["unreadable"] == 40
    assert not found.ok


def test_class_names_that_the_model_does_not_know(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.fromarray(PIXELS[number + 3 * (name == "dog")]).save(tmp_path / name / f"{number}.png")
    model = dubito.wrap(Colours().eval(), transform=HALF, classes=[f"colour {k}" for k in range(8)])
    finding = only(audit(model, tmp_path, workers=0, progress=False))
    assert finding.severity == "suspicious"
    assert finding.what == "None of the 2 class names (cat, dog) is one of the model's 8 classes."
    assert audit(model, tmp_path, label_space="own", workers=0, progress=False).findings == []
    nameless = only(look(Colours(), tmp_path, None))
    assert nameless.severity == "wrong"
    assert "2 class names came for a model of 8 classes" in nameless.what


def test_a_sample_is_drawn_by_its_seed():
    images = Labelled(ArrayImages(images=PIXELS), torch.from_numpy(LABELS))
    found = [look(Colours(), images, None, limit=60, seed=seed) for seed in (0, 0, 1)]
    assert [(entry.rows, entry.of) for entry in found] == [(60, COUNT)] * 3
    assert found[0].figures == found[1].figures != found[2].figures


def test_what_cannot_be_audited():
    with pytest.raises(
        ModelError, match=r"dubito.wrap, or be a torch.nn.Module; str came. For a name, use dubito.load"
    ):
        _classifier("timm:resnet50")  # under test, audit itself is guarded by its annotations
    with pytest.raises(ModelError, match=r"wrapped without a transform.*Pass transform=... to dubito.wrap"):
        audit(Colours(), PIXELS, workers=0)
    with pytest.raises(ValueRangeError, match="limit must be at least 1; 0 came"):
        look(Colours(), limit=0)


def test_the_module_is_left_alone_by_every_check():
    module = Colours(middle=Batched())
    module.middle.norm.train()
    before = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    look(module, labels=LABELS + 1, against=PIXELS, eval=False)
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_worker_processes_give_the_same(tmp_path: Path):
    for number, pixels in enumerate(PIXELS[:24]):
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
    model = dubito.wrap(Colours().eval(), transform=HALF, name="colours")
    one, two = (audit(model, tmp_path, workers=count, progress=False) for count in (0, 2))
    assert one.to_json() == two.to_json()
