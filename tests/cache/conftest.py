"""A small network with every kind of state, and real image files to run it on."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.storage import write_sealed

collect_ignore = ["child.py"]


def small_network(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


@pytest.fixture
def network():
    return small_network()


@pytest.fixture
def model(network):
    return dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16), name="small")


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "photos")


def image_folder(root, count: int = 23, size: int = 20):
    """Photographs of noise in three class folders."""
    rng = np.random.default_rng(0)
    for index in range(count):
        path = root / "abc"[index % 3] / f"{index:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(path)
    return root


def edit_manifest(folder, edit):
    """Change the entries of a manifest, which is sealed again: as another version might have written it."""
    entries = json.loads((folder / "manifest.json").read_text())
    del entries["digest"]
    edit(entries)
    write_sealed(folder / "manifest.json", entries)
    return entries


def contents(folder):
    """Every file of a cache by name, as a hash of its bytes."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
