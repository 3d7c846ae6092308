"""Large tables and large folders: seconds and memory of every step at half the size and at the full size.

A table of ready arrays is extracted by a linear model, extracted again (nothing is left to do), opened, scored and
evaluated; so is a folder of small JPEG files. Every step runs in a process of its own. `growth` is how much longer a
step takes at twice the size: 2 is linear. `memory` is the most resident memory that the step adds, in GB; pages of
memory-mapped shards are among it, which the system takes back when it needs them.

    python benchmarks/large.py                                       # 10,000,000 rows, 200,000 images
    python benchmarks/large.py --rows 1000000 --images 20000         # to try it out: some minutes

Neighbours (R-AUROC, Recall@1) are left out of the evaluation: each compares all rows with all rows. The last line is
one JSON object.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from _measure import watched_memory
from PIL import Image
from torch import nn

import dubito
from dubito.types import Classifier

METRICS = ("error_auroc", "aurc", "accuracy", "nll", "ece")
SIDE = 16
"""Pixels of an image of the folder."""


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table; 0: no table")
    parser.add_argument("--images", type=int, default=200_000, help="images of the folder; 0: no folder")
    parser.add_argument("--width", type=int, default=64, help="features of a row")
    parser.add_argument("--folder", type=Path, help="where files are written; by default a temporary folder")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(dir=options.folder))
    result: dict[str, Any] = {"rows": options.rows, "images": options.images, "width": options.width}
    try:
        if options.rows:
            result["table"] = measured(TABLE_STEPS, draw_rows, options.rows, options.width, place)
        if options.images:
            result["folder"] = measured(FOLDER_STEPS, draw_images, options.images, SIDE, place)
    finally:
        shutil.rmtree(place)
    print(json.dumps(result))


def measured(
    steps: dict[str, Callable[[Path], object]], draw: Callable[[int, int, Path], None], n: int, width: int, place: Path
) -> dict[str, Any]:
    """Of every step: seconds at half the size and at the full size, how much longer that is, and memory."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    memory: dict[str, list[float]] = {name: [] for name in steps}
    for size in (n // 2, n):
        folder = place / str(size)
        folder.mkdir()
        draw(size, width, folder)
        for name, step in steps.items():
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
                took, grew = pool.submit(alone, step, folder).result()
            seconds[name].append(took)
            memory[name].append(grew)
            print(f"{size:>12,} {name:<10} {took:8.1f} s {size / took:12,.0f} /s {grew:6.2f} GB", flush=True)
        shutil.rmtree(folder)
    return {
        name: {
            "seconds": [round(one, 2) for one in seconds[name]],
            "growth": round(seconds[name][1] / seconds[name][0], 2),
            "memory": [round(one, 2) for one in memory[name]],
        }
        for name in steps
    }


def alone(step: Callable[[Path], object], folder: Path) -> tuple[float, float]:
    """Seconds of a step, and the gigabytes that its process grows by."""
    torch.set_num_threads(1)
    before, peak = psutil.Process().memory_info().rss, [0]
    with watched_memory(peak):
        start = time.perf_counter()
        step(folder)
        seconds = time.perf_counter() - start
    return seconds, (max(peak) - before) / 1e9


def draw_rows(n: int, width: int, folder: Path) -> None:
    """Inputs and labels as .npy files, block by block."""
    draw = np.random.default_rng(0)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (n, width))
    for start in range(0, n, 100_000):
        x[start : start + 100_000] = draw.standard_normal((min(100_000, n - start), width), dtype=np.float32)
    x.flush()
    np.save(folder / "y.npy", draw.integers(0, 10, n))


def draw_images(n: int, side: int, folder: Path) -> None:
    """JPEG files in a hundred folders."""
    draw = np.random.default_rng(0)
    for number in range(100):
        (folder / "images" / f"{number:02d}").mkdir(parents=True)
    for number in range(n):
        pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number % 100:02d}" / f"{number:07d}.jpg")


def model_of(inputs: int) -> Classifier:
    """A linear classifier of ten classes behind as many features as inputs."""
    torch.manual_seed(0)
    return dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, 10)))


def extract_rows(folder: Path) -> None:
    """Nothing is left to do at the second call."""
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    options: Any = {"batch_size": 4096, "shard_size": 65_536, "progress": False}
    dubito.extract(model_of(x.shape[1]), x, to=folder / "cache", labels=y, **options)


def extract_images(folder: Path) -> None:
    """Nothing is left to do at the second call."""
    torch.manual_seed(0)
    model = dubito.wrap(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 64), nn.ReLU(), nn.Linear(64, 10)),
        transform=dubito.Preprocess(size=SIDE),
    )
    images = dubito.open_images(folder / "images")
    options: Any = {"label_space": "own", "workers": 0, "batch_size": 256, "progress": False}
    dubito.extract(model, images, to=folder / "cache", **options)


def list_images(folder: Path) -> None:
    """Which images there are."""
    dubito.open_images(folder / "images")


def open_table(folder: Path) -> None:
    """The first rows of a cache."""
    dubito.open(folder / "cache").rows(range(5))


def score_table(folder: Path) -> None:
    """One uncertainty per row."""
    dubito.Entropy().score(dubito.open(folder / "cache"))


def evaluate_table(folder: Path) -> None:
    """Two scores by the metrics that need no neighbours."""
    scores = {"entropy": dubito.Entropy(), "max_logit": dubito.scores.MaxLogit()}
    dubito.evaluate(scores, dubito.open(folder / "cache"), metrics=METRICS, resamples=20)


TABLE_STEPS = {
    "extract": extract_rows,
    "resume": extract_rows,
    "open": open_table,
    "score": score_table,
    "evaluate": evaluate_table,
}
FOLDER_STEPS = {"list": list_images, "extract": extract_images, "resume": extract_images, "open": open_table}


if __name__ == "__main__":
    main()
