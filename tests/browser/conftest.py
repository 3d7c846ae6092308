"""One Chromium for all tests in this folder; without one they are skipped, and say how to get it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from .install import OPTIONS, find, find_axe

_CONTEXTS = """{
  window.contexts = {};
  const real = HTMLCanvasElement.prototype.getContext;
  HTMLCanvasElement.prototype.getContext = function (kind, ...more) {
    const context = kind === "webgl2" && MISSING ? null : real.call(this, kind, ...more);
    if (context === null && !MISSING) throw new Error(`this browser has no ${kind}`);
    window.contexts[kind] = context;
    return context;
  };
}"""
_SERIOUS = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target} ${failureSummary}`));
}"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find()
    if path is None:
        pytest.skip("no Chromium found; `make browser` installs one")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a file as a page; anything that it loads or any error in its script fails the test."""
    context = browser.new_context(locale="en-US", viewport={"width": 1000, "height": 900})
    problems: list[str] = []

    def open_file(path: Path, *, before: str = "") -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: None if sent.url.startswith(("file:", "data:")) else problems.append(sent.url))
        if before:
            page.add_init_script(before)
        page.goto(path.as_uri())
        return page

    yield open_file
    context.close()
    assert problems == []


@pytest.fixture(scope="session")
def barriers() -> Callable[[Page], list[str]]:
    """Every serious or critical violation of accessibility that axe-core finds on a page, as it is now."""
    path = find_axe()
    if path is None:
        pytest.skip("axe-core is not installed; `make browser` installs it where npm is")
    script = path.read_text(encoding="utf-8")

    def look(page: Page) -> list[str]:
        if not page.evaluate("'axe' in window"):
            page.evaluate(script)  # which no content security policy of the page prevents
        return list(page.evaluate(_SERIOUS))

    return look


@pytest.fixture(scope="session")
def with_webgl2() -> str:
    """A script to run before a page's own: without WebGL2 the page fails."""
    return _CONTEXTS.replace("MISSING", "false")


@pytest.fixture(scope="session")
def without_webgl2() -> str:
    """A script to run before a page's own: there is no WebGL2."""
    return _CONTEXTS.replace("MISSING", "true")


@pytest.fixture(scope="module", params=["with_webgl2", "without_webgl2"])
def renderer(request: pytest.FixtureRequest) -> str:
    """One of these two scripts."""
    return str(request.getfixturevalue(request.param))
