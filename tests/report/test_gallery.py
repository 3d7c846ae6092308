"""Cards are ordered, escaped and self-contained; the gallery shows both ends of a set and no image twice."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.page.test_render import Reader

from dubito.data import open_images
from dubito.errors import TableError, ValueRangeError
from dubito.report.gallery import Card, Summary, cards_page, write_gallery
from dubito.storage import export

EVIL = """<script>alert("x")</script>&'"""


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
    assert "What is the model sure of, and what not?" in text
    assert "The 2 most uncertain and the 2 most certain images of images in memory." in text
    assert "Each shows its rank among all 7: 1 is the most uncertain." in text
    assert "median entropy 0.6" in text
    # The label of 000002, the most uncertain of all; 000001 is the most certain.
    assert re.findall(r"<h2><span>(.*?)</span> <small>(.*?)</small>", text) == [
        ("label: c", "1 of 7"),
        ("label: b", "2 of 7"),
        ("label: a", "6 of 7"),
        ("label: b", "7 of 7"),
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
    result = shown(write_gallery(photos(n), torch.arange(n), tmp_path / "g.html"))
    assert (len(result["most uncertain"]), len(result.get("most certain", []))) == each
    listed = [name for names in result.values() for name in names]
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
    assert "from the 20% at either end. Each shows its rank among all 100" in text


def test_errors(tmp_path: Path):
    page = tmp_path / "g.html"
    with pytest.raises(TableError, match=r"u must have one value per image, \(3,\); got shape \(2,\).*ids=table.id"):
        write_gallery(photos(3), [1.0, 2.0], page)
    with pytest.raises(TableError, match="ids must be images of images in memory; 'x' is not"):
        write_gallery(photos(3), [1.0], page, ids=["x"])
    with pytest.raises(ValueRangeError, match=r"write_gallery: count must be a whole number, at least 1; got 0"):
        write_gallery(photos(3), [1.0, 2.0, 3.0], page, count=0)
    with pytest.raises(ValueRangeError, match=r"write_gallery: tail must be a number in \[0, 0.5\]; got 0.6"):
        write_gallery(photos(3), [1.0, 2.0, 3.0], page, tail=0.6)
    with pytest.raises(ValueRangeError, match="write_gallery: u: 1 of 3 values are NaN"):
        write_gallery(photos(3), [1.0, float("nan"), 3.0], page)
    with pytest.raises(
        ValueRangeError, match="write_gallery needs images as pixels; '000001' of images in memory is a model input"
    ):
        write_gallery(torch.zeros(2, 3, 8, 8), [0.0, 1.0], page)
    assert not page.exists()


def card(u: float, v: float = 0.0, **changes: str) -> Card:
    texts = {"title": "tabby", "detail": "62%", "caption": "a cat, blur 2", "group": "blur"} | changes
    return Card(image=Image.new("RGB", (600, 300), "teal"), scores={"entropy": u, "max_logit": v}, **texts)


def write_cards(to: Path, *what: Any, **options: Any) -> Path:
    return export(to, cards_page(*what, **options).encode())


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    summary = Summary("Means", ("", "1"), {"blur": [("1.23", "2/3 kept", 0.5), ("-", "", None)]}, remarks=["Aha."])
    cards = [card(1.0, 9.0), card(3.0, 8.0, group="noise", mark="prediction changed"), card(2.0, 7.0)]
    return write_cards(
        tmp_path / "new" / "page.html",
        "Three cats",
        cards,
        lead="They differ.",
        facts=["n = 3"],
        about={"entropy": "spread"},
        summary=summary,
    )


def test_cards_it_is_whole(page: Path) -> None:
    result = read(page)
    assert result.open == []
    text = " ".join(result.text)
    for part in (
        "Three cats",
        "They differ.",
        "n = 3",
        "Means",
        "1.23",
        "2/3 kept",
        "Aha.",
        "spread",
        "90 % of the other images are less uncertain",
    ):
        assert part in text
    assert result.all("html") == [{"lang": "en"}]
    assert len(result.all("article")) == 3


def test_cards_stand_in_order_with_ranks(page: Path) -> None:
    data = [json.loads(attributes["data-scores"] or "") for attributes in read(page).all("article")]
    # Of the other two, both, one or none are less uncertain.
    assert data == [[[3.0, 1.0], [8.0, 0.5]], [[2.0, 0.5], [7.0, 0.0]], [[1.0, 0.0], [9.0, 1.0]]]
    assert [attributes["data-group"] for attributes in read(page).all("article")] == ["noise", "blur", "blur"]


def test_cards_nothing_comes_from_outside(page: Path) -> None:
    result = read(page)
    sources = [value for _, attributes in result.tags for key, value in attributes.items() if key in ("src", "href")]
    assert len(sources) == 3
    assert all(value is not None and value.startswith("data:image/jpeg;base64,") for value in sources)
    text = re.sub(r'src="data:[^"]*"', "", page.read_text(encoding="utf-8"))
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_cards_pictures_have_texts_and_choices_have_names(page: Path) -> None:
    result = read(page)
    assert [attributes["alt"] for attributes in result.all("img")] == ["a cat, blur 2"] * 3
    radios = [attributes for attributes in result.all("input") if attributes["type"] == "radio"]
    assert [(one["name"], one["value"]) for one in radios] == [
        ("order", "0"),
        ("order", "1"),
        ("group", ""),
        ("group", "blur"),
        ("group", "noise"),
    ]
    assert [one["name"] for one in radios if "checked" in one] == ["order", "group"]


def test_cards_everything_is_escaped(tmp_path: Path) -> None:
    evil = card(1.0, title=EVIL, detail=EVIL, caption=EVIL, group=EVIL, mark=EVIL)
    summary = Summary(EVIL, (EVIL,), {EVIL: [(EVIL, EVIL, None)]}, remarks=[EVIL])
    path = write_cards(
        tmp_path / "page.html", EVIL, [evil, card(0.0)], lead=EVIL, facts=[EVIL], about={EVIL: EVIL}, summary=summary
    )
    result = read(path)
    assert len(result.all("script")) == 1
    assert result.open == []
    assert result.all("img")[0]["alt"] == EVIL
    assert 'alert("' not in path.read_text(encoding="utf-8")


def test_cards_one_group_needs_no_filter_and_one_card_no_span(tmp_path: Path) -> None:
    result = read(write_cards(tmp_path / "page.html", "One", [card(-0.001)], lead=""))
    assert all(attributes.get("name") != "group" for attributes in result.all("input"))
    assert "0 %" in result.text
    assert [one["title"] for one in result.all("div") if "title" in one] == [
        "entropy \N{MINUS SIGN}0.001",
        "max logit 0",
    ]


def test_cards_one_score_needs_no_choice_of_an_order(tmp_path: Path) -> None:
    cards = [Card(Image.new("RGB", (9, 9)), "a", "", "b", group, {"head": 1.0}) for group in ("one", "two")]
    result = read(write_cards(tmp_path / "page.html", "One", cards, lead=""))
    names = [attributes["name"] for attributes in result.all("input")]
    assert names == ["group", "group", "group", "flip"]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.0, 6.9), ["100 %", "0 %"]),
        ((1.0, 1.0, 1.0, 2.0), ["100 %", "0 %", "0 %", "0 %"]),
        ((1.0, 2.0, 3.0), ["100 %", "50 %", "0 %"]),
    ],
)
def test_cards_show_ranks_in_per_cent(tmp_path: Path, values: tuple[float, ...], texts: list[str]) -> None:
    cards = [Card(Image.new("RGB", (9, 9)), "a", "", "b", "c", {"head": value}) for value in values]
    page = write_cards(tmp_path / "page.html", "Close", cards, lead="").read_text(encoding="utf-8")
    assert re.findall(r"</i><span>(.*?)</span></dd>", page) == texts


def test_cards_keep_an_order_of_their_own_and_show_verdicts(tmp_path: Path) -> None:
    first = card(1.0, verdict="look at it", reason="two classes", tone="bad", caption="first")
    page = write_cards(tmp_path / "page.html", "Own", [first, card(2.0, caption="second")], lead="", order="worst")
    text = page.read_text(encoding="utf-8")
    assert text.index('alt="first"') < text.index('alt="second"')
    assert '<b class="bad">look at it</b> two classes' in text
    orders = [one["value"] for one in read(page).all("input") if one.get("name") == "order"]
    assert orders == ["given", "0", "1"]


def test_cards_need_no_picture(tmp_path: Path) -> None:
    page = read(write_cards(tmp_path / "page.html", "None", [Card(None, "a", "", "b", "c", {"u": 1.0})], lead=""))
    assert (len(page.all("article")), page.all("img")) == (1, [])


def test_cards_pictures_from_files_are_small(tmp_path: Path) -> None:
    Image.effect_noise((1200, 900), 60).save(tmp_path / "big.png")
    page = write_cards(
        tmp_path / "page.html", "Big", [Card(tmp_path / "big.png", "a", "b", "c", "d", {"u": 1.0})], lead=""
    )
    assert page.stat().st_size < 100_000 < (tmp_path / "big.png").stat().st_size


def test_cards_the_same_cards_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (write_cards(tmp_path / name, "Same", [card(1.0), card(2.0)], lead="").read_bytes() for name in "ab")
    assert one == two


@pytest.mark.parametrize(
    ("cards", "text"),
    [
        ([], "at least one card; got none"),
        ([card(1.0), card(float("nan"))], "the same finite scores, entropy, max_logit; 'a cat, blur 2' has"),
        ([card(1.0), Card(Image.new("RGB", (9, 9)), "", "", "c", "", {"entropy": 1.0})], "'c' has {'entropy': 1.0}"),
        ([Card(Image.new("RGB", (9, 9)), "", "", "c", "", {})], "at least one; 'c' has {}"),
    ],
)
def test_cards_must_be_comparable(tmp_path: Path, cards: list[Card], text: str) -> None:
    with pytest.raises(ValueRangeError, match=re.escape(text)):
        write_cards(tmp_path / "page.html", "Odd", cards, lead="")
    assert not (tmp_path / "page.html").exists()
