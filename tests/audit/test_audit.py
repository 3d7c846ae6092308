"""The audit as users call it: a healthy set-up without a word, what it says, and that nothing changes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.audit.audit import audit, draw_subset
from dubito.data import ArrayImages, Labelled
from dubito.errors import ModelError, ValueRangeError
from tests.audit.colours import COUNT, HALF, LABELS, NORMALISED, PIXELS, Batched, Colours, look, pictures
from tests.audit.drawn import draw


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def test_a_healthy_set_up_has_no_finding(healthy):
    result = healthy
    assert result.issues == []
    assert result.ok
    assert result.figures["accuracy"] > 0.9
    text = str(result)
    assert text.startswith("colours on 120 of 120 images of ")
    assert f"(accuracy {100 * result.figures['accuracy']:.1f} %): nothing wrong was found.\nLooked for: unread" in text
    for fault in ("train mode", "labels off by one", NORMALISED, "duplicates across the sets", "dead features"):
        assert fault in result.checked
    assert result.unchecked == {}
    assert result.partly == {}


def test_without_labels_it_says_what_it_could_not_look_for():
    result = look(Colours(), labels=None)
    assert result.issues == []
    assert result.figures["accuracy"] is None
    assert result.unchecked["labels off by one"] == "no labels"
    assert result.unchecked["duplicates across the sets"] == "needs a second set: against="
    assert "Not looked for: class names" in str(result)


def test_json_is_plain():
    result = look(Colours(), labels=LABELS + 1)
    again = json.loads(json.dumps(result.to_dict()))
    assert again["ok"] is False
    assert again["issues"][0]["evidence"]["shift"] == -1
    assert again["rows"] == again["of"] == COUNT


def test_a_model_that_cannot_be_understood_for_another_reason_still_says_so():
    with pytest.raises(ModelError, match="differ from those of its last linear layer"):
        look(nn.Sequential(Colours(), nn.Tanh()))


def test_a_sample_is_drawn_by_its_seed():
    images = Labelled(ArrayImages(images=PIXELS), torch.from_numpy(LABELS))
    result = [look(Colours(), images, None, limit=60, seed=seed) for seed in (0, 0, 1)]
    assert [(entry.rows, entry.of) for entry in result] == [(60, COUNT)] * 3
    assert result[0].figures == result[1].figures != result[2].figures


def test_it_says_how_many_images_were_compared():
    result = look(Colours(), against=pictures(50, seed=1)[0], compare=40)
    assert result.issues == []
    within, across = "duplicates within the set", "duplicates across the sets"
    assert result.partly[within] == "40 of 120 images of this set were compared"
    assert result.partly[across] == "40 of 120 images of this set and 40 of 50 images of the other set were compared"
    assert f"{within} (40 of 120 images of this set were compared), {across} (40 of" in str(result)
    assert result.to_dict()["partly"] == result.partly
    result = look(Colours(), against=PIXELS, compare=40)
    assert "among all of them, an estimated 100.0 % are in both" in result.issues[0].what


def test_what_cannot_be_audited():
    with pytest.raises(ModelError, match=r"module must be a torch.nn.Module; got str. For a name, use dubito.load"):
        dubito.wrap.__wrapped__("timm:resnet50")  # past the type checks of the tests
    with pytest.raises(ModelError, match=r"wrapped without a transform.*Pass transform=... to dubito.wrap"):
        audit(Colours(), PIXELS, workers=0)
    with pytest.raises(ValueRangeError, match="limit must be a whole number, at least 1; got 0"):
        look(Colours(), limit=0)
    for name, value, least in (("seed", -1, 0), ("batch_size", 0, 1), ("workers", -1, 0)):
        with pytest.raises(
            ValueRangeError, match=f"audit: {name} must be a whole number, at least {least}; got {value}"
        ):
            audit(Colours(), PIXELS, **{name: value})


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
    assert one.to_dict() == two.to_dict()


def test_a_smaller_draw_is_part_of_a_larger_one():
    images = ArrayImages(inputs=draw(50, 4))
    subset, many = (draw_subset(images, limit, 3).ids for limit in (10, 30))
    assert set(subset) < set(many)
    assert subset == sorted(subset)
    assert list(draw_subset(images, 100, 3).ids) == list(images.ids)
