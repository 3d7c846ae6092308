"""The explorer in a browser, on a real server: select, filter, decide, look at one image, drop one, export, reload."""

import csv
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

import dubito
from dubito.explore.explorer import Explorer

from ..explore.conftest import EVIL, network, pictures

READY = "body[data-ready=true]"


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    folder = tmp_path_factory.mktemp("explorer")
    model, images = network(), pictures(folder / "images", 60)
    table = dubito.extract(model, images, folder / "cache")
    predicted = table.logit.argmax(1)
    label = {
        name: int(one + (row % 4 == 0)) % 3
        for row, (name, one) in enumerate(zip(table.row_ids(), predicted, strict=True))
    }
    table = dubito.cache.label_cache(folder / "cache", label)
    ood = dubito.extract(model, pictures(folder / "ood", 12), folder / "other")
    second = dubito.extract(network(seed=1), images, folder / "second")
    with dubito.explore(table, images, model=model, ood={"noise": ood}, other=second, browser=False) as running:
        yield running


@contextmanager
def watched(browser: Browser, address: str) -> Iterator[Page]:
    """A page of its own; whatever leaves the machine, or any error in a script, fails the test."""
    context = browser.new_context(locale="en-US", viewport={"width": 1400, "height": 900}, accept_downloads=True)
    opened, problems = context.new_page(), list[str]()
    local = address.split("/", 3)[:3]
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on(
        "request",
        lambda sent: (
            None
            if sent.url.split("/", 3)[:3] == local or sent.url.startswith(("data:", "blob:"))
            else problems.append(sent.url)
        ),
    )
    opened.add_init_script("window.alerts = 0; window.alert = () => { window.alerts += 1; };")
    opened.goto(address)
    opened.wait_for_selector(READY)
    yield opened
    assert opened.evaluate("window.alerts") == 0  # names with HTML in them are text
    context.close()
    assert problems == []


@pytest.fixture
def page(browser: Browser, explorer: Explorer) -> Iterator[Page]:
    with watched(browser, explorer.address) as opened:
        yield opened


def shown(page: Page) -> int:
    """How many images are selected."""
    text = page.locator("#count").inner_text()
    return int(re.search(r"[\d,]+", text).group().replace(",", ""))  # type: ignore[union-attr]


def test_it_opens_with_all_images_and_their_pictures(page):
    assert shown(page) == 72
    expect(page.locator("#grid .cell").first).to_be_visible()
    page.wait_for_function("() => [...document.querySelectorAll('#grid img')].some((one) => one.naturalWidth > 0)")


def test_a_filter_narrows_and_clears(page):
    page.locator('input[name="is.correct"][value="0"]').check(force=True)
    expect(page.locator("#count")).to_contain_text("15")  # a quarter of 60
    page.locator("#clear").click()
    expect(page.locator("#count")).to_contain_text("72")


def test_text_in_the_name_finds_an_image_with_html_in_its_name(page):
    page.locator("#find").fill("onerror")
    expect(page.locator("#count")).to_contain_text("2 of 72")  # one in each folder
    page.locator("#grid .cell").first.click()
    expect(page.locator("#image-body")).to_contain_text(EVIL)


def test_a_lasso_selects_and_its_address_restores_it(page):
    page.locator("[data-tool=lasso]").click()
    box = page.locator("#canvas").bounding_box()
    assert box is not None
    x, y, w, h = box["x"], box["y"], box["width"], box["height"]
    page.mouse.move(x + 0.02 * w, y + 0.02 * h)
    page.mouse.down()
    for left, top in ((0.55, 0.02), (0.55, 0.98), (0.02, 0.98), (0.02, 0.02)):
        page.mouse.move(x + left * w, y + top * h, steps=8)
    page.mouse.up()
    page.wait_for_function("() => /lasso/.test(location.hash)")
    count = shown(page)
    assert 0 < count < 72
    page.goto("about:blank")
    page.go_back()
    page.wait_for_selector(READY)
    page.wait_for_function(f"() => document.querySelector('#count').textContent.includes('{count}')")


def test_the_slider_moves_coverage_risk_and_bound(page):
    page.locator("[data-panel-of=threshold]").first.click()
    page.wait_for_function("() => /%/.test(document.querySelector('#coverage').textContent)")
    before = [page.locator(name).inner_text() for name in ("#coverage", "#risk", "#bound")]
    slider = page.locator("#slider")
    slider.focus()
    slider.press("Home")
    page.wait_for_function("(text) => document.querySelector('#coverage').textContent !== text", arg=before[0])
    after = [page.locator(name).inner_text() for name in ("#coverage", "#risk", "#bound")]
    assert after != before


def test_an_image_in_detail_and_the_next_by_keyboard(page):
    page.locator("#grid .cell").first.click()
    body = page.locator("#image-body")
    expect(body.locator("h2").first).to_be_visible()
    expect(page.locator(".neighbours button").first).to_be_visible()
    first = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('image')")
    page.keyboard.press("j")
    page.wait_for_function("(before) => new URLSearchParams(location.hash.slice(1)).get('image') !== before", arg=first)


def test_a_link_to_an_image_opens_it(page, explorer):
    page.goto("about:blank")
    page.goto(f"{explorer.address}#image=3")
    expect(page.locator("#image-body h2").first).to_be_visible(timeout=20_000)
    expect(page.locator("[data-panel-of=image]")).to_have_attribute("aria-current", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#grid")).to_be_visible()
    assert "image=" not in page.url.replace("panel=image", "")


def test_a_mark_survives_a_reload(page):
    page.locator("#grid .cell").first.click()
    expect(page.locator("#mark")).to_be_visible()
    with page.expect_response(lambda answer: "/api/notes/" in answer.url):
        page.locator("#mark").click()
    page.reload()
    page.wait_for_selector(READY)
    page.locator('input[name="is.marked"][value="1"]').check(force=True)
    expect(page.locator("#count")).to_contain_text("1 of 72")


def test_an_own_image_is_judged(page, tmp_path):
    picture = next(pictures(tmp_path / "own", 1).iterdir())
    page.locator("#file").set_input_files(picture)
    expect(page.locator("#image-body")).to_contain_text(picture.name)
    expect(page.locator(".neighbours button").first).to_be_visible()


def test_an_export_holds_what_was_selected(page, tmp_path):
    page.locator("#find").fill("02")
    page.wait_for_function("() => !document.querySelector('#count').textContent.startsWith('72')")
    count = shown(page)
    page.locator("#export").click()
    with page.expect_download() as download:
        page.locator("[data-format=csv]").click()
    path = tmp_path / "selection.csv"
    download.value.save_as(path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == count
    assert all("02" in row["id"] for row in rows)


def test_two_models_side_by_side(page):
    page.get_by_role("button", name="Compare").or_(page.locator("#layouts button", has_text="Compare")).first.click()
    page.locator("#compare-y").select_option("other:entropy")
    page.wait_for_function("() => /compare|other/.test(location.hash)")
    expect(page.locator("#agreement")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_in_its_width(browser: Browser, explorer: Explorer, scheme: Any):
    context = browser.new_context(locale="en-US", viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.goto(explorer.address)
    page.wait_for_selector(READY)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


VIEWS = {
    "panel=map": "#canvas",
    "panel=filters&is.correct=0": "#histograms svg, #histograms canvas",
    "panel=images": "#grid .cell img",
    "panel=threshold": "#curve svg",
    "panel=image&image=1&tiles=1&curves=1": ".corruption svg",
    "panel=map&layout=ranks!entropy!other:entropy": "#agreement",
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_is_accessible(
    browser: Browser, explorer: Explorer, barriers: Callable[[Page], list[str]], tmp_path: Path, scheme: Any, width: int
):
    # Without motion: colours that are still changing would be measured half-way.
    context = browser.new_context(
        locale="en-US", viewport={"width": width, "height": 844}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(explorer.address)
    page.wait_for_selector(READY)
    found = dict[str, list[str]]()
    for view, sign in VIEWS.items():
        page.evaluate("(view) => { location.hash = view; }", view)
        expect(page.locator(sign).first).to_be_visible()
        found[view] = barriers(page)
    page.locator("#file").set_input_files(next(pictures(tmp_path, 1).iterdir()))
    expect(page.locator("#place")).to_have_text("new image")
    found["upload"] = barriers(page)
    page.evaluate("location.hash = 'panel=map'")
    expect(page.locator("#pin")).to_be_visible()
    found["upload on the map"] = barriers(page)
    for dialog in ("export", "help"):
        page.locator(f"#{dialog}").click()
        found[dialog] = barriers(page)
        page.keyboard.press("Escape")
    context.close()
    assert {view: problems for view, problems in found.items() if problems} == {}


def random_table(rows: int, outputs: int, **columns: Any) -> dubito.Table:
    draw = torch.Generator().manual_seed(0)
    made = {
        "logit": torch.randn(rows, outputs, generator=draw),
        "feature": torch.randn(rows, 5, generator=draw),
        "label": torch.randint(outputs, (rows,), generator=draw),
    }
    return dubito.Table(**{key: one for key, one in {**made, **columns}.items() if one is not None})


EVIL_NAMES = ["<script>alert(1)</script>", EVIL, "\"'`&<b>"]
HARD = {
    "no features": (random_table(20, 4, feature=None), "#compare-words", "The table has no features"),
    "no labels": (random_table(20, 4, label=None), "#threshold-words", "Without labels of the model's classes"),
    "features alone": (random_table(20, 4, logit=None, label=None), "#threshold-words", "There is no score"),
    "no images": (random_table(20, 4), "#notices-list", "No pictures: open the explorer with images"),
    "one image": (random_table(1, 4), "#count", "1 image"),
    "one class": (random_table(20, 1), "#notices-list", "needs at least two classes"),
    "a thousand classes": (random_table(1200, 1000), "#count", "1,200 images"),
    "names with markup": (
        random_table(20, 3, classes=EVIL_NAMES, id=[f"{EVIL}{row}" for row in range(20)], name=EVIL),
        "#name",
        EVIL,
    ),
}


@pytest.mark.parametrize("case", HARD)
def test_tables_that_lack_things_are_shown_with_words(browser: Browser, case: str):
    table, where, words = HARD[case]
    with dubito.explore(table, browser=False) as running, watched(browser, running.address) as page:
        for view in ("panel=threshold", "panel=image&image=0"):
            page.evaluate("(view) => { location.hash = view; }", view)
            expect(page.locator(f"section.{view.split('&')[0][6:]}")).to_be_visible()
        expect(page.locator("#image-body h2").first).to_be_visible(timeout=20_000)
        expect(page.locator(where)).to_contain_text(words)


def test_images_that_moved_are_said(browser: Browser, tmp_path: Path):
    images = pictures(tmp_path / "images", 3)
    table = dubito.extract(network(), images)
    with dubito.explore(table, images, browser=False) as running:
        for path in list(images.iterdir()):
            path.rename(tmp_path / path.name)  # while it runs
        page = browser.new_page()
        page.goto(f"{running.address}#image=0")
        expect(page.locator("#image-body .missing")).to_contain_text("It may have been moved or renamed")
        page.keyboard.press("Escape")
        expect(page.locator("#grid .missing")).to_have_count(3)
        page.close()


def test_a_server_that_ends_is_said_and_one_that_comes_back_goes_on(browser: Browser, tmp_path: Path):
    options = {"folder": tmp_path / "kept", "browser": False}
    table = random_table(20, 4, id=[f"{row:02}.png" for row in range(20)])
    running = dubito.explore(table, **options)
    pages = [browser.new_page(), browser.new_page()]
    for page in pages:
        page.goto(f"{running.address}#image=0")
        page.wait_for_selector(READY)
    running.close()
    for page in pages:
        page.locator("#mark").click()
        expect(page.locator("#banner")).to_contain_text("The server does not answer. Start it again")
    with dubito.explore(table, **options) as again:
        assert again.address == running.address
        for page in pages:
            page.evaluate("document.getElementById('retry').click()")  # hidden where the page has asked by itself
            expect(page.locator("#banner")).to_be_hidden()
        pages[1].goto(f"{again.address}#image=2")
        expect(pages[1].locator("#image-body h2").first).to_have_text("02.png")
    for page in pages:
        page.close()


def test_a_wrong_token_is_said(browser: Browser, explorer: Explorer):
    page = browser.new_page()
    page.goto(re.sub(r"/[^/]+/$", "/wrong/", explorer.address))
    assert "token is wrong or missing" in page.inner_text("body")
    page.close()


def test_the_picture_folder_is_not_touched(explorer: Explorer):
    assert explorer.kept is not None
    assert Path(explorer.kept).name == "cache.explore"


def changed_watch(folder: Path) -> tuple[dubito.Table, Path, dubito.guard.Watch]:
    """A watch that has raised an alarm, of images that are in the table, and one with HTML in its name that is not."""
    images = pictures(folder / "images", 40)
    table = dubito.extract(network(), images, folder / "cache")
    guard = dubito.Guard.fit(None, table, coverage=0.5, confidence=0.6, scores=["entropy"], sets=False)
    watch = guard.watch(folder / "watch")
    rows = dubito.Entropy().score(table).argsort()[-5:].tolist()  # the most uncertain images alone
    gone = table.rows(rows).extended(id=[f"{EVIL}-{row}" for row in rows])
    for _ in range(20):
        watch.update(guard.decide(table.rows(rows)))
        watch.update(guard.decide(gone))
    return table, images, watch


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 1000, 390])
def test_a_watch_is_a_panel(
    browser: Browser, barriers: Callable[[Page], list[str]], tmp_path: Path, scheme: Any, width: int
):
    table, images, watch = changed_watch(tmp_path)
    with dubito.explore(table, images, watch=watch, browser=False) as running:
        context = browser.new_context(
            locale="en-US", viewport={"width": width, "height": 844}, color_scheme=scheme, reduced_motion="reduce"
        )
        page = context.new_page()
        page.goto(running.address)
        page.wait_for_selector(READY)
        page.locator("#watch-tab").click()
        expect(page.locator("#watch .history svg").first).to_be_visible()
        assert barriers(page) == []
        assert page.evaluate(
            "document.querySelector('.tabs').scrollWidth <= document.querySelector('.tabs').clientWidth"
        )
        assert page.evaluate(
            "document.querySelector('#watch').scrollWidth <= document.querySelector('#watch').clientWidth"
        )
        context.close()


def test_a_watch_is_drawn_its_images_open_and_a_reload_shows_what_is_new(browser: Browser, tmp_path: Path):
    table, images, watch = changed_watch(tmp_path)
    report = watch.report()
    with (
        dubito.explore(table, images, watch=watch, browser=False) as running,
        watched(browser, running.address) as page,
    ):
        page.locator("#watch-tab").click()
        expect(page.locator("#watch .verdict")).to_have_text(report.title())
        expect(page.locator("#watch .sentences li").last).to_have_text(report.advice)
        (alarm, *_) = report.alarms
        expect(page.locator("#watch .span title").first).to_contain_text(f"Alarm 1 after {alarm['images']:,} images")
        at = page.locator("#watch .span .end").first.get_attribute("x1")
        assert float(at or "") == pytest.approx(40 + 252 * alarm["images"] / report.images, abs=0.06)
        expect(page.locator("#watch > .fine")).to_contain_text(EVIL)
        page.wait_for_function("() => document.querySelector('#watch .neighbours img')?.naturalWidth > 0")
        picture = page.locator("#watch .neighbours button").first
        name = picture.get_attribute("title")
        picture.click()
        expect(page.locator("#image-body h2").first).to_have_text(name or "")
        page.go_back()
        expect(page.locator("#watch")).to_be_visible()
        fed = dubito.guard.Watch.open(watch.guard, tmp_path / "watch")  # as another process would
        fed.update(watch.guard.decide(table))
        page.reload()
        expect(page.locator("#watch .verdict")).to_contain_text(f"{report.images + 40} images")


def test_without_a_watch_there_is_no_tab(page):
    expect(page.locator("[data-panel-of=watch]")).to_be_hidden()
