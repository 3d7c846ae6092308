"""Layouts: kept, read again only for the same images, and every image placed by its neighbours."""

import time

import numpy as np
import torch

from dubito import Table
from dubito.explore import layout
from dubito.explore.collection import Collection
from dubito.explore.layout import Layouts
from dubito.report.layout import principal_components


def clusters(n: int = 60, seed: int = 0) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    return Table(feature=6 * torch.eye(3, 8)[label] + torch.randn(n, 8, generator=draw), label=label)


def laid_out(layouts: Layouts) -> np.ndarray:
    layouts.start("tsne")
    end = time.monotonic() + 120
    while layouts.runs["tsne"].state == "running" and time.monotonic() < end:
        time.sleep(0.05)
    assert layouts.runs["tsne"].state == "ready", layouts.runs["tsne"].words
    points = layouts.points("tsne")
    assert points is not None
    return points


def test_components_are_there_at_once_in_the_unit_square():
    table = clusters()
    points = Layouts(Collection(table), None).points("pca")
    assert points is not None
    x = principal_components(table, 50)[:, :2] * [1, -1]  # y grows downwards
    span = np.ptp(x, axis=0).max()
    np.testing.assert_allclose(points, 0.5 + (x - (x.max(0) + x.min(0)) / 2) / span, atol=1e-5)


def test_a_layout_is_kept_and_belongs_to_its_images(tmp_path, monkeypatch):
    points = laid_out(Layouts(Collection(clusters()), tmp_path))
    assert points.min() >= -1e-6
    assert points.max() <= 1 + 1e-6
    monkeypatch.setattr(layout, "lay_out", lambda *_, **__: np.zeros((60, 2)))
    np.testing.assert_array_equal(laid_out(Layouts(Collection(clusters()), tmp_path)), points)
    other = laid_out(Layouts(Collection(clusters(seed=1)), tmp_path))
    assert (other == 0.5).all()  # computed anew
    (tmp_path / "tsne.safetensors").write_bytes(b"damaged")
    assert (laid_out(Layouts(Collection(clusters()), tmp_path)) == 0.5).all()


def test_images_that_were_not_drawn_lie_among_their_neighbours(monkeypatch):
    monkeypatch.setattr(layout, "_MOST", 30)
    table = clusters(90)
    layouts = Layouts(Collection(table), None)
    points = laid_out(layouts)
    assert "30 images drawn at random were laid out" in layouts.runs["tsne"].words
    centre = np.stack([points[np.arange(90) % 3 == k].mean(0) for k in range(3)])
    nearest = np.linalg.norm(points[:, None] - centre[None], axis=-1).argmin(1)
    assert (nearest == np.arange(90) % 3).mean() > 0.95


def test_a_new_image_lies_where_its_copy_lies():
    table = clusters()
    layouts = Layouts(Collection(table), None)
    points = layouts.points("pca")
    assert points is not None
    np.testing.assert_allclose(layouts.place(table.feature[7:8])["pca"], points[7], atol=1e-4)


def test_few_rows_and_no_features():
    for n in (1, 2, 4):
        assert np.isfinite(laid_out(Layouts(Collection(clusters(n)), None))).all()
    without = Layouts(Collection(Table(logit=[[1.0, 0.0]])), None)
    assert without.points("pca") is None
    without.start("tsne")
    assert {one["state"] for one in without.describe()} == {"failed"}
    assert "no features" in without.describe()[0]["words"]


def test_a_layout_that_is_under_way_ends_with_its_explorer():
    layouts = Layouts(Collection(clusters(3000)), None)
    layouts.start("tsne")
    layouts.close()
    while layouts.runs["tsne"].state == "running":
        time.sleep(0.05)
    assert layouts.runs["tsne"].state == "none"
    assert layouts.points("tsne") is None
