"""Images that are files, in a folder or of a list, on the disk or elsewhere: which files count, their class folders.

Class folders: leave out the folders that all images share at the top. If every image then still lies in a folder, the
first one is its class, and sorted names count 0..k-1; otherwise the set has no labels. So `cats/1.jpg, dogs/2.jpg` has
two classes; `photos/1.jpg, photos/2.jpg` and `1.jpg, dogs/2.jpg` have none.

Whatever has the ending of an image is in the set, also links that lead nowhere, pipes, and formats without their
plug-in: they are broken images, which extraction lists with the reason. A warning counts all other files.
"""

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.data.decode import decode, read_content
from dubito.data.image_set import ImageSet, in_threads, is_null, some
from dubito.errors import BrokenImageError, ImagesError, LeftOutFilesWarning, users_level
from dubito.storage import reading
from dubito.storage.locations import Place, is_url, join

_KINDS = "avif bmp gif heic heif hif jfif jp2 jpe jpeg jpg jxl pbm pgm png pnm ppm tif tiff webp"
SUFFIXES = tuple(f".{kind}" for kind in _KINDS.split())
"""Endings, in lower case, of the files that count as images."""
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
_SYSTEM = ("__MACOSX", "._", ".DS_Store", "Thumbs.db", "desktop.ini")
"""What the names of files begin with that systems write by themselves, which nobody misses."""
_ENDINGS_SHOWN = 6


@final
class FileImages(ImageSet):
    """Image files below a root, whose ids are their paths relative to it, with forward slashes, or are addresses.

    Only paths travel to worker processes. The digest depends on every file's bytes and not on the root.
    """

    def __init__(
        self,
        root: Place,
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

    def _place(self, index: int) -> Place:
        return join(self.root, self.ids[index])


def open_folder(root: Place, paths: Sequence[str] | None = None) -> FileImages:
    """All images in a folder and its sub-folders, with labels if they lie in class folders (see above).

    Hidden files and files that are no images are left out, with a warning that counts them. Links are followed, but
    never in a circle.

    Args:
        root: The folder.
        paths: What `files_below` returns, if it is known already.
    """
    name = f"folder '{root}'"
    ids = only_images(files_below(root) if paths is None else paths, name)
    return FileImages(root, ids, *class_folders(ids, name))


def files_below(root: Place) -> list[str]:
    """The path of every file in a folder and its sub-folders, relative to it, sorted; a hidden folder is one path."""
    with reading(f"folder '{root}'", "Repair its permissions, or move the images.", error=ImagesError):
        return sorted(_walk(root, "", frozenset())) if isinstance(root, Path) else root.files_below()


def listed_ids(root: Place, paths: Sequence[Any], what: str, repair: str) -> list[str]:
    """The ids of listed files; ImagesError for rows without a path, and for files on the disk that do not exist.

    Args:
        root: The folder that paths are relative to.
        paths: The list.
        what: What an error calls the list.
        repair: What the error advises, a sentence.
    """
    if nulls := [str(row) for row, path in enumerate(paths) if is_null(path)]:
        raise ImagesError(
            f"{what} must name an image in every row; {len(nulls)} of {len(paths)} rows name none, counted from 0: "
            f"{some(nulls)}. Leave these rows out."
        )
    ids = [path if is_url(path) else Path(path).as_posix() for path in map(str, paths)]
    if not isinstance(root, Path):
        return ids
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


def only_images(paths: Iterable[str], name: str) -> list[str]:
    """The paths of images that are not hidden; a warning counts the other files, by ending.

    Args:
        paths: The paths of all files.
        name: What messages call their place.

    Raises:
        ImagesError: There are no images.
    """
    images, others = separate(paths)
    report_others(others, name, images=len(images))
    return images


def separate(paths: Iterable[str]) -> tuple[list[str], "Counter[str]"]:
    """The paths of images that are not hidden, and the number of other files by ending, or as hidden or system."""
    images: list[str] = []
    others: Counter[str] = Counter()
    for path in paths:
        if not is_hidden(path) and is_image(path):
            images.append(path)
        elif any(part.startswith(_SYSTEM) for part in path.split("/")):
            others["system"] += 1
        else:
            others["hidden" if is_hidden(path) else _ending(path)] += 1
    return images, others


def report_others(others: "Counter[str]", name: str, *, images: int) -> None:
    """Warn of files that are left out, as `separate` counts them; ImagesError without any image."""
    endings = {ending: count for ending, count in sorted(others.items()) if ending not in ("hidden", "system")}
    if not images:
        got = "got hidden files only" if others else "it is empty"
        got = f"got {sum(endings.values())} other files, with endings {some(list(endings), 6)}" if endings else got
        raise ImagesError(f"{name} must hold images ({' '.join(SUFFIXES)}); {got}. Check the path.")
    counts = Counter(endings | ({"hidden": others["hidden"]} if others["hidden"] else {}))
    if counts:
        kinds = [f"{count} {ending}" for ending, count in counts.most_common(_ENDINGS_SHOWN)]
        rest = counts.total() - sum(count for _, count in counts.most_common(_ENDINGS_SHOWN))
        left = ", ".join(kinds + [f"{rest} others"] * (rest > 0))
        warnings.warn(f"{name}: left out {left}.", LeftOutFilesWarning, stacklevel=users_level())


def _ending(path: str) -> str:
    return PurePosixPath(path).suffix.lower() or "without an ending"


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
