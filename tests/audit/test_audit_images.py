"""The audit of images and labels: each fault planted, each found with its evidence."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.audit.audit import audit
from tests.audit.colours import HALF, LABELS, NORMALISED, PIXELS, Colours, look, only, pictures


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.mark.parametrize("by", [1, 2])
def test_labels_that_do_not_count_from_zero(by, healthy):
    finding = only(look(Colours(), labels=LABELS + by))
    assert finding.check == "labels off by one"
    assert finding.evidence["shift"] == -by
    assert finding.evidence["accuracy_then"] == pytest.approx(healthy.figures["accuracy"])
    assert f"Subtract {by} from every label" in finding.repair
    assert ("Labels seem to start at one" in finding.what) == (by == 1)


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


def test_predictions_that_have_nothing_to_do_with_the_labels():
    mixed = np.random.default_rng(3).permutation(LABELS)
    finding = only(look(Colours(), labels=mixed))
    assert (finding.check, finding.severity) == ("accuracy at chance", "wrong")
    assert finding.evidence["by_chance"] == pytest.approx(1 / 8, abs=0.02)


def test_duplicates_within_and_across():
    twice = np.concatenate([PIXELS, PIXELS[:6]])
    result = look(Colours(), twice, np.concatenate([LABELS, (LABELS[:6] + 1) % 8]))
    finding = only(result)
    assert (finding.check, finding.severity) == ("duplicates within the set", "suspicious")
    assert finding.evidence["exact"] == 6
    assert finding.evidence["different_labels"] == 6
    assert finding.evidence["pairs"]["exact"][0] == ["000000", "000120"]
    assert "6 (6 exact, 0 near) of 126 images have a duplicate" in finding.what
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
    result = look(Colours(), tmp_path / "one", None, transform, against=tmp_path / "other")
    assert result.issues[0].evidence["pairs"] == {"near": [["4.png", "copy.jpg"]]}


def test_images_that_cannot_be_read_are_counted_and_left_out(tmp_path):
    for number, pixels in enumerate(PIXELS[:40]):
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
    (tmp_path / "05.png").write_bytes(b"no image")
    finding = only(look(Colours(), tmp_path, {f"{i:02}.png": int(label) for i, label in enumerate(LABELS[:40])}))
    assert (finding.check, finding.severity) == ("unreadable images", "suspicious")
    assert finding.evidence == {"unreadable": 1, "images": 40, "ids": ["05.png"]}
    for path in tmp_path.iterdir():
        path.write_bytes(b"no image")
    result = look(Colours(), tmp_path, None)
    assert only(result).evidence["unreadable"] == 40
    assert not result.ok


def test_class_names_that_the_model_does_not_know(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.fromarray(PIXELS[number + 3 * (name == "dog")]).save(tmp_path / name / f"{number}.png")
    model = dubito.wrap(Colours().eval(), transform=HALF, classes=[f"colour {k}" for k in range(8)])
    finding = only(audit(model, tmp_path, workers=0, progress=False))
    assert finding.severity == "suspicious"
    assert finding.what == "None of the 2 class names (cat, dog) is one of the model's 8 classes."
    assert audit(model, tmp_path, label_space="own", workers=0, progress=False).issues == []
    nameless = only(look(Colours(), tmp_path, None))
    assert nameless.severity == "wrong"
    assert "got 2 class names for a model of 8 classes" in nameless.what


def test_classes_in_a_circle_are_reported_in_the_original_labels():
    """Plus three is right for five labels of eight, and a wrong transform is right now and then: neither is advised."""
    finding = only(look(Colours(), labels=(LABELS + 5) % 8))
    assert finding.check == "classes in another order"
    assert finding.evidence["order"] == {str(label): (label + 3) % 8 for label in range(8)}
    assert finding.what.startswith(
        "Labels and model seem to order their classes differently (8 differ): accuracy on images"
    )


def test_names_in_another_order_than_the_outputs():
    names = [f"colour {k}" for k in range(8)]
    model = dubito.wrap(Colours().eval(), transform=HALF, classes=names)
    finding = only(audit(model, PIXELS, labels=[names[(k + 7) % 8] for k in LABELS], workers=0, progress=False))
    assert "0 (colour 0) -> 1 (colour 1)" in finding.what
    assert finding.repair.endswith(
        "put the names in dubito.wrap(..., classes=[...]) into the order of the model's outputs."
    )


def test_swapped_colours_go_before_the_order_that_they_look_like():
    """Red and blue exchange the classes 4 r + 2 g + b one to one: an order would be as right as the transform."""
    finding = only(look(Colours(), PIXELS[..., ::-1].copy()))
    assert finding.check == NORMALISED
