"""The page and the figure of a map: what is in them, what is not, and that names stay text."""

import json
import re
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dubito import Table, draw_map
from dubito.errors import ArtefactError, DiskFullError, MissingPackageError, TableError, ValueRangeError
from dubito.report.map import COLOURS, OTHER, Map, colour_by, map_figure, ranked, size_key
from dubito.report.map_page import write_map_page

EVIL = '</script><img src=x onerror="alert(1)">&.png'


# How linear colours look to those who lack one kind of cone: Machado et al. (2009), Table 1, severity 1.0.
SIGHT = {
    "usual": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}


def linear(shade: str) -> np.ndarray:
    original = np.array([int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(original <= 0.04045, original / 12.92, ((original + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Where equal distances look equal (Ottosson 2020); black and white are 1 apart."""
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    cones += [[0.0883024619, 0.2817188376, 0.6299787005]]
    axes = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099]]
    axes += [[0.0259040371, 0.7827717662, -0.808675766]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ rgb.clip(0, 1))


def a_map(n: int = 8, **more) -> Map:
    values = {
        "name": "cache/photos",
        "images": n,
        "method": "tsne",
        "points": np.random.default_rng(0).normal(size=(n, 2)),
        "u": np.arange(n) / 10,
        "rows": np.arange(n),
        "ids": [f"{i}.png" for i in range(n)],
        "labels": [f"class {i % 2}" for i in range(n)],
        "predicted": None,
        "score": "entropy",
    }
    return Map(**values | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    for i in range(8):
        Image.new("RGB", (200, 100), (30 * i, 0, 0)).save(place / f"{i}.png")
    return place


def data_of(page: str) -> dict:
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert result
    return json.loads(result[1])


def test_the_page_holds_every_point_and_loads_nothing(tmp_path, folder):
    result = a_map()
    page = write_map_page(result, tmp_path / "sub" / "map.html", images=folder).read_text()
    data = data_of(page)
    assert data["id"] == result.ids
    assert data["u"] == pytest.approx(result.u.tolist())
    assert data["radius"] == [5, 20]  # few images: the smallest circle has 5 pixels, the largest four times as many
    assert data["opacity"] == [0.9, 0.2]
    assert data["share"] == pytest.approx(result.share, abs=1e-3)
    for axis in ("x", "y"):
        assert min(data[axis]) >= 0
        assert max(data[axis]) <= 1
    assert len(data["thumbnails"]) == 8
    assert all(one.startswith("data:image/jpeg;base64,") for one in data["thumbnails"].values())
    assert "8 of 8 images have a thumbnail" in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert "default-src 'none'" in page
    assert "NaN" not in page
    assert data["colourings"]["label"] == {"classes": ["class 0", "class 1"], "of": [0, 1] * 4}
    assert data["first"] == "label"
    assert "uncertainty: entropy" in page


def test_names_that_utf8_cannot_write_are_shown_as_far_as_it_goes(tmp_path):
    result = a_map(ids=["a\udcff.png"] * 8, labels=["b\udcff"] * 8, name="c\udcff")
    page = write_map_page(result, tmp_path / "map.html").read_text()
    assert '<th scope="row">a?.png</th>' in page
    assert data_of(page)["id"][0] == "a\udcff.png"
    assert map_figure(result).legends[1].get_texts()[0].get_text() == "b?"


def test_names_stay_text(tmp_path):
    page = write_map_page(a_map(ids=[EVIL] * 8, labels=[EVIL] * 8), tmp_path / "map.html").read_text()
    assert EVIL not in page
    assert "<img src=x" not in page
    assert data_of(page)["id"][0] == EVIL
    assert "&lt;/script&gt;&lt;img src=x onerror=&#34;alert(1)&#34;&gt;&amp;.png" in page


def test_thumbnails_are_few_and_the_most_uncertain_have_one(tmp_path, folder):
    page = write_map_page(a_map(), tmp_path / "map.html", images=folder, thumbnails=4, side=16).read_text()
    places = {int(place) for place in data_of(page)["thumbnails"]}
    assert len(places) == 4
    assert {6, 7} <= places
    assert data_of(write_map_page(a_map(), tmp_path / "none.html").read_text())["thumbnails"] == {}


def test_the_most_uncertain_are_listed_first(tmp_path):
    page = write_map_page(a_map(30), tmp_path / "map.html").read_text()
    listed = re.findall(r'<tr data-place="(\d+)">', page)
    assert listed == [str(place) for place in range(29, 9, -1)]


def test_few_classes_are_in_order_and_of_many_the_most_frequent_come_first(tmp_path):
    assert ranked(["10", "9", "b", "a", "9", "b"]) == ["9", "10", "a", "b"]
    names = [f"c{i:02d}" for i in range(15)] + ["c14", "c13", "c14"]
    assert ranked(names)[:3] == ["c14", "c13", "c00"]
    data = data_of(write_map_page(a_map(18, labels=names), tmp_path / "map.html").read_text())
    assert data["colourings"]["label"]["of"][:3] == [2, 3, 4]
    assert data["colours"] == list(COLOURS)
    assert data["other"] == OTHER


def test_where_ten_colours_are_too_few_the_uncertainty_has_them():
    many = a_map(40, labels=[f"c{i}" for i in range(40)])
    assert colour_by(many, None) == "uncertainty"
    assert colour_by(many, "label") == "label"
    # Ten of 20 images: exactly half.
    assert colour_by(a_map(20, labels=[f"c{i}" for i in range(20)]), None) == "label"
    assert colour_by(a_map(labels=None, predicted=["a"] * 8), None) == "predicted"
    assert colour_by(a_map(labels=None), None) == "uncertainty"


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_can_be_distinguished(sight):
    seen = np.array([oklab(SIGHT[sight] @ linear(shade)) for shade in (*COLOURS, OTHER)])
    apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1) + np.eye(len(seen))
    assert apart.min() > 0.07


def test_the_key_shows_what_sizes_and_opacities_stand_for(tmp_path):
    result = a_map(101, u=np.arange(101) / 100)
    assert size_key(result) == [(0, "≤ 0.02"), (0.25, "0.26"), (0.5, "0.5"), (0.75, "0.74"), (1, "≥ 0.98")]
    page = write_map_page(result, tmp_path / "map.html").read_text()
    assert "<li>" in page
    assert re.findall(r"--d:[\d.]+px;opacity:[\d.]+", page)[::4] == [
        "--d:10.0px;opacity:0.900",
        "--d:40.0px;opacity:0.200",
    ]
    assert size_key(a_map(u=np.full(8, -3.0))) == [(0, "\N{MINUS SIGN}3")]
    assert "(all equal)" in write_map_page(a_map(u=np.zeros(8)), tmp_path / "alike.html").read_text()
    # Far below what tells images apart, digits are noise.
    assert size_key(a_map(u=np.array([1e-16] * 4 + [0.8] * 4)))[0] == (0, "≤ 0")


def test_a_map_without_labels_or_of_one_point(tmp_path):
    page = write_map_page(a_map(1, labels=None, points=np.zeros((1, 2))), tmp_path / "map.html").read_text()
    assert data_of(page)["colourings"] == {}
    assert data_of(page)["x"] == [0.5]
    assert "<h1>A map of 1 image</h1>" in page
    assert [legend.get_title().get_text() for legend in map_figure(a_map(1, labels=None)).legends] == ["entropy"]


def test_the_figure_draws_sizes_and_opacities(tmp_path):
    result = a_map()
    panel = map_figure(result).axes[0]
    dots = panel.collections[0]
    sizes, colours = dots.get_sizes(), dots.get_facecolors()
    assert len(sizes) == 8
    # The most uncertain first: large and transparent below small and opaque.
    assert (np.diff(sizes) <= 0).all()
    assert (np.diff(colours[:, 3]) >= 0).all()
    sizes_key, classes = map_figure(result).legends
    assert [text.get_text() for text in sizes_key.get_texts()] == [text for _, text in size_key(result)]
    assert [text.get_text() for text in classes.get_texts()] == ["class 0", "class 1"]
    with pytest.raises(ValueRangeError, match="colour must be one of label, uncertainty; got 'predicted'"):
        map_figure(result, colour="predicted")


def test_the_figure_names_what_has_no_colour_of_its_own():
    names = [f"c{i:02d}" for i in range(12)]
    texts = [text.get_text() for text in map_figure(a_map(12, labels=names)).legends[1].get_texts()]
    assert texts == [*names[:10], "other"]


def test_draw_map_writes_both(tmp_path):
    draw = torch.Generator().manual_seed(0)
    table = Table(feature=torch.randn(20, 4, generator=draw), name="some/photos")
    result = draw_map(table, np.arange(20.0), to=tmp_path / "a" / "map.html", png=tmp_path / "b" / "map.png", seed=3)
    assert len(result) == 20
    assert "photos" in (tmp_path / "a" / "map.html").read_text()
    with Image.open(tmp_path / "b" / "map.png") as picture:
        assert picture.width > 500


def test_other_images_are_refused(tmp_path, folder):
    with pytest.raises(TableError, match=r"ids must be images of .*; got 'x' and others"):
        write_map_page(a_map(ids=["x"] * 8), tmp_path / "map.html", images=folder)
    with pytest.raises(ValueRangeError, match="thumbnails must be a whole number, at least 0; got -1"):
        write_map_page(a_map(), tmp_path / "map.html", thumbnails=-1)


def test_a_figure_needs_matplotlib_and_says_so_before_the_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(Map, "of", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'dubito\[figures\]'"):
        draw_map(Table(feature=torch.zeros(3, 2)), [0.0] * 3, png=tmp_path / "map.png")


def test_what_cannot_be_written_is_refused_before_the_layout(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(Map, "of", None)  # a layout would fail with something else
    table = Table(feature=torch.zeros(3, 2), id=["0.png", "1.png", "x"])
    strange = Table(feature=torch.zeros(3, 2), id=["x", "y", "z"])
    for original, wrong, words in (
        (table, {"png": tmp_path / "map.xyz"}, r"png must end in one of .*; got '.*map.xyz'. Name it map.png"),
        (table, {"to": tmp_path}, "to must be a file; '.*' is a folder"),
        (
            table,
            {"to": folder / "0.png" / "a.html"},
            r"a.html' cannot be written \('.*0.png' is not a folder\). Choose another",
        ),
        (table, {"to": "a.svg", "png": Path("a.svg")}, "to and png must be two files; got 'a.svg' for both"),
        (table, {"to": tmp_path / "a.html", "colour": "label"}, "colour must be one of uncertainty; got 'label'"),
        (table, {"to": tmp_path / "a.html", "thumbnails": -1}, "thumbnails must be a whole number, at least 0; got -1"),
        (strange, {"to": tmp_path / "a.html", "images": folder}, "such as '0.png'; got 'x' and others"),
    ):
        with pytest.raises((ArtefactError, ValueRangeError, TableError), match=words):
            draw_map(original, [0.0] * 3, **wrong)
    assert not list(tmp_path.iterdir())


def test_a_place_that_turns_out_not_to_be_writable_is_an_error(tmp_path, monkeypatch):
    table = Table(feature=torch.eye(3))

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dubito.storage.files.write_file", refused)
    for place in ({"to": tmp_path / "map.html"}, {"png": tmp_path / "map.png"}):
        with pytest.raises(
            ArtefactError, match=r"'map\..*' cannot be saved in '.*' \(Permission denied\). Choose another place."
        ):
            draw_map(table, [0.0] * 3, **place)

    def full(*_: object) -> None:
        raise DiskFullError("it goes on from there")

    monkeypatch.setattr("dubito.storage.files.write_file", full)
    with pytest.raises(DiskFullError, match=r"no space left for 'map.png' in '.*'. What is in memory is safe"):
        draw_map(table, [0.0] * 3, png=tmp_path / "map.png")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ArtefactError, match=r"map.png' cannot be written \('.*' is not writable\)"):
        draw_map(table, [0.0] * 3, png=tmp_path / "new" / "map.png")


@pytest.mark.parametrize("kind", ["zip", "npz"])
def test_thumbnails_come_from_whatever_holds_images(tmp_path, folder, kind):
    place = tmp_path / f"pictures.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(place, "w") as file:
            for path in folder.iterdir():
                file.write(path, path.name)
    else:
        ids = np.array([f"{i}.png" for i in range(8)])
        np.savez(place, images=np.zeros((8, 20, 30, 3), np.uint8), ids=ids)
    page = write_map_page(a_map(), tmp_path / "map.html", images=place).read_text()
    assert set(data_of(page)["thumbnails"]) == {str(i) for i in range(8)}


def test_broken_and_missing_images_have_no_thumbnail(tmp_path):
    Image.new("RGB", (20, 10)).save(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes(b"not a picture")
    page = write_map_page(a_map(), tmp_path / "map.html", images=tmp_path).read_text()
    assert list(data_of(page)["thumbnails"]) == ["0"]
    assert "1 of 8 images have a thumbnail" in page


def test_model_inputs_cannot_be_shown(tmp_path):
    np.savez(
        tmp_path / "x.npz", inputs=np.zeros((8, 3, 4, 4), np.float32), ids=np.array([f"{i}.png" for i in range(8)])
    )
    with pytest.raises(ValueRangeError, match=r"write_map_page needs images as pixels; '.*' of .* is a model input"):
        write_map_page(a_map(), tmp_path / "map.html", images=tmp_path / "x.npz")
