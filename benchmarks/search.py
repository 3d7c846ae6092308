"""Safe search: what it costs beside bare faiss, and an index of a million items: built, saved, loaded.

Speed: `SafeIndex.search` against `faiss.IndexFlatIP.search` on the same vectors, those that the rule keeps, with the
same queries, in turns; none of the queries is refused, so that both do all the work. Ours normalises and checks queries
and names what it finds. `ratio` is our queries a second over faiss's, the best of the repeats each, in the median of
five rounds with new copies of the vectors; `ratio_single` the same with one query a call.

Size: items are drawn block by block in a process of its own, so that its peak of resident memory is that of the index.
`build_seconds` includes drawing them (`draw_seconds` alone); `memory_gb` is the peak beyond the vectors themselves;
loading maps the file (`load_seconds` with checksums, `open_seconds` without).

    python benchmarks/search.py                # 100,000 x 512 in the race, 1,000,000 x 512 in size: some minutes
    python benchmarks/search.py --quick        # to try it out: so small a race is won by either, by up to a third

The last line is one JSON object.
"""

import argparse
import json
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import psutil
from _measure import seconds_of, timed, watched_memory

import dubito
from dubito.search import SafeIndex

BLOCK = 50_000
ROUNDS = 5
"""Where the vectors lie in memory changes the speed of either: several places even that out."""
SINGLE = range(20)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="items of the race against faiss")
    parser.add_argument("--rows-large", type=int, default=1_000_000, help="items of the large index; 0: none")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=8, help="of each round, of which the best counts")
    parser.add_argument("--folder", type=Path, help="where the large index is written; by default a temporary folder")
    parser.add_argument("--quick", action="store_true", help="20,000 and 50,000 items of 128")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rows_large, options.width, options.repeats = 20_000, 50_000, 128, 40
    result = race(options)
    print(f"race: {result}")
    if options.rows_large:
        place = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
                result |= pool.submit(large, options.rows_large, options.width, place).result()
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
                result |= pool.submit(loaded, options.width, place).result()
        finally:
            shutil.rmtree(place)
    print(json.dumps(result))


def race(options: argparse.Namespace) -> dict[str, Any]:
    """Queries a second of both, and whether they agree: medians over rounds with new copies of the vectors."""
    x, u = drawn(0, options.rows, options.width)
    q, _ = drawn(1, options.queries, options.width)
    rounds = [one_round(x, u, q, options.k, options.repeats) for _ in range(ROUNDS)]
    middle = {name: float(np.median([one[name] for one in rounds])) for name in rounds[0]}
    return {
        "rows": options.rows,
        "width": options.width,
        "k": options.k,
        "threads": faiss.omp_get_max_threads(),
        "queries_per_second": round(len(q) / middle["ours"], 1),
        "faiss_queries_per_second": round(len(q) / middle["faiss"], 1),
        "ratio": round(middle["ratio"], 3),
        "ratios": [round(one["ratio"], 3) for one in rounds],
        "ratio_single": round(middle["ratio_single"], 3),
        "same_neighbours": middle["same"],
    }


def one_round(x: np.ndarray, u: np.ndarray, q: np.ndarray, k: int, repeats: int) -> dict[str, float]:
    """Both indexes built anew, then searched in turns: the least seconds of each, and their ratios."""
    index = SafeIndex.build(x, u)
    kept = u <= index.thresholds.overall
    bare = faiss.IndexFlatIP(x.shape[1])
    bare.add(x[kept] / np.linalg.norm(x[kept], axis=1, keepdims=True))
    unit, clear = q / np.linalg.norm(q, axis=1, keepdims=True), np.zeros(len(q))
    times: dict[str, list[float]] = {"ours": [], "faiss": [], "ours_single": [], "faiss_single": []}
    for _ in range(repeats):
        result, seconds = timed(lambda: index.search(q, clear, k=k))
        times["ours"].append(seconds)
        (_, rows), seconds = timed(lambda: bare.search(unit, k))
        times["faiss"].append(seconds)
        times["ours_single"].append(seconds_of(lambda: [index.search(q[i : i + 1], clear[:1], k=k) for i in SINGLE]))
        times["faiss_single"].append(seconds_of(lambda: [bare.search(unit[i : i + 1], k) for i in SINGLE]))
    best = {name: min(seconds) for name, seconds in times.items()}
    names = np.flatnonzero(kept).astype(str)
    return best | {
        "ratio": best["faiss"] / best["ours"],
        "ratio_single": best["faiss_single"] / best["ours_single"],
        "same": float(np.mean(result.ids == names[rows])),
    }


def large(n: int, d: int, place: Path) -> dict[str, Any]:
    """Build and save a large index from blocks that are drawn when they are read."""
    draw_seconds = seconds_of(lambda: [drawn(at, min(BLOCK, n - at), d) for at in range(0, n, BLOCK)])
    before = psutil.Process().memory_info().rss
    peak: list[int] = []
    with watched_memory(peak):
        u = np.random.default_rng(7).random(n)
        index, build_seconds = timed(lambda: SafeIndex.build(dubito.Table(feature=Drawn(n, d)), u))
        save_seconds = seconds_of(lambda: index.save(place / "index"))
    return {
        "rows_large": n,
        "kept_large": index.kept,
        "draw_seconds": round(draw_seconds, 1),
        "build_seconds": round(build_seconds, 1),
        "save_seconds": round(save_seconds, 1),
        "vectors_gb": round(n * d * 4 / 1e9, 3),
        "memory_gb": round((max(peak) - before - n * d * 4) / 1e9, 3),
        "disk_gb": round(sum(path.stat().st_size for path in (place / "index").iterdir()) / 1e9, 3),
    }


def loaded(d: int, place: Path) -> dict[str, Any]:
    """Load it in a fresh process, search it, change it."""
    before = psutil.Process().memory_info().rss
    open_seconds = seconds_of(lambda: SafeIndex.load(place / "index", check=False))
    index, load_seconds = timed(lambda: SafeIndex.load(place / "index"))
    load_memory = psutil.Process().memory_info().rss - before
    q, _ = drawn(1, 64, d)
    index.search(q[:1], [0.0], k=10)  # the file is read once
    search_seconds = seconds_of(lambda: index.search(q, np.zeros(64), k=10))
    result = index.search(drawn(0, 5, d)[0], np.zeros(5), k=1)
    own = float(np.mean((result.similarities[:, 0] > 0.999) | ~np.isin([str(row) for row in range(5)], result.ids)))
    remove_seconds = seconds_of(lambda: (index.remove([str(row) for row in range(1000)]), index.kept))
    return {
        "open_seconds": round(open_seconds, 2),
        "load_seconds": round(load_seconds, 2),
        "load_memory_gb": round(load_memory / 1e9, 3),
        "large_queries_per_second": round(64 / search_seconds, 1),
        "finds_itself": own,
        "remove_1000_seconds": round(remove_seconds, 2),
        "rows_after": len(index),
    }


class Drawn:
    """A column that is drawn when rows are asked for: a million features that are nowhere at once."""

    def __init__(self, n: int, d: int) -> None:
        self.shape = (n, d)

    def __getitem__(self, rows: slice) -> Any:
        """Some rows; blocks of 50,000 have a seed each."""
        start, stop, _ = rows.indices(self.shape[0])
        parts = []
        while start < stop:
            at = start // BLOCK * BLOCK
            if getattr(self, "at", None) != at:
                self.at, self.block = at, drawn(at, min(BLOCK, self.shape[0] - at), self.shape[1])[0]
            end = min(stop, at + BLOCK)
            parts.append(self.block[start - at : end - at])
            start = end
        return np.concatenate(parts)


def drawn(seed: int, n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and uncertainties."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal((n, d), dtype=np.float32), draw.random(n)


if __name__ == "__main__":
    main()
