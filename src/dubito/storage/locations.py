"""Files wherever they lie: paths on the disk, and addresses such as s3://bucket/photos, which fsspec reads.

fsspec knows many schemes (s3, gs, az, hf, memory, ...), most of them through a package of its own, and takes
credentials and other options from its own configuration and from the environment.

- A file system belongs to the process that opened it, because its event loop does not survive a fork. fsspec keeps one
  per process, so it is asked for it at every access, and a `RemotePath` holds its address only.
- Reading ranges of bytes keeps memory bounded whatever lies there.
- A file that is missing is one broken image. A store that cannot be reached or refuses access is a `StoreError`, which
  stops everything: images that were skipped in such a minute would be missing from a finished cache. So is a disk of
  another machine that does not answer (`mounted`).
"""

import errno
import glob
import io
import itertools
import math
import os
import posixpath
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from dubito.errors import DubitoError, ImagesError, MissingPackageError, StoreError, first_words

BLOCK = 4 << 20
"""Bytes of one request where a file is read from front to back."""
_PIECE, _AHEAD, _GAP = 1 << 25, 1 << 20, 1 << 16
_MOST_FILES = 1_000_000
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_AWAY = {
    getattr(errno, name)
    for name in (
        "ESTALE",
        "ETIMEDOUT",
        "ENOTCONN",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ENETDOWN",
        "ENETUNREACH",
        "ECONNRESET",
        "ECONNABORTED",
        "EREMOTEIO",
    )
    if hasattr(errno, name)
}
"""What reading a file raises if it is on a disk of another machine, and that does not answer."""
_PACKAGES = {
    "s3": "'dubito[s3]'",
    "gs": "'dubito[gs]'",
    "gcs": "'dubito[gs]'",
    "az": "'dubito[az]'",
    "abfs": "'dubito[az]'",
}
"""By scheme what pip installs to read it."""


class RemoteStat(NamedTuple):
    """The size of a remote file in bytes, under the name that `os.stat_result` has for it."""

    st_size: int


@final
@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder at an address, with the methods of `pathlib.Path` that dubito uses.

    In most stores, a folder is there as long as files are in it. A file that is written appears in one step.
    """

    url: str

    def __post_init__(self) -> None:
        scheme, _, path = self.url.partition("://")
        object.__setattr__(self, "url", f"{scheme}://{path.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, key: str) -> "RemotePath":
        scheme, _, path = f"{self.url}/{key}".partition("://")
        return RemotePath(f"{scheme}://{posixpath.normpath(path) if '..' in key.split('/') else path}")

    @property
    def name(self) -> str:
        """The part behind the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> "RemotePath":
        """The folder of a file."""
        return RemotePath(self.url.rpartition("/")[0])

    def absolute(self) -> "RemotePath":
        """The same address: it means the same wherever it is used."""
        return self

    def resolve(self) -> "RemotePath":
        """The same address: stores have no links."""
        return self

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there is a folder with something in it."""
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return self._kind() is not None

    def stat(self) -> RemoteStat:
        """The size of the file."""
        with self._accessed() as (files, path):
            files.invalidate_cache(self.parent.url)
            size: int | None = files.size(path)
        if size is None:
            raise StoreError(f"'{self}' must be on a server that states the size of its files. Download it first.")
        return RemoteStat(size)

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Nothing: a folder comes with the first file in it."""

    def iterdir(self) -> "Iterator[RemotePath]":
        """Everything in the folder, sorted; nothing if there is no folder."""
        return (self / name for name in sorted(self.sizes()))

    def sizes(self) -> dict[str, int]:
        """By name, the bytes of every file in the folder, and 0 for every folder in it, from one listing."""
        try:
            with self._accessed() as (files, path):
                files.invalidate_cache(path)
                entries = files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        names = {entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0) for entry in entries}
        return {name: size for name, size in names.items() if name not in ("", self.name)}

    def files_below(self) -> list[str]:
        """The path, relative to this folder, of every file below it, sorted."""
        with self._accessed() as (files, path):
            root = path.rstrip("/")
            files.invalidate_cache(root)
            names = [name for name in files.find(root) if name.startswith(f"{root}/") and not name.endswith("/")]
            return sorted(name[len(root) + 1 :] for name in names)

    def open(self, mode: str = "rb", block: int = BLOCK) -> io.BufferedReader:
        """The file for reading, at any position, with requests of so many bytes; it need not be closed."""
        if mode != "rb":
            raise ValueError(f"mode must be 'rb'; got {mode!r}. A remote file is written as a whole: write_bytes.")
        return io.BufferedReader(_RemoteFile(self), block)

    def read_bytes(self) -> bytes:
        """The whole file."""
        with self._accessed() as (files, path):
            return bytes(files.cat_file(path))

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole file as text."""
        return self.read_bytes().decode(encoding, errors)

    def read_range(self, start: int, size: int) -> bytes:
        """Bytes from a position on: `size`, or fewer where the file ends.

        Raises:
            FileNotFoundError: There is no such file.
            StoreError: The store cannot be reached or refuses.
        """
        with self._accessed() as (files, path):
            try:
                content: bytes = files.cat_file(path, start=start, end=start + size)
            except FileNotFoundError:
                raise
            except Exception:
                if files.size(path) > start:
                    raise
                return b""  # stores refuse a range that begins where the file ends, as every range of an empty one does
        if len(content) > size:
            raise StoreError(f"'{self}' must be on a server that sends ranges; it sends whole files. Download it.")
        return content

    def write_bytes(self, data: bytes) -> None:
        """Replace the file in one step."""
        with self._accessed() as (files, path):
            files.pipe_file(path, data)

    def create(self, data: bytes) -> None:
        """Write a new file; FileExistsError if there is one, so that of several writers one alone succeeds."""
        with self._accessed() as (files, path):
            files.pipe_file(path, data, mode="create")

    def upload(self, file: Path) -> None:
        """Replace the file by one from the disk, in one step, without reading it into memory."""
        with self._accessed() as (files, path):
            files.put_file(str(file), path)

    def download(self, file: Path) -> None:
        """Write the file to the disk, a piece at a time; an OSError is the disk's, a StoreError the store's."""
        with file.open("wb") as target:
            while piece := self.read_range(target.tell(), _PIECE):
                target.write(piece)
                if len(piece) < _PIECE:
                    break

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        try:
            with self._accessed() as (files, path):
                files.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Remove the file, or the folder with everything in it."""
        with self._accessed() as (files, path):
            files.rm(path, recursive=True)

    def _kind(self) -> str | None:
        try:
            with self._accessed() as (files, path):
                files.invalidate_cache(self.parent.url)
                return str(files.info(path)["type"])
        except FileNotFoundError:
            return None

    @contextmanager
    def _accessed(self) -> Iterator[tuple[Any, str]]:
        """The file system of this process, and the path in it; what it raises becomes an error of ours."""
        with _errors_of(self.url):
            from fsspec.core import url_to_fs  # noqa: PLC0415 (the command line starts without it)

            yield url_to_fs(self.url)


Place = Path | RemotePath
"""A path on the disk, or an address."""


@contextmanager
def mounted(path: Place) -> Iterator[None]:
    """Turn what a disk of another machine raises when it does not answer into StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _AWAY:
            raise
        raise StoreError(
            f"'{path}' is on a disk that does not answer ({error.strerror}). When it does, run the same call again: "
            f"what was finished is kept."
        ) from error


def is_url(text: object) -> bool:
    """Whether a text is an address: a scheme, :// and a path.

    >>> is_url("s3://bucket/photos"), is_url("photos/s3"), is_url("https://example.org/a.jpg")
    (True, False, True)
    """
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_web(place: object) -> bool:
    """Whether something is the address of a file on a web server."""
    return str(place).lower().startswith(("http://", "https://"))


def to_place(text: str | Place) -> Place:
    """A user's path or address as a place.

    >>> to_place("s3://bucket/cache/") / "manifest.json"
    RemotePath(url='s3://bucket/cache/manifest.json')
    """
    if isinstance(text, RemotePath):
        return text
    if isinstance(text, str) and text.lower().startswith("file://"):
        return Path(text[len("file://") :])
    return RemotePath(str(text)) if is_url(text) else Path(text).expanduser()


def to_path(text: str | Place, what: str) -> Path:
    """A user's path on the disk; StoreError for an address, which Path would take for a folder called `s3:`."""
    place = to_place(text)
    if isinstance(place, RemotePath):
        raise StoreError(f"{what} must be on this machine; got '{text}'. Pass a path.")
    return place


def join(folder: Place, key: str) -> Place:
    """The place of a file in a folder; a key that is an address stands for itself.

    >>> str(join(RemotePath("s3://bucket/lists"), "../photos/a.jpg"))
    's3://bucket/photos/a.jpg'
    """
    return RemotePath(key) if is_url(key) else folder / key


def names_of(places: Sequence[Place]) -> list[str]:
    """What tells files apart: their paths below the folder that all of them share.

    >>> names_of([RemotePath("s3://b/train/0.tar"), RemotePath("s3://b/train/1.tar")])
    ['0.tar', '1.tar']
    """
    parts = [(place.as_posix() if isinstance(place, Path) else place.url).split("/") for place in places]
    shared = len(os.path.commonprefix([part[:-1] for part in parts]))  # noqa: RUF071 (of lists: whole folders)
    return ["/".join(part[shared:]) for part in parts]


def sizes_in(folder: Place) -> dict[str, int]:
    """By name, the bytes of every file in a folder, from one listing; empty if there is no folder."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}
    except FileNotFoundError:
        return {}


def is_pattern(text: str) -> bool:
    """Whether a path or address stands for several: it has braces, or a * outside of the web."""
    return _BRACES.search(text) is not None or ("*" in text and not is_web(text))


def expand(pattern: str) -> list[str]:
    """The paths or addresses that a pattern stands for, in order.

    Braces are written out, whether these files exist or not; a * stands for the names that are there.

    >>> expand("train-{08..10}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar']
    >>> expand("s3://{a,b}/{1..2}.tar")
    ['s3://a/1.tar', 's3://a/2.tar', 's3://b/1.tar', 's3://b/2.tar']
    """
    parts = _BRACES.split(pattern)  # in turn, what is outside and what is inside of braces
    choices = [_choices(part, pattern) if place % 2 else [part] for place, part in enumerate(parts)]
    if math.prod(map(len, choices)) > _MOST_FILES:
        raise ImagesError(f"'{pattern}' must stand for at most {_MOST_FILES:,} files. Write a smaller range.")
    written = map("".join, itertools.product(*choices))
    names = [name for one in written for name in (_matches(one) if "*" in one and not is_web(one) else [one])]
    if not names:
        raise ImagesError(f"'{pattern}' must match files; it matches none. Check the path.")
    return names


def to_readable(place: Place, block: int = BLOCK) -> Path | io.BufferedReader:
    """What readers of archives take: a path as it is, of an address an open file, which need not be closed.

    Args:
        place: The file.
        block: Bytes of one request to another machine.
    """
    return place if isinstance(place, Path) else place.open(block=block)


@final
class RangeReader:
    """Reads ranges of files, and from another machine more than one at once where a thread reads forward."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type["RangeReader"], tuple[()]]:
        return RangeReader, ()

    def read(self, place: Place, start: int, size: int) -> bytes:
        """`size` bytes from `start`, or fewer where the file ends."""
        if isinstance(place, Path):
            with mounted(place), place.open("rb") as file:
                file.seek(start)
                return file.read(size)
        last, first, block = getattr(self._local, "last", (None, 0, b""))
        at = start - first
        if last != place or at < 0 or at + size > len(block):
            forward = last == place and 0 <= at <= len(block) + _GAP
            block, at = place.read_range(start, max(size, _AHEAD) if forward else size), 0
            self._local.last = (place, start, block)
        return block[at : at + size]


@final
class _RemoteFile(io.RawIOBase):
    """A remote file as Python's readers of archives and tables need it: every read is one request."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._size, self._at = path, path.stat().st_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "a position before the beginning of the file")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        content = self._path.read_range(self._at, size) if size > 0 else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Turn what file systems raise into FileNotFoundError, FileExistsError, or one error of ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"there is no '{url}'") from error
    except (DubitoError, FileExistsError):
        raise
    except ImportError as error:
        scheme = url.partition("://")[0].lower()
        package = _PACKAGES.get(scheme, "aiohttp" if is_web(url) else f"the package of fsspec for {scheme}")
        raise MissingPackageError(f"'{url}' is accessed by another package: pip install {package}") from error
    except Exception as error:  # every file system has errors of its own
        raise StoreError(
            f"'{url}' cannot be accessed ({type(error).__name__}: {first_words(error)}). Check the address, your "
            f"credentials and the network, then run the same call again: what was finished is kept."
        ) from error


def _choices(inside: str, pattern: str) -> list[str]:
    """What one pair of braces stands for: numbers from..to, as wide as the first is written, or names with commas."""
    first, dots, last = inside.partition("..")
    if not dots:
        return inside.split(",")
    numbers = first.isdecimal() and last.isdecimal() and len(inside) < 40
    if not numbers or not 0 <= int(last) - int(first) < _MOST_FILES:
        raise ImagesError(
            f"'{pattern}' must have braces such as {{0000..0099}} or {{a,b}}; got {{{inside}}}. Write two numbers, the "
            f"smaller one first, for at most {_MOST_FILES:,} files."
        )
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


def _matches(pattern: str) -> list[str]:
    """The files whose names match a *, sorted."""
    if not is_url(pattern):
        return sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))  # noqa: PTH207 (also absolute)
    with RemotePath(pattern)._accessed() as (files, path):
        scheme = pattern.partition("://")[0]
        return [f"{scheme}://{name.lstrip('/')}" for name in sorted(files.glob(path))]
