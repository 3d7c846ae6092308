"""The page: valid, escaped, ordered and self-contained."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from dubito.errors import ValueRangeError
from dubito.report.page import Card, Cell, Summary, write_page

VOID = {"meta", "img", "input", "br", "link"}
EVIL = """<script>alert("x")</script>&'"""


class Reader(HTMLParser):
    """Every tag with its attributes; every opened tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def card(u: float, v: float = 0.0, **changes: str) -> Card:
    texts = {"title": "tabby", "detail": "62%", "caption": "a cat, blur 2", "group": "blur"} | changes
    return Card(image=Image.new("RGB", (600, 300), "teal"), scores={"entropy": u, "max_logit": v}, **texts)


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    summary = Summary("Means", ("", "1"), {"blur": [Cell("1.23", "2/3 kept", 0.5), Cell("-")]}, remarks=["Aha."])
    cards = [card(1.0, 9.0), card(3.0, 8.0, group="noise", mark="answer changed"), card(2.0, 7.0)]
    return write_page(
        tmp_path / "new" / "page.html",
        "Three cats",
        cards,
        lead="They differ.",
        facts=["n = 3"],
        about={"entropy": "spread"},
        summary=summary,
    )


def test_it_is_whole(page: Path) -> None:
    found = read(page)
    assert found.open == []
    text = " ".join(found.text)
    for part in (
        "Three cats",
        "They differ.",
        "n = 3",
        "Means",
        "1.23",
        "2/3 kept",
        "Aha.",
        "spread",
        "Higher is always",
    ):
        assert part in text
    assert found.all("html") == [{"lang": "en"}]
    assert len(found.all("article")) == 3


def test_cards_stand_in_order_with_shares(page: Path) -> None:
    data = [json.loads(attributes["data-scores"] or "") for attributes in read(page).all("article")]
    # (u - 1) / (3 - 1) and (v - 7) / (9 - 7)
    assert data == [[[3.0, 1.0], [8.0, 0.5]], [[2.0, 0.5], [7.0, 0.0]], [[1.0, 0.0], [9.0, 1.0]]]
    assert [attributes["data-group"] for attributes in read(page).all("article")] == ["noise", "blur", "blur"]


def test_nothing_comes_from_outside(page: Path) -> None:
    found = read(page)
    sources = [value for _, attributes in found.tags for key, value in attributes.items() if key in ("src", "href")]
    assert len(sources) == 3
    assert all(value is not None and value.startswith("data:image/jpeg;base64,") for value in sources)
    text = re.sub(r'src="data:[^"]*"', "", page.read_text(encoding="utf-8"))
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_pictures_have_texts_and_choices_have_names(page: Path) -> None:
    found = read(page)
    assert [attributes["alt"] for attributes in found.all("img")] == ["a cat, blur 2"] * 3
    radios = [attributes for attributes in found.all("input") if attributes["type"] == "radio"]
    assert [(one["name"], one["value"]) for one in radios] == [
        ("order", "0"),
        ("order", "1"),
        ("group", ""),
        ("group", "blur"),
        ("group", "noise"),
    ]
    assert [one["name"] for one in radios if "checked" in one] == ["order", "group"]


def test_everything_is_escaped(tmp_path: Path) -> None:
    evil = card(1.0, title=EVIL, detail=EVIL, caption=EVIL, group=EVIL, mark=EVIL)
    summary = Summary(EVIL, (EVIL,), {EVIL: [Cell(EVIL, EVIL)]}, remarks=[EVIL])
    path = write_page(
        tmp_path / "page.html", EVIL, [evil, card(0.0)], lead=EVIL, facts=[EVIL], about={EVIL: EVIL}, summary=summary
    )
    found = read(path)
    assert len(found.all("script")) == 1
    assert found.open == []
    assert found.all("img")[0]["alt"] == EVIL
    assert 'alert("' not in path.read_text(encoding="utf-8")


def test_one_group_needs_no_filter_and_one_card_no_span(tmp_path: Path) -> None:
    found = read(write_page(tmp_path / "page.html", "One", [card(-0.001)], lead=""))
    assert all(attributes.get("name") != "group" for attributes in found.all("input"))
    assert "0.00" in " ".join(found.text)
    assert "\N{MINUS SIGN}0.00" not in " ".join(found.text)


def test_one_score_needs_no_choice_of_an_order(tmp_path: Path) -> None:
    cards = [Card(Image.new("RGB", (9, 9)), "a", "", "b", group, {"head": 1.0}) for group in ("one", "two")]
    found = read(write_page(tmp_path / "page.html", "One", cards, lead=""))
    names = [attributes["name"] for attributes in found.all("input")]
    assert names == ["group", "group", "group", "flip"]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.0, 6.9), ["6.90", "0.00"]),
        ((0.5, 0.95), ["0.95", "0.50"]),  # the logarithm of 0.45 is rounded to 0: two decimals
        ((0.701, 0.732), ["0.7320", "0.7010"]),  # of 0.031 to -2: two more
        ((-3.0, -2.8), ["\N{MINUS SIGN}2.800", "\N{MINUS SIGN}3.000"]),
        ((1.0, 1.0 + 1e-12), ["1.000000", "1.000000"]),
    ],
)
def test_close_scores_have_more_decimals(tmp_path: Path, values: tuple[float, float], texts: list[str]) -> None:
    cards = [Card(Image.new("RGB", (9, 9)), "a", "", "b", "c", {"head": value}) for value in values]
    page = write_page(tmp_path / "page.html", "Close", cards, lead="").read_text(encoding="utf-8")
    assert re.findall(r"</i><span>(.*?)</span></dd>", page) == texts


def test_pictures_from_files_are_small(tmp_path: Path) -> None:
    Image.effect_noise((1200, 900), 60).save(tmp_path / "big.png")
    page = write_page(
        tmp_path / "page.html", "Big", [Card(tmp_path / "big.png", "a", "b", "c", "d", {"u": 1.0})], lead=""
    )
    assert page.stat().st_size < 100_000 < (tmp_path / "big.png").stat().st_size


def test_the_same_cards_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (write_page(tmp_path / name, "Same", [card(1.0), card(2.0)], lead="").read_bytes() for name in "ab")
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
        write_page(tmp_path / "page.html", "Odd", cards, lead="")
    assert not (tmp_path / "page.html").exists()
