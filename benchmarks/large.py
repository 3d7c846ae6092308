"""Large tables and large folders: seconds and memory of every step at half the size and at the full size.

A table of ready arrays is extracted by a linear model, extracted again (nothing is left to do), opened, scored and
evaluated; the extraction of a second table is killed half-way and resumed, and images that both tables share are found:
one row in a hundred. So is a folder of small JPEG files, as far as it applies. Every step runs in a process of its own;
those that only read run twice, and the faster run counts.

Of every step, the last line, one JSON object, has at half the size and at the full size:

    seconds      of the clock; rates are printed
    cpu_seconds  of all threads of the process: other programs on the machine change them little
    exponent     log2 of the ratio of the two cpu_seconds: 1 is linear, 2 quadratic
    peak_mb      the most memory that the step adds: what it has allocated, ...
    resident_mb  ... and with pages of memory-mapped files, which the system takes back when it needs them

    python benchmarks/large.py                                       # 10,000,000 rows, 200,000 images
    python benchmarks/large.py --rows 1000000 --images 20000         # to try it out: some minutes

Neighbours (R-AUROC, Recall@1) are left out of the evaluation: each compares all rows with all rows.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from _measure import watched_memory
from PIL import Image
from torch import nn

import dubito
from dubito.table.overlap import shared_rows
from dubito.types import Classifier

METRICS = ("error_auroc", "aurc", "accuracy", "nll", "ece")
SIDE = 16
"""Pixels of an image of the folder."""
SHARED = 100
"""One row of the second table in so many is also in the first."""
SHARD = 65_536
"""Rows of a shard of a table."""
Step = Callable[[Path], object]


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
    steps = [step for part in ("table", "folder") for step in result.get(part, {}).get("steps", {}).values()]
    result["peak_mb"] = max(step["peak_mb"][1] for step in steps)
    print(json.dumps(result))


def measured(steps: dict[str, Step], draw: Callable[[int, int, Path], None], n: int, width: int, place: Path) -> Any:
    """What every step takes at half the size and at the full size, and bytes of the cache per row."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    row_bytes = 0.0
    for size in (n // 2, n):
        folder = place / str(size)
        folder.mkdir()
        draw(size, width, folder)
        for name, step in steps.items():
            runs = [in_own_process(step, folder) for _ in range(1 if step in WRITING else 2)]
            took = min(runs, key=itemgetter("cpu_seconds"))
            taken[name].append(took)
            rate = size / took["seconds"]
            memory = f"{took['peak_mb']:8,.0f} MB {took['resident_mb']:8,.0f} MB with mapped pages"
            print(f"{size:>12,} {name:<10} {took['seconds']:8.1f} s {rate:12,.0f} /s {memory}", flush=True)
        row_bytes = sum(path.stat().st_size for path in (folder / "cache").iterdir()) / size
        shutil.rmtree(folder)
    both = {name: {key: [round(one[key], 2) for one in sizes] for key in sizes[0]} for name, sizes in taken.items()}
    exponents = {
        name: round(math.log2(one[1]["cpu_seconds"] / one[0]["cpu_seconds"]), 2) for name, one in taken.items()
    }
    return {
        "bytes_per_row": round(row_bytes, 1),
        "steps": {name: {"exponent": exponents[name], **both[name]} for name in steps},
    }


def in_own_process(step: Step, folder: Path) -> dict[str, float]:
    """What a step takes in a process that has done nothing else."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(alone, step, folder).result()


def alone(step: Step, folder: Path) -> dict[str, float]:
    """Seconds of a step, and the megabytes that its process grows by."""
    torch.set_num_threads(1)
    process, allocated, resident = psutil.Process(), [0], [0]
    before = process.memory_info()
    with watched_memory(resident), watched_memory(allocated, lambda info: info.rss - info.shared):
        start, cpu = time.perf_counter(), time.process_time()
        step(folder)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mb": (max(allocated) - (before.rss - before.shared)) / 1e6,
        "resident_mb": (max(resident) - before.rss) / 1e6,
    }


def draw_rows(n: int, width: int, folder: Path) -> None:
    """Inputs and labels of two tables as .npy files, block by block; the second one's extraction is killed half-way."""
    draw = np.random.default_rng(0)
    x, other = (
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, (n, width)) for name in ("x", "other_x")
    )
    for start in range(0, n, 100_000):
        for one in (x, other):
            one[start : start + 100_000] = draw.standard_normal((min(100_000, n - start), width), dtype=np.float32)
    other[::SHARED] = x[-len(other[::SHARED]) :]
    x.flush()
    other.flush()
    for name in ("y", "other_y"):
        np.save(folder / f"{name}.npy", draw.integers(0, 10, n))
    process = get_context("spawn").Process(target=extract_other, args=(folder,))
    process.start()
    while process.is_alive() and len(list((folder / "other").glob("forward-*.safetensors"))) < n / SHARD / 2:
        time.sleep(0.05)
    process.kill()
    process.join()


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


def extract_rows(folder: Path, name: str = "", to: str = "cache") -> None:
    """Nothing is left to do at the second call."""
    x, y = (np.load(folder / f"{name}{part}.npy", mmap_mode="r") for part in "xy")
    options: Any = {"batch_size": 4096, "shard_size": SHARD, "progress": False}
    dubito.extract(model_of(x.shape[1]), x, to=folder / to, labels=y, **options)


def extract_other(folder: Path) -> None:
    """The second table; half of it is left to do at the second call."""
    extract_rows(folder, "other_", "other")


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
    """One uncertainty per row, from logits."""
    dubito.Entropy().score(dubito.open(folder / "cache"))


def fit_score(folder: Path) -> None:
    """A score that learns from features and labels, and one uncertainty per row."""
    table = dubito.open(folder / "cache")
    dubito.scores.Mahalanobis().fit(table).score(table)


def evaluate_table(folder: Path) -> None:
    """Two scores by the metrics that need no neighbours."""
    scores = {"entropy": dubito.Entropy(), "max_logit": dubito.scores.MaxLogit()}
    dubito.evaluate(scores, dubito.open(folder / "cache"), metrics=METRICS, resamples=20)


def find_shared(folder: Path) -> None:
    """Images of the one table that are also in the other."""
    table, other = (dubito.open(folder / name) for name in ("cache", "other"))
    shared = shared_rows(table, other)
    expected = -(-len(other) // SHARED)
    if len(shared.here) != expected:
        raise RuntimeError(f"{len(shared.here)} rows are shared, expected {expected}")


TABLE_STEPS = {
    "extract": extract_rows,
    "again": extract_rows,
    "resume": extract_other,
    "open": open_table,
    "score": score_table,
    "fit": fit_score,
    "evaluate": evaluate_table,
    "shared": find_shared,
}
WRITING = {extract_rows, extract_other, extract_images}
"""Steps that do something else when they are repeated."""
FOLDER_STEPS = {
    "list": list_images,
    "extract": extract_images,
    "again": extract_images,
    "open": open_table,
    "score": score_table,
}


if __name__ == "__main__":
    main()
