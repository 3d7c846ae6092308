"""Does anything get lost? Faults at seeded random instants of everything that dubito does for more than a moment.

    python -m tests.faults.run [--parts extract,train] [--faults 320] [--seed 0]

Processes are killed, stopped and continued; disks are full, permissions revoked, bytes flipped and cut; the object
store fails and delays, the database goes away, workers, nodes and drivers of a Ray cluster die. After every fault the
same call resumes, and the result is compared with that of an undisturbed run, byte by byte.

    faults    how many have struck; those that came after the end of the work do not count
    lost      faults after which something that was finished was gone, or the work could not be resumed
    silent    faults after which other values or other bytes were there, without an error
    hangs     faults after which a process did not end within a minute
    unnamed   faults after which nothing was lost, but the error was none of dubito's own

The last line is one JSON object. The exit code is 1 if any of these but the first is not 0. A failure is
printed with its part, the kind of fault and the number of its case: with the same seed, these make the same draws.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.faults.folders import FolderPart
from tests.faults.outcome import HUNG, LOST, OK, SILENT, UNNAMED, Outcome, Part
from tests.faults.victims import VICTIMS

FOLDERS = {
    "extract": 44,
    "extract with workers": 18,
    "label": 28,
    "train": 36,
    "train with workers": 12,
    "head": 20,
    "guard": 32,
    "index": 32,
    "acquire": 32,
    "watch": 32,
}
"""Faults of each part by default."""
OTHERS = {
    "ray": "cluster.ClusterPart",
    "store": "store.StorePart",
    "database": "database.DatabasePart",
    "service": "service.ServicePart",
    "stream": "service.StreamPart",
}
"""Parts with a module of their own, which is imported when it is needed."""
RESULTS = {"lost": LOST, "silent": SILENT, "hangs": HUNG, "unnamed": UNNAMED}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it)
"""Where flushing a file takes no time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Strike, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help=f"separated by commas; by default all: {', '.join(names())}")
    parser.add_argument("--faults", type=int, help="at least so many in all, shared among the parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="of faults on folders, separated by commas; by default all")
    args = parser.parse_args(arguments)
    chosen = [name for name in args.parts.split(",") if name] or names()
    if unknown := set(chosen) - set(names()):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    begin, console = time.monotonic(), Console()
    with scratch() as place:
        parts = [make_part(name, place, [kind for kind in args.kinds.split(",") if kind]) for name in chosen]
        outcomes = run(parts, args.faults, args.seed, console)
    console.print(table_of(outcomes))
    result = summary(outcomes) | {"seconds": round(time.monotonic() - begin), "seed": args.seed}
    print(json.dumps(result))  # noqa: T201 (what a script says)
    return int(any(result[key] for key in RESULTS))


def names() -> list[str]:
    """All parts."""
    return [*FOLDERS, *OTHERS]


def make_part(name: str, place: Path, kinds: Sequence[str]) -> Part:
    """A part, with a folder of its own."""
    folder = place / name.replace(" ", "-")
    folder.mkdir()
    if name in OTHERS:
        module, part = OTHERS[name].split(".")
        return getattr(import_module(f"tests.faults.{module}"), part)(folder)
    return FolderPart(VICTIMS[name], folder, FOLDERS[name], kinds)


def run(parts: Sequence[Part], faults: int | None, seed: int, console: Console) -> list[Outcome]:
    """All parts in turn, with a bar; what is not ok is printed at once."""
    total = sum(part.faults for part in parts)
    shares = {part.name: -(-part.faults * (faults or total) // total) for part in parts}
    columns = (TextColumn("{task.description:21}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    outcomes = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(shares.values()))
        for part in parts:
            progress.update(task, description=part.name)
            for outcome in part.run(shares[part.name], seed):
                outcomes.append(outcome)
                progress.advance(task)
                if outcome.result != OK:
                    where = f"{outcome.part}, {outcome.fault}, case {outcome.case} of seed {seed}"
                    console.print(f"{where}: {outcome.result}: {outcome.note}", markup=False, highlight=False)
    return outcomes


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """One row per part and kind of fault."""
    table = Table("part", "fault", "faults", *RESULTS)
    counts = Counter((one.part, one.fault, one.result) for one in outcomes)
    for part, fault in dict.fromkeys((one.part, one.fault) for one in sorted(outcomes, key=lambda one: one.part)):
        of_kind = {result: counts[part, fault, result] for result in (OK, *RESULTS.values())}
        table.add_row(part, fault, str(sum(of_kind.values())), *(str(of_kind[one]) for one in RESULTS.values()))
    return table


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Counts in all and per part."""

    def counts(some: Sequence[Outcome]) -> dict[str, int]:
        results = Counter(one.result for one in some)
        return {"faults": len(some)} | {key: results[result] for key, result in RESULTS.items()}

    parts = dict.fromkeys(one.part for one in outcomes)
    return counts(outcomes) | {"parts": {part: counts([one for one in outcomes if one.part == part]) for part in parts}}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for everything, in shared memory where there is any."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
