"""Draw the pictures of pages in docs/images, as a browser shows them: a report, and the explorer.

    python docs/_pictures.py report CACHE [OOD...]
    python docs/_pictures.py explorer CACHE IMAGES

CACHE holds labelled images, OOD out-of-distribution images by the same model. No image is in the picture of the report;
in that of the explorer there are, so IMAGES must be ones that may be shown. `make browser` installs the browser.
"""

import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

import dubito

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1200
GAP = 24


def report(cache: str, *others: str) -> Image.Image:
    """From the top to the end of the section on risk."""
    ood = {Path(path).name: dubito.open(path) for path in others}
    with tempfile.TemporaryDirectory() as place, opened() as page:
        made = dubito.report.model_report(dubito.open(cache), ood=ood).to_html(Path(place) / "report.html")
        page.goto(made.as_uri())
        end = page.evaluate("document.getElementById('risk').getBoundingClientRect().bottom + scrollY")
        return shot(page, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end + 24})


def explorer(cache: str, images: str) -> Image.Image:
    """Filters, map and the most uncertain images; beside them, the panel of the threshold at a risk of 1 %."""
    with dubito.explore(dubito.open(cache), images, browser=False) as running, opened(WIDTH + 240) as page:
        page.goto(f"{running.address}#layout=tsne&panel=images&histograms=energy,max_logit")
        page.wait_for_selector("#layouts [data-state=ready]:has-text('t-SNE')", timeout=180_000)
        page.locator("#dismiss").click()
        page.wait_for_load_state("networkidle")
        whole = shot(page)
        page.locator("[data-panel-of=threshold]").click()
        page.locator("#target").fill("1")
        page.locator("#risk-form button").click()
        page.wait_for_function("document.getElementById('target-words').textContent")
        panel = shot(page.locator(".side"))
    picture = Image.new("RGB", (whole.width + GAP + panel.width, whole.height), "white")
    picture.paste(whole)
    picture.paste(panel, (whole.width + GAP, whole.height - panel.height))
    return picture


@contextmanager
def opened(width: int = WIDTH) -> Iterator[Page]:
    """An empty page of a browser."""
    sys.path.insert(0, str(ROOT))
    from tests.browser.install import OPTIONS, find  # noqa: PLC0415 (found from the root)

    path = find()  # which starts one, too
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser.new_page(viewport={"width": width, "height": 860}, locale="en-US")
        browser.close()


def shot(shown: Page | Locator, **options: Any) -> Image.Image:
    """A page, or a part of it, as it looks."""
    return Image.open(io.BytesIO(shown.screenshot(**options)))


if __name__ == "__main__":
    pages: dict[str, Callable[..., Image.Image]] = {"report": report, "explorer": explorer}
    picture = pages[sys.argv[1]](*sys.argv[2:]).convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    picture.save(ROOT / "docs" / "images" / f"{sys.argv[1]}.png", optimize=True)
