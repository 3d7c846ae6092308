"""Cards in a browser: ordered by any score, filtered by group, and all of them shown without a script."""

import pytest
from PIL import Image

from dubito.report import Card, cards_page
from dubito.storage import export


@pytest.fixture(scope="module")
def page(tmp_path_factory, open_page):
    scores = {"a": ("blur", 3.0, 1.0), "b": ("noise", 2.0, 3.0), "c": ("blur", 1.0, 2.0)}
    cards = [
        Card(Image.new("RGB", (20, 20)), name, "", name, group, {"entropy": u, "max_logit": v})
        for name, (group, u, v) in scores.items()
    ]
    shown = cards_page("Three", cards, lead="Some.").encode()
    return open_page(export(tmp_path_factory.mktemp("cards") / "cards.html", shown))


def visible(page) -> str:
    return "".join(card.locator("h2 span").inner_text() for card in page.locator("article:visible").all())


def test_cards_are_ordered_and_filtered(page):
    assert (visible(page), page.locator("#count").inner_text()) == ("abc", "3 images")
    page.get_by_text("max logit").first.click()
    assert visible(page) == "bca"
    page.get_by_label("most certain first").check()
    assert visible(page) == "acb"
    page.locator(".choice").get_by_text("noise").click()
    assert (visible(page), page.locator("#count").inner_text()) == ("b", "1 image")
    page.locator(".choice").get_by_text("all").click()
    assert visible(page) == "acb"
    chosen = page.locator("article dl .chosen dt").all_inner_texts()
    assert chosen == ["max logit"] * 3


def test_a_report_starts_in_its_own_order_and_comes_back_to_it(tmp_path, open_page):
    cards = [
        Card(None, name, "", name, verdict, {"entropy": u}, verdict=verdict, reason="because", tone="bad")
        for name, verdict, u in (("a", "abstain", 1.0), ("b", "accept", 2.0), ("c", "accept", 2.0))
    ]
    shown = cards_page("Own", cards, lead="Some.", order="least trusted").encode()
    page = open_page(export(tmp_path / "own.html", shown))
    assert visible(page) == "abc"
    page.locator(".choice").get_by_text("entropy").click()
    assert visible(page) == "bca"  # b and c are equal, and stay as they were
    page.locator(".choice").get_by_text("least trusted").click()
    page.get_by_label("most certain first").check()
    assert visible(page) == "cba"
    page.locator(".choice").get_by_text("accept").click()
    assert visible(page) == "cb"


def test_without_scripts_every_card_is_there(browser, page):
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(page.url)
    assert plain.locator("article:visible").count() == 3
    assert not plain.locator("#controls").is_visible()
    context.close()
