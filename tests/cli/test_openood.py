"""`dubito openood`: the same table as the library, as text, JSON and CSV, in the words of the command line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dubito

from .conftest import MODEL, Run, write_images


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In-distribution images, one near and one far set, as OpenOOD lays them out for ImageNet."""
    folder, draw = tmp_path_factory.mktemp("openood"), np.random.default_rng(0)
    (folder / "benchmark_imglist/imagenet").mkdir(parents=True)
    for name, place in {"imagenet": "largescale", "ninco": "largescale", "textures": "classic"}.items():
        (folder / f"images_{place}/{name}").mkdir(parents=True)
        for row in range(4):
            picture = Image.fromarray(draw.integers(0, 256, (40, 40, 3), dtype=np.uint8))
            picture.save(folder / f"images_{place}/{name}/{row}.png")
        lines = [f"{name}/{row}.png {row if name == 'imagenet' else -1}\n" for row in range(4)]
        (folder / f"benchmark_imglist/imagenet/test_{name}.txt").write_text("".join(lines))
    return folder


def test_table_json_and_csv(run: Run, root: Path, weights: Path, tmp_path: Path) -> None:
    call = ["openood", MODEL, "--root", root, "--weights", weights, "--workers", 0, "--to", tmp_path / "caches"]
    options = ["--only", "ninco", "--only", "textures", "-s", "entropy", "-s", "energy"]
    answer = run(*call, *options, "--csv", tmp_path / "rows.csv", "--json")
    assert answer.code == 0, answer.err
    rows = answer.json["scores"]["energy"]
    assert list(rows) == ["ninco", "nearood", "textures", "farood"]
    assert rows["ninco"] == rows["nearood"]
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert header == "score,data_set,fpr95,auroc,aupr_in,aupr_out,acc"
    assert len(lines) == 8
    shown = run(*call, *options)
    assert "FPR@95" in shown.out
    assert "Left out: ssb_hard, inaturalist, openimage_o." in " ".join(shown.out.split())
    assert f"{rows['textures']['auroc']:.2f}" in shown.out


def test_settings_of_a_score_that_learns(run: Run, root: Path, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "train", 12, seed=3)
    model = dubito.load(MODEL, weights=weights)
    train = dubito.extract(model, tmp_path / "train", tmp_path / "cache", workers=0, progress=False)
    call = ["openood", MODEL, "--root", root, "--weights", weights, "--workers", 0, "--only", "ninco"]
    options = ("--learn-from", tmp_path / "cache", "-s", "neighbours", "--json")
    answer = run(*call, *options, "--set", "neighbours.k=2")
    assert answer.code == 0, answer.err
    scores = {"neighbours": dubito.Neighbours(k=2)}
    same = dubito.protocols.openood(model, root, scores=scores, sets=["ninco"], train=train, workers=0, progress=False)
    assert answer.json["scores"] == same.to_dict()["scores"]
    assert "Pass --score NAME, too." in run(*call, "--set", "neighbours.k=2").err


def test_errors_speak_of_options(run: Run, root: Path, weights: Path, tmp_path: Path) -> None:
    call = ["openood", MODEL, "--root", root, "--weights", weights, "--workers", 0]
    answer = run(*call)
    assert answer.code == 1
    assert "ssb_hard (there is no list 'benchmark_imglist/imagenet/test_ssb_hard.txt')" in answer.err
    assert "--only with what is there: ninco, textures" in answer.err
    answer = run(*call, "--only", "ninco", "-s", "neighbours")
    assert "--learn-images 50_000" in answer.err
    both = run(*call, "--learn-from", tmp_path, "--learn-images", 3)
    assert (both.code, "Pass one of them" in both.err) == (2, True)
