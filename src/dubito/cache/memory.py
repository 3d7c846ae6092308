"""Keep freed memory between batches instead of handing it back to the system and fetching it zeroed again.

By default glibc maps every block above 32 MB anew and unmaps it when it is freed. A network's activations are such
blocks: on a CPU, a third of a forward pass or more goes into page faults (benchmarks/extract.py measures it). While
extraction runs, freed blocks stay in the process; afterwards they are given back and the usual limits hold.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the numbers of glibc's malloc.h
_MOST = 2**31 - 1
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""The defaults, with the thresholds where glibc itself moves them once a program has freed large blocks."""


@contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, freed blocks are used again; nothing is done without glibc, or where the user has tuned it already."""
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if tuned or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _MOST)
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)
