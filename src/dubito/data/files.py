"""Images that are files, in a folder or a zip archive: which files count, their class folders, and decoding.

Class folders: leave out the folders that all images share at the top. If every image then still lies in a folder, the
first one is its class, and sorted names count 0..k-1; otherwise the set has no labels. So `cats/1.jpg, dogs/2.jpg` has
two classes; `photos/1.jpg, photos/2.jpg` and `1.jpg, dogs/2.jpg` have none.

Files of any kind that Pillow reads become RGB pixels that mean what the file meant. Choices that change pixels:

- Transparent pixels (RGBA, LA, palette or key colour) are laid over white, as a page or a viewer shows them.
- 16-bit grey is divided by 257 (65535 becomes 255), 12-bit TIFF by 4095/255; Pillow alone clips above 255.
- Grey of more than 8 bits in a TIFF that calls 0 white is turned over; Pillow does so for 8 bits only.
- Float grey must lie in 0..1 and is scaled by 255. Other ranges have no known scale and are an error.
- The EXIF orientation is applied; EXIF that cannot be parsed counts as none. Colour profiles are not applied.
- Of several frames the first is read.

Images above Pillow's hard limit (179 million pixels) are refused as decompression bombs.
"""

import contextlib
import io
import lzma
import os
import threading
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from dubito.data.image_set import ImageSet, hash_bytes, in_threads, some
from dubito.errors import BrokenImageError, ImagesError
from dubito.storage import reading

_KINDS = "avif bmp gif jfif jp2 jpe jpeg jpg pbm pgm png pnm ppm tif tiff webp"
SUFFIXES = tuple(f".{kind}" for kind in _KINDS.split())
"""Endings, in lower case, of the files that count as images."""
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
_REPAIR = "Copy it again from its source, or take it out."
_MAYBE_TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa", "P")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
_ENCRYPTED = 0x1
_UNPACKING = (OSError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


@final
class FileImages(ImageSet):
    """Image files below a root; ids are their paths relative to it, with forward slashes.

    Only paths travel to worker processes. The digest depends on every file's bytes and not on the root.
    """

    def __init__(
        self,
        root: Path,
        ids: Sequence[str],
        labels: Int[Tensor, "n"] | None = None,
        classes: Sequence[str] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name or str(root), ids, labels, classes)
        # Workers on another machine or in another folder must find the same files.
        self.root = root.absolute()

    def read(self, index: int) -> Image.Image:
        """The image as RGB."""
        path = self.root / self.ids[index]
        return decode(path, str(path))

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each file's bytes."""
        return in_threads(lambda row: _content(self.root / self.ids[row])[1], rows)

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of the file's bytes, from one reading of the file."""
        path = self.root / self.ids[index]
        content, hashed = _content(path)
        try:
            return decode(content, str(path)), hashed
        except BrokenImageError as broken:
            return broken, hashed


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
            message = f"image '{name}' must be a whole member of its archive; unpacking gave: {error}."
            raise BrokenImageError(f"{message} Create the archive again.") from error
        return decode(content, name)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image's CRC-32 sum and size; reading an image verifies its sum."""
        return [hash_bytes(b"%d %d" % self._sums[row]) for row in rows]

    def _archive(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(self.path))
        return self._opened[1]


def open_folder(root: Path) -> FileImages:
    """All images in a folder and its sub-folders, with labels if they lie in class folders (see above).

    Hidden files, `__MACOSX` and files that are no images are passed over. Links are followed, but never in a circle.
    """
    with reading(f"folder '{root}'", "Repair its permissions, or move the images.", error=ImagesError):
        paths = sorted(_walk(root, "", frozenset()))
    ids = only_images(paths, f"folder '{root}'")
    return FileImages(root, ids, *class_folders(ids, f"folder '{root}'"))


def is_image(name: str) -> bool:
    """Whether a file counts as an image, by its ending."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def is_hidden(part: str) -> bool:
    """Whether a file or folder is passed over: a name with a leading dot, or what macOS adds to archives."""
    return part.startswith(".") or part == "__MACOSX"


def class_folders(ids: Sequence[str], name: str) -> tuple[Int[Tensor, "n"] | None, tuple[str, ...] | None]:
    """The label of each path and the names of the classes, or (None, None) without class folders."""
    folders = [PurePosixPath(path).parts[:-1] for path in ids]
    shared = len(os.path.commonprefix(folders))  # noqa: RUF071 (of tuples: whole folders)
    if any(len(parts) == shared for parts in folders):
        return None, None
    names = [parts[shared] for parts in folders]
    classes = tuple(sorted(set(names)))
    if _SPLITS.issuperset(part.lower() for part in classes):
        raise ImagesError(f"{name} must hold class folders or images; it holds the splits {some(classes)}. Open one.")
    return torch.tensor(np.searchsorted(classes, names)), classes


def only_images(paths: Sequence[str], name: str) -> list[str]:
    """The paths of images; ImagesError if there are none."""
    images = [path for path in paths if is_image(path)]
    if not images:
        endings = sorted({PurePosixPath(path).suffix.lower() or "none" for path in paths})
        got = f"got {len(paths)} other files, with endings {some(endings, 6)}" if paths else "it is empty"
        raise ImagesError(f"{name} must hold images ({' '.join(SUFFIXES)}); {got}. Check the path.")
    return images


def decode(source: bytes | Path | OSError, name: str) -> Image.Image:
    """The first frame of an image file, upright and in RGB.

    Args:
        source: The file's content, its path, or why it could not be read.
        name: What an error calls the image.

    Raises:
        BrokenImageError: The file is missing, empty, cut off, no image, or has no known meaning in RGB.
    """
    try:
        if isinstance(source, OSError):
            raise source
        content = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise BrokenImageError(
            f"image '{name}' must be a readable file; reading it gave: {error.strerror or error}. "
            f"Restore the file or its permissions, or take it out."
        ) from error
    if not content:
        raise BrokenImageError(f"image '{name}' must be an image file; it has 0 bytes. {_REPAIR}")
    kind = "image"
    with _quiet():
        try:
            with Image.open(io.BytesIO(content)) as image:
                kind = image.format or kind
                image.load()
                # In place, so that pixels stay turned even when the EXIF block cannot be written back afterwards.
                with contextlib.suppress(Exception):
                    ImageOps.exif_transpose(image, in_place=True)
                return to_rgb(image, name)
        except BrokenImageError:
            raise
        except Image.DecompressionBombError as error:
            fault = f"must fit in memory; got a decompression bomb: {error} Shrink it, or take it out."
            raise BrokenImageError(f"image '{name}' {fault}") from error
        except Exception as error:  # on damaged bytes, Pillow's plug-ins raise anything, down to struct.error
            state = "truncated" if "truncated" in str(error).lower() else "damaged"
            fault = f"a whole image file; got {state} {kind}: {error}"
            if isinstance(error, UnidentifiedImageError):
                got = f"{len(content)} bytes that begin with {content[:8]!r}"
                fault = f"an image file; got {got}, which is no format that this Pillow reads"
            raise BrokenImageError(f"image '{name}' must be {fault}. {_REPAIR}") from error


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An image of any mode as RGB; the top of this file says what each mode means."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey_levels(image, name)).convert("RGB")
    if image.mode in _MAYBE_TRANSPARENT or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def _content(path: Path) -> tuple[bytes | OSError, bytes]:
    """A file's bytes and their hash. A file that cannot be read is one broken image: the others are still extracted."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return error, hash_bytes(f"unreadable: {error.errno}".encode())
    return content, hash_bytes(content)


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """The path of every visible file below the top; a folder that a link makes its own ancestor is passed over."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not is_hidden(entry.name)]
    for entry in visible:
        if entry.is_dir():
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", above | {here})
        else:
            yield prefix + entry.name


def _members(path: Path, name: str) -> list[zipfile.ZipInfo]:
    """The visible files, sorted by path."""
    with reading(name, "Copy it again, or create it again.", error=ImagesError), zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    files = [info for info in infos if not (info.is_dir() or any(map(is_hidden, PurePosixPath(info.filename).parts)))]
    locked = [info.filename for info in files if info.flag_bits & _ENCRYPTED]
    if locked:
        raise ImagesError(
            f"{name} must not be encrypted; {len(locked)} of {len(files)} files are, such as '{locked[0]}'. "
            f"Unpack it with its password and open the folder."
        )
    return sorted(files, key=lambda info: info.filename)


def _grey_levels(image: Image.Image, name: str) -> UInt8[np.ndarray, "h w"]:
    """Grey of more than 8 bits as 0..255, rounded."""
    tags = getattr(image, "tag_v2", {})
    values = np.asarray(image, dtype=np.float64)
    top = 1 if image.mode == "F" else 4095 if tags.get(_BITS_PER_SAMPLE) == (12,) else 65535
    # Written so that NaN fails too.
    if not (values.min() >= 0 and values.max() <= top):
        raise BrokenImageError(
            f"image '{name}' of mode {image.mode} must have values in 0..{top}; "
            f"got {values.min():g}..{values.max():g}. Save it with 8 or 16 bits, scaled for display."
        )
    scaled = np.rint(values * (255 / top)).astype(np.uint8)
    return 255 - scaled if tags.get(_PHOTOMETRIC) == 0 else scaled


_decoding: "list[warnings.catch_warnings[None]]" = []
"""One entry for each thread that decodes; the first one restores the filters, when the last thread has ended."""
_lock = threading.Lock()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings; overlapping `warnings.catch_warnings` would restore each other's filters."""
    with _lock:
        _decoding.append(_decoding[0] if _decoding else warnings.catch_warnings())
        if len(_decoding) == 1:
            _decoding[0].__enter__()
            warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
    try:
        yield
    finally:
        with _lock:
            catcher = _decoding.pop()
            if not _decoding:
                catcher.__exit__(None, None, None)
