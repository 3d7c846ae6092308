"""Labels added to a finished cache: without the model, with the bytes of an extraction that had them from the start."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.cache import label_cache
from dubito.cli import main
from dubito.errors import ImagesError
from tests.cache.conftest import contents

NAMES = ["cat", "dog", "owl"]


def wrapped(classes=NAMES):
    torch.manual_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    return dubito.wrap(net, transform=dubito.Preprocess((8, 8), 8), name="tiny", classes=classes)


@pytest.fixture
def photos(tmp_path):
    """Nine images, one of them broken."""
    chance = np.random.default_rng(0)
    for number in range(9):
        path = tmp_path / "photos" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
    path.with_name("4.png").write_bytes(b"")
    return path.parent


@pytest.fixture
def labels(tmp_path):
    """A file of labels, as mapping, too."""
    by_name = {f"{number}.png": NAMES[number * 5 % 3] for number in range(9)}
    lines = ["file,label", *(f"{name},{label}" for name, label in by_name.items())]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    return by_name


@pytest.mark.filterwarnings("ignore::dubito.errors.SkippedImagesWarning")
@pytest.mark.parametrize("kind", ["csv", "dict", "list", "pandas", "polars", "command"])
def test_the_bytes_are_those_of_an_extraction_with_labels(photos, labels, tmp_path, capsys, kind):
    options = {"workers": 0, "shard_size": 4, "batch_size": 3}
    dubito.extract(wrapped(), photos, tmp_path / "expected", labels=labels, **options)
    dubito.extract(wrapped(), photos, tmp_path / "cache", **options)
    assert contents(tmp_path / "cache") != contents(tmp_path / "expected")
    if kind == "command":
        assert main(["label", str(tmp_path / "cache"), str(tmp_path / "labels.csv"), "--json"]) == 0
        table = dubito.open(tmp_path / "cache")
        right = (table.logit.argmax(1) == table.label).double().mean()
        assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(float(right))
    else:
        frame = {"image": list(labels), "label": list(labels.values())}
        added = {
            "csv": lambda: tmp_path / "labels.csv",
            "dict": lambda: labels,
            "list": lambda: list(labels.values()),
            "pandas": lambda: pytest.importorskip("pandas").DataFrame(frame),
            "polars": lambda: pytest.importorskip("polars").DataFrame(frame),
        }[kind]()
        table = label_cache(tmp_path / "cache", added)
        assert [NAMES[label] for label in table.label] == [labels[name] for name in table.id]
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


@pytest.mark.filterwarnings("ignore::dubito.errors.SkippedImagesWarning")
@pytest.mark.parametrize("kind", ["mapping", "sequence"])
def test_images_that_could_not_be_decoded_need_no_label(photos, labels, tmp_path, kind):
    dubito.extract(wrapped(), photos, tmp_path / "cache", workers=0, shard_size=4)
    known = {name: label for name, label in labels.items() if name != "4.png"}
    table = label_cache(tmp_path / "cache", known if kind == "mapping" else list(known.values()))
    assert [NAMES[label] for label in table.label] == list(known.values())
    assert [name for name, _ in table.skipped] == ["4.png"]
    with pytest.raises(ImagesError, match=r"1 have none .* '?7\.png"):
        label_cache(tmp_path / "cache", {name: label for name, label in known.items() if name != "7.png"})
