"""Images in zip archives, read in place: nothing is unpacked to the disk."""

import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, final

from PIL import Image

from dubito.data.decode import LIMIT, decode, missing_package, too_large
from dubito.data.files import class_folders, is_hidden, only_images
from dubito.data.image_set import ImageSet, hash_bytes
from dubito.errors import BrokenImageError, ImagesError
from dubito.storage import reading
from dubito.storage.locations import Place, mounted, to_readable
from dubito.threads import Lock

_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error)
UNPACKING = (OSError, EOFError, KeyError, ValueError, OverflowError, RuntimeError, *_DAMAGED)
"""What reading a damaged archive may raise."""
REPAIR = "Copy it again, or create it again."
_ENCRYPTED = 0x1
_BLOCK = 1 << 18
"""Bytes of a request: members are read in any order."""


@final
class ArchiveImages(ImageSet):
    """The images of a zip file in the order of their sorted paths, with labels if they lie in class folders.

    Each process opens the archive for itself at its first read, so workers never share a file position.
    The digest takes names, sizes and CRC-32 sums from the archive's directory and unpacks nothing.
    """

    def __init__(self, path: Place) -> None:
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
        return unwrap(self.read_hashed(index)[0])

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
            with mounted(self.path), self._lock, archive.open(info) as member:  # threads share one file position
                content = member.read(info.file_size + 1)  # no more than the directory states, whatever is there
            return decode(content, name), hashed
        except BrokenImageError as broken:
            return broken, hashed
        except UNPACKING as error:
            return damaged(name, error), hashed

    def _hash(self, index: int, sums: tuple[int, int]) -> bytes:
        missing = missing_package(PurePosixPath(self.ids[index]).suffix.lower())
        return hash_bytes(b"%d %d" % sums, b"" if missing is None else b" no plug-in")

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(to_readable(self.path, _BLOCK)))
        return self._opened[1]


def unwrap(image: Image.Image | BrokenImageError) -> Image.Image:
    """The image; the error is raised if it is one."""
    if isinstance(image, BrokenImageError):
        raise image
    return image


def damaged(name: str, error: Exception) -> BrokenImageError:
    """Why a member of an archive is a broken image."""
    reason = getattr(error, "strerror", None) or error
    message = f"image '{name}' must be a whole member of its archive; unpacking gave: {reason}."
    return BrokenImageError(f"{message} Create the archive again.")


def _members(path: Place, name: str) -> list[zipfile.ZipInfo]:
    """The files of a zip archive, sorted by path."""
    with (
        reading(name, REPAIR, error=ImagesError),
        zipfile.ZipFile(to_readable(path, _BLOCK)) as archive,
    ):
        files = [info for info in archive.infolist() if not info.is_dir()]
    visible = [info for info in files if not is_hidden(info.filename)]
    locked = [info.filename for info in visible if info.flag_bits & _ENCRYPTED]
    if locked:
        raise ImagesError(
            f"{name} must not be encrypted; {len(locked)} of {len(visible)} files are, such as '{locked[0]}'. "
            f"Unpack it with its password and open the folder."
        )
    return sorted(files, key=lambda info: info.filename)
