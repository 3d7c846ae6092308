"""The gallery: both ends of a set, no image twice, on one page."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dubito.data import open_images
from dubito.errors import TableError, ValueRangeError
from dubito.report.gallery import write_gallery


def photos(n: int, **options):
    return open_images(np.zeros((n, 8, 8, 3), np.uint8), **options)


def shown(page: Path) -> dict[str, list[str]]:
    cards = re.findall(r'<article data-group="([^"]+)".*?alt="([^"]+)"', page.read_text(), flags=re.DOTALL)
    return {group: [name for kind, name in cards if kind == group] for group, _ in cards}


def test_both_ends(tmp_path: Path):
    u = [0.5, 0.1, 0.9, 0.2, 0.8, 0.6, 0.7]
    page = write_gallery(
        photos(7, labels=list("abcabca")), u, tmp_path / "g" / "gallery.html", count=2, score="entropy"
    )
    assert page == tmp_path / "g" / "gallery.html"
    assert shown(page) == {"most uncertain": ["000002", "000004"], "most certain": ["000003", "000001"]}
    text = page.read_text()
    assert "What is clear, and what is not?" in text
    assert "The 2 most uncertain and the 2 most certain images of images in memory." in text
    assert "Each has its place among all 7: 1 is the most uncertain." in text
    assert "median entropy 0.6" in text
    # The label of 000002, the most uncertain of all; 000001 is the most certain.
    assert re.findall(r"<h2><span>(\w)</span> <small>(.*?)</small>", text) == [
        ("c", "1 of 7"),
        ("b", "2 of 7"),
        ("a", "6 of 7"),
        ("b", "7 of 7"),
    ]


def test_equal_uncertainties_have_places_in_order(tmp_path: Path):
    text = write_gallery(photos(4), [1.0, 1.0, 1.0, 1.0], tmp_path / "g.html").read_text()
    assert re.findall(r"<h2><span>(.*?)</span> <small>(.*?)</small>", text) == [
        ("most uncertain", "1 of 4"),
        ("most uncertain", "2 of 4"),
        ("most certain", "3 of 4"),
        ("most certain", "4 of 4"),
    ]


def test_a_page_does_not_tell_where_the_images_lie(tmp_path: Path):
    for number in range(2):
        place = tmp_path / "private" / "set" / "val"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(place / f"{number}.png")
    text = write_gallery(place, [0.0, 1.0], tmp_path / "g.html").read_text()
    assert "images of set/val." in text
    assert "private" not in text


@pytest.mark.parametrize(("n", "each"), [(1, (1, 0)), (2, (1, 1)), (5, (2, 2)), (30, (12, 12))])
def test_no_image_is_shown_twice(tmp_path: Path, n: int, each: tuple[int, int]):
    found = shown(write_gallery(photos(n), torch.arange(n), tmp_path / "g.html"))
    assert (len(found["most uncertain"]), len(found.get("most certain", []))) == each
    listed = [name for names in found.values() for name in names]
    assert len(set(listed)) == len(listed)


def test_ids_say_whose_uncertainty_it_is(tmp_path: Path):
    # 000001 could not be decoded and has no row.
    page = write_gallery(
        photos(4), [3.0, 1.0, 2.0], tmp_path / "g.html", ids=np.array(["000000", "000002", "000003"]), count=1
    )
    assert shown(page) == {"most uncertain": ["000000"], "most certain": ["000002"]}


def test_random_examples_out_of_the_tails(tmp_path: Path):
    drawn = [
        shown(write_gallery(photos(100), torch.arange(100), tmp_path / "g.html", count=3, tail=0.2, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(int(name) >= 80 for name in drawn[0]["most uncertain"])
    assert all(int(name) < 20 for name in drawn[0]["most certain"])
    assert drawn[0]["most uncertain"] != ["000099", "000098", "000097"]
    text = (tmp_path / "g.html").read_text()
    assert "3 of the most uncertain and 3 of the most certain images of images in memory, drawn at random" in text
    assert "from the 20% at either end. Each has its place among all 100" in text


def test_errors(tmp_path: Path):
    page = tmp_path / "g.html"
    with pytest.raises(TableError, match=r"u must have one value an image, \(3,\); got shape \(2,\).*ids=table.id"):
        write_gallery(photos(3), [1.0, 2.0], page)
    with pytest.raises(TableError, match="ids must be images of images in memory; 'x' is not"):
        write_gallery(photos(3), [1.0], page, ids=["x"])
    with pytest.raises(ValueRangeError, match=r"count=0, tail=0.0 came"):
        write_gallery(photos(3), [1.0, 2.0, 3.0], page, count=0)
    with pytest.raises(ValueRangeError, match="write_gallery: u: 1 of 3 values are NaN"):
        write_gallery(photos(3), [1.0, float("nan"), 3.0], page)
    with pytest.raises(
        ValueRangeError, match="write_gallery needs pictures; '000001' of images in memory is a model input"
    ):
        write_gallery(torch.zeros(2, 3, 8, 8), [0.0, 1.0], page)
    assert not page.exists()
