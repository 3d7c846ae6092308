"""Labels in another order than the model's classes are told of once; chance, skew and bad models are not."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.cache.order import NO_CLASS, _better_order, _spread, cross_fitted, exchanged, matched
from dubito.errors import LabelOrderWarning

COUNT = 60
NAMES = ("blue", "green", "red")
"""As folders are sorted: the model's outputs are red, green and blue."""


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture
def folder(tmp_path):
    """Twenty pictures of each colour, in class folders."""
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        pixels = rng.integers(0, 100, (8, 8, 3), dtype=np.uint8)
        pixels[..., number % 3] += 100
        path = tmp_path / "photos" / NAMES[2 - number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def brightest(classes=None):
    """Which colour is the brightest: red, green, blue."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))
    nn.init.eye_(net[2].weight)
    return dubito.wrap(net, transform=dubito.Preprocess((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3), classes=classes)


@pytest.mark.parametrize("store_logit", [True, False])
def test_folders_by_place_are_told_of_once(folder, tmp_path, store_logit):
    options = {"probes": [dubito.probes.Forward(store_logit=store_logit)], "shard_size": 16, "workers": 0}
    told = (
        r"labels of '.*photos' seem to be the model's classes in another order: they agree with its answers on 33\.3 % "
        r"of 60 images, and with classes exchanged on 100\.0 % \(label 0 'blue' -> class 2, label 2 'red' -> class "
        r"0\)\. The model does not name its classes, so class names were taken for them in sorted order\. Run "
        r"dubito\.audit\(model, images\) \(dubito audit MODEL IMAGES\), which reports what to repair\.$"
    )
    with pytest.warns(LabelOrderWarning, match=told) as warned:
        table = dubito.extract(brightest(), folder, tmp_path / "cache", **options)
    assert len(warned) == 1
    assert table.label_space == "model"
    dubito.extract(brightest(), folder, tmp_path / "cache", **options)  # warnings are errors here
    options["probes"].append(dubito.probes.Noise(2))
    dubito.extract(brightest(), folder, tmp_path / "cache", **options)


def test_names_and_integers_in_the_right_order_say_nothing(folder, tmp_path):
    dubito.extract(brightest(["red", "green", "blue"]), folder, tmp_path / "named", workers=0)
    right = {path.name: int(path.stem) % 3 for path in folder.rglob("*.png")}
    dubito.extract(brightest(), folder, tmp_path / "numbered", labels=right, workers=0)
    dubito.extract(brightest(), folder, tmp_path / "own", label_space="own", workers=0)


def test_wrong_names_of_the_model_are_told_of_too(folder, tmp_path):
    with pytest.warns(LabelOrderWarning, match="another order") as told:
        dubito.extract(brightest(["green", "red", "blue"]), folder, tmp_path / "cache", workers=0)
    assert "(label 0 'green' -> class 1 'red', label 1 'red' -> class 0 'green'). Run dubito.audit" in str(
        told[0].message
    )


@pytest.mark.parametrize("seed", range(20))
def test_answers_at_random_have_no_better_order(seed):
    rng = torch.Generator().manual_seed(seed)
    predicted, labels = torch.randint(0, 3, (2, 200), generator=rng)
    assert _better_order(predicted, labels) is None


def test_one_answer_for_skewed_labels_is_no_order():
    """Nine tenths are of class 0, and every answer is 1: exchanged, nine tenths would be right by no merit."""
    labels = torch.zeros(100, dtype=torch.long)
    labels[:10] = 1
    assert _better_order(torch.ones(100, dtype=torch.long), labels) is None
    assert _better_order(torch.ones(100, dtype=torch.long), torch.zeros(100, dtype=torch.long)) is None


def test_a_mediocre_model_and_few_images_say_nothing():
    labels = torch.arange(3).repeat(40)
    predicted = torch.where(torch.arange(120) % 5 < 2, (labels + 1) % 3, labels)  # right on three of five
    assert _better_order(predicted, labels) is None
    assert _better_order((labels[:19] + 1) % 3, labels[:19]) is None
    assert _better_order((labels[:21] + 1) % 3, labels[:21]) == (0.0, 1.0)


def test_an_order_is_one_to_one():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    predicted = torch.tensor([1, 1, 1, 1, 1, 2])
    mapping = matched(predicted, labels)
    assert mapping == {0: 1, 2: 2}  # label 1 has the answer 1 too, but label 0 has it oftener
    assert exchanged(labels, mapping).tolist() == [1, 1, 1, NO_CLASS, NO_CLASS, 2]


def test_an_image_is_never_judged_by_an_order_that_it_was_read_from():
    """Two images of label 0 with answers 1 and 2: each is given the other's answer."""
    assert cross_fitted(torch.tensor([1, 2]), torch.tensor([0, 0])).tolist() == [2, 1]


def test_rows_are_of_few_shards_from_the_first_to_the_last():
    assert _spread(10, 4).tolist() == list(range(10))
    rows = _spread(1_000_000, 512)
    assert len(rows) <= 4096
    shards = set((rows // 512).tolist())
    assert len(shards) == 16
    assert {0, 999_999 // 512} <= shards
    assert len(_spread(50_000, 100_000)) <= 4096
