"""Files wherever they lie: paths on the disk, and addresses such as s3://bucket/photos, which fsspec reads.

fsspec knows many schemes (s3, gs, az, hf, memory, ...), most of them through a package of its own, and takes
credentials and other options from its own configuration and from the environment.

- A file system belongs to the process that opened it, because its event loop does not survive a fork. fsspec keeps one
  per process, so it is asked for it at every read, and sets of images hold addresses only.
- Every read is a range of bytes, so memory is bounded whatever lies there.
- A file that is missing is one broken image. A store that cannot be reached or refuses access stops everything:
  images that were skipped in such a minute would be missing from a finished cache.
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
from pathlib import Path
from typing import Any, final

from fsspec.core import url_to_fs

from dubito.errors import DubitoError, ImagesError, MissingPackageError, first_words

Place = Path | str
"""A path on the disk, or an address, which is a text."""
BLOCK = 4 << 20
"""Bytes of one request where a file is read from front to back."""
_AHEAD, _GAP = 1 << 20, 1 << 16
_MOST_FILES = 1_000_000
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_PACKAGES = {"s3": "'dubito[s3]'", "gs": "'dubito[gs]'", "gcs": "'dubito[gs]'", "az": "adlfs", "abfs": "adlfs"}
"""By scheme what pip installs to read it."""


def is_url(text: object) -> bool:
    """Whether a text is an address: a scheme, :// and a path.

    >>> is_url("s3://bucket/photos"), is_url("photos/s3"), is_url("https://example.org/a.jpg")
    (True, False, True)
    """
    return isinstance(text, str) and _ADDRESS.match(text) is not None


def is_web(text: object) -> bool:
    """Whether a text is the address of something on a web server."""
    return isinstance(text, str) and text.lower().startswith(("http://", "https://"))


def to_place(text: str | Path) -> Place:
    """A user's path or address as a place."""
    return text if isinstance(text, str) and is_url(text) else Path(text).expanduser()


def absolute(place: Place) -> Place:
    """The same place, also for worker processes in another folder, without a slash at its end."""
    if isinstance(place, Path):
        return place.absolute()
    scheme, _, path = place.partition("://")
    return f"{scheme}://{path.rstrip('/')}"


def join(folder: Place, key: str) -> Place:
    """The place of a file in a folder; a key that is an address stands for itself.

    >>> join("s3://bucket/lists", "../photos/a.jpg")
    's3://bucket/photos/a.jpg'
    """
    if is_url(key):
        return key
    if isinstance(folder, Path):
        return folder / key
    scheme, _, path = f"{absolute(folder)}/{key}".partition("://")
    return f"{scheme}://{posixpath.normpath(path) if '..' in key.split('/') else path}"


def parent(place: Place) -> Place:
    """The folder of a file."""
    return place.parent if isinstance(place, Path) else place.rpartition("/")[0]


def names_of(places: Sequence[Place]) -> list[str]:
    """What tells files apart: their paths below the folder that all of them share.

    >>> names_of(["s3://b/train/0.tar", "s3://b/train/1.tar"])
    ['0.tar', '1.tar']
    """
    parts = [(place.as_posix() if isinstance(place, Path) else place).split("/") for place in places]
    shared = len(os.path.commonprefix([part[:-1] for part in parts]))  # noqa: RUF071 (of lists: whole folders)
    return ["/".join(part[shared:]) for part in parts]


def list_files(folder: str) -> list[str]:
    """The path, relative to a folder at an address, of every file below it, sorted."""
    with _errors_of(folder):
        files, root = url_to_fs(folder)
        root = root.rstrip("/")
        files.invalidate_cache(root)
        names = [name for name in files.find(root) if name.startswith(f"{root}/") and not name.endswith("/")]
        return sorted(name[len(root) + 1 :] for name in names)


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


def open_binary(place: Place) -> io.BufferedReader:
    """A file for reading, at any position."""
    file = to_readable(place)
    return file.open("rb") if isinstance(file, Path) else file


def to_readable(place: Place, block: int = BLOCK) -> Path | io.BufferedReader:
    """What readers of archives take: a path as it is, of an address an open file, which needs not be closed.

    Args:
        place: The file.
        block: Bytes of one request to another machine.
    """
    return place if isinstance(place, Path) else io.BufferedReader(_RemoteFile(place), block)


def read_range(url: str, start: int, size: int) -> bytes:
    """Bytes of a file at an address from a position on: `size`, or fewer where it ends.

    Raises:
        FileNotFoundError: There is no such file.
        ImagesError: The store cannot be reached or refuses.
    """
    with _errors_of(url):
        files, path = url_to_fs(url)
        try:
            content: bytes = files.cat_file(path, start=start, end=start + size)
        except FileNotFoundError:
            raise
        except Exception:
            if files.size(path) > start:
                raise
            return b""  # stores refuse a range that begins where the file ends, as every range of an empty one does
    if len(content) > size:
        raise ImagesError(f"'{url}' must be on a server that sends ranges; it sends whole files. Download it first.")
    return content


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
            with place.open("rb") as file:
                file.seek(start)
                return file.read(size)
        url, first, block = getattr(self._local, "last", ("", 0, b""))
        at = start - first
        if url != place or at < 0 or at + size > len(block):
            forward = url == place and 0 <= at <= len(block) + _GAP
            block, at = read_range(place, start, max(size, _AHEAD) if forward else size), 0
            self._local.last = (place, start, block)
        return block[at : at + size]


@final
class _RemoteFile(io.RawIOBase):
    """A file at an address, as Python's readers of archives and tables need it: every read is one request."""

    def __init__(self, url: str) -> None:
        with _errors_of(url):
            files, path = url_to_fs(url)
            size: int | None = files.size(path)
        if size is None:
            raise ImagesError(f"'{url}' must be on a server that states the size of its files. Download it first.")
        self._url, self._size, self._at = url, size, 0

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
        content = read_range(self._url, self._at, size) if size > 0 else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Turn what file systems raise into FileNotFoundError, or into one error for all images."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"there is no '{url}'") from error
    except DubitoError:
        raise
    except ImportError as error:
        scheme = url.partition("://")[0].lower()
        package = _PACKAGES.get(scheme, "aiohttp" if is_web(url) else f"the package of fsspec for {scheme}")
        raise MissingPackageError(f"'{url}' is read by another package: pip install {package}") from error
    except Exception as error:  # every file system has errors of its own
        raise ImagesError(
            f"'{url}' cannot be read ({type(error).__name__}: {first_words(error)}). Check the address, your "
            f"credentials and the network, then run the same call again: what an extraction has finished is kept."
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
    with _errors_of(pattern):
        files, path = url_to_fs(pattern)
        scheme = pattern.partition("://")[0]
        return [f"{scheme}://{name.lstrip('/')}" for name in sorted(files.glob(path))]
