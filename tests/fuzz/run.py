"""A long run over all targets: coverage-guided by atheris where it is installed, else drawn by hypothesis.

    python tests/fuzz/run.py --seconds 300
    python tests/fuzz/run.py --seconds 60 --target guard --target index

Every target has its share of the time, in a process of its own. An input that shows a fault is saved in
regressions/TARGET/, one for each place in the code, and the tests replay it from then on. The last line that is
printed is a JSON object; the exit code is 1 where there was a fault.
"""

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT)]
from tests.fuzz.sandbox import Examiner, private, scratch_folder  # noqa: E402 (after the path; imports nothing heavy)

KINDS = {"crash": "crashes", "hang": "hangs", "memory": "memory", "code": "code"}
"""Faults, and what the last line calls them."""
_GRACE = 120.0
"""Seconds beyond its share after which a process hangs."""
_GUIDED = importlib.util.find_spec("atheris") is not None
_DRAWN = {"cli"}
"""Targets that hypothesis draws in any case: most of what they cover is not in the library's own code."""


@dataclass
class Tally:
    """What a target has shown so far.

    Attributes:
        executions: How many inputs were examined.
        outcomes: Of these, how many had which verdict.
        faults: By place in the code, the kind of the fault and its text.
    """

    executions: int = 0
    outcomes: "Counter[str]" = field(default_factory=Counter)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def with_more(self, other: "Tally") -> "Tally":
        """Both together."""
        return Tally(
            self.executions + other.executions, self.outcomes + other.outcomes, {**other.faults, **self.faults}
        )

    def count(self, kind: str) -> int:
        """Different faults of a kind."""
        return sum(fault[0] == kind for fault in self.faults.values())


def main() -> int:
    """Run all targets, or one of them as a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=300.0, help="For all targets together.")
    parser.add_argument("--target", action="append", help="Only this one; repeat it for several.")
    parser.add_argument("--seed", type=int, default=0, help="Of what is drawn at random; 0 for another one every time.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(Path(options.worker), options.target[0], options.seconds, options.seed)
    from tests.fuzz.targets import TARGETS  # noqa: PLC0415 (workers import it in their own way)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worker ends, and its folder is removed
    names = options.target or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    parts = sum(TARGETS[name].share for name in names)
    return report(run_all({name: options.seconds * TARGETS[name].share / parts for name in names}, options.seed))


def run_all(shares: dict[str, float], seed: int) -> dict[str, Tally]:
    """Run targets in turn, each for its seconds, under a progress bar."""
    from rich.console import Console  # noqa: PLC0415 (workers do not need it)
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    text = TextColumn("{task.description:<14}"), TextColumn("{task.fields[shown]}")
    tallies: dict[str, Tally] = {}
    with Progress(text[0], BarColumn(), text[1], TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar, before = progress.add_task("", total=sum(shares.values()), shown=""), 0.0
        for name, seconds in shares.items():

            def shown(tally: Tally, done: float, before: float = before, name: str = name) -> None:
                counted = f"{tally.executions:,} inputs, {len(tally.faults)} faults"
                progress.update(bar, completed=before + done, description=name, shown=counted)

            tallies[name] = run_target(name, seconds, seed, shown)
            before += seconds
    return tallies


def report(tallies: dict[str, Tally]) -> int:
    """Print what became of all inputs, and return the exit code."""
    from rich.console import Console  # noqa: PLC0415 (workers do not need it)
    from rich.table import Table  # noqa: PLC0415

    table = Table("target", "inputs", "loaded", "refused", *KINDS)
    for name, tally in tallies.items():
        own = [tally.outcomes["loaded"], tally.outcomes["refused"], *map(tally.count, KINDS)]
        table.add_row(name, f"{tally.executions:,}", *map(str, own))
    console = Console()
    console.print(table)
    for name, tally in tallies.items():
        for where, (kind, text) in tally.faults.items():
            console.print(f"{name}: {kind}: {where}\n{text}\n", markup=False, highlight=False)
    totals = {words: sum(tally.count(kind) for tally in tallies.values()) for kind, words in KINDS.items()}
    executions = sum(tally.executions for tally in tallies.values())
    print(json.dumps({"targets": len(tallies), "executions": executions, **totals}))  # noqa: T201
    return 1 if any(totals.values()) else 0


def run_target(name: str, seconds: float, seed: int, shown: Callable[[Tally, float], None]) -> Tally:
    """Run one target in processes of its own, until its time is over; one that dies is replaced."""
    total, spent = Tally(), 0.0
    while spent < seconds - 1:
        with scratch_folder() as folder:
            command = [sys.executable, __file__, "--worker", folder, "--target", name]
            command += ["--seconds", str(seconds - spent), "--seed", str(seed)]
            (folder / "started").touch()
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
            try:
                while (state := _state(process, folder, seconds - spent)) == "running":
                    time.sleep(0.2)
                    shown(total.with_more(_read(folder)), spent + min(seconds - spent, _seconds(folder)))
            finally:
                process.kill()
            total = total.with_more(_read(folder))
            if state != "done":
                log_text = (folder / "log").read_text(errors="replace")[-1500:]
                if (folder / "input").exists():
                    save(name, (folder / "input").read_bytes())
                total.faults[f"{name} {state}"] = ["hang" if state == "hangs" else "crash", log_text]
            spent += _seconds(folder) or seconds  # one that does not even begin will not do so the next time
    return total


def _state(process: "subprocess.Popen[bytes]", folder: Path, seconds: float) -> str:
    """Whether a worker is running, done, or what it died of; one that has overrun its time is ended."""
    if process.poll() is not None:
        return "done" if process.returncode == 0 else f"died ({process.returncode})"
    if _seconds(folder) > seconds + _GRACE or _seconds(folder, "started") > seconds + 5 * _GRACE:
        process.kill()
        process.wait()
        return "hangs"
    return "running"


def _seconds(folder: Path, since: str = "began") -> float:
    """For how long a worker has been drawing inputs, or has been there."""
    file = folder / since
    return time.time() - file.stat().st_mtime if file.exists() else 0.0


def _read(folder: Path) -> Tally:
    try:
        content = json.loads((folder / "tally.json").read_text())
    except (OSError, ValueError):
        return Tally()
    return Tally(content["executions"], Counter(content["outcomes"]), content["faults"])


def save(name: str, data: bytes) -> Path:
    """Keep an input that shows a fault, for the tests to replay."""
    place = HERE / "regressions" / name / hashlib.sha256(data).hexdigest()[:12]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return place


def work(folder: Path, name: str, seconds: float, seed: int) -> int:
    """The process of one target: draw inputs until the time is over, and keep the tally in a file."""
    private(folder)
    # As in the sandbox of the tests: processes that an input starts would not keep to its limits of time and memory.
    multiprocessing.current_process().daemon = True
    if not _GUIDED or name in _DRAWN:
        return _draw(Recorder(folder, name, seconds, Examiner(folder)), seconds, seed)
    import atheris  # noqa: PLC0415 (optional)

    with atheris.instrument_imports(include=["dubito"]):
        examiner = Examiner(folder)
    one, corpus = Recorder(folder, name, seconds, examiner), folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(one.target.seeds(examiner.world)):
        (corpus / str(number)).write_bytes(data)
    # Limits of time and memory are the examiner's: both would use the same timer.
    limits = [f"-max_total_time={max(1, int(seconds))}", "-timeout=0", "-rss_limit_mb=0", f"-seed={seed}"]
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()
    return 0


class Recorder:
    """Examines inputs of one target, and keeps the tally in a file: the process may die at any of them."""

    def __init__(self, folder: Path, name: str, seconds: float, examiner: Examiner) -> None:
        self.folder, self.name, self.examiner, self.target = folder, name, examiner, examiner.targets[name]
        examiner.examine(name, b"")  # prepares what the target needs
        self._tally, self._noted, self._end = Tally(), 0.0, time.time() + seconds
        (folder / "began").touch()

    def __call__(self, data: bytes) -> None:
        """Examine one input."""
        (self.folder / "input").write_bytes(data)
        verdict = self.examiner.examine(self.name, data)
        self._tally.executions += 1
        self._tally.outcomes[verdict.kind] += 1
        if verdict.fault and verdict.place not in self._tally.faults:
            save(self.name, data)
            self._tally.faults[verdict.place] = [verdict.kind, verdict.text]
        now = time.time()
        if now - self._noted > 0.3 or now > self._end - 1:
            self._noted = now
            (self.folder / "tally.part").write_text(json.dumps(vars(self._tally)))
            (self.folder / "tally.part").replace(self.folder / "tally.json")


def _draw(one: Recorder, seconds: float, seed: int) -> int:
    """Scripts by hypothesis, in rounds, until the time is over."""
    from hypothesis import HealthCheck, Phase, given, settings  # noqa: PLC0415 (libFuzzer draws by itself)
    from hypothesis import seed as seeded  # noqa: PLC0415
    from hypothesis import strategies as st  # noqa: PLC0415

    end, world = time.monotonic() + seconds, one.examiner.world
    for data in one.target.seeds(world):
        if time.monotonic() < end:
            one(data)
    number, checks = seed or int(time.time()), list(HealthCheck)
    while time.monotonic() < end:
        number += 1

        @seeded(number)
        @settings(max_examples=50, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=checks)
        @given(st.binary(min_size=1, max_size=64))
        def drawn(script: bytes) -> None:
            if time.monotonic() < end:
                one(one.target.example(world, script))

        drawn()
    return 0


if __name__ == "__main__":
    sys.exit(main())
