"""The race: what dubito and its peers both do, on the same columns, each in a process of its own.

    python benchmarks/peers.py                                 # installs the peers into .venv/peers, then measures
    python benchmarks/peers.py --small --only energy           # the named rows alone, on few images
    python benchmarks/peers.py --data DIR --images cifar10.npz --docs docs/peers.md

DIR holds cifar10h/ (cifar10h-counts-first5000.npy) and cifar10_resnets/ (resnet20.pt, resnet56.pt); without it, real
label errors are left out. The environment has the same torch as this one and the peers in the versions below; dubito
is the one of this checkout. `ratio` is our seconds over the peer's, fitting and scoring together, each the best of
--repeats runs that take turns, with --threads threads. Memory is what a process grows by beyond columns and libraries.
Columns are made up: 50,000 images, 1,000 classes, 1,280 features, float32 as in a cache; half of the images are learned
from. "equal" answers differ by a ten-thousandth at most, relative to the largest.

The last line is one JSON object. The exit code is 1 if a row fails on our side; what fails on the peer's is listed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
PEERS = {
    "pytorch-ood": "0.4.0",
    "torch-uncertainty": "0.13.0",
    "cleanlab": "2.9.0",
    "mapie": "1.6.0",
    "laplace-torch": "0.3",
    "torchcp": "1.2.1",
    "crepes": "0.9.1",
    "venn-abers": "1.5.4",
}
BESIDE = ("lightning", "torchmetrics", "scikit-learn", "psutil", "threadpoolctl", "faiss-cpu", "seaborn")
"""What peers need, or the measurement; seaborn for torch-uncertainty."""
LARGE = {"rows": 50_000, "classes": 1000, "dims": 1280, "million": 1_000_000}
SMALL = {"rows": 4000, "classes": 20, "dims": 64, "million": 20_000}
TEN = {"rows": 20_000, "classes": 10, "dims": 64, "million": 1000}
FEW = {"rows": 600, "classes": 10, "dims": 32, "million": 1000}
SAME, SAME_ORDER = 1e-4, 0.9999
INSTALLED = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({name: found(name) for name in json.loads(sys.argv[1])}))
"""
PREPARE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from importlib.metadata import PackageNotFoundError, version
from _peers_data import write_columns, write_votes
from _peers_rows import rows
job = json.loads(sys.argv[2])
for place, settings in job["columns"].items():
    write_columns(Path(place), **settings)
for place, depth in job["votes"].items():
    write_votes(Path(place), depth, data=Path(job["data"]), images=Path(job["images"]))
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
listed = [vars(row) | {"name": row.name, "ours": None, "theirs": None} for row in rows()]
print(json.dumps({"rows": listed, "versions": {name: found(name) for name in job["packages"]}}))
"""


def main() -> None:
    """Parse the command line, install, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=ROOT / ".venv" / "peers", help="where the peers are, or will be")
    parser.add_argument("--data", type=Path, help="a folder with cifar10h and cifar10_resnets, for real label errors")
    parser.add_argument("--images", type=Path, help="cifar10.npz; by default in --data")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    parser.add_argument("--small", action="store_true", help="few images, to see that all rows run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1200, help="seconds that one process may take")
    parser.add_argument("--docs", type=Path, help="write the page here")
    options = parser.parse_args()
    if options.docs and (options.small or options.only):
        parser.error("--docs is of all rows and images: leave out --small and --only")
    python = environment(options.env)
    with tempfile.TemporaryDirectory() as place:
        listed, versions, sizes = prepared(python, Path(place), options)
        results = []
        for row in listed:
            if not options.only or any(part.lower() in row["name"].lower() for part in options.only):
                results.append(raced(row, python, Path(place), options, sizes))
                print(line(results[-1]), flush=True)
    summary = summarised(results, versions, options)
    print("\n" + table(results))
    for side, whose in (("ours", "failed on our side"), ("theirs", "failed on the peer's side")):
        for row in results:
            if message := row["failed"].get(side):
                print(f"{whose}: {row['name']}: {message}")
    if options.docs:
        options.docs.write_text(page(summary))
    print(json.dumps(summary))
    sys.exit(any("ours" in row["failed"] for row in results))


def environment(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is made if it is not there, and completed if it is."""
    python = folder / "bin" / "python"
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else "uv"
    if not python.exists():
        print(f"installing the peers into {folder}", flush=True)
        run([uv, "venv", "--python", sys.executable, str(folder)])
    wanted = {**PEERS, **dict.fromkeys(("torch", "torchvision", *BESIDE))}
    command = [str(python), "-c", INSTALLED, json.dumps([*wanted])]
    installed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603
    missing = [
        name for name, number in wanted.items() if installed[name] is None or number not in (None, installed[name])
    ]
    if missing:
        same = {name: version(name) for name in ("torch", "torchvision")}
        numbers = {**wanted, **same}
        asked = [name if numbers[name] is None else f"{name}=={numbers[name]}" for name in missing if name != "torchcp"]
        install = [uv, "pip", "install", "--python", str(python)]
        run([*install, *asked, "-e", str(ROOT)])
        # One of its losses depends on torchsort, which must be compiled; nothing here uses it.
        if "torchcp" in missing:
            run([*install, "--no-deps", f"torchcp=={PEERS['torchcp']}"])
    return python


def run(command: Sequence[str]) -> None:
    """Or end with what went wrong."""
    subprocess.run(command, check=True)  # noqa: S603


def prepared(
    python: Path, place: Path, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, str | None], dict[str, int]]:
    """The rows, the versions, and how many images each kind of columns has; writes the columns."""
    settings = {"large": SMALL if options.small else LARGE, "small": FEW if options.small else TEN, "warm": FEW}
    sizes = {name: one["rows"] for name, one in settings.items()}
    images = options.images or (options.data and options.data / "cifar10.npz")
    votes = {str(place / f"votes{depth}"): depth for depth in (20, 56)} if options.data else {}
    job = {
        "columns": {str(place / name): one for name, one in settings.items()},
        "votes": votes,
        "data": str(options.data),
        "images": str(images),
        "packages": ["dubito", "torch", "numpy", *PEERS, "torchmetrics", "scikit-learn", "faiss-cpu"],
    }
    command = [str(python), "-c", PREPARE, str(Path(__file__).parent), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables(options), check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"cannot prepare the columns:\n{done.stderr[-3000:]}")
    described = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in described["rows"] if votes or not row["columns"].startswith("votes")]
    return rows, described["versions"], sizes


def variables(options: argparse.Namespace) -> dict[str, str]:
    """As many threads for both, and dubito of this checkout."""
    threads = {name: str(options.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **threads, "PYTHONPATH": str(ROOT / "src"), "LOKY_MAX_CPU_COUNT": str(options.threads)}


def raced(
    row: dict[str, Any], python: Path, place: Path, options: argparse.Namespace, sizes: dict[str, int]
) -> dict[str, Any]:
    """Both contenders, in turn, each time in a new process."""
    queries = max(100, round(row["share"] * sizes[row["columns"]])) if row["share"] < 1 else None
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    failed: dict[str, str] = {}
    for _ in range(options.repeats):
        for side, done in runs.items():
            if side in failed:
                continue
            try:
                done.append(one_run(row, side, python, place, options, queries))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed[side] = str(error)[-300:]
    result = {key: row[key] for key in ("what", "peer", "name", "why")}
    result |= {"failed": failed, "scored": queries or sizes.get(row["columns"], 5000)}
    for side, done in runs.items():
        if done and side not in failed:
            best = min(done, key=lambda one: one["fit"] + one["score"])
            result[side] = {**best, "seconds": best["fit"] + best["score"]}
            result[side]["megabytes"] = min(one["megabytes"] for one in done)
    if not failed:
        result["ratio"] = round(result["ours"]["seconds"] / result["theirs"]["seconds"], 3)
        result["memory_ratio"] = round(result["ours"]["megabytes"] / max(result["theirs"]["megabytes"], 1), 3)
        answers = [place / f"{side}.npy" for side in runs]
        result["answers"] = compared(answers, result)
    for answer in place.glob("*.npy"):
        answer.unlink()
    return result


def one_run(
    row: dict[str, Any], side: str, python: Path, place: Path, options: argparse.Namespace, queries: int | None
) -> dict[str, Any]:
    """Of one contender; RuntimeError with its last words."""
    script = str(Path(__file__).parent / "_peers_run.py")
    command = [str(python), script, row["name"], side, str(place / row["columns"]), "--warm", str(place / "warm")]
    command += ["--answer", str(place / f"{side}.npy"), "--threads", str(options.threads)]
    command += ["--queries", str(queries)] if queries else []
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, env=variables(options), timeout=options.limit, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compared(answers: Sequence[Path], result: dict[str, Any]) -> dict[str, Any]:
    """Are they the same?"""
    if all(answer.exists() for answer in answers):
        ours, theirs = (np.load(answer).astype(np.float64) for answer in answers)
        difference = np.abs(ours - theirs)
        rank = [np.argsort(np.argsort(one)) for one in (ours, theirs)]
        correlation = float(np.corrcoef(*rank)[0, 1])
        found = {"max_absolute": float(difference.max()), "rank_correlation": correlation}
        found["max_relative"] = float(difference.max() / max(np.abs(theirs).max(), 1e-300))
        equal, order = found["max_relative"] <= SAME, correlation >= SAME_ORDER
    else:
        pairs = {key: (result["ours"]["figures"][key], value) for key, value in result["theirs"]["figures"].items()}
        found = {"max_absolute": max(abs(a - b) for a, b in pairs.values())}
        equal, order = all(abs(a - b) <= SAME * max(abs(b), 1e-3) for a, b in pairs.values()), False
    found["verdict"] = "equal" if equal else "same order" if order else "different"
    return found


def summarised(results: list[dict[str, Any]], versions: dict[str, str | None], options: argparse.Namespace) -> Any:
    """What the last line says."""
    ratios = {row["name"]: row["ratio"] for row in results if "ratio" in row}
    worst = max(ratios, key=lambda name: ratios[name]) if ratios else None
    return {
        "worst_ratio": ratios.get(worst) if worst else None,
        "worst_row": worst,
        "slower": [name for name, ratio in ratios.items() if ratio > 1],
        "rows": results,
        "versions": versions,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "small": options.small,
        "threads": options.threads,
        "repeats": options.repeats,
    }


def line(row: dict[str, Any]) -> str:
    """One row while it runs."""
    if row["failed"]:
        return f"{row['name']}: failed ({', '.join(row['failed'])})"
    return f"{row['name']}: {row['ratio']:.2f} ({row['answers']['verdict']})"


HEAD = ("what", "peer", "images", "ours: fit + score", "theirs: fit + score", "ratio", "MB: ours, theirs", "answers")


def cells(row: dict[str, Any]) -> list[str]:
    """Of the table and of the page."""
    both = ("ours", "theirs")
    sides = [f"{row[side]['fit']:.3g} + {row[side]['score']:.3g} s" if side in row else "failed" for side in both]
    memory = ", ".join(f"{row[side]['megabytes']:.0f}" if side in row else "-" for side in both)
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
    return [row["what"], row["peer"], f"{row['scored']:,}", *sides, ratio, memory, answer(row)]


def answer(row: dict[str, Any]) -> str:
    """Whether answers are equal, and if not, by how much and why."""
    if "answers" not in row:
        return "-"
    found = row["answers"]
    text = found["verdict"]
    if "rank_correlation" in found:
        text += f" (rank correlation {found['rank_correlation']:.5f}"
        text += f", largest difference {found['max_absolute']:.2g})"
    elif text != "equal":
        pairs = [(key, row["ours"]["figures"][key], value) for key, value in row["theirs"]["figures"].items()]
        text = "; ".join(f"{key.replace('_', ' ')} {ours:.4g}, theirs {theirs:.4g}" for key, ours, theirs in pairs)
    figures = [row[side].get("figures", {}).get("auroc") for side in ("ours", "theirs")]
    if found["verdict"] == "different" and None not in figures:
        text += f"; AUROC of OOD images {figures[0]:.4f}, theirs {figures[1]:.4f}"
    return text + (f": {row['why']}" if row["why"] and found["verdict"] != "equal" else "")


def table(results: list[dict[str, Any]]) -> str:
    """In columns of one width."""
    lines = [[*HEAD], *(cells(row) for row in results)]
    widths = [max(len(one[place]) for one in lines) for place in range(len(HEAD) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(one, widths, strict=False)), one[-1]]) for one in lines
    )


def page(summary: dict[str, Any]) -> str:
    """The page of the documentation."""
    rows = summary["rows"]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    faster = sum(ratio <= 1 for ratio in ratios)
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items() if number)
    body = "\n".join("| " + " | ".join(cells(row)) + " |" for row in rows)
    slower = [row for row in rows if row.get("ratio", 0) > 1]
    hungry = [row for row in rows if row.get("memory_ratio", 0) > 1 and row["ours"]["megabytes"] > 50]
    failed = [f"- {row['name']}, {side}: {text}" for row in rows for side, text in row["failed"].items()]
    sentences = [f"- **{row['name']}**: the peer takes {1 / row['ratio']:.2f} of our time." for row in slower]
    sentences += [
        f"- **{row['name']}**: the peer needs {row['theirs']['megabytes']:.0f} MB, dubito "
        f"{row['ours']['megabytes']:.0f} MB."
        for row in hungry
    ]
    return PAGE.format(
        date=summary["date"],
        versions=versions,
        threads=summary["threads"],
        repeats=summary["repeats"],
        count=len(ratios),
        faster=faster,
        head="| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD),
        body=body,
        better="\n".join(sentences) or "In no row of this run.",
        failed="\n".join(failed) or "Nothing.",
    )


PAGE = """# Beside other libraries

Several libraries compute some of what dubito computes. This page compares them: the same columns, the same number of
threads, every contender in a process of its own. It is written by `benchmarks/peers.py`:

<!-- not run: installs the peers, and takes an hour -->
```bash
python benchmarks/peers.py --data DIR --images cifar10.npz --docs docs/peers.md
```

Measured on {date} with {threads} threads, the best of {repeats} runs that take turns: {versions}.

dubito is as fast as the peer or faster in {faster} of {count} rows. A ratio is our seconds over the peer's: below 1,
dubito is faster. Memory is what the process grows by, beyond the columns and the imported libraries. Columns are made
up: 50,000 images of 1,000 classes with 1,280 features, of which a tenth of the scored images is out-of-distribution.
dubito counts in float64 where the order of images depends on it; most peers count in float32.

{head}
{body}

## Where the peer is better

{better}

Figures of label issues, sets and guarantees are in the table: read precision together with recall, and coverage
together with size or violations. A guarantee is violated where more of the accepted images are wrong than the risk
allows, which may happen in 5 % of 500 draws of 1,000 calibration images each; "guard" also fits a temperature to a
tenth of every draw, as `Guard.fit` does.

## What did not run

{failed}

## What is not compared

- DEUP of torch-uncertainty learns from a model's outputs, not from its features, so it is another thing than an
  uncertainty head of dubito.
- crepes is compared in `experiments/watch.py`.
- What needs images, such as probes, gradients and extraction: the peers have no cache to start from.
"""

if __name__ == "__main__":
    main()
