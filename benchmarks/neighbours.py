"""Exact nearest neighbours: `dubito.metrics.nearest` against faiss's flat search, in time and in memory.

Both search every row of the same seeded features for its most similar other row, in one process, in turns.
faiss gets vectors that are normalised and copied into its index before the clock starts, and is asked for two
neighbours, of which the row itself is one. The last line is one JSON object; `ratio` is our seconds over
faiss's, the best of the repeats each.

    python benchmarks/neighbours.py            # 50,000 and 200,000 x 768: some minutes on two cores
    python benchmarks/neighbours.py --quick    # seconds
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import psutil
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from dubito.metrics import nearest

GIGABYTE = 1e9


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000, help="rows of the race against faiss")
    parser.add_argument("--rows-large", type=int, default=200_000, help="rows of the memory run; 0 leaves it out")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=2, help="of which the best counts")
    parser.add_argument("--quick", action="store_true", help="4,000 and 8,000 rows of 128")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rows_large, options.width = 4_000, 8_000, 128

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns) as progress:
        result = race(options.rows, options.width, options.repeats, progress)
        if options.rows_large:
            result |= large(options.rows_large, options.width, progress)
    print(json.dumps(result))


def race(n: int, d: int, repeats: int, progress: Progress) -> dict[str, Any]:
    """Time and memory of both on the same rows, and whether they agree."""
    z, label = clustered(n, d)
    unit = torch.nn.functional.normalize(z).numpy()
    index = faiss.IndexFlatIP(d)
    index.add(unit)
    ours, theirs = [], []
    for repeat in range(repeats):
        ours.append(measure(lambda: nearest(z).numpy(), f"dubito, run {repeat + 1}", progress))
        theirs.append(measure(lambda: without_self(index.search(unit, 2)[1]), f"faiss, run {repeat + 1}", progress))
    found, reference = ours[0][0], theirs[0][0]
    seconds, faiss_seconds = min(run[1] for run in ours), min(run[1] for run in theirs)
    return {
        "rows": n,
        "width": d,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 3),
        "faiss_seconds": round(faiss_seconds, 3),
        "ratio": round(seconds / faiss_seconds, 3),
        "extra_memory_gb": round(max(run[2] for run in ours), 3),
        "recall": float((label[found] == label).mean()),
        "faiss_recall": float((label[reference] == label).mean()),
        "same_neighbour": float((found == reference).mean()),
    }


def large(n: int, d: int, progress: Progress) -> dict[str, Any]:
    """Memory and time of ours alone on many rows."""
    z, _ = clustered(n, d)
    _, seconds, memory = measure(lambda: nearest(z).numpy(), f"dubito, {n:,} rows", progress)
    return {
        "rows_large": n,
        "seconds_200k": round(seconds, 1),
        "extra_memory_gb_200k": round(memory, 3),
    }


def clustered(n: int, d: int) -> tuple[Tensor, np.ndarray]:
    """Features around class centres, of unequal norms, and their classes."""
    generator = torch.Generator().manual_seed(0)
    classes = max(2, n // 50)
    label = torch.randint(classes, (n,), generator=generator)
    centres = torch.randn(classes, d, generator=generator)
    z = torch.randn(n, d, generator=generator)
    for rows in torch.arange(n).split(8192):
        z[rows] += 0.28 * centres[label[rows]] * (768 / d) ** 0.25
        z[rows] *= torch.rand(len(rows), 1, generator=generator) + 0.5
    return z, label.numpy()


def without_self(found: np.ndarray) -> np.ndarray:
    """The first of faiss's two neighbours that is not the row itself."""
    return np.where(found[:, 0] == np.arange(len(found)), found[:, 1], found[:, 0])


def measure(run: Callable[[], np.ndarray], what: str, progress: Progress) -> tuple[np.ndarray, float, float]:
    """The result, its seconds, and the peak of resident memory above the start, in gigabytes."""
    task = progress.add_task(what, total=None)
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    try:
        result = run()
    finally:
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    peak = max(peak, process.memory_info().rss)
    memory = (peak - before) / GIGABYTE
    progress.update(task, description=f"{what}: {seconds:.1f} s, {memory:.2f} GB more", total=1, completed=1)
    return result, seconds, memory


if __name__ == "__main__":
    main()
