"""The page and the figure of a map: what is in them, what is not, and that names stay text."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dubito import Table, draw_map
from dubito.apps.map import Map
from dubito.errors import TableError, ValueRangeError
from dubito.report.map import COLOURS, OTHER, map_figure, write_map_page

EVIL = '</script><img src=x onerror="alert(1)">&.png'


def a_map(n: int = 8, **more) -> Map:
    given = {
        "name": "cache/photos",
        "images": n,
        "method": "tsne",
        "points": np.random.default_rng(0).normal(size=(n, 2)),
        "u": np.arange(n) / 10,
        "rows": np.arange(n),
        "ids": [f"{i}.png" for i in range(n)],
        "labels": [f"class {i % 2}" for i in range(n)],
        "predictions": None,
    }
    return Map(**given | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    for i in range(8):
        Image.new("RGB", (200, 100), (30 * i, 0, 0)).save(place / f"{i}.png")
    return place


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_holds_every_point_and_loads_nothing(tmp_path, folder):
    found = a_map()
    page = write_map_page(found, tmp_path / "sub" / "map.html", images=folder).read_text()
    data = data_of(page)
    assert data["id"] == found.ids
    assert data["u"] == pytest.approx(found.u.tolist())
    assert (np.diff(data["radius"]) >= 0).all()
    assert (np.diff(data["opacity"]) <= 0).all()
    for axis in ("x", "y"):
        assert min(data[axis]) >= 0
        assert max(data[axis]) <= 1
    assert len(data["pictures"]) == 8
    assert all(one.startswith("data:image/jpeg;base64,") for one in data["pictures"].values())
    assert "8 thumbnails" in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert "default-src 'none'" in page
    assert "NaN" not in page
    assert data["colourings"]["label"]["groups"][0] == ["class 0", COLOURS[0]]


def test_names_stay_text(tmp_path):
    page = write_map_page(a_map(ids=[EVIL] * 8, labels=[EVIL] * 8), tmp_path / "map.html").read_text()
    assert EVIL not in page
    assert "<img src=x" not in page
    assert data_of(page)["id"][0] == EVIL
    assert "&lt;/script&gt;&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;.png" in page


def test_thumbnails_are_few_and_the_most_uncertain_have_one(tmp_path, folder):
    page = write_map_page(a_map(), tmp_path / "map.html", images=folder, thumbnails=4, side=16).read_text()
    places = {int(place) for place in data_of(page)["pictures"]}
    assert len(places) == 4
    assert {6, 7} <= places
    assert data_of(write_map_page(a_map(), tmp_path / "none.html").read_text())["pictures"] == {}


def test_the_most_uncertain_are_listed_first(tmp_path):
    page = write_map_page(a_map(30), tmp_path / "map.html").read_text()
    listed = re.findall(r'<tr data-place="(\d+)">', page)
    assert listed == [str(place) for place in range(29, 9, -1)]


def test_many_classes_share_a_last_colour(tmp_path):
    names = [f"c{i:02d}" for i in range(15)]
    data = data_of(write_map_page(a_map(15, labels=names), tmp_path / "map.html").read_text())
    colouring = data["colourings"]["label"]
    assert len(colouring["groups"]) == len(COLOURS) + 1
    assert colouring["groups"][-1] == ["other", OTHER]
    assert colouring["of"] == [*range(10), *[10] * 5]


def test_a_map_without_labels_or_of_one_point(tmp_path):
    page = write_map_page(a_map(1, labels=None, points=np.zeros((1, 2))), tmp_path / "map.html").read_text()
    assert data_of(page)["colourings"] == {}
    assert data_of(page)["x"] == [0.5]
    assert map_figure(a_map(1, labels=None)).axes[0].get_legend() is None


def test_the_figure_draws_sizes_and_opacities(tmp_path):
    found = a_map()
    panel = map_figure(found).axes[0]
    dots = panel.collections[0]
    sizes, colours = dots.get_sizes(), dots.get_facecolors()
    assert len(sizes) == 8
    # The most uncertain first: large and transparent below small and opaque.
    assert (np.diff(sizes) <= 0).all()
    assert (np.diff(colours[:, 3]) >= 0).all()
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["class 0", "class 1"]
    with pytest.raises(ValueRangeError, match="colour must be one of label; 'prediction' came"):
        map_figure(found, colour="prediction")


def test_draw_map_writes_both(tmp_path):
    draw = torch.Generator().manual_seed(0)
    table = Table(feature=torch.randn(20, 4, generator=draw), name="some/photos")
    found = draw_map(table, np.arange(20.0), to=tmp_path / "a" / "map.html", png=tmp_path / "b" / "map.png", seed=3)
    assert len(found) == 20
    assert "photos" in (tmp_path / "a" / "map.html").read_text()
    with Image.open(tmp_path / "b" / "map.png") as picture:
        assert picture.width > 500


def test_other_images_are_refused(tmp_path, folder):
    with pytest.raises(TableError, match=r"ids of the map must be images of .*; 'x' is not, nor any other"):
        write_map_page(a_map(ids=["x"] * 8), tmp_path / "map.html", images=folder)
    with pytest.raises(ValueRangeError, match="thumbnails=-1, side=72 came"):
        write_map_page(a_map(), tmp_path / "map.html", thumbnails=-1)
