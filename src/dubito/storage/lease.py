"""A lock in an object store: a lease, because no system releases a lock there when its holder dies.

    .lock-000001, .lock-000002, ...    files of a folder; the one with the highest number counts

Whoever creates the next number holds the folder. Stores create a file for one writer alone (`RemotePath.create`), so
there is one holder. It renews its file every few seconds, and marks it as released in the end. A file that has not
been renewed for `_PATIENCE_SECONDS` belongs to a process that has died, and the next number may be created; if it was a
process of this machine, it is known at once that it has died. No clocks are compared.

A holder that was suspended for longer than that has lost its lease. It finds the higher number before it replaces the
file that describes a folder (`check_held`). Between that look and the write lies a moment in which another one may
write as well; a lock of a disk has no such moment.
"""

import contextlib
import json
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from dubito.errors import StoreError
from dubito.storage.locations import RemotePath

PREFIX = ".lock-"
_NAME = re.compile(r"\.lock-(\d{6,})")
_RENEWAL_SECONDS, _PATIENCE_SECONDS, _LOOK_SECONDS = 4.0, 15.0, 0.5
_HELD: dict[str, "Lease"] = {}
"""The leases of this process, by folder."""


class LeaseTakenError(Exception):
    """Another process holds the folder."""


@final
class Lease:
    """The lease of a folder, renewed by a thread until it is released."""

    def __init__(self, folder: RemotePath, number: int) -> None:
        self.folder, self.number = folder, number
        self._file = folder / f"{PREFIX}{number:06}"
        self._owner = {"token": secrets.token_hex(8), "machine": _machine(), "pid": os.getpid()}
        self._renewals = 0
        self._done = threading.Event()
        self._file.create(self._content())
        self._thread = threading.Thread(target=self._renew, name="dubito-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise StoreError if another process has taken the folder meanwhile."""
        if _latest(self.folder) != self.number:
            raise StoreError(
                f"'{self.folder}' is written by another process now: this one was suspended, or had no connection, for "
                f"more than {_PATIENCE_SECONDS:g} s. Run the same call again: what was finished is kept."
            )

    def release(self) -> None:
        """Let others have the folder; the file stays, because numbers must rise."""
        self._done.set()
        self._thread.join()
        with contextlib.suppress(StoreError):  # then others wait until they see that it is not renewed
            self._file.write_bytes(self._content(released=True))

    def remove_older(self) -> None:
        """Remove the files of earlier holders."""
        for name in self.folder.sizes():
            if (number := _number(name)) is not None and number < self.number:
                (self.folder / name).unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._done.wait(_RENEWAL_SECONDS):
            self._renewals += 1
            with contextlib.suppress(StoreError):  # the next one may succeed
                self._file.write_bytes(self._content())

    def _content(self, *, released: bool = False) -> bytes:
        return json.dumps({**self._owner, "renewals": self._renewals, "released": released}).encode()


@contextlib.contextmanager
def leased(folder: RemotePath, *, seconds: float) -> Iterator[None]:
    """Hold the lease of a folder.

    Args:
        folder: A folder in a store.
        seconds: How long to wait for a holder that is alive.

    Raises:
        LeaseTakenError: Somebody else holds it, and is alive.
        StoreError: The store cannot be reached or refuses to write.
    """
    lease = _acquire(folder, time.monotonic() + seconds)
    _HELD[folder.url] = lease
    try:
        lease.remove_older()
        yield
    finally:
        del _HELD[folder.url]
        lease.release()


def check_held(folder: RemotePath) -> None:
    """Raise StoreError if this process has lost the lease of a folder that it writes into."""
    if lease := _HELD.get(folder.url):
        lease.check()


def is_lease(name: str) -> bool:
    """Whether a file is that of a lease."""
    return _number(name) is not None


def _acquire(folder: RemotePath, deadline: float) -> Lease:
    while True:
        latest = _latest(folder)
        if latest:
            _wait_until_free(folder / f"{PREFIX}{latest:06}", deadline)
        with contextlib.suppress(FileExistsError):  # another process was faster: look at its lease
            return Lease(folder, latest + 1)


def _wait_until_free(file: RemotePath, deadline: float) -> None:
    """Return once a lease is released or its holder has died; LeaseTakenError if it is alive after the deadline."""
    content, seen = _read(file), time.monotonic()
    while content and not content.get("released") and not _has_died(content):
        now = time.monotonic()
        if now - seen > _PATIENCE_SECONDS:
            return
        time.sleep(_LOOK_SECONDS)
        if (latest := _read(file)) != content:
            if now > deadline and latest and not latest.get("released"):
                raise LeaseTakenError
            content, seen = latest, now


def _read(file: RemotePath) -> dict[str, Any] | None:
    """What a lease says; None if its file is gone or holds anything else."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _has_died(content: dict[str, Any]) -> bool:
    """Whether a holder was a process of this machine that no longer exists."""
    if content.get("machine") != _machine() or not isinstance(content.get("pid"), int):
        return False
    try:
        os.kill(content["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _machine() -> str:
    """This machine since it was started, and the name by which containers on it differ."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{platform.node()} {boot.read_text().strip()}"
    return f"{platform.node()} {secrets.token_hex(8)}"  # unlike every other: whether a process has died is unknown


def _latest(folder: RemotePath) -> int:
    """The highest number of a lease; 0 if there is none."""
    return max((number for name in folder.sizes() if (number := _number(name)) is not None), default=0)


def _number(name: str) -> int | None:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
