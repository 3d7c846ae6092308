"""A long run over all targets: coverage-guided by atheris where it is installed, else drawn by hypothesis.

    python tests/fuzz/run.py --seconds 300
    python tests/fuzz/run.py --seconds 60 --target guard --target index

Every target has the same share of the time, in a process of its own. An input that shows a fault is saved in
regressions/TARGET/, one for each place in the code, and the tests replay it from then on. The last line that is
printed is a JSON object; the exit code is 1 where there was a fault.
"""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT)]
from tests.fuzz.sandbox import Examiner, private, scratch_folder  # noqa: E402 (after the path; imports nothing heavy)

KINDS = ("crash", "hang", "memory", "code")
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

    names = options.target or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    return report(names, options.seconds, options.seed)


def report(names: list[str], seconds: float, seed: int) -> int:
    """Run targets in turn under a progress bar, and print what became of them."""
    from rich.console import Console  # noqa: PLC0415 (workers do not need it)
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    tallies: dict[str, Tally] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=seconds, shown="")
        for place, name in enumerate(names):
            share = seconds / len(names)

            def shown(tally: Tally, done: float, before: float = place * share, name: str = name) -> None:
                text = f"{tally.executions:,} inputs, {len(tally.faults)} faults"
                progress.update(bar, completed=before + done, description=name, shown=text)

            tallies[name] = run_target(name, share, seed, shown)
    table = Table("target", "inputs", "loaded", "refused", *KINDS)
    for name, tally in tallies.items():
        own = [tally.outcomes["loaded"], tally.outcomes["refused"], *map(tally.count, KINDS)]
        table.add_row(name, f"{tally.executions:,}", *map(str, own))
    Console().print(table)
    for name, tally in tallies.items():
        for where, (kind, text) in tally.faults.items():
            Console().print(f"{name}: {kind}: {where}\n{text}\n", markup=False, highlight=False)
    totals = {kind: sum(tally.count(kind) for tally in tallies.values()) for kind in KINDS}
    words = {"crash": "crashes", "hang": "hangs", "memory": "memory", "code": "code"}
    executions = sum(tally.executions for tally in tallies.values())
    print(json.dumps({"targets": len(names), "executions": executions, **{words[key]: n for key, n in totals.items()}}))  # noqa: T201
    return 1 if any(totals.values()) else 0


def run_target(name: str, seconds: float, seed: int, shown: Callable[[Tally, float], None]) -> Tally:
    """Run one target in processes of its own, until its time is over; one that dies is replaced."""
    total, spent = Tally(), 0.0
    while spent < seconds - 1:
        with scratch_folder() as folder:
            command = [sys.executable, __file__, "--worker", folder, "--target", name]
            command += ["--seconds", str(seconds - spent), "--seed", str(seed)]
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
            while (state := _state(process, folder, seconds - spent)) == "running":
                time.sleep(0.2)
                shown(total.with_more(_read(folder)), spent + min(seconds - spent, _seconds(folder)))
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
    if _seconds(folder) > seconds + _GRACE:
        process.kill()
        process.wait()
        return "hangs"
    return "running"


def _seconds(folder: Path) -> float:
    """For how long a worker has been drawing inputs."""
    began = folder / "began"
    return time.time() - began.stat().st_mtime if began.exists() else 0.0


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
    guided = _GUIDED and name not in _DRAWN
    if guided:
        import atheris  # noqa: PLC0415 (optional)

        with atheris.instrument_imports(include=["dubito"]):
            examiner = Examiner(folder)
    else:
        examiner = Examiner(folder)
    examiner.examine(name, b"")  # prepares what the target needs
    tally, noted, began = Tally(), [0.0], time.time()
    (folder / "began").touch()

    def one(data: bytes) -> None:
        (folder / "input").write_bytes(data)
        verdict = examiner.examine(name, data)
        tally.executions += 1
        tally.outcomes[verdict.kind] += 1
        if verdict.fault and verdict.place not in tally.faults:
            save(name, data)
            tally.faults[verdict.place] = [verdict.kind, verdict.text]
        if time.time() - noted[0] > 0.3 or time.time() - began > seconds - 1:
            noted[0] = time.time()
            (folder / "tally.part").write_text(json.dumps(vars(tally)))
            (folder / "tally.part").replace(folder / "tally.json")

    if not guided:
        return _draw(examiner, name, seconds, seed, one)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(examiner.targets[name].seeds(examiner.world)):
        (corpus / str(number)).write_bytes(data)
    # Limits of time and memory are the examiner's: both would use the same timer.
    limits = [f"-max_total_time={max(1, int(seconds))}", "-timeout=0", "-rss_limit_mb=0", f"-seed={seed}"]
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", str(corpus)], one)
    atheris.Fuzz()
    return 0


def _draw(examiner: Any, name: str, seconds: float, seed: int, one: Any) -> int:
    """Scripts by hypothesis, in rounds, until the time is over."""
    from hypothesis import HealthCheck, Phase, given, settings  # noqa: PLC0415 (libFuzzer draws by itself)
    from hypothesis import seed as seeded  # noqa: PLC0415
    from hypothesis import strategies as st  # noqa: PLC0415

    end, target = time.monotonic() + seconds, examiner.targets[name]
    for data in target.seeds(examiner.world):
        if time.monotonic() < end:
            one(data)
    number = seed or int(time.time())
    while time.monotonic() < end:
        number += 1

        @seeded(number)
        @settings(
            max_examples=50,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.binary(min_size=1, max_size=64))
        def drawn(script: bytes) -> None:
            if time.monotonic() < end:
                one(target.example(examiner.world, script))

        drawn()
    return 0


if __name__ == "__main__":
    sys.exit(main())
