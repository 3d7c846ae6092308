"""What the benchmarks measure with: seconds of a call, and the resident memory of a process."""

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import psutil

Result = TypeVar("Result")


def timed(run: Callable[[], Result]) -> tuple[Result, float]:
    """What one call gives, and its seconds."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def seconds_of(run: Callable[[], object]) -> float:
    """Of one call."""
    return timed(run)[1]


@contextmanager
def watched_memory(peak: list[int], of: Callable[[Any], int] = attrgetter("rss")) -> Iterator[None]:
    """Collect the memory of this process in bytes, a hundred times a second and at the end.

    Args:
        peak: What it is collected in.
        of: Which memory, of what psutil reports; by default all that is resident.
    """
    process, done = psutil.Process(), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak.append(of(process.memory_info()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        peak.append(of(process.memory_info()))


def growth_of(run: Callable[[], object], passes: int = 3) -> float:
    """By how many bytes some calls let resident memory grow at most; to be asked in a process of its own."""
    _give_back()
    before = psutil.Process().memory_info().rss
    peak: list[int] = []
    kept = _restart_peak()
    with watched_memory(peak):
        for _ in range(passes):
            run()
    return float((_highest() if kept else max(peak)) - before)


def _give_back() -> None:
    """Freed memory to the system, where glibc can: what building a network left over would hide what a pass takes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _restart_peak() -> bool:
    """Let Linux forget the highest resident memory so far: its own count misses nothing, unlike samples."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _highest() -> int:
    """Resident memory in bytes, the most since it was forgotten."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])
