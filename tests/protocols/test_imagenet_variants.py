"""ImageNet-A, -R, -V2 and -C on a few small images, in the folders of their authors' archives."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.errors import ImagesError, TableError, ValueRangeError
from dubito.metrics import aurc
from dubito.protocols.imagenet_variants import (
    ALEXNET,
    SEVERITIES,
    ImagenetVariants,
    classes_of_variant,
    imagenet_variants,
    open_variant,
    restrict_classes,
)
from dubito.table import Table

QUICK = {"progress": False, "workers": 0}
Folder = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes class folders of random images."""

    def write(name: str, classes: tuple[str, ...], count: int = 2) -> Path:
        draw = np.random.default_rng(len(name))
        for one in classes:
            (tmp_path / name / one).mkdir(parents=True)
            for row in range(count):
                pixels = draw.integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / one / f"{row}.png")
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000)
    )
    return dubito.wrap(layers, transform=dubito.Preprocess((8, 8), 8), name="small")


def test_classes_are_those_of_the_variants():
    # n01440764 (tench) is class 0, n01443537 (goldfish) 1; goldfish is in -R, n01498041 (stingray, 6) in -A.
    assert classes_of_variant("imagenet-r")[0] == 1
    assert classes_of_variant("imagenet-a")[0] == 6
    assert [len(set(classes_of_variant(name))) for name in ("imagenet-a", "imagenet-r", "imagenet-v2")] == [
        200,
        200,
        1000,
    ]


def test_folders_name_the_classes(folder: Folder):
    assert open_variant("imagenet-r", folder("r", ("n01443537", "n01484850"))).labels.tolist() == [1, 1, 2, 2]
    # "10" stands before "9" among names, but is the larger number.
    images = open_variant("imagenet-v2", folder("v2", ("9", "10", "999")))
    assert images.ids == ["10/0.png", "10/1.png", "9/0.png", "9/1.png", "999/0.png", "999/1.png"]
    assert images.labels.tolist() == [10, 10, 9, 9, 999, 999]
    assert open_variant("imagenet-c", folder("fog", ("n01440764",))).labels.tolist() == [0, 0]


def test_logits_of_other_classes_are_left_out():
    table = Table(logit=[[9.0, 1.0, 0.0, 2.0], [9.0, 1.0, 0.0, 0.5]], label=[3, 3])
    part = restrict_classes(table, [1, 3])
    assert part.logit.tolist() == [[1.0, 2.0], [1.0, 0.5]]
    assert part.label.tolist() == [1, 1]
    # Among all classes, 0 wins both times; among the two, class 3 wins once.
    assert (dubito.metrics.table_accuracy(table), dubito.metrics.table_accuracy(part)) == (0, 0.5)


def test_accuracy_and_selective_prediction(folder: Folder, model, tmp_path: Path):
    roots = {"imagenet-a": folder("a", ("n01498041", "n01531178"), 4), "imagenet-v2": folder("v", ("0", "1", "2"))}
    result = imagenet_variants(model, roots, tmp_path / "caches", scores=["entropy", "margin"], **QUICK)
    table = dubito.open(tmp_path / "caches" / "imagenet-a")
    assert table.label.unique().tolist() == [6, 11]
    classes = torch.tensor(classes_of_variant("imagenet-a"))
    part = Table(logit=table.logit[:, classes], label=torch.searchsorted(classes, table.label))
    wrong = part.logit.argmax(1) != part.label
    assert result.accuracy["imagenet-a"].value == pytest.approx(1 - wrong.double().mean().item())
    assert result.scores["imagenet-a"]["entropy"].aurc == aurc(dubito.Entropy().score(part), wrong)
    assert result.scores["imagenet-a"]["entropy"].aurc is not None
    assert result.images == {"imagenet-a": 8, "imagenet-v2": 6}
    assert [line[:2] for line in result.lines()[1:]] == [
        [name, score] for name in ("imagenet-a", "imagenet-v2") for score in ("entropy", "margin")
    ]


def test_corruptions_run_by_severity(folder: Folder, model, tmp_path: Path):
    for level in ("fog/1", "fog/5", "snow/3"):
        folder(f"c/{level}", ("n01440764", "n01443537"))
    result = imagenet_variants(model, {"imagenet-c": tmp_path / "c"}, tmp_path / "caches", **QUICK)
    assert {kind: list(one) for kind, one in result.errors_by_corruption.items()} == {"snow": ["3"], "fog": ["1", "5"]}
    assert result.images == {"imagenet-c": 12}
    fog = dubito.open(tmp_path / "caches" / "imagenet-c-fog-5")
    assert result.errors_by_corruption["fog"]["5"] == 1 - dubito.metrics.table_accuracy(fog)
    assert result.mce is None
    assert result.findings() == ["No mCE: it takes the 15 corruptions at 5 severities each, and 3 folders were run."]


def test_mean_corruption_error_by_hand():
    # As bad as AlexNet everywhere is 100 %; half of its errors at noise by Gaussians: (14 + 1/2) / 15.
    errors = {kind: dict.fromkeys(SEVERITIES, alexnet) for kind, alexnet in ALEXNET.items()}
    assert ImagenetVariants("m", errors_by_corruption=errors).mce == pytest.approx(100)
    # The mean over severities counts: two of five at 0, three at 5/6 of AlexNet's is one half.
    uneven = [0.0, 0.0, *[5 / 6 * ALEXNET["gaussian_noise"]] * 3]
    errors["gaussian_noise"] = dict(zip(SEVERITIES, uneven, strict=True))
    result = ImagenetVariants("m", errors_by_corruption=errors)
    assert result.mce == pytest.approx(100 * 14.5 / 15)
    assert result.facts() == {"mCE": "96.7 %"}
    assert json.loads(result.to_json())["mce"] == result.mce


def test_errors(folder: Folder, model, tmp_path: Path):
    tench = folder("x", ("n01440764",))
    with pytest.raises(
        ImagesError, match=r"imagenet-r: .* must hold one folder for each of its classes, WordNet ids.*'n01440764'"
    ):
        open_variant("imagenet-r", tench)  # a class of ImageNet, but none of the 200
    with pytest.raises(ImagesError, match=r"imagenet-v2: .*'0' to '999'; got 'n01440764'"):
        open_variant("imagenet-v2", tench)
    with pytest.raises(ImagesError, match=r"imagenet-a: .*no' must be an existing folder"):
        open_variant("imagenet-a", tmp_path / "no")
    with pytest.raises(ImagesError, match=r"imagenet-c: .* must hold folders such as gaussian_noise/1"):
        imagenet_variants(model, {"imagenet-c": tench})
    with pytest.raises(ValueRangeError, match=r"variant must be one of imagenet-a.*; got 'imagenet-o'"):
        imagenet_variants(model, {"imagenet-o": tench})
    with pytest.raises(TableError, match="roots must name variants"):
        imagenet_variants(model, {})
    with pytest.raises(TableError, match=r"classes must be different numbers from 0 to 1; got '0', '2'"):
        restrict_classes(Table(logit=[[1.0, 0.0]], label=[0]), [0, 2])
    with pytest.raises(TableError, match=r"labels must be among the 1 classes; row 1 of .* has 1"):
        restrict_classes(Table(logit=[[1.0, 0.0]] * 2, label=[0, 1]), [0])
