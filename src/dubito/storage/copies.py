"""Local copies of remote files, kept by content: each is fetched once, and then read like any file on the disk.

Names of shards and of parts carry the CRC-32 of their content, so a copy is never out of date, and what is fetched is
compared with it. All copies together take at most `DUBITO_COPIES_GB` (20) gigabytes: those that were not used for the
longest time are removed first, but none that was used within the last minutes. They lie in a folder of their own in
`DUBITO_COPIES`, or in the system's folder for caches.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dubito.errors import DubitoError, ValueRangeError
from dubito.storage.files import UNFINISHED, application_folder, checksum, writing
from dubito.storage.lease import check_held
from dubito.storage.locations import Place, RemotePath

FOLDER, LIMIT = "DUBITO_COPIES", "DUBITO_COPIES_GB"
_NAME = "dubito-copies"
_DEFAULT_GB, _KEPT, _IN_USE_SECONDS = 20.0, 0.9, 120.0
_AT_ONCE = 4
_DIGEST = re.compile("[0-9a-f]{16}")
_CRC = re.compile(r"-([0-9a-f]{8})(\.[a-z]+)?$")
_unchecked = [sys.maxsize]
"""Bytes that this process has fetched since it last looked how much all copies take; at first, it has not looked."""
_fetching: dict[Path, threading.Thread] = {}
"""By copy, what fetches it ahead."""
_compared: set[Path] = set()
"""Copies that this process has compared with their checksums when it fetched them."""


def local_copy(place: Place, *, folder: bool = False) -> Path:
    """A file on the disk as it is, or a copy of a remote one.

    Args:
        place: A file or folder whose name carries its checksum.
        folder: Whether it is a folder.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It does not have the checksum of its name.
    """
    if isinstance(place, Path):
        return place
    copy = _place_of(place)
    if thread := _fetching.pop(copy, None):
        thread.join()
    try:
        with contextlib.suppress(PermissionError):  # another user's, which can be read all the same
            os.utime(copy)  # it is in use
    except FileNotFoundError:
        _fetch(place, copy, folder=folder)
    return copy


def fetch_ahead(place: Place) -> None:
    """Fetch the copy of a remote file in a thread, so that it is there, or soon will be, when it is needed."""
    if isinstance(place, Path) or (copy := _place_of(place)) in _fetching or copy.exists():
        return
    if sum(thread.is_alive() for thread in list(_fetching.values())) >= _AT_ONCE:
        return

    def fetch() -> None:
        try:
            # Whoever needs it tries again, and sees the error.
            with contextlib.suppress(OSError, ValueError, DubitoError):
                _fetch(place, copy, folder=False)
        finally:
            _fetching.pop(copy, None)

    thread = threading.Thread(target=fetch, name="dubito-copy", daemon=True)
    thread.start()
    _fetching[copy] = thread  # may have ended already: then waiting for it takes no time


def is_compared(copy: Path) -> bool:
    """Whether a copy was compared with its checksum as it was fetched; it counts once, as files may change."""
    compared = copy in _compared
    _compared.discard(copy)
    return compared


def forget_copy(place: Place) -> bool:
    """Remove the copy of a remote file, which may be damaged; whether there was one."""
    if isinstance(place, Path) or not (copy := _place_of(place)).exists():
        return False
    _remove(copy)
    return True


@contextlib.contextmanager
def staged(folder: Place) -> Iterator[Path]:
    """A folder on the disk to write into: the folder itself, or one whose files are then uploaded."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dubito-") as name:
        yield Path(name)
        for file in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            check_held(folder)
            (folder / file.relative_to(name).as_posix()).upload(file)


def _place_of(place: RemotePath) -> Path:
    digest = hashlib.blake2b(place.parent.url.encode(), digest_size=8).hexdigest()
    return _folder() / digest / place.name


def _folder() -> Path:
    chosen = os.environ.get(FOLDER)
    return (Path(chosen).expanduser() if chosen else application_folder("caches")) / _NAME


def _fetch(place: RemotePath, copy: Path, *, folder: bool) -> None:
    part, is_there = copy.with_name(f"{copy.name}.{secrets.token_hex(4)}{UNFINISHED}"), True
    with writing(f"a local copy of '{place}' (set {FOLDER} to choose another folder)", copy.parent):
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            is_there = _download(place, part, folder=folder)
            if is_there:
                _check(part, copy.name)
                part.replace(copy)
                _compared.add(copy)
        except OSError:
            if not copy.exists():  # else another process was faster
                raise
        finally:
            _remove(part)
    if not is_there:
        raise FileNotFoundError(errno.ENOENT, f"there is no '{place}'")
    _unchecked[0] += _size(copy)
    if _unchecked[0] > _limit() / 10:
        _make_room()


def _check(part: Path, name: str) -> None:
    """Raise ValueError unless the content of a file or folder has the checksum of its name, if that has one."""
    crc = _CRC.search(name)
    if crc and (actual := checksum(part)) != crc[1]:
        raise ValueError(f"it has checksum {actual}, its name says {crc[1]}")


def _download(place: RemotePath, to: Path, *, folder: bool) -> bool:
    """Write a remote file or folder to the disk; whether there is one."""
    try:
        keys = place.files_below() if folder else []
        if outside := [key for key in keys if not {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", key))]:
            raise ValueError(f"it holds '{outside[0]}', which would be written outside of its folder")
        for key in keys:
            (to / key).parent.mkdir(parents=True, exist_ok=True)
            (place / key).download(to / key)
        if not folder:
            place.download(to)
    except FileNotFoundError:
        return False
    return bool(keys) or not folder


def _make_room() -> None:
    """Remove the copies that were not used for the longest time, if all of them take too much."""
    folders = [folder for folder in _folder().iterdir() if _DIGEST.fullmatch(folder.name) and folder.is_dir()]
    copies = [copy for folder in folders for copy in folder.iterdir()]
    sizes = {copy: _size(copy) for copy in copies}
    total, limit = sum(sizes.values()), _limit()
    if total > limit:
        for copy in sorted(copies, key=_last_use):
            if total <= _KEPT * limit or time.time() - _last_use(copy) < _IN_USE_SECONDS:
                break
            total -= sizes[copy]
            _remove(copy)
    _unchecked[0] = 0


def _limit() -> float:
    text = os.environ.get(LIMIT) or str(_DEFAULT_GB)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes >= 0:
        raise ValueRangeError(f"{LIMIT} must be a number of gigabytes, such as 20; got '{text}'.")
    return 1e9 * gigabytes


def _last_use(copy: Path) -> float:
    try:
        return copy.stat().st_mtime
    except OSError:
        return 0.0


def _size(copy: Path) -> int:
    files = copy.rglob("*") if copy.is_dir() else [copy]
    size = 0
    for file in files:
        with contextlib.suppress(OSError):  # another process has removed it
            size += file.stat().st_size
    return size


def _remove(copy: Path) -> None:
    with contextlib.suppress(OSError):
        if copy.is_dir():
            shutil.rmtree(copy)
        else:
            copy.unlink(missing_ok=True)
