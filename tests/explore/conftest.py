"""A small model, its images on disk, and what the explorer knows of them."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.explore.collection import Collection
from dubito.explore.inspector import Inspector
from dubito.explore.layout import Layouts
from dubito.explore.notes import Notes

EVIL = "<img src=x onerror=alert(1)>&'\".png"


def pictures(folder: Path, count: int) -> Path:
    """Coloured squares, one of them with a name that a page must not execute."""
    folder.mkdir(parents=True, exist_ok=True)
    colours = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    for row, colour in enumerate(colours):
        name = EVIL if row == 1 else f"{row:03}.png"
        Image.fromarray(colour).resize((32, 32), Image.Resampling.BICUBIC).save(folder / name)
    return folder


def network(classes: int = 3, seed: int = 0) -> dubito.models.WrappedClassifier:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    ).eval()
    names = ["cat", EVIL, "dog", "eel"][:classes]
    return dubito.wrap(net, transform=dubito.Preprocess(size=32), classes=names)


@pytest.fixture(scope="session")
def model() -> Any:
    return network()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("images"), 40)


@pytest.fixture(scope="session")
def labelled(model: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with labels: the prediction for three of four images, another class for the rest."""
    path = tmp_path_factory.mktemp("labelled") / "cache"
    made = dubito.extract(model, folder, path)
    predicted = made.logit.argmax(1)
    label = torch.where(torch.arange(len(made)) % 4 == 0, (predicted + 1) % 3, predicted)
    dubito.cache.label_cache(path, dict(zip(made.row_ids(), label.tolist(), strict=True)))
    return path


@pytest.fixture
def table(labelled: Path, tmp_path: Path) -> dubito.Table:
    """A copy of it: explorers write beside a cache."""
    return dubito.open(shutil.copytree(labelled, tmp_path / "cache"))


@pytest.fixture
def inspector(table: dubito.Table, folder: Path, model: Any, tmp_path: Path) -> Inspector:
    collection = Collection(table, images=folder)
    return Inspector(collection, Layouts(collection, tmp_path), Notes(tmp_path), model)
