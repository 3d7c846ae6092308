"""What the benchmarks measure with: seconds of a call, and the resident memory of a process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

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
def watched_memory(peak: list[int]) -> Iterator[None]:
    """Collect the resident memory of this process in bytes, a hundred times a second and at the end."""
    process, done = psutil.Process(), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        peak.append(process.memory_info().rss)
