"""A small world for the command line: few images, a tiny model with fixed weights, one finished cache."""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from dubito.cli import main

MODEL = "timm:test_resnet"
COUNT = 12


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.out)
        return result


Run = Callable[..., Answer]


def call(*arguments: object) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Answer(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def run() -> Run:
    return call


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file({key: value.contiguous() for key, value in timm.create_model("test_resnet").state_dict().items()}, path)
    return path


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, COUNT)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, images: Path, weights: Path) -> Path:
    folder = tmp_path_factory.mktemp("caches") / "plain"
    answer = call("extract", MODEL, images, "--to", folder, "--weights", weights, "--workers", 0)
    assert answer.code == 0, answer.err
    return folder


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory, images: Path, weights: Path, cache: Path) -> Path:
    """The same images with labels that the model gets right, except for every third."""
    folder = tmp_path_factory.mktemp("labelled")
    assert call("score", cache, "-s", "entropy", "--to", folder / "scores.csv").code == 0
    rows = [line.split(",") for line in (folder / "scores.csv").read_text().splitlines()[1:]]
    labels = ["image,label", *(f"{row[0]},{(int(row[1]) + (i % 3 == 0)) % 1000}" for i, row in enumerate(rows))]
    (folder / "labels.csv").write_text("\n".join(labels))
    options = ("--labels", folder / "labels.csv", "--weights", weights, "--workers", 0)
    answer = call("extract", MODEL, images, "--to", folder / "cache", *options)
    assert answer.code == 0, answer.err
    return folder / "cache"


def write_images(folder: Path, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((48, 40)).save(folder / f"{number:02d}.png")
