"""A report in a browser: light, dark, on a phone and on paper, by keyboard, and nothing in it is executed."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

import dubito
from dubito.report import model_report

EVIL = """<img src=x onerror="document.title='run'">"'&"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    draw, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    weight = torch.randn(4, 6, generator=draw)
    label = torch.randint(4, (120,), generator=draw)
    feature = weight[label] + torch.randn(120, 6, generator=draw)
    (folder / "photos").mkdir()
    names = [f"{number:03d}.png" for number in range(120)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(folder / "photos" / name)
    table = dubito.Table(
        feature=feature,
        logit=feature @ weight.T,
        label=label,
        id=names,
        classes=["ant", EVIL, "cat", "dog"],
        name="photos",
        skipped=[(EVIL, EVIL)],
    )
    other = 3 * torch.randn(40, 6, generator=draw)
    ood = {EVIL: dubito.Table(feature=other, logit=other @ weight.T)}
    guard = dubito.Guard.fit(None, table, coverage=0.5, confidence=0.6, scores=["entropy"], sets=False)
    watch = guard.watch()
    for _ in range(4):
        watch.update(guard.decide(ood[EVIL].extended(id=[f"{row} {EVIL}" for row in range(40)])))
    assert watch.report().alarm
    return model_report(table, folder / "photos", ood=ood, watch=watch).to_html(folder / "report.html")


def test_it_opens_from_the_disk_and_names_stay_text(path, open_page):
    page = open_page(path)  # which fails for errors in the console and for anything that is loaded
    assert page.title() == "How far can you trust the model?"
    assert EVIL in page.locator("#undecodable").inner_text()
    assert f" {EVIL}': " in page.locator("#watch").inner_text()
    loaded = page.eval_on_selector_all("article img", "all => all.map((one) => one.naturalWidth)")
    assert len(loaded) > 24
    assert min(loaded) > 0
    assert page.locator("script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_it_is_accessible(browser, path, barriers, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, locale="en-US")
    page = context.new_page()
    page.goto(path.as_uri())
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert barriers(page) == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_it_fits_the_window_and_can_be_read(browser, path, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, locale="en-US")
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Contrast by WCAG 2: (lighter + 0.05) / (darker + 0.05) of relative luminances, at least 4.5 for small text.
    for selector in (".lead", ".answer h2", ".answer p", ".more", ".fine", ".results td small", ".mark"):
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector
    context.close()


CONTRAST = """(selector) => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (text) => {
    const [r, g, b] = channels(text).slice(0, 3).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  let behind = element;
  const paint = (one) => getComputedStyle(one).backgroundColor;
  const clear = (one) => channels(paint(one)).length > 3 && channels(paint(one))[3] === 0;
  while (behind.parentElement && clear(behind)) behind = behind.parentElement;
  const pair = [getComputedStyle(element).color, paint(behind)].map(luminance).sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""


def test_the_keyboard_reaches_sections_wide_tables_and_what_is_folded(path, open_page):
    page = open_page(path)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#scores"
    page.keyboard.press("Enter")
    assert page.url.endswith("#scores")
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    assert page.locator(".wide:not([tabindex='0'])").count() == 0


def test_a_screen_reader_finds_headings_and_descriptions(path, open_page):
    page = open_page(path)
    levels = [
        int(tag[1]) for tag in page.eval_on_selector_all("h1, h2, h3, h4", "all => all.map((one) => one.tagName)")
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert page.locator("article h2").count() == 0  # images are below the headings of their sections
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.locator("svg:not([aria-hidden]):not([aria-label])").count() == 0
    assert page.locator("img:not([alt])").count() == 0
    assert page.locator("section:not([aria-label]):not([aria-labelledby])").count() == 0
    identifiers = page.eval_on_selector_all("[id]", "all => all.map((one) => one.id)")
    assert len(identifiers) == len(set(identifiers))


def test_it_prints_in_black_on_white_without_navigation(browser, path):
    context = browser.new_context(color_scheme="dark", locale="en-US")
    page = context.new_page()
    page.goto(path.as_uri())
    page.emulate_media(media="print")
    assert not page.locator(".contents").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.locator("article img").first.is_visible()
    context.close()
