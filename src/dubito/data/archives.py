"""Images in zip and tar archives, read in place: nothing is unpacked to the disk.

A tar of shards as WebDataset writes them has labels beside its images: `0001.jpg` with `0001.cls` (a class index or a
class name) or `0001.json` (its key label or cls). Otherwise labels come from class folders, as in a folder.
"""

import bz2
import gzip
import json
import lzma
import os
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, final

from PIL import Image

from dubito.data.decode import LIMIT, decode, hash_content, missing_package, too_large
from dubito.data.files import class_folders, is_hidden, is_image, only_images
from dubito.data.image_set import ImageSet, hash_bytes, in_threads
from dubito.data.labels import to_labels
from dubito.errors import BrokenImageError, ImagesError
from dubito.storage import reading
from dubito.threads import Lock

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
"""Endings, in lower case, of tar files."""
_ENCRYPTED = 0x1
_UNPACKING = (OSError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_REPAIR = "Copy it again, or create it again."
_STREAMS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""By the first bytes of a compressed tar, what opens it."""
_BESIDE = (".cls", ".json")
_NOTE = 1 << 16
"""Bytes of a label beside an image, at most."""


@final
class ArchiveImages(ImageSet):
    """The images of a zip file in the order of their sorted paths, with labels if they lie in class folders.

    Each process opens the archive for itself at its first read, so workers never share a file position.
    The digest takes names, sizes and CRC-32 sums from the archive's directory and unpacks nothing.
    """

    def __init__(self, path: Path) -> None:
        name = f"archive '{path}'"
        members = _members(path, name)
        ids = only_images([info.filename for info in members], name)
        super().__init__(str(path), ids, *class_folders(ids, name))
        self.path = path.absolute()
        sums = {info.filename: (info.CRC, info.file_size) for info in members}
        self._sums = [sums[key] for key in ids]
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def read(self, index: int) -> Image.Image:
        """The image as RGB."""
        return _image(self.read_hashed(index)[0])

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image's CRC-32 sum and size; reading an image verifies its sum."""
        return [self._hash(row, self._sums[row]) for row in rows]

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of the sum that reading it has verified."""
        name, hashed = f"{self.path}/{self.ids[index]}", hash_bytes(b"missing")
        try:
            archive = self._archive()
            info = archive.getinfo(self.ids[index])
            hashed = self._hash(index, (info.CRC, info.file_size))
            if info.file_size > LIMIT:
                raise too_large()
            with self._lock, archive.open(info) as member:  # threads share one file position
                content = member.read(info.file_size + 1)  # no more than the directory states, whatever is there
            return decode(content, name), hashed
        except BrokenImageError as broken:
            return broken, hashed
        except _UNPACKING as error:
            return _damaged(name, error), hashed

    def _hash(self, index: int, sums: tuple[int, int]) -> bytes:
        missing = missing_package(PurePosixPath(self.ids[index]).suffix.lower())
        return hash_bytes(b"%d %d" % sums, b"" if missing is None else b" no plug-in")

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(self.path))
        return self._opened[1]


@final
class TarImages(ImageSet):
    """The images of a tar file, compressed or not, in the order of the file.

    An index of offsets allows any order of reading. A compressed tar is unpacked from the front, once in every process,
    so reading it in another order than its own is slow.
    """

    def __init__(self, path: Path) -> None:
        name = f"archive '{path}'"
        self.path = path.absolute()
        with reading(name, _REPAIR, error=ImagesError), path.open("rb") as file:
            start = file.read(6)
        self._stream: Any = next((opener for magic, opener in _STREAMS.items() if start.startswith(magic)), None)
        places, notes = _index(path, name)
        texts = _labels_beside(list(places), notes)
        used = frozenset(notes) if texts else frozenset[str]()
        ids = only_images(list(places), name, used)
        labels = to_labels([texts[key] for key in ids], f"labels of {name}") if texts else class_folders(ids, name)
        super().__init__(str(path), ids, *labels)
        self._places = [places[key] for key in ids]
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _local=threading.local())

    def read(self, index: int) -> Image.Image:
        """The image as RGB."""
        return _image(self.read_hashed(index)[0])

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image's bytes."""
        if self._stream is None:
            return in_threads(lambda row: self._content(row)[1], rows)
        return [self._content(row)[1] for row in rows]  # from front to back

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of its bytes, from one reading."""
        name = f"{self.path}/{self.ids[index]}"
        content, hashed = self._content(index)
        if isinstance(content, Exception):
            return _damaged(name, content), hashed
        try:
            return decode(content, name), hashed
        except BrokenImageError as broken:
            return broken, hashed

    def _content(self, index: int) -> tuple[bytes | Exception, bytes]:
        try:
            content = self._unpack(*self._places[index])
        except _UNPACKING as error:
            return error, hash_bytes(b"unreadable")
        return content, hash_content(content)

    def _unpack(self, start: int | None, size: int) -> bytes:
        if start is None:
            raise OSError("it is a link or another special file")
        if size > LIMIT:
            raise too_large()
        if self._stream is None:
            with self.path.open("rb") as file:
                file.seek(start)
                content = file.read(size)
        else:
            stream = self._open_stream()
            stream.seek(start)
            content = stream.read(size)
        if len(content) < size:
            raise OSError(f"{size - len(content)} of {size} bytes are missing")
        return content

    def _open_stream(self) -> Any:
        """What unpacks the whole file: one for every thread of every process, since it has a position."""
        pid, stream = getattr(self._local, "opened", (None, None))
        if pid != os.getpid():
            stream = self._stream(self.path, "rb")
            self._local.opened = (os.getpid(), stream)
        return stream


def _image(image: Image.Image | BrokenImageError) -> Image.Image:
    if isinstance(image, BrokenImageError):
        raise image
    return image


def _damaged(name: str, error: Exception) -> BrokenImageError:
    reason = getattr(error, "strerror", None) or error
    message = f"image '{name}' must be a whole member of its archive; unpacking gave: {reason}."
    return BrokenImageError(f"{message} Create the archive again.")


def _members(path: Path, name: str) -> list[zipfile.ZipInfo]:
    """The files of a zip archive, sorted by path."""
    with reading(name, _REPAIR, error=ImagesError), zipfile.ZipFile(path) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
    visible = [info for info in files if not is_hidden(info.filename)]
    locked = [info.filename for info in visible if info.flag_bits & _ENCRYPTED]
    if locked:
        raise ImagesError(
            f"{name} must not be encrypted; {len(locked)} of {len(visible)} files are, such as '{locked[0]}'. "
            f"Unpack it with its password and open the folder."
        )
    return sorted(files, key=lambda info: info.filename)


def _index(path: Path, name: str) -> tuple[dict[str, tuple[int | None, int]], dict[str, bytes]]:
    """By path, start and size of every file of a tar, no start for special files; and what lies beside images.

    Of two files with one path the last counts, as when a tar is unpacked.
    """
    places: dict[str, tuple[int | None, int]] = {}
    notes: dict[str, bytes] = {}
    with reading(name, _REPAIR, error=ImagesError):
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    key = member.name.removeprefix("./")
                    if member.isreg() and not member.issparse():
                        places[key] = (member.offset_data, member.size)
                        if key.endswith(_BESIDE) and member.size <= _NOTE:
                            file = archive.extractfile(member)
                            notes[key] = b"" if file is None else file.read()
                    elif not member.isdir():
                        linked = member.linkname.removeprefix("./") if member.islnk() else ""
                        places[key] = places.get(linked, (None, 0))
        except tarfile.TarError as error:
            raise ValueError(str(error)) from error
    return places, notes


def _labels_beside(paths: Sequence[str], notes: dict[str, bytes]) -> dict[str, str]:
    """By image the text of its label in a .cls or .json file of the same name; empty unless every image has one."""
    labels = {}
    for path, content in notes.items():
        with_label: Any = content.decode("utf-8", "replace").strip()
        if path.endswith(".json"):
            try:
                entries = json.loads(content)
            except (ValueError, RecursionError):
                continue
            with_label = entries.get("label", entries.get("cls")) if isinstance(entries, dict) else None
        if isinstance(with_label, str | int):
            labels[_key(path)] = str(with_label)
    texts = {path: labels.get(_key(path)) for path in paths if is_image(path) and not is_hidden(path)}
    return {path: text for path, text in texts.items() if text is not None} if all(texts.values()) else {}


def _key(path: str) -> str:
    """The path up to the first dot of the file's name, which files that belong together share."""
    folder, _, file = path.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
