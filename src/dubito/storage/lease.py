"""A lock in an object store: a lease, because no system releases a lock there when its holder dies.

    .lock/000001, .lock/000002, ...    files below a folder; the one with the highest number counts

Whoever creates the next number holds the folder. The stores of `_CONDITIONAL` create a file for one writer alone
(`RemotePath.create`), which is tried out each time, so there is one holder; others are not written to. It renews its
file every few seconds, and marks it as released in the end. A file that has not been renewed for `_PATIENCE_SECONDS`
belongs to a process that has died, and the next number may be created; if it was a process of this machine, it is known
at once that it has died. No clocks are compared.

A holder that was suspended for longer than that has lost its lease. It finds the higher number before it writes or
removes a file in or below the folder (`check_held`). Between that look and the write lies a moment in which another one
may write as well; a lock of a disk has no such moment.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from dubito.errors import StoreError
from dubito.storage.locations import RemotePath

FOLDER = ".lock"
_RENEWAL_SECONDS, _PATIENCE_SECONDS, _LOOK_SECONDS, _END_SECONDS = 4.0, 15.0, 0.5, 5.0
_CONDITIONAL = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Schemes whose file systems create a file under a condition that the store checks. In fsspec's own way, which others
have, they look whether it is there, and then write it: two processes may do so at the same time."""
_HELD: dict[str, "Lease"] = {}
"""The leases of this process, by folder."""


class LeaseTakenError(Exception):
    """Another process holds the folder."""


@final
class Lease:
    """The lease of a folder, renewed by a thread until it is released."""

    def __init__(self, folder: RemotePath, number: int) -> None:
        self.folder, self.number = folder, number
        self._file = folder / FOLDER / f"{number:06}"
        self._owner = {"token": secrets.token_hex(8), "machine": _machine(), "pid": os.getpid()}
        self._renewals = 0
        self._done = threading.Event()
        self._file.create(self._content())
        self._check_exclusive()
        self._thread = threading.Thread(target=self._renew, name="dubito-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise StoreError if another process has taken the folder meanwhile."""
        latest = max(_numbers(self.folder), default=0)
        if latest != self.number or (_read(self._file) or {}).get("token") != self._owner["token"]:
            raise StoreError(
                f"'{self.folder}' is written by another process now: this one was suspended, or had no connection, for "
                f"more than {_PATIENCE_SECONDS:g} s. Run the same call again: what was finished is kept."
            )

    def release(self) -> None:
        """Let others have the folder; the file stays, because numbers must rise."""
        self._done.set()
        self._thread.join(_END_SECONDS)
        with contextlib.suppress(StoreError):  # then others wait until they see that it is not renewed
            self._file.write_bytes(self._content(released=True))

    def remove_older(self) -> None:
        """Remove the files of earlier holders."""
        for number in _numbers(self.folder):
            if number < self.number:
                (self.folder / FOLDER / f"{number:06}").unlink(missing_ok=True)

    def _check_exclusive(self) -> None:
        """Raise StoreError for a store that would give the same lease to another process."""
        with contextlib.suppress(FileExistsError):
            self._file.create(self._content())
            self._file.unlink(missing_ok=True)
            raise _refusal(self.folder)

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
    """Raise StoreError if this process has lost the lease of a folder that it writes into, or of one above it."""
    for held, lease in list(_HELD.items()):
        if f"{folder.url}/".startswith(f"{held}/"):
            lease.check()


def _refusal(folder: RemotePath) -> StoreError:
    return StoreError(
        f"'{folder}' is in a store that cannot create a file for one writer alone, so that two processes could write "
        f"there at the same time. Write to a disk, and copy the folder."
    )


def _acquire(folder: RemotePath, deadline: float) -> Lease:
    if folder.url.partition("://")[0].lower() not in _CONDITIONAL:
        raise _refusal(folder)
    while True:
        latest = max(_numbers(folder), default=0)
        if latest and not _is_free(folder / FOLDER / f"{latest:06}", deadline):
            continue
        with contextlib.suppress(FileExistsError):  # another process was faster: look at its lease
            lease = Lease(folder, latest + 1)
            if max(_numbers(folder)) == lease.number:
                return lease
            lease.release()  # there was a higher number, which was not there when this process looked


def _is_free(file: RemotePath, deadline: float) -> bool:
    """Whether a lease is released or its holder has died; False if it is gone, so that another one counts.

    Raises:
        LeaseTakenError: Its holder is alive after the deadline.
    """
    content, since = _read(file), time.monotonic()
    while content is not None and not content.get("released") and not _has_died(content):
        now = time.monotonic()
        if now - since > _PATIENCE_SECONDS:
            return True
        time.sleep(_LOOK_SECONDS)
        if (latest := _read(file)) != content:
            if now > deadline and latest is not None and not latest.get("released"):
                raise LeaseTakenError
            content, since = latest, now
    return content is not None


def _read(file: RemotePath) -> dict[str, Any] | None:
    """What a lease says, nothing if that cannot be read; None if its file is gone."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


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
    """This machine since it was started; containers on it differ in name, or in how they number processes."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        return f"{platform.node()} {boot.read_text().strip()} {numbers.readlink()}"
    return f"{platform.node()} {secrets.token_hex(8)}"  # unlike every other: whether a process has died is unknown


def _numbers(folder: RemotePath) -> list[int]:
    """The numbers of all leases of a folder."""
    return [int(name) for name in (folder / FOLDER).sizes() if name.isdecimal() and len(name) < 19]
