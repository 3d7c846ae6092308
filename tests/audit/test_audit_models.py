"""The audit of models and transforms: each fault planted, each found with its evidence."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dubito
from dubito.audit.audit import audit
from dubito.audit.transforms import OWN, SIZE, Alternative, TransformedPredictions, check_transform
from tests.audit.colours import HALF, LABELS, NORMALISED, PIXELS, Batched, Colours, look, only, pictures


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.mark.parametrize(
    "value",
    [
        dubito.Preprocess((8, 8)),
        dubito.Preprocess((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3),
        dubito.Preprocess((8, 8), mean=(0.0,) * 3, std=(1 / 255,) * 3),
        lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255,
    ],
    ids=["imagenet", "0..1", "0..255", "a function to 0..1"],
)
def test_wrong_normalisation(value, healthy):
    result = look(Colours(), transform=value)
    # Both are right here: 127 / 255 is nearly one half.
    best = next(finding for finding in result.issues if finding.check == NORMALISED)
    assert best.severity == "wrong"
    assert best.evidence["better"] in ("mean 0.5 and std 0.5", "(x - 127) / 128")
    assert best.evidence["accuracy_then"] == pytest.approx(healthy.figures["accuracy"], abs=0.02)
    assert best.evidence["accuracy"] == result.figures["accuracy"] < best.evidence["accuracy_then"] - 0.04
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


class Fine(Colours):
    """Reads the difference of neighbouring pixels, as texture: images that are resized have lost it."""

    def forward(self, x: Tensor) -> Tensor:
        texture = (x[..., 1:] - x[..., :-1]).abs().mean((2, 3))
        return self.fc((texture - 1) / 2)


def textured(n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 12, 12, 3) in columns around grey, of strong contrast in those colours that the class has."""
    labels = np.random.default_rng(0).integers(0, 8, n)
    bits = np.stack([labels >> 2 & 1, labels >> 1 & 1, labels & 1], -1)
    stripes = np.where(np.arange(12) % 2 == 0, 1, -1)[None, None, :, None]
    noise = np.random.default_rng(1).integers(-5, 6, (n, 12, 12, 3))
    return (128 + stripes * np.where(bits, 100, 20)[:, None, None] + noise).astype(np.uint8), labels


def test_an_input_size_that_is_not_that_of_the_images():
    images, labels = textured()
    shrunk = dubito.Preprocess(8, 8, mean=(0.5,) * 3, std=(0.5,) * 3)
    result = look(Fine(), images, labels, shrunk)
    finding = next(one for one in result.issues if one.check == "wrong input size")
    assert finding.severity == "wrong"
    assert finding.evidence["better"] == "inputs of 12x12, the size of the images,"
    assert finding.evidence["accuracy_then"] == 1
    assert "transform=dubito.Preprocess(..., size=(12, 12), resize=12)" in finding.repair
    right = look(Fine(), images, labels, dubito.Preprocess(12, mean=(0.5,) * 3, std=(0.5,) * 3))
    assert "wrong input size" in right.checked
    assert right.figures["accuracy"] == 1
    assert [one.check for one in right.issues] == ["duplicates within the set"]


def test_an_input_size_that_is_better_by_a_few_points_is_only_suspicious():
    def at(alternative: Alternative, correct: int) -> TransformedPredictions:
        result = TransformedPredictions(alternative)
        predicted = (torch.arange(400) >= correct).long()
        result.add(torch.ones(400, 1), F.one_hot(predicted, 2).float(), torch.ones(400, dtype=torch.bool))
        return result

    own, sized = Alternative(OWN, ""), Alternative("inputs of 12x12", "Load it so.", check=SIZE)
    truth = torch.zeros(400, dtype=torch.long)
    (few,) = check_transform([at(own, 300), at(sized, 320)], truth)  # 75 and 80 %
    (many,) = check_transform([at(own, 300), at(sized, 340)], truth)  # 75 and 85 %
    assert [(one.check, one.severity) for one in (few, many)] == [(SIZE, "suspicious"), (SIZE, "wrong")]


def test_an_input_size_that_cannot_be_compared():
    images, labels = textured()
    several = [*images, images[0][:, :10]]
    result = look(Colours(), several, [*labels, 0])
    assert result.unchecked["wrong input size"] == "images differ in size"
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(192, 3), nn.Linear(3, 8))
    assert "does not run at the images' own size" in look(fixed, images, labels).unchecked["wrong input size"]
    large = np.zeros((3, 40, 40, 3), np.uint8)
    assert look(Colours(), large, [0, 1, 2]).unchecked["wrong input size"] == "images are far larger than inputs"


def test_ready_inputs_that_look_like_pixels():
    ready = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
    finding = next(entry for entry in look(Colours(), images=ready).issues if entry.check == NORMALISED)
    assert finding.evidence["better"] in ("mean 0.5 and std 0.5", "(x - 127) / 128")
    result = look(Colours(), images=2 * ready - 1)
    assert result.issues == []
    assert result.unchecked["other normalisations"] == "the scale of the inputs is not known"


def test_train_mode_is_measured_and_nothing_changes():
    module = Colours(middle=Batched()).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    result = look(module, eval=False)
    finding = only(result)
    assert (finding.check, finding.severity) == ("train mode", "wrong")
    assert finding.evidence["names"] == ["middle.norm", "middle.drop"]
    assert finding.evidence["change_from_eval"] > 0.1
    assert finding.evidence["change_between_passes"] > 0.1
    assert "2 layers (middle.norm, middle.drop) that behave differently there" in finding.what
    assert "module.eval()" in finding.repair
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_train_mode_without_layers_that_mind_is_no_fault():
    assert look(Colours().train(), eval=False).issues == []


def test_one_layer_left_in_train_mode():
    module = Colours(middle=Batched()).eval()
    module.middle.drop.train()
    assert only(look(module, eval=False)).evidence["names"] == ["middle.drop"]


class AlwaysDropped(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return F.dropout(z, 0.2)


def test_dropout_that_is_always_on():
    finding = look(Colours(middle=AlwaysDropped()), labels=None).issues[0]
    assert (finding.check, finding.severity) == ("predictions that change by themselves", "wrong")
    assert "training=self.training" in finding.repair


def test_batch_norm_without_running_statistics():
    module = Colours(middle=nn.BatchNorm1d(3, track_running_stats=False))
    finding = next(entry for entry in look(module).issues if entry.check == "predictions that change by themselves")
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
    assert audit(repaired, PIXELS, labels=LABELS, workers=0, progress=False).issues == []


def test_saturated_softmax():
    finding = only(look(Colours(sharpness=400)))
    assert (finding.check, finding.severity) == ("saturated softmax", "wrong")
    assert finding.evidence["exactly_one"] > 0.5
    assert "exactly 1 in float32" in finding.what
    assert "dubito.scores.ScaledEntropy, Energy, MaxLogit" in finding.repair


def test_a_softmax_that_is_saturated_in_float32_alone_is_not_wrong():
    result = look(Colours(sharpness=60))
    finding = only(result)
    assert (finding.check, finding.severity) == ("saturated softmax", "suspicious")
    assert finding.evidence["exactly_one"] > 0.05
    assert finding.evidence["exactly_one_in_float64"] < 0.05
    assert result.ok


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
    finding = only(look(Padded(dead), *pictures(200)))
    assert (finding.check, finding.severity) == ("dead features", severity)
    assert finding.evidence == {
        "constant": dead + 1,
        "zero": dead,
        "features": 4 + dead,
        "share": (dead + 1) / (4 + dead),
        "columns": list(range(3, 4 + dead)),
    }


def test_one_class_for_all():
    module = Colours()
    with torch.no_grad():
        module.fc.bias[5] = 100
    result = look(module)
    finding = next(entry for entry in result.issues if entry.check == "one class for all")
    assert finding.severity == "wrong"
    assert (
        finding.what
        == "All 120 images are classified as class 5, although 101 have another label than the most common one."
    )
    one = LABELS == 5
    assert "one class for all" not in [f.check for f in look(Colours(), PIXELS[one], LABELS[one]).issues]


@pytest.mark.parametrize(
    ("rare", "severity"), [(1, None), (6, None), (7, "suspicious"), (20, "suspicious"), (21, "wrong")]
)
def test_a_rare_class_that_is_never_predicted_is_not_called_wrong(rare, severity):
    """200 pictures of class 5, some of them labelled otherwise, and a model that never says so."""
    pixels, labels = pictures(4000)
    pixels, labels = pixels[labels == 5][:200], labels[labels == 5][:200]
    labels[:rare] = 2
    module = Colours()
    with torch.no_grad():
        module.fc.bias[5] = 1
    result = look(module, pixels, labels)
    assert [entry.severity for entry in result.issues] == ([] if severity is None else [severity])
    if severity is None:
        reason = f"too few images have another label than the most common one: {rare} of 200"
        assert result.unchecked["one class for all"] == reason
    else:
        what = f"All 200 images are classified as class 5, although {rare} have another label than the most common one."
        assert result.issues[0].what == what
        assert ("are rare in the training data too" in result.issues[0].repair) == (severity == "suspicious")


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
    assert "They are already in 2 weight tensors: fc.weight, fc.bias." in finding.what
