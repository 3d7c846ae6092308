"""The explorer's modules by themselves: numbers against numpy, addresses, and rules of the page's files."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route

from dubito.report.map import COLOURS

STATIC = Path(str(files("dubito.explore").joinpath("static")))
TEMPLATES = Path(str(files("dubito.report").joinpath("templates")))
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
VALUES = [0.5, float("nan"), -1.25, float("inf"), 0.5, 3e-8, -7.0, 0.0, 12.5, float("nan"), -1.25, 0.25]


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page that can import the modules."""

    def answer(route: Route) -> None:
        name = route.request.url.rsplit("/", 1)[1]
        path = (TEMPLATES if name == "points.js" else STATIC) / name
        if name == "":
            route.fulfill(body="<!doctype html><title>modules</title>", content_type="text/html")
        else:
            route.fulfill(body=path.read_text(encoding="utf-8"), content_type=TYPES[path.suffix])

    context = browser.new_context()
    opened = context.new_page()
    opened.route("http://explorer.test/**", answer)
    opened.goto("http://explorer.test/")
    yield opened
    context.close()


def columns(page: Page, expression: str) -> Any:
    """What an expression gives for a column 'u' of VALUES."""
    script = f"""async (text) => {{
        const {{ Columns }} = await import("http://explorer.test/columns.js");
        const values = JSON.parse(text, (_, one) => ({{ nan: NaN, inf: Infinity }})[one] ?? one);
        const columns = new Columns({{ rows: values.length, columns: [], score: "u" }});
        columns.define({{ name: "u", title: "u", kind: "score" }}, () => new Float32Array(values));
        await columns.load("u");
        return {expression};
    }}"""
    text = json.dumps([value if np.isfinite(value) else str(value) for value in VALUES])
    return page.evaluate(script, text)


def test_rows_are_ordered_as_numpy_orders_them(page: Page) -> None:
    expected = np.argsort(np.array(VALUES, dtype=np.float32), kind="stable").tolist()  # NaN last, equal ones in order
    assert columns(page, "[...columns.order('u')]") == expected
    assert columns(page, "columns.known('u')") == 10


@pytest.mark.parametrize("share", [0, 0.02, 0.3, 0.5, 0.98, 1])
def test_quantiles_are_those_of_the_finite_values(page: Page, share: float) -> None:
    finite = np.array([value for value in VALUES if np.isfinite(value)], dtype=np.float32)
    assert columns(page, f"columns.quantile('u', {share})") == pytest.approx(float(np.quantile(finite, share)))


def test_shares_lie_between_the_2_and_98_percent_quantiles(page: Page) -> None:
    u = np.array(VALUES, dtype=np.float32)
    low, high = np.quantile(u[np.isfinite(u)], (0.02, 0.98))
    expected = np.nan_to_num(np.clip((u - low) / (high - low), 0, 1), nan=0.0)
    assert columns(page, "[...columns.shares('u')]") == pytest.approx(expected.tolist(), abs=1e-6)


def test_equal_scores_have_equal_ranks(page: Page) -> None:
    # Ascending: -7, -1.25 (twice), 0, 3e-8, 0.25, 0.5 (twice), 12.5, inf; places 0 to 9 of 10, equal ones their mean.
    places = {-7.0: 0, -1.25: 1.5, 0.0: 3, 3e-8: 4, 0.25: 5, 0.5: 6.5, 12.5: 8, float("inf"): 9}
    ranks = columns(page, "[...columns.ranks('u')].map((rank) => (Number.isNaN(rank) ? null : rank))")
    expected = [places.get(value) for value in VALUES]
    assert [None if one is None else pytest.approx(one / 9) for one in expected] == ranks


def test_masks_are_packed_as_numpy_packs_them(page: Page) -> None:
    mask = np.random.default_rng(0).integers(0, 2, 21).astype(np.uint8)
    script = """async (mask) => {
        const { pack, unpack } = await import("http://explorer.test/api.js");
        const bits = pack(new Uint8Array(mask));
        return [[...bits], [...unpack(bits, mask.length)]];
    }"""
    bits, back = page.evaluate(script, mask.tolist())
    assert bits == np.packbits(mask, bitorder="little").tolist()
    assert back == mask.tolist()


def test_an_address_survives_names_with_any_character(page: Page) -> None:
    script = """async (name) => {
        const { Address } = await import("http://explorer.test/address.js");
        const address = new Address();
        address.set({ [`in.${name}`]: "1,2", find: name });
        const again = new Address();
        return [again.get(`in.${name}`), again.get("find"), again.filters().length];
    }"""
    name = 'a, b&c=d+e %41 #x ü "q" <i>'
    assert page.evaluate(script, name) == ["1,2", name, 2]


def test_colours_are_those_of_the_pages() -> None:
    def tokens(path: Path) -> list[str]:
        return re.findall(r"--[a-z-]+: #[0-9a-f]{6}", path.read_text(encoding="utf-8"))

    assert tokens(STATIC / "style.css") == tokens(TEMPLATES / "page.css")
    assert re.findall(r'"(#[0-9a-f]{6})"', (STATIC / "colours.js").read_text(encoding="utf-8"))[:10] == list(COLOURS)


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_files_obey_the_content_security_policy(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    assert re.search(markup, text) is None  # names from files become text, never markup
    assert re.search(r"""["'`(](https?:)?//(?!www\.w3\.org)""", text) is None  # nothing from elsewhere
    assert re.search(r"""["'`]/(api|static)/""", text) is None  # the token is in the path: addresses are relative
    if path.suffix == ".html":
        assert re.search(r"\s(style|on\w+)=|<script(?![^>]*src)|<style", text) is None
