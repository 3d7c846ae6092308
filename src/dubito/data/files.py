"""Images that are files in a folder or of a list, or lie on the web: which files count, and their class folders.

Class folders: leave out the folders that all images share at the top. If every image then still lies in a folder, the
first one is its class, and sorted names count 0..k-1; otherwise the set has no labels. So `cats/1.jpg, dogs/2.jpg` has
two classes; `photos/1.jpg, photos/2.jpg` and `1.jpg, dogs/2.jpg` have none.

Whatever has the ending of an image is in the set, also links that lead nowhere, pipes, and formats without their
plug-in: they are broken images, which extraction lists with the reason. A warning counts all other files.
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.data.decode import decode, is_url, read_content
from dubito.data.image_set import ImageSet, in_threads, some
from dubito.errors import BrokenImageError, ImagesError, LeftOutFilesWarning, users_level
from dubito.storage import reading

_KINDS = "avif bmp gif heic heif hif jfif jp2 jpe jpeg jpg jxl pbm pgm png pnm ppm tif tiff webp"
SUFFIXES = tuple(f".{kind}" for kind in _KINDS.split())
"""Endings, in lower case, of the files that count as images."""
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
_SYSTEM = ("__MACOSX", "._", ".DS_Store", "Thumbs.db", "desktop.ini")
"""What the names of files begin with that systems write by themselves, which nobody misses."""
_ENDINGS_SHOWN = 6


@final
class FileImages(ImageSet):
    """Image files below a root, whose ids are their paths relative to it, with forward slashes; ids may be URLs, too.

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
        place = self._place(index)
        return decode(read_content(place)[0], str(place))

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each file's bytes."""
        return in_threads(lambda row: read_content(self._place(row))[1], rows)

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of the file's bytes, from one reading of the file."""
        place = self._place(index)
        content, hashed = read_content(place)
        try:
            return decode(content, str(place)), hashed
        except BrokenImageError as broken:
            return broken, hashed

    def _place(self, index: int) -> Path | str:
        return self.ids[index] if is_url(self.ids[index]) else self.root / self.ids[index]


def open_folder(root: Path) -> FileImages:
    """All images in a folder and its sub-folders, with labels if they lie in class folders (see above).

    Hidden files and files that are no images are left out, with a warning that counts them. Links are followed, but
    never in a circle.
    """
    name = f"folder '{root}'"
    with reading(name, "Repair its permissions, or move the images.", error=ImagesError):
        paths = sorted(_walk(root, "", frozenset()))
    ids = only_images(paths, name)
    return FileImages(root, ids, *class_folders(ids, name))


def listed_ids(root: Path, paths: Sequence[str], what: str, repair: str) -> list[str]:
    """The ids of listed files and URLs; ImagesError for files that do not exist.

    Args:
        root: The folder that paths are relative to.
        paths: The list.
        what: What an error calls the list.
        repair: What the error advises, a sentence.
    """
    ids = [path if is_url(path) else Path(path).as_posix() for path in paths]
    # Pipes and devices exist: as in a folder, they are skipped when images are read.
    missing = [key for key in ids if not (is_url(key) or ((root / key).exists() and not (root / key).is_dir()))]
    if missing:
        raise ImagesError(
            f"{what} must list files that exist; {len(missing)} of {len(ids)} do not: {some(missing)}. {repair}"
        )
    return ids


def is_image(name: str) -> bool:
    """Whether a file counts as an image, by its ending."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def is_hidden(path: str) -> bool:
    """Whether a file is passed over: a part of its path has a leading dot, or is what macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


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


def only_images(paths: Sequence[str], name: str, used: frozenset[str] = frozenset()) -> list[str]:
    """The paths of images that are not hidden; a warning counts the other files, by ending.

    Args:
        paths: The paths of all files.
        name: What messages call their place.
        used: Files that are no images, but used all the same.

    Raises:
        ImagesError: There are no images.
    """
    hidden = {path for path in paths if is_hidden(path)}
    images = [path for path in paths if is_image(path) and path not in hidden]
    others = [path for path in paths if not is_image(path) and path not in hidden]
    if not images:
        endings = sorted({_ending(path) for path in others})
        got = "got hidden files only" if hidden else "it is empty"
        got = f"got {len(others)} other files, with endings {some(endings, 6)}" if others else got
        raise ImagesError(f"{name} must hold images ({' '.join(SUFFIXES)}); {got}. Check the path.")
    counts = Counter(
        "hidden" if path in hidden else _ending(path) for path in (*others, *hidden) if _counts(path, used)
    )
    if counts:
        kinds = [f"{count} {ending}" for ending, count in counts.most_common(_ENDINGS_SHOWN)]
        rest = counts.total() - sum(count for _, count in counts.most_common(_ENDINGS_SHOWN))
        left = ", ".join(kinds + [f"{rest} others"] * (rest > 0))
        warnings.warn(f"{name}: left out {left}.", LeftOutFilesWarning, stacklevel=users_level())
    return images


def _ending(path: str) -> str:
    return PurePosixPath(path).suffix.lower() or "without an ending"


def _counts(path: str, used: frozenset[str]) -> bool:
    return path not in used and not any(part.startswith(_SYSTEM) for part in path.split("/"))


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[str]:
    """The path of every file below the top; a folder that is hidden, or that a link makes its own ancestor, is closed.

    A hidden folder is one path. A link that points to itself is a file that nobody can read.
    """
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        listed = list(entries)
    for entry in listed:
        if not is_hidden(entry.name) and _is_folder(entry):
            yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", above | {here})
        else:
            yield prefix + entry.name


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
