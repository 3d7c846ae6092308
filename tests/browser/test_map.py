"""The map's page in a browser does what its guide says; and everything that its script reads is in the page."""

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dubito.report import Map, write_map_page

from ..report.test_map_page import EVIL, data_of

SCRIPT = files("dubito.report").joinpath("templates/map.js").read_text(encoding="utf-8")
DRIVE = Path(__file__).with_name("drive_map.js")
CORNERS = ["bottom left.png", "bottom right.png", "top left.png", "top right.png"]


def square() -> Map:
    """Five images; the surest at the bottom left, the most uncertain in the middle."""
    return Map(
        name="photos",
        images=5,
        method="tsne",
        points=np.array([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0], [5.0, 5.0]]),
        u=np.arange(5) / 10,
        rows=np.arange(5),
        ids=[*CORNERS, EVIL],
        labels=["cat", "dog", "cat", "dog", EVIL],
        predicted=["cat", "dog", "dog", "dog", "cat"],
        score="max_probability",
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    for name in CORNERS:
        (folder / "pictures").mkdir(exist_ok=True)
        Image.new("RGB", (20, 20), (200, 0, 0)).save(folder / "pictures" / name)
    return write_map_page(square(), folder / "map.html", images=folder / "pictures")


def test_what_the_script_reads_is_in_the_page(page):
    text = page.read_text()
    data = data_of(text)
    read = set(re.findall(r"\bdata\.(\w+)", SCRIPT))
    assert read == set(data)  # and nothing is in the page for nobody
    of_points = {name: len(data[name]) for name in ("x", "y", "u", "share", "id")}
    assert set(of_points.values()) == {5}
    assert all(set(one) == {"classes", "of"} and len(one["of"]) == 5 for one in data["colourings"].values())
    requested = set(re.findall(r'\bat\("(\w+)"\)', SCRIPT)) | {
        "map",
        "canvas",
        "ring",
        "tip",
        "key",
        "find",
        "from",
        "to",
    }
    assert {name for name in requested if f'id="{name}"' not in text} == set()
    assert data["first"] in {*data["colourings"], "uncertainty"}


@pytest.fixture(scope="module")
def shown(page, open_page, renderer):
    """What the page shows when somebody points, searches, zooms and types, with WebGL2 and without."""
    before = "window.alerts = 0; window.alert = () => { window.alerts += 1; };"
    return open_page(page, before=renderer + before).evaluate(DRIVE.read_text())


def test_a_notebook_shows_the_page_in_a_frame(tmp_path, open_page, renderer):
    (tmp_path / "notebook.html").write_text(f"<!doctype html>{square()._repr_html_()}")
    notebook = open_page(tmp_path / "notebook.html", before=renderer)
    frame = notebook.frame_locator("iframe")
    frame.get_by_text("5 images", exact=True).wait_for()
    shades = frame.locator("#canvas").evaluate(
        """(canvas) => new Promise((done) => requestAnimationFrame(() => setTimeout(() => {
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          done(new Set(new Uint32Array(data.buffer)).size);
        })))"""
    )
    assert shades > 10


def test_it_begins_with_all_images_and_their_classes(shown):
    assert shown["start"] == {"count": "5 images", "controls": True, "keys": [f"{EVIL} (1)", "cat (2)", "dog (2)"]}


def test_circles_are_where_they_belong_in_the_colour_of_their_class(shown):
    colours = shown["colours"]
    assert colours["first"] == "label"
    assert colours["nowhere"][3] == 0
    for name, shade in (("bottom left", (0xD5, 0x5E, 0x00)), ("top right", (0x00, 0x9E, 0x73))):
        assert colours[name][:3] == pytest.approx(shade, abs=3)
    # The share of u = 0.3 is (0.3 - 0.008) / (0.392 - 0.008) = 0.76.
    assert colours["bottom left"][3] == pytest.approx(255 * 0.9, abs=2)
    assert colours["top right"][3] == pytest.approx(255 * (0.9 - 0.7 * 0.76), abs=2)


def test_pointing_shows_an_image(shown):
    pointed = shown["pointed"]
    assert pointed["text"] == ["top right.png", "max probability 0.3", "label: dog", "predicted: dog"]
    assert pointed["ring"] == pytest.approx(pointed["place"], abs=1.5)
    assert pointed["picture"].startswith("data:image/jpeg;base64,")
    assert shown["nowhere"] is None


def test_names_stay_text_on_the_page(shown):
    assert shown["evil"] == {
        "text": [EVIL, "max probability 0.4", f"label: {EVIL}", "predicted: cat"],
        "images": 0,
        "rows": 0,
    }
    assert shown["alerts"] == 0


def test_images_are_found_by_class_by_name_and_by_rank(shown):
    assert shown["searched"] == {
        # By prediction as well: the third image is predicted to be a dog.
        "dog": ["3 of 5 images", ["cat (1)", "dog (2)"]],
        "TOP": ["2 of 5 images", ["cat (1)", "dog (1)"]],
        "nothing": ["0 of 5 images", []],
    }
    assert shown["ranked"] == ["3 of 5 images", "0.2 to 0.4"]
    assert shown["crossed"] == ["25", "1 of 5 images"]  # the lower end follows the upper one
    assert shown["all"] == ["5 images", True]


def test_a_class_can_be_hidden_and_the_keyboard_stays_where_it_is(shown):
    hidden = shown["hidden"]
    assert (hidden["count"], hidden["pressed"], hidden["focus"]) == ("3 of 5 images", ["true", "false", "true"], 1)


def test_uncertainty_has_a_scale_of_its_own(shown):
    assert (shown["shaded"]["keys"], shown["shaded"]["sizes"]) == (0, True)
    assert shown["shaded"]["pixel"][:3] == pytest.approx((0x23, 0x78, 0x8F), abs=3)


def test_zooming_keeps_what_is_under_the_pointer_and_dragging_moves_it(shown):
    zoomed = shown["zoomed"]
    assert (zoomed["text"], zoomed["wider"]) == ("top right.png", True)
    assert zoomed["ring"] == pytest.approx(zoomed["place"], abs=3)  # a wheel knows whole pixels only
    assert shown["dragged"] == "top right.png"


def test_arrows_go_from_image_to_image(shown):
    expected = [EVIL, "bottom right.png", "top right.png", "top left.png", "top left.png", None]
    assert shown["walk"] == expected


def test_the_list_leads_to_its_image_even_if_it_was_filtered_away(shown):
    assert (shown["listed"]["text"], shown["listed"]["count"]) == (EVIL, "5 images")
    assert shown["listed"]["ring"] == pytest.approx(shown["listed"]["middle"], abs=1.5)
