"""Draw docs/images/report.png: the first screens of a report, as a browser shows them.

    python docs/_report_picture.py CACHE [OOD...] [--to docs/images/report.png]

CACHE holds labelled images, others are out-of-distribution images by the same model. No image of theirs is in the
picture. `make browser` installs the browser.
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import dubito

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"width": 1200, "height": 900}


def main() -> None:
    """Report, open, cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images" / "report.png")
    options = parser.parse_args()
    table, *others = [dubito.open(path) for path in options.caches]
    ood = {path.name: one for path, one in zip(options.caches[1:], others, strict=True)}
    with tempfile.TemporaryDirectory() as place:
        page = dubito.report.model_report(table, ood=ood).to_html(Path(place) / "report.html")
        picture = Image.open(io.BytesIO(shot(page)))
    picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(options.to, optimize=True)


def shot(page: Path) -> bytes:
    """From the top to the end of the section on risk."""
    sys.path.insert(0, str(ROOT))
    from tests.browser.install import OPTIONS, find  # noqa: PLC0415 (found from the root)

    path = find()  # which starts one, too
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        opened = browser.new_page(viewport=SIZE)
        opened.goto(page.as_uri())
        end = opened.evaluate("document.getElementById('risk').getBoundingClientRect().bottom + scrollY")
        taken = opened.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": end + 24})
        browser.close()
    return taken


if __name__ == "__main__":
    main()
