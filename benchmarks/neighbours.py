"""Exact nearest neighbours: `dubito.metrics.nearest` against faiss's flat search, in time and in memory.

Time: both search every row of the same seeded features for its most similar other row, in one process, in turns.
faiss gets vectors that are normalised and copied into its index before the clock starts, and is asked for two
neighbours, of which the row itself is one. `ratio` is our seconds over faiss's, the best of the repeats each.
Memory: a fresh process, its peak of resident memory less what it had before the features, less the features.

    python benchmarks/neighbours.py            # 50,000 and 200,000 x 768: some minutes on two cores
    python benchmarks/neighbours.py --quick    # seconds

The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import faiss
import numpy as np
import psutil
import torch
from _measure import timed, watched_memory
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from dubito.metrics import nearest


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000, help="rows of the race against faiss")
    parser.add_argument("--rows-large", type=int, default=200_000, help="rows of the second memory run; 0: none")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=2, help="of which the best counts")
    parser.add_argument("--quick", action="store_true", help="4,000 and 8,000 rows of 128")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rows_large, options.width = 4_000, 8_000, 128

    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as progress:
        result = race(options.rows, options.width, options.repeats, progress)
        result["extra_memory_gb"] = extra_memory(options.rows, options.width, progress)
        if options.rows_large:
            result["rows_large"] = options.rows_large
            result["extra_memory_gb_200k"] = extra_memory(options.rows_large, options.width, progress)
    print(json.dumps(result))


def race(n: int, d: int, repeats: int, progress: Progress) -> dict[str, Any]:
    """Time of both on the same rows, and whether they agree."""
    z, label = clustered(n, d)
    unit = torch.nn.functional.normalize(z).numpy()
    index = faiss.IndexFlatIP(d)
    index.add(unit)
    ours, theirs = [], []
    for run in range(1, repeats + 1):
        ours.append(shown(lambda: nearest(z).numpy(), f"dubito, run {run}", progress))
        theirs.append(shown(lambda: without_self(index.search(unit, 2)[1]), f"faiss, run {run}", progress))
    (result, _), (reference, _) = ours[0], theirs[0]
    seconds, faiss_seconds = min(run[1] for run in ours), min(run[1] for run in theirs)
    return {
        "rows": n,
        "width": d,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 3),
        "faiss_seconds": round(faiss_seconds, 3),
        "ratio": round(seconds / faiss_seconds, 3),
        "recall": float((label[result] == label).mean()),
        "faiss_recall": float((label[reference] == label).mean()),
        "same_neighbour": float((result == reference).mean()),
    }


def extra_memory(n: int, d: int, progress: Progress) -> float:
    """Gigabytes beyond the features, measured in a fresh process."""
    task = progress.add_task(f"memory of dubito, {n:,} rows", total=None)
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        gigabytes = pool.submit(peak_beyond_features, n, d).result()
    progress.update(task, description=f"memory of dubito, {n:,} rows: {gigabytes:.3f} GB", total=1, completed=1)
    return round(gigabytes, 3)


def peak_beyond_features(n: int, d: int) -> float:
    """Gigabytes of resident memory that the search adds to the features at its peak."""
    before = psutil.Process().memory_info().rss
    z, _ = clustered(n, d)
    peak: list[int] = []
    with watched_memory(peak):
        nearest(z)
    return (max(peak) - before - z.nbytes) / 1e9


def clustered(n: int, d: int) -> tuple[Tensor, np.ndarray]:
    """Features around class centres, of unequal norms, and their classes."""
    generator = torch.Generator().manual_seed(0)
    classes = max(2, n // 50)
    label = torch.randint(classes, (n,), generator=generator)
    centres = torch.randn(classes, d, generator=generator)
    z = torch.randn(n, d, generator=generator)
    for rows in torch.arange(n).split(1024):
        z[rows] += 0.32 * (768 / d) ** 0.25 * centres[label[rows]]
        z[rows] *= torch.rand(len(rows), 1, generator=generator) + 0.5
    return z, label.numpy()


def without_self(result: np.ndarray) -> np.ndarray:
    """The first of faiss's two neighbours that is not the row itself."""
    return np.where(result[:, 0] == np.arange(len(result)), result[:, 1], result[:, 0])


def shown(run: Callable[[], np.ndarray], what: str, progress: Progress) -> tuple[np.ndarray, float]:
    """The result and its seconds, which are also shown."""
    task = progress.add_task(what, total=None)
    result, seconds = timed(run)
    progress.update(task, description=f"{what}: {seconds:.1f} s", total=1, completed=1)
    return result, seconds


if __name__ == "__main__":
    main()
