"""Faults of processes, disks and bytes, on work whose result is a folder.

    kill, terminate, interrupt   SIGKILL, SIGTERM, SIGINT, up to three times while the same work resumes
    stop                         SIGSTOP, and some time later SIGCONT
    disk full                    every call that needs space fails, from one call on; or a small disk is really full
    permissions                  nothing can be written any more, from one call on
    worker killed                SIGKILL for a process that decodes images
    flip, cut                    bytes of a finished or unfinished folder are changed, or the end of a file is gone

Half of the faults strike at an instant that is drawn from the time that the work takes, half at one of its calls that
change the folder (`instants`). After every fault the folder is read, then the same call resumes the work, and then
every byte is compared with that of an undisturbed run.
"""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.faults import processes
from tests.faults.instants import FULL, REVOKED, Instants, allow
from tests.faults.outcome import HUNG, LOST, OK, SILENT, UNNAMED, Outcome, generator
from tests.faults.processes import Child, Ending, call, value_of
from tests.faults.victims import Victim

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
KINDS = ("kill", "flip", "terminate", "disk full", "cut", "kill", "interrupt", "stop", "permissions", "small disk")
"""In turn."""
_STRIKES = 3
_PAGES = 4096


@dataclass(frozen=True)
class Undisturbed:
    """What a run without faults gives, takes and does."""

    contents: dict[str, str]
    values: str | None
    before: str | None
    seconds: float
    calls: int


@dataclass
class FolderPart:
    """Faults on one victim.

    Attributes:
        victim: The class of the victim.
        place: A folder of its own.
        faults: How many there are by default.
        kinds: Kinds of faults, in turn; by default all.
    """

    victim: type[Victim]
    place: Path
    faults: int = 40
    kinds: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.name, self.kinds = self.victim.name, self.kinds or (*KINDS, *self.victim.faults)
        self.one = self.victim(self.place / "inputs")

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Case after case, until there are as many faults."""
        count = case = 0
        while count < faults:
            outcomes = self.strike(self.kinds[case % len(self.kinds)], case, seed)
            count, case = count + len(outcomes), case + 1
            yield from outcomes

    def strike(self, kind: str, case: int, seed: int) -> list[Outcome]:
        """One case; without an outcome where the work had ended before."""
        draw, _ = generator(seed, self.name, case), self.undisturbed
        with tempfile.TemporaryDirectory(dir=self.place) as folder:
            to = Path(folder) / "to"
            value_of(self.one.begin, to)
            if kind in SIGNALS:
                results = self._signals(SIGNALS[kind], to, draw)
            elif kind in ("flip", "cut"):
                results = self._damage(kind, to, draw)
            else:
                results = _CASES[kind](self, to, draw)
        return [Outcome(self.name, kind, case, *result) for result in results]

    @cached_property
    def undisturbed(self) -> Undisturbed:
        """The first run warms up; the second must end with the same bytes."""
        value_of(self.one.prepare)
        runs = []
        for number in range(2):
            to = self.place / f"undisturbed-{number}"
            value_of(self.one.begin, to)
            before = value_of(self.one.values, to) if self.one.safe else None
            begin = time.monotonic()
            calls = value_of(counted, self.one, to)
            seconds = time.monotonic() - begin
            runs.append(Undisturbed(self.one.contents(to), value_of(self.one.values, to), before, seconds, calls))
        if runs[0].contents != runs[1].contents:
            raise RuntimeError(f"{self.name}: two undisturbed runs give different bytes")
        return runs[1]

    def _signals(self, number: int, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
        """The same work is ended several times while it resumes."""
        results = []
        for _ in range(draw.integers(1, _STRIKES + 1)):
            child, hit = self.struck(number, to, draw)
            ending = child.end()
            hit = hit and ending.how not in (processes.FINISHED, processes.REFUSED)
            if hit or ending.how == processes.HUNG:
                results.append(self.judge(to, ending))
            if not hit:
                break
        return [*results[:-1], _worse(results[-1], self.resumed(to))] if results else []

    def _damage(self, kind: str, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
        """Bytes of the folder are not what they were."""
        if draw.random() < 0.5:
            self.struck(signal.SIGKILL, to, draw)[0].end()
        else:
            value_of(self.one.work, to)
        done = self.one.contents(to) == self.undisturbed.contents
        paths = [to / name for name in self.one.contents(to) if Path(name).name not in self.one.editable]
        paths = [path for path in paths if path.stat().st_size]
        if not paths:
            return []
        path = paths[draw.integers(len(paths))]
        what = f"{kind} of {path.relative_to(to)}: " + (flip if kind == "flip" else cut)(path, draw)
        look = call(self.one.values, to)
        if look.how == processes.HUNG:
            return [(HUNG, f"{what}: reading hangs")]
        if look.how == processes.RAISED:
            return [(UNNAMED, f"{what}: {look.value}")]
        if look.how == processes.FINISHED and look.value not in (self.undisturbed.values, self.undisturbed.before):
            return [(SILENT, f"{what}: other values are read")]
        result, note = self.resumed(to, damaged=True)
        return [(result, f"{what}: {note}" if note else f"{what}, {'finished' if done else 'unfinished'}")]

    def struck(self, number: int, to: Path, draw: np.random.Generator) -> tuple[Child, bool]:
        """The work, to which a signal is sent, or which sends it to itself; whether it was alive, if that is known."""
        if draw.random() < 0.5:
            return Child(at_call, self.one, to, int(draw.integers(self.undisturbed.calls)), int(number)), True
        child, delay = Child(self.one.work, to), draw.uniform(0, self.undisturbed.seconds)
        time.sleep(delay)
        return child, child.send(number)

    def judge(self, to: Path, ending: Ending) -> tuple[str, str]:
        """How a fault was taken, and what a reader gets before the work is resumed."""
        if ending.how == processes.HUNG:
            return HUNG, "the work hangs"
        look = call(self.one.values, to)
        if look.how == processes.HUNG:
            return HUNG, "reading hangs"
        if look.how == processes.FINISHED and look.value not in (self.undisturbed.values, self.undisturbed.before):
            return SILENT, f"other values are read: {look.value}"
        if look.how != processes.FINISHED and self.one.safe:
            return LOST, f"what was there before cannot be read: {look.value}"
        if processes.RAISED in (look.how, ending.how):
            return UNNAMED, str(look.value if look.how == processes.RAISED else ending.value)
        return OK, ""

    def resumed(self, to: Path, *, damaged: bool = False) -> tuple[str, str]:
        """Resume the work, and compare every byte; damage may be refused, and is removed then, as the error says."""
        ending = call(self.one.work, to)
        if damaged and ending.how == processes.REFUSED:
            shutil.rmtree(to)
            value_of(self.one.begin, to)
            ending = call(self.one.work, to)
        if ending.how == processes.HUNG:
            return HUNG, "resuming hangs"
        if ending.how != processes.FINISHED:
            return LOST, f"it cannot be resumed: {ending.value}"
        return compare(self.undisturbed.contents, self.one.contents(to))


def _stop(part: FolderPart, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
    """Others read while the work is stopped; then it goes on as if nothing had happened."""
    child, _ = part.struck(signal.SIGSTOP, to, draw)
    hit = child.stopped()
    result = part.judge(to, Ending(processes.KILLED)) if hit else (OK, "")
    time.sleep(draw.uniform(0, 0.2))
    child.send(signal.SIGCONT)
    ending = child.end()
    if ending.how == processes.HUNG:
        return [(HUNG, "it does not go on")]
    if ending.how != processes.FINISHED:
        return [(LOST, f"it does not go on: {ending.value}")]
    return [_worse(result, compare(part.undisturbed.contents, part.one.contents(to)))] if hit else []


def _full(part: FolderPart, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
    ending = call(at_call, part.one, to, int(draw.integers(part.undisturbed.calls)), FULL)
    return _refused(part, to, ending)


def _revoked(part: FolderPart, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
    ending = call(at_call, part.one, to, int(draw.integers(part.undisturbed.calls)), REVOKED)
    if to.exists():
        allow(to)
    return _refused(part, to, ending)


def _small_disk(part: FolderPart, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
    """A real disk with room for a part of the result; without the right to mount one, calls fail instead."""
    size = sum(path.stat().st_size // _PAGES + 2 for path in part.place.glob("undisturbed-1/**/*"))
    with mounted(part.place / "disk", 4 * size * _PAGES) as disk:
        if disk is None:
            return _full(part, to, draw)
        to = disk / "to"
        value_of(part.one.begin, to)
        free, left = shutil.disk_usage(disk).free, int(draw.uniform(0, size)) * _PAGES
        (disk / "ballast").write_bytes(bytes(max(0, free - left)))
        ending = call(part.one.work, to)
        (disk / "ballast").unlink()
        return _refused(part, to, ending)


def _refused(part: FolderPart, to: Path, ending: Ending) -> list[tuple[str, str]]:
    """Judge work that the disk refused; none if it had ended before."""
    return [] if ending.how == processes.FINISHED else [_worse(part.judge(to, ending), part.resumed(to))]


def _worker_killed(part: FolderPart, to: Path, draw: np.random.Generator) -> list[tuple[str, str]]:
    """Whoever waits for the worker must see that it is gone."""
    child, workers, end = Child(part.one.work, to), [], time.monotonic() + part.undisturbed.seconds
    while child.process.is_alive() and not workers and time.monotonic() < end:
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(child.pid).children()
    time.sleep(draw.uniform(0, part.undisturbed.seconds / 2))
    for one in workers:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    return _refused(part, to, child.end())


_CASES = {
    "stop": _stop,
    "disk full": _full,
    "permissions": _revoked,
    "small disk": _small_disk,
    "worker killed": _worker_killed,
}


def counted(victim: Victim, to: Path) -> int:
    """Do the work, and count its calls that change the folder."""
    instants = Instants(to)
    victim.work(to)
    return instants.count


def at_call(victim: Victim, to: Path, number: int, fault: int | str) -> None:
    """Do the work; a fault strikes at one of its calls."""
    Instants(to, number, fault)
    victim.work(to)


def flip(path: Path, draw: np.random.Generator) -> str:
    """Change some bits of a file."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.integers(1, 4)):
        data[draw.integers(len(data))] ^= 1 << draw.integers(8)
    path.write_bytes(data)
    return f"{len(data)} bytes"


def cut(path: Path, draw: np.random.Generator) -> str:
    """Drop the end of a file."""
    data = path.read_bytes()
    length = int(draw.integers(len(data)))
    path.write_bytes(data[:length])
    return f"{length} of {len(data)} bytes"


def compare(expected: dict[str, str], contents: dict[str, str]) -> tuple[str, str]:
    """Whether folders have the same bytes."""
    if missing := expected.keys() - contents.keys():
        return LOST, f"{sorted(missing)} are missing"
    other = [name for name in contents if contents[name] != expected.get(name)]
    return (SILENT, f"{other} have other bytes") if other else (OK, "")


@contextmanager
def mounted(place: Path, size: int) -> Iterator[Path | None]:
    """A small disk; None without the right to mount one."""
    place.mkdir(exist_ok=True)
    mount: Any = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if mount is None or subprocess.run(command, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def _worse(one: tuple[str, str], other: tuple[str, str]) -> tuple[str, str]:
    order = (OK, UNNAMED, HUNG, SILENT, LOST)
    return max(one, other, key=lambda result: order.index(result[0]))
