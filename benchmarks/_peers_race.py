"""Runs every row of benchmarks/peers.py in the peers' environment; started by that script, with its options as JSON.

Every run is a process of its own, forked from one that has imported all libraries, so that no run pays for imports and
none inherits memory from another.
"""

import json
import multiprocessing
import sys
import tempfile
from argparse import Namespace
from datetime import datetime, timezone
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from _peers_data import write_columns, write_photos, write_votes
from _peers_guarantees import ALLOWED, COVERAGE, DRAWS
from _peers_page import line, page, table
from _peers_rows import Row, rows
from _peers_run import contend

LARGE = {"rows": 50_000, "classes": 1000, "dims": 1280, "million": 1_000_000}
SMALL = {"rows": 4000, "classes": 20, "dims": 64, "million": 20_000}
MEDIUM = {"rows": 20_000, "classes": 100, "dims": 512, "million": 1000}
TEN = {"rows": 20_000, "classes": 10, "dims": 64, "million": 1000}
FEW = {"rows": 6000, "classes": 10, "dims": 32, "million": 1000}
SAME, SAME_ORDER = 1e-4, 0.9999
WORTH = 0.001
"""By less, no figure is better than another; `_peers_page.py` states this."""
EQUAL_COUNTS = ("recall_of_first_1_percent", "recall_of_first_4_percent")
"""Wrong labels among as many of the most suspicious ones."""
HIGHER = ("auroc", "error_auroc", "ood_auroc", "average_precision", "kept_coverage", *EQUAL_COUNTS)
LOWER = ("nll",)
SHORT, MOST = 1.0, 7
"""Rows whose runs take less than a second on both sides are repeated so often."""
LONG = 60.0
"""Rows of which a run takes longer on either side are not repeated."""
SIDES = ("ours", "theirs")
LIBRARIES = (
    *("dubito.calibration", "dubito.guard", "dubito.metrics", "dubito.scores", "dubito.active", "_peers_run"),
    *("pytorch_ood.detector", "torchmetrics.functional.classification", "torch_uncertainty.metrics.classification"),
    *("torch_uncertainty.post_processing", "cleanlab.filter", "cleanlab.rank", "cleanlab.outlier", "faiss"),
    *("mapie.classification", "mapie.risk_control", "laplace", "venn_abers"),
)


def main() -> None:
    """Write the columns, race, print."""
    settings = json.loads(sys.argv[1])
    paths = {name: settings[name] and Path(settings[name]) for name in ("data", "images", "docs")}
    options = Namespace(**{**settings, **paths})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LIBRARIES])
    with tempfile.TemporaryDirectory() as folder:
        sizes = prepared(context, Path(folder), options)
        chosen = [row for row in rows() if row.columns in sizes]
        chosen = [
            row for row in chosen if not options.only or any(part.lower() in row.name.lower() for part in options.only)
        ]
        results = []
        for row in chosen:
            results.append(raced(context, row, Path(folder), options, sizes[row.columns]))
            print(line(results[-1]), flush=True)
    summary = summarised(results, options)
    print("\n" + table(results))
    for side, whose in (("ours", "failed on our side"), ("theirs", "failed on the peer's side")):
        for result in results:
            if message := result["failed"].get(side):
                print(f"{whose}: {result['name']}: {message}")
    if options.docs:
        options.docs.write_text(page(summary))
    print(json.dumps(summary))
    sys.exit(any("ours" in result["failed"] for result in results))


def prepared(context: Any, folder: Path, options: Namespace) -> dict[str, tuple[int, str]]:
    """Write the columns, and return by name how many images each of them has, and its size in words."""
    settings = {"large": LARGE, "medium": MEDIUM, "small": TEN, "warm": FEW}
    if options.small:
        settings = {"large": SMALL, "medium": FEW, "small": FEW, "warm": FEW}
    jobs = [(write_columns, (folder / name,), one) for name, one in settings.items()]
    sizes = {
        name: (one["rows"], f"{one['rows']:,} x {one['classes']:,} classes, {one['dims']:,} features")
        for name, one in settings.items()
    }
    if options.data:
        images = options.images or options.data / "cifar10.npz"
        jobs += [
            (write_votes, (folder / f"votes{depth}", depth), {"data": options.data, "images": images})
            for depth in (20, 56)
        ]
        jobs.append((write_photos, (folder / "photos",), {"data": options.data}))
        sizes |= {f"votes{depth}": (5000, f"CIFAR-10, 5,000 images, ResNet-{depth}") for depth in (20, 56)}
        sizes["photos"] = (2000, "ImageNet, 2,000 images, EfficientNet-Lite0")
    for function, arguments, named in jobs:
        process = context.Process(target=function, args=arguments, kwargs=named)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"cannot write the columns of {arguments[0].name}; see the error above")
    return sizes


def raced(context: Any, row: Row, folder: Path, options: Namespace, size: tuple[int, str]) -> dict[str, Any]:
    """Both contenders, in turn, each time in a new process."""
    count, data = size
    queries = max(100, round(row.share * count)) if row.share < 1 else None
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    failed: dict[str, str] = {}
    repeats = options.repeats
    while len(runs[SIDES[0]]) < repeats and not failed:
        for side in SIDES:
            run = one_run(context, row, side, folder, options, queries)
            if "error" in run:
                failed[side] = run["error"][-300:]
            else:
                runs[side].append(run)
        if all(done and seconds(done[0]) < SHORT for done in runs.values()):
            repeats = max(options.repeats, MOST)
        if not row.same_work or any(done and seconds(done[0]) > LONG for done in runs.values()):
            break
    result: dict[str, Any] = {"what": row.what, "peer": row.peer, "name": row.name, "why": row.why, "kind": row.kind}
    result |= {"same_work": row.same_work, "failed": failed, "scored": queries or count, "data": data}
    for side, done in runs.items():
        if done and side not in failed:
            best = min(done, key=seconds)
            result[side] = {**best, "seconds": seconds(best), "megabytes": min(one["megabytes"] for one in done)}
    if not failed:
        result["ratio"] = round(result["ours"]["seconds"] / result["theirs"]["seconds"], 3)
        result["memory_ratio"] = round(result["ours"]["megabytes"] / max(result["theirs"]["megabytes"], 1), 3)
        result["answers"] = compared([folder / f"{side}.npy" for side in SIDES], result)
        equal = result["answers"]["verdict"] == "equal"
        result["worse"] = [] if equal else worse(*(result[side]["figures"] for side in SIDES))
    for answer in folder.glob("*.npy"):
        answer.unlink()
    return result


def seconds(run: dict[str, Any]) -> float:
    """Fitting and scoring."""
    return float(run["fit"] + run["score"])


def one_run(context: Any, row: Row, side: str, folder: Path, options: Namespace, queries: int | None) -> dict[str, Any]:
    """Seconds, memory and figures of one contender; or why it failed, as "error"."""
    receiver, sender = context.Pipe(duplex=False)
    places = {"columns": folder / row.columns, "warm": folder / "warm", "answer": folder / f"{side}.npy"}
    process: BaseProcess = context.Process(
        target=contend, args=(sender, row.name, side), kwargs={**places, "queries": queries, "threads": options.threads}
    )
    process.start()
    sender.close()
    try:
        if not receiver.poll(options.limit):
            return {"error": f"took longer than {options.limit:g} s"}
        result: dict[str, Any] = receiver.recv()
        return result
    except EOFError:
        process.join()
        return {"error": f"ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def compared(answers: list[Path], result: dict[str, Any]) -> dict[str, Any]:
    """How far apart the answers of both sides are."""
    if all(answer.exists() for answer in answers):
        ours, theirs = (np.load(answer).astype(np.float64) for answer in answers)
        difference = np.abs(ours - theirs)
        ranks = [np.argsort(np.argsort(one)) for one in (ours, theirs)]
        correlation = float(np.corrcoef(*ranks)[0, 1])
        gap = {"max_absolute": float(difference.max()), "rank_correlation": correlation}
        gap["max_relative"] = float(difference.max() / max(np.abs(theirs).max(), 1e-300))
        equal, order = gap["max_relative"] <= SAME, correlation >= SAME_ORDER
    else:
        pairs = [(result["ours"]["figures"][key], value) for key, value in result["theirs"]["figures"].items()]
        gap = {"max_absolute": max(abs(a - b) for a, b in pairs)}
        equal, order = all(abs(a - b) <= SAME * max(abs(b), 1e-3) for a, b in pairs), False
    verdict = "equal" if equal else "same order" if order else "different"
    return {**gap, "verdict": verdict}


def worse(ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    """In which figures the peer is better, by more than `WORTH`.

    A size of sets counts if these cover what they should, a precision of flags if as many of the wrong labels are
    flagged; a guarantee that is broken more often than it may counts for nothing.
    """
    pairs = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
    behind = [name for name in HIGHER if name in pairs and pairs[name][1] > pairs[name][0] + WORTH]
    behind += [name for name in LOWER if name in pairs and pairs[name][1] < pairs[name][0] - WORTH]
    if "size" in pairs and theirs["coverage"] >= COVERAGE - WORTH and theirs["size"] < ours["size"] * (1 - WORTH):
        behind.append("size")
    both = [pairs[name] for name in ("precision", "recall") if name in pairs]
    if both and all(their >= our for our, their in both) and any(their > our for our, their in both):
        behind.append("precision and recall")
    if "violations" in pairs:
        most = ALLOWED + 3 * float(np.sqrt(ALLOWED * (1 - ALLOWED) / DRAWS))
        behind = behind if theirs["violations"] <= most else []
        behind += ["violations"] if ours["violations"] > most else []
    return behind


def summarised(results: list[dict[str, Any]], options: Namespace) -> dict[str, Any]:
    """The JSON object of the last line."""
    ratios = {row["name"]: row["ratio"] for row in results if "ratio" in row and row["same_work"]}
    worst = max(ratios, key=lambda name: ratios[name]) if ratios else None
    return {
        "worst_ratio": ratios[worst] if worst else None,
        "worst_row": worst,
        "slower": [name for name, ratio in ratios.items() if ratio > 1],
        "worse": {row["name"]: row["worse"] for row in results if row.get("worse")},
        "rows": results,
        "versions": {name: version(name) for name in options.packages},
        "date": datetime.now(timezone.utc).date().isoformat(),
        "small": options.small,
        "threads": options.threads,
        "repeats": options.repeats,
    }


if __name__ == "__main__":
    main()
