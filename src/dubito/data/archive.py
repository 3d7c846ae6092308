"""Images inside a zip archive, read in place: nothing is unpacked to disk."""

import lzma
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, final

from PIL import Image

from dubito.data.decode import decode
from dubito.data.digest import hash_bytes
from dubito.data.image_set import ImageSet
from dubito.data.tree import class_folders, is_hidden, is_image, no_images
from dubito.errors import BrokenImageError, ImagesError

_ENCRYPTED = 0x1
_UNPACKING = (
    OSError,
    EOFError,
    KeyError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


@final
class ArchiveImages(ImageSet):
    """The images of a zip file in the order of their sorted paths, with labels if they lie in class folders.

    Each process opens the archive for itself at its first read, so workers never share a file position.
    The digest takes names, sizes and CRC-32 sums from the archive's directory and unpacks nothing.
    """

    def __init__(self, path: Path) -> None:
        name = f"archive '{path}'"
        members = _members(path, name)
        ids = [info.filename for info in members if is_image(info.filename)]
        if not ids:
            raise no_images(name, [info.filename for info in members])
        super().__init__(str(path), ids, *class_folders(ids, name))
        self.path = path.absolute()
        self._sums = [(info.CRC, info.file_size) for info in members if is_image(info.filename)]
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def read(self, index: int) -> Image.Image:
        """The image as RGB."""
        name = f"{self.path}/{self.ids[index]}"
        try:
            content = self._archive().read(self.ids[index])
        except _UNPACKING as error:
            raise BrokenImageError(
                f"image '{name}' must be a whole member of its archive; unpacking gave: {error}. Make the archive anew."
            ) from error
        return decode(content, name)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image's CRC-32 sum and size; reading an image verifies its sum."""
        return [hash_bytes(b"%d %d" % self._sums[row]) for row in rows]

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(self.path))
        return self._opened[1]


def _members(path: Path, name: str) -> list[zipfile.ZipInfo]:
    """The visible files, sorted by path."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise ImagesError(
            f"{name} must be a whole zip file; opening it gave: {error}. Copy or make it again."
        ) from error
    files = [info for info in infos if not (info.is_dir() or any(map(is_hidden, _parts(info))))]
    locked = [info.filename for info in files if info.flag_bits & _ENCRYPTED]
    if locked:
        raise ImagesError(
            f"{name} must not be encrypted; {len(locked)} of {len(files)} files are, such as '{locked[0]}'. "
            f"Unpack it with its password and open the folder."
        )
    return sorted(files, key=lambda info: info.filename)


def _parts(info: zipfile.ZipInfo) -> tuple[str, ...]:
    return PurePosixPath(info.filename).parts
