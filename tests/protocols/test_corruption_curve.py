"""Corruption curves: every level run once, medians and rises by hand, resumable."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import dubito
from dubito.data import ArrayImages
from dubito.data.corruptions import Corrupted
from dubito.errors import NotFittedError, SkippedImagesWarning, TableError, ValueRangeError
from dubito.metrics import Interval
from dubito.protocols.corruption_curve import (
    CorruptionCurve,
    CorruptionCurves,
    CorruptionLevel,
    corruption_curve,
    rank_correlations,
)
from dubito.scores import Entropy, Neighbours
from dubito.table import Table
from dubito.types import Score

module = importlib.import_module("dubito.protocols.corruption_curve")  # the room exports a function of its name
QUICK = {"resamples": 40, "progress": False, "workers": 0}
pytestmark = pytest.mark.usefixtures("one_thread")


@final
@dataclass
class Flatness(Score):
    """Minus how far the pixels' mean colours differ: a grey box flattens, noise does not."""

    name = "flatness"
    kind = "aleatoric"
    needs = ("feature",)

    def score_batch(self, batch: Table) -> torch.Tensor:
        return -batch.feature.std(-1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    return dubito.wrap(layers, transform=dubito.Preprocess((16, 16), 16), name="small")


@pytest.fixture(scope="module")
def images() -> ArrayImages:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 20, 20, 3), dtype=np.uint8)
    return ArrayImages(images=pixels, labels=["a", "b"] * 3 + ["a"])


@pytest.fixture(scope="module")
def run(model, images, tmp_path_factory):
    to = tmp_path_factory.mktemp("corruption_curve")
    scores = {"flatness": Flatness(), "entropy": Entropy()}
    return to, corruption_curve(model, images, scores, to, corruptions=("blur", "box"), severities=(0, 2, 5), **QUICK)


def test_every_level_has_a_cache_and_the_clean_images_one(run):
    to, result = run
    assert sorted(path.name for path in to.iterdir()) == ["blur-2", "blur-5", "box-2", "box-5", "clean"]
    assert (result.rows, result.severities, result.name) == (7, (0, 2, 5), "images in memory")
    assert [(one.score, one.corruption) for one in result.curves] == [
        ("flatness", "blur"),
        ("flatness", "box"),
        ("entropy", "blur"),
        ("entropy", "box"),
    ]


def test_quartiles_and_correlations_are_those_of_the_tables(run):
    to, result = run
    tables = [dubito.open(to / name) for name in ("clean", "box-2", "box-5")]
    u = np.stack([Entropy().score(table).numpy() for table in tables], axis=1)
    curve = result.curve("box", "entropy")
    for column, level in zip(u.T, curve.levels, strict=True):
        assert level[1:] == pytest.approx(tuple(np.quantile(column, (0.25, 0.5, 0.75))))
    expected = np.mean([spearmanr([0, 2, 5], row).statistic for row in u])
    assert curve.spearman.value == pytest.approx(expected)
    assert curve.rises == sum(np.diff(np.median(u, axis=0)) > 0)


def test_levels_are_the_corrupted_images(run, images):
    to, _ = run
    assert dubito.open(to / "box-5").id.tolist() == list(images.ids)
    assert dubito.open(to / "box-5").label_space == "own"
    manifest = json.loads((to / "box-5" / "manifest.json").read_text())
    assert manifest["identity"]["images"] == Corrupted(images, "box", 5).digest()


def test_a_second_run_runs_no_model(run, model, images, monkeypatch):
    to, result = run
    before = {path: path.stat().st_mtime_ns for path in to.rglob("*") if path.name != ".lock" and path.is_file()}
    scores = {"flatness": Flatness(), "entropy": Entropy()}
    call = {"corruptions": ("blur", "box"), "severities": (0, 2, 5), **QUICK}
    assert corruption_curve(model, images, scores, to, **call) == result
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_an_interrupted_run_resumes(model, images, tmp_path, monkeypatch):
    done = []
    extract = module.extract

    def stop(model, images, to, **options):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(Path(to).name)
        return extract(model, images, to, **options)

    call = {"corruptions": ("noise",), "severities": (0, 1, 2), **QUICK}
    monkeypatch.setattr(module, "extract", stop)
    with pytest.raises(KeyboardInterrupt):
        corruption_curve(model, images, {"entropy": Entropy()}, tmp_path / "a", **call)
    monkeypatch.setattr(module, "extract", extract)
    resumed = corruption_curve(model, images, {"entropy": Entropy()}, tmp_path / "a", **call)
    assert done == ["clean", "noise-1"]
    assert resumed == corruption_curve(model, images, {"entropy": Entropy()}, tmp_path / "b", **call)


def test_fitted_scores_serve(model, images, tmp_path):
    table = dubito.extract(model, images, tmp_path / "train", label_space="own", progress=False)
    scores = {"neighbours": Neighbours(k=1).fit(table)}
    result = corruption_curve(model, images, scores, tmp_path / "l", corruptions=["noise"], severities=[0, 5], **QUICK)
    # Its own feature is in the bank, so a clean image is at distance 0, and a noisy one is not.
    assert result.curve("noise", "neighbours").levels[0].median == pytest.approx(0, abs=1e-6)
    assert result.curve("noise", "neighbours").spearman.value == 1
    assert result.curve("noise", "neighbours").rises == 1


def test_a_broken_image_is_left_out_of_every_level(model, images, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in images.ids[:3]:
        images.read(int(name)).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes(b"no image")
    with pytest.warns(SkippedImagesWarning, match="1 of 4 images could not be decoded"):
        result = corruption_curve(
            model, folder, {"u": Entropy()}, tmp_path / "l", corruptions=["box"], severities=[0, 3], **QUICK
        )
    assert result.rows == 3


def test_levels_with_other_images_cannot_be_compared(model, images, tmp_path, monkeypatch):
    def forget(model, images, to, **options):
        return Table(
            id=list(images.ids)[: 7 if to.name == "clean" else 6], logit=torch.zeros(7, 2)[: 7 - (to.name != "clean")]
        )

    monkeypatch.setattr(module, "extract", forget)
    with pytest.raises(
        TableError, match="every level must have the same images; table in memory has 6, the first level 7"
    ):
        corruption_curve(model, images, {"u": Entropy()}, tmp_path, corruptions=["box"], severities=[0, 3], **QUICK)


def test_rank_correlations():
    u = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0], [5.0, 5.0, 5.0], [0.0, 0.0, 1.0], [0.0, 2.0, 1.0]]).double()
    # the last two: ranks .5 .5 2 give 1.5 / sqrt(1.5 · 2), ranks 0 2 1 give 1 / 2
    assert rank_correlations(u).tolist() == pytest.approx([1, -1, 0, 1.5 / 3**0.5, 0.5])


def curve(medians: list[float]) -> CorruptionCurve:
    levels = tuple(CorruptionLevel(step, value - 1, value, value + 1) for step, value in enumerate(medians))
    return CorruptionCurve("blur", "u", levels, Interval(0.5, 0.25, 0.75, 0.95))


def test_rises_count_strict_steps():
    up_and_down = curve([1.0, 2.0, 2.0, 1.0, 3.0])
    assert (up_and_down.rises, up_and_down.steps) == (2, 4)


def test_text_and_json():
    result = CorruptionCurves("photos", 9, (0, 1, 2), (curve([1.0, 2.0, 3.0]),))
    assert str(result).splitlines() == [
        "photos: 9 images",
        "score  corruption  median at 0  median at 1  median at 2  rises  Spearman",
        "u      blur        1.000        2.000        3.000        2/2    0.500 [0.250, 0.750]",
    ]
    plain = json.loads(result.to_json())
    assert plain["curves"][0]["levels"][1] == {"severity": 1, "low": 1, "median": 2, "high": 3}
    assert plain["curves"][0]["rises"] == 2
    assert plain["curves"][0]["spearman"]["low"] == 0.25


def test_plot_draws_one_score_over_severity(run, axes):
    _, result = run
    assert result.plot(axes, score="entropy") is axes
    assert [line.get_label() for line in axes.lines] == ["blur", "box"]
    medians = [level.median for level in result.curve("box", "entropy").levels]
    assert axes.lines[1].get_xydata().tolist() == [list(point) for point in zip((0, 2, 5), medians, strict=True)]
    assert result.plot(axes).get_ylabel() == "flatness"
    with pytest.raises(ValueRangeError, match="score must be one of flatness, entropy; got 'margin'"):
        result.plot(score="margin")


def test_a_curve_that_was_not_run(run):
    _, result = run
    message = "CorruptionCurves.curve: corruption must be one of blur, box; got 'noise'"
    with pytest.raises(ValueRangeError, match=message):
        result.curve("noise", "entropy")
    with pytest.raises(ValueRangeError, match="score must be one of flatness, entropy; got 'margin'"):
        result.curve("box", "margin")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corruptions": ("blur", "fog")}, r"^corruption_curve: corruption must be one of blur, box, .*; got 'fog'"),
        ({"corruptions": "blur"}, "got 'blur'"),
        ({"corruptions": ()}, r"corruptions must be a list of blur, .*; got \(\)\. Leave it out for all"),
        ({"severities": (0,)}, "severities must be at least two, rising, from 0 to 5"),
        ({"severities": (2, 1)}, "severities must be at least two, rising"),
        ({"severities": (0, 6)}, r"from 0 to 5; got \(0, 6\)"),
        ({"severities": (1, 1)}, "rising"),
    ],
)
def test_levels_that_make_no_curve(model, images, tmp_path, options, message):
    with pytest.raises(ValueRangeError, match=message):
        corruption_curve(model, images, {"u": Entropy()}, tmp_path, **options, **QUICK)


def test_scores_are_checked_before_the_model_is_run(model, images, tmp_path):
    with pytest.raises(TableError, match="corruption_curve needs at least one score"):
        corruption_curve(model, images, {}, tmp_path, **QUICK)
    with pytest.raises(NotFittedError, match=r"neighbours.score was called before fit"):
        corruption_curve(model, images, {"u": Neighbours()}, tmp_path, **QUICK)
    assert list(tmp_path.iterdir()) == []
