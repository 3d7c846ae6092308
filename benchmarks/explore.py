"""How quickly does the explorer open, move and select? A real browser, without a graphics card, on a real server.

    first_paint_seconds     from the address to a map of --rows images that can be used
    frames_per_second       drawn while such a map is dragged for two seconds
    ratio                   frames_per_second / 30, the least that looks smooth (>= 1)
    million_open_seconds    opening a cache of --many images and starting its server
    million_ready_seconds   from its address to its map
    million_lasso_seconds   from the end of a lasso around about a quarter of them to the new count
    server_memory_mb        what the server's process has grown by, with all of these columns computed

    python benchmarks/explore.py [--rows 100000] [--many 1000000] [--width 32] [--browser CHROMIUM]

Images are rows of a cache without pictures: features of ten clusters, and their logits. The browser is the one that
`make browser` found. The last line is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from _measure import seconds_of
from playwright.sync_api import Page, sync_playwright
from rich.progress import track

import dubito

READY = "body[data-ready=true]"
OPTIONS = ["--no-sandbox", "--disable-gpu", "--lang=en-US"]
SERVER = """
import sys, time, dubito
from dubito.explore import explore
start = time.perf_counter()
explorer = explore(dubito.open(sys.argv[1]), browser=False)
print(explorer.address, time.perf_counter() - start, flush=True)
explorer.wait()
"""
FRAMES = """() => new Promise((done) => {
  let [frames, start] = [0, performance.now()];
  const count = () => {
    frames += 1;
    const passed = performance.now() - start;
    if (passed < 2000) requestAnimationFrame(count); else done(1000 * frames / passed);
  };
  requestAnimationFrame(count);
})"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--browser", type=Path, default=Path(__file__).parents[1] / ".venv" / "browser" / "chromium")
    args = parser.parse_args()
    result: dict[str, Any] = {"rows": args.rows, "many": args.many, "width": args.width}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=OPTIONS)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        for rows, measure in track([(args.rows, few), (args.many, many)], description="explore"):
            cache = made(Path(place) / str(rows), rows, args.width)
            command = [sys.executable, "-c", SERVER, str(cache)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 (our own code)
                address, opened = next(iter(server.stdout or ())).split()
                result |= measure(page, address, psutil.Process(server.pid), float(opened))
                server.terminate()
        browser.close()
    result = {"ratio": round(result["frames_per_second"] / 30, 2), **result}
    print(json.dumps(result))


def made(folder: Path, rows: int, width: int) -> Path:
    """A cache of that many images: vectors that a linear model takes as they are."""
    draw = torch.Generator().manual_seed(0)
    label = torch.randint(10, (rows,), generator=draw)
    x = 3 * torch.eye(10, width)[label] + torch.randn(rows, width, generator=draw)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(width, 10))
    torch.nn.init.eye_(net[1].weight)
    dubito.extract(dubito.wrap(net, classes=10), x, folder, labels=label, batch_size=4096, workers=0, progress=True)
    return folder


def few(page: Page, address: str, _: psutil.Process, __: float) -> dict[str, float]:
    """Open a map, and drag it."""
    opened = seconds_of(lambda: (page.goto(address), page.wait_for_selector(READY)))
    x, y = place_on_map(page, 0.5, 0.5)
    page.mouse.move(x, y)
    page.mouse.down()
    drag = """([x, y]) => { let i = 0; const canvas = document.querySelector("#canvas"); const move = () => {
      i += 1; canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x + 3 * (i % 60), clientY: y + i % 40,
      bubbles: true, pointerId: 1, buttons: 1 })); if (i < 400) requestAnimationFrame(move); };
      requestAnimationFrame(move); }"""
    page.evaluate(drag, [x, y])
    frames = page.evaluate(FRAMES)
    page.mouse.up()
    return {"first_paint_seconds": round(opened, 2), "frames_per_second": round(frames, 1)}


def many(page: Page, address: str, server: psutil.Process, opened: float) -> dict[str, float]:
    """Open a million, and draw a lasso."""
    before = server.memory_info().rss
    ready = seconds_of(lambda: (page.goto(address), page.wait_for_selector(READY, timeout=120_000)))
    page.locator("[data-tool=lasso]").click()
    corners = [(0.02, 0.02), (0.5, 0.02), (0.5, 0.5), (0.02, 0.5), (0.02, 0.02)]
    places = [place_on_map(page, *corner) for corner in corners]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=6)
    text = page.locator("#count").inner_text()
    start = time.perf_counter()
    page.mouse.up()
    page.wait_for_function("(text) => document.querySelector('#count').innerText !== text", arg=text, timeout=120_000)
    lasso = time.perf_counter() - start
    grown = (server.memory_info().rss - before) / 1e6
    return {
        "million_open_seconds": round(opened, 2),
        "million_ready_seconds": round(ready, 2),
        "million_lasso_seconds": round(lasso, 2),
        "server_memory_mb": round(grown),
    }


def place_on_map(page: Page, x: float, y: float) -> tuple[float, float]:
    """Where on the screen a share of the map's width and height is."""
    box: Any = page.locator("#canvas").bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


if __name__ == "__main__":
    main()
