"""`dubito reject`: the same numbers as rejection_study, shown, as JSON, as CSV and as a page."""

import csv
from pathlib import Path

import pytest
import torch

import dubito
from dubito.evaluate.rejection import rejection_study
from dubito.probes.tiles import Tiles

from .conftest import COUNT, MODEL, Run, write_images

QUICK = ("--resamples", 10, "--buckets", 4)


def extracted(folder: Path, weights: Path, seed: int) -> Path:
    """A cache with labels that the model gets right, except for every third; and the logits of its tiles."""
    write_images(folder / "images", COUNT, seed=seed)
    model = dubito.load(MODEL, weights=weights)
    plain = dubito.extract(model, folder / "images", folder / "plain", workers=0, progress=False)
    label = (plain.logit.argmax(1) + (torch.arange(COUNT) % 3 == 0).long()) % 1000
    labels = dict(zip(plain.id.tolist(), label.tolist(), strict=True))
    probes = [dubito.probes.Forward(), Tiles([2, 3], keep="logits")]
    options = {"labels": labels, "label_space": "model", "probes": probes, "workers": 0, "progress": False}
    dubito.extract(model, folder / "images", folder / "cache", **options)
    return folder / "cache"


@pytest.fixture(scope="module")
def tiled(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(tmp_path_factory.mktemp("tiled"), weights, 0)


@pytest.fixture(scope="module")
def other(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(tmp_path_factory.mktemp("other"), weights, 5)


def test_json_is_that_of_the_library(run: Run, tiled: Path, other: Path) -> None:
    answer = run("reject", tiled, "--calibration", other, *QUICK, "--seed", 3, "--json")
    assert answer.code == 0, answer.err
    study = rejection_study(dubito.open(tiled), calibration=dubito.open(other), resamples=10, buckets=4, seed=3)
    assert answer.json == {**study.to_dict(), "written": [], "notes": []}
    assert [found.order.ensemble for found in study.results[:4]] == ["original", *["tiles_2"] * 3]


def test_shown_and_written(run: Run, tiled: Path, tmp_path: Path) -> None:
    options = ("--of", "tiles_3", "-u", "mutual_information", "--original", *QUICK)
    answer = run("reject", tiled, *options, "--csv", tmp_path / "csv", "--html", tmp_path / "page.html")
    assert answer.code == 0, answer.err
    for text in (
        f"{COUNT} images, all by the original's",
        "entropy",
        "mutual information",
        "3x3",
        "against 1 other order,",
    ):
        assert text in answer.out
    with (tmp_path / "csv" / "table.csv").open(newline="") as file:
        assert [row["ensemble"] for row in csv.DictReader(file)] == ["original", "tiles_3"]
    assert (tmp_path / "csv" / "curves.csv").exists()
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(tmp_path / "page.html") in answer.out


def test_what_is_missing_is_told(run: Run, tiled: Path, cache: Path) -> None:
    answer = run("reject", cache)
    assert answer.code == 1
    assert "rejection_study needs column 'label'" in answer.err
    answer = run("reject", tiled, "--of", "tiles_9", *QUICK)
    assert answer.code == 1
    assert "needs an ensemble 'tiles_9'" in answer.err
    answer = run("reject", tiled, "--calibration", tiled, *QUICK)
    assert answer.code == 1
    assert f"at least {COUNT} of the {COUNT} images of" in answer.err


def test_calibration_must_be_of_the_same_model(run: Run, images: Path, tiled: Path, tmp_path: Path) -> None:
    assert run("extract", MODEL, images, "--to", tmp_path / "x", "--weights", "none", "--workers", 0).code == 0
    answer = run("reject", tiled, "--calibration", tmp_path / "x")
    assert answer.code == 1
    assert answer.err.startswith("error: --calibration: ")
