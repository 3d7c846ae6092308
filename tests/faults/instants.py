"""Instants at which a fault hurts most: between the calls by which a process changes a folder.

A process counts its calls that open a file for writing, write half of it and the rest, flush, rename, remove or make
something below a folder, and strikes at one of them: it kills or stops itself, finds the disk full from then on, or
loses its permissions.
"""

import builtins
import ctypes
import errno
import io
import os
import stat
import sys
from pathlib import Path
from typing import Any

_EVENTS = {"open": 0, "os.rename": 0, "os.remove": 0, "os.mkdir": 0, "os.rmdir": 0, "shutil.rmtree": 0}
"""Events of `sys.audit`, with the place of the path among their arguments."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OVERRIDES = (1 << 1) | (1 << 2)
"""The capabilities CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root needs no permission."""
FULL, REVOKED = "full", "revoked"


class Instants:
    """Counts the calls of this process that change a folder; at one of them, the fault strikes.

    Args:
        folder: The folder.
        at: The number of the call, from 0; None only counts.
        fault: A signal, `FULL` or `REVOKED`.
    """

    def __init__(self, folder: Path, at: int | None = None, fault: int | str = "") -> None:
        self.folder, self.at, self.fault, self.count = str(folder), at, fault, 0
        self._open, self._fsync = io.open, os.fsync
        if fault == REVOKED:
            _obey_permissions()
        sys.addaudithook(self._heard)
        os.fsync = self._flush
        io.open = builtins.open = self._opened

    def tick(self, *, needs_space: bool = False) -> None:
        """One more call is about to happen."""
        number, self.count = self.count, self.count + 1
        if self.at is None or number < self.at:
            return
        if self.fault == FULL:
            if needs_space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif number == self.at and self.fault == REVOKED:
            revoke(Path(self.folder))
        elif number == self.at:
            os.kill(os.getpid(), int(self.fault))

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or not self._is_inside(path := arguments[_EVENTS[event]]):
            return
        if event != "open":
            self.tick(needs_space=event == "os.mkdir")
        elif arguments[2] & _WRITES:
            self.tick(needs_space=not os.path.exists(path))  # noqa: PTH110 (any kind of path)

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder)

    def _flush(self, handle: Any) -> None:
        self.tick(needs_space=not stat.S_ISDIR(os.fstat(handle).st_mode))
        self._fsync(handle)

    def _opened(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "wb" and self._is_inside(file):
            return _HalvedFile(io.FileIO(file, "w"), self)
        return self._open(file, mode, *arguments, **options)


class _HalvedFile(io.BufferedWriter):
    """A file whose content reaches the disk in two halves."""

    def __init__(self, raw: io.FileIO, instants: Instants) -> None:
        super().__init__(raw)
        self._instants = instants

    def write(self, data: Any) -> int:
        """Write half of the data, and then the rest."""
        view = memoryview(data).cast("B")
        for half in (view[: len(view) // 2], view[len(view) // 2 :]):
            self._instants.tick(needs_space=True)
            super().write(half)
            self.flush()
        return len(view)


def revoke(folder: Path) -> None:
    """Nothing below a folder can be written any more."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)


def allow(folder: Path) -> None:
    """Everything below a folder can be written again."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)


def _obey_permissions() -> None:
    """Root needs no permissions; from now on, this process does. Its other rights stay as they are."""
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the interface, this process
    data = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable capabilities, twice 32 bits of each
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, data)
    data[0] &= ~_OVERRIDES
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "the capabilities of root cannot be dropped")
