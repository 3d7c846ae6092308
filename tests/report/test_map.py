"""Maps: sizes and opacities follow u, layouts repeat themselves, and edges have clear answers."""

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from dubito import Entropy, Table
from dubito.errors import MissingColumnError, MissingPackageError, TableError, ValueRangeError
from dubito.report import Map

pytestmark = pytest.mark.usefixtures("one_thread")


def images(n: int = 60, seed: int = 0, **more) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    feature = 6 * torch.eye(3, 8)[label] + torch.randn(n, 8, generator=draw)
    return Table(feature=feature, logit=feature[:, :3], label=label, **more)


def without(monkeypatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)


def test_uncertain_images_are_larger_and_more_transparent():
    u = np.random.default_rng(0).gamma(1.0, size=60)
    result = Map.of(images(), u)
    order = np.argsort(u)
    assert (np.diff(result.radius[order]) >= 0).all()
    assert (np.diff(result.opacity[order]) <= 0).all()
    assert (result.radius.min(), result.radius.max()) == (1, 4)
    assert result.opacity.min() == pytest.approx(0.2)
    # Between the ends it is linear: (u - low) / (high - low), 2 % and 98 % quantiles.
    low, high = np.quantile(u, (0.02, 0.98))
    middle = order[30]
    assert result.radius[middle] == pytest.approx(1 + 3 * (u[middle] - low) / (high - low))


def test_the_most_uncertain_have_a_ring():
    result = Map.of(images(), np.arange(60.0))
    assert np.flatnonzero(result.ringed).tolist() == [57, 58, 59]  # 5 % of 60
    assert not Map.of(images(), np.ones(60)).ringed.any()


def test_a_map_is_shown_in_one_line():
    assert repr(Map.of(images(), Entropy())) == "Map(table in memory: a map of 60 images by t-SNE)"


def test_a_map_sums_itself_up_and_hands_out_every_point():
    result = Map.of(images(), Entropy(), most=30)
    low, high = np.quantile(result.u, (0.02, 0.98))
    summary = {"name": "table in memory", "images": 60, "method": "tsne", "score": "entropy", "shown": 30}
    assert result.to_dict() == {**summary, "u": {"low": pytest.approx(low), "high": pytest.approx(high)}}
    assert len(result.to_pandas()) == 30
    assert len(result.lines()) == 1 + 10
    assert "and 20 more" in str(result)


def test_equal_uncertainties_are_all_small_and_a_single_high_one_stands_out():
    assert set(Map.of(images(), [0.5] * 60).radius.tolist()) == {1.0}
    one = Map.of(images(), [0.0] * 59 + [1.0])
    assert one.ends == (0, 1)
    assert one.radius.tolist() == [1.0] * 59 + [4.0]


@pytest.mark.parametrize("package", ["openTSNE", "sklearn"])
def test_tsne_repeats_itself_and_keeps_classes_together(monkeypatch, package):
    if package == "sklearn":
        without(monkeypatch, "openTSNE")
    else:
        pytest.importorskip("openTSNE")
    table = images()
    first, second = (Map.of(table, Entropy()).points for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()
    pairs = np.linalg.norm(first[:, None] - first[None], axis=-1)
    np.fill_diagonal(pairs, np.inf)
    label = table.label.numpy()
    assert (label[pairs.argmin(1)] == label).mean() > 0.9


def test_umap_needs_its_package(monkeypatch):
    without(monkeypatch, "umap")
    with pytest.raises(MissingPackageError, match=r"method='umap' requires umap-learn: pip install 'dubito\[maps\]'"):
        Map.of(images(), Entropy(), method="umap")


UMAP = """
import numpy as np, torch
from dubito import Table
from dubito.report import Map
label = np.arange(14) % 2
feature = 8 * torch.eye(2, 4)[label] + torch.randn(14, 4, generator=torch.Generator().manual_seed(0))
options = {"method": "umap", "neighbours": 4}
first, second = (Map.of(Table(feature=feature), [0.0] * 14, **options).points for _ in range(2))
assert np.array_equal(first, second)
pairs = np.linalg.norm(first[:, None] - first[None], axis=-1) + 1e9 * np.eye(14)
assert (label[pairs.argmin(1)] == label).all()
# All on one line, and fewer rows than neighbours: a layout that began on a line was NaN.
assert np.isfinite(Map.of(Table(feature=torch.arange(6.0)[:, None]), [0.0] * 6, method="umap").points).all()
"""


@pytest.mark.skipif(find_spec("umap") is None, reason="umap-learn is not installed")
def test_umap_repeats_itself_and_keeps_classes_together():
    # Its machine code takes a minute to compile; for so few rows it need not be compiled.
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", UMAP], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("n", [1, 2, 4, 5, 7, 20])
def test_few_points_have_a_place(n):
    result = Map.of(images(n), [0.1] * n, perplexity=30.0)
    assert result.points.shape == (n, 2)
    assert np.isfinite(result.points).all()


def test_features_that_are_all_alike_or_one_wide():
    for value in (1.0, 0.1, 1234.567):
        assert Map.of(Table(feature=torch.full((12, 3), value)), [0.0] * 12).points.tolist() == [[0, 0]] * 12
    narrow = Map.of(Table(feature=torch.arange(12.0)[:, None]), [0.0] * 12)
    assert np.isfinite(narrow.points).all()
    assert (np.ptp(narrow.points, axis=0) > 1).all()  # points that began on a line could never leave it
    assert narrow.labels is None
    assert narrow.predicted is None
    assert narrow.ids[3] == "3"


def test_a_large_table_is_drawn_from():
    table = images(90, id=[f"i{i}" for i in range(90)])
    u = np.arange(90.0)
    result = Map.of(table, u, most=30)
    assert (len(result), result.images) == (30, 90)
    assert (np.diff(result.rows) > 0).all()
    assert result.u.tolist() == u[result.rows].tolist()
    assert result.ids == [f"i{row}" for row in result.rows]
    assert result.labels == [str(row % 3) for row in result.rows]


def test_the_uncertainty_has_its_name():
    assert Map.of(images(4), Entropy()).score == "entropy"
    assert Map.of(images(4), [0.0] * 4).score == "uncertainty"


def test_names_of_classes_are_shown():
    result = Map.of(images(9, classes=["ant", "bee", "cat"]), [0.0] * 9)
    assert result.labels == ["ant", "bee", "cat"] * 3
    assert result.predicted == result.labels
    own = Map.of(images(9, classes=["ant", "bee", "cat"], label_space="own"), [0.0] * 9)
    assert own.labels == ["0", "1", "2"] * 3
    names = {"label_space": "own", "label_names": ["dry", "wet", "ice"]}
    own = Map.of(images(9, classes=["ant", "bee", "cat"], **names), [0.0] * 9)
    assert (own.labels, own.predicted) == (["dry", "wet", "ice"] * 3, ["ant", "bee", "cat"] * 3)


def test_columns_that_a_map_does_not_show_are_not_read():
    class Unread:
        shape = (90, 1000, 1000)

        def __getitem__(self, rows):
            raise AssertionError("a million numbers an image")

    assert len(Map.of(images(90, members_logit=Unread()), Entropy(), most=30)) == 30


def test_a_map_has_no_scale():
    table = images(30)
    whole = Map.of(table, [0.0] * 30).points
    for scale in (2.0**-100, 2.0**100):  # exact in floating point
        scaled = Table(feature=table.feature.double() * scale)
        np.testing.assert_array_equal(Map.of(scaled, [0.0] * 30).points, whole)


def test_what_cannot_be_drawn_is_refused():
    table = images(12)
    with pytest.raises(TableError, match="map: table needs at least 1 row"):
        Map.of(table.rows([]), Entropy())
    with pytest.raises(MissingColumnError, match="map needs column 'feature'"):
        Map.of(table.select("logit"), Entropy())
    with pytest.raises(ValueRangeError, match="map: score 'u': 1 of 12 values are NaN"):
        Map.of(table, [float("nan")] + [0.0] * 11)
    for wrong in (-1.0, 0.001, float("nan")):
        with pytest.raises(
            ValueRangeError, match=rf"map: perplexity must be a number, at least 1; got {wrong}. 30 is usual."
        ):
            Map.of(table, Entropy(), perplexity=wrong)
    with pytest.raises(ValueRangeError, match=r"map: seed must be a whole number, at least 0; got -1"):
        Map.of(table, Entropy(), seed=-1)
    with pytest.raises(ValueRangeError, match=r"map: most must be a whole number, at least 1; got 0"):
        Map.of(table, Entropy(), most=0)
    with pytest.raises(ValueRangeError, match="map: features of table in memory: 1 of 6 values are NaN"):
        Map.of(Table(feature=[[0.0, 1.0], [float("nan"), 1.0], [1.0, 1.0]]), [0.0] * 3)
