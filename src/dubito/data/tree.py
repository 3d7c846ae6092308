"""Paths of images in a folder or an archive: which files count, and which class folder each lies in.

Class folders, defined: leave out the folders that all images share at the top. If every image then still lies
in a folder, the first one is its class, and sorted names count 0..k-1. If any image lies directly at the top,
the set has no labels. So `cats/1.jpg, dogs/2.jpg` has two classes; `photos/1.jpg, photos/2.jpg` and `1.jpg,
dogs/2.jpg` have none.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath

import torch
from jaxtyping import Int
from torch import Tensor

from dubito.data.image_set import some
from dubito.errors import ImagesError

SUFFIXES = (
    ".avif",
    ".bmp",
    ".gif",
    ".jfif",
    ".jp2",
    ".jpe",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".pnm",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)
"""Endings, in lower case, of the files that count as images."""

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


def is_image(name: str) -> bool:
    """Whether a file counts as an image, by its ending."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def is_hidden(part: str) -> bool:
    """Whether a file or folder is passed over: a name with a leading dot, or what macOS adds to archives."""
    return part.startswith(".") or part == "__MACOSX"


def class_folders(ids: Sequence[str], name: str) -> tuple[Int[Tensor, "n"] | None, tuple[str, ...] | None]:
    """The label of each path and the names of the classes, or (None, None) without class folders."""
    folders = [PurePosixPath(path).parts[:-1] for path in ids]
    shared = _shared(folders)
    if any(len(parts) == shared for parts in folders):
        return None, None
    names = [parts[shared] for parts in folders]
    classes = tuple(sorted(set(names)))
    if _SPLITS.issuperset(part.lower() for part in classes):
        raise ImagesError(
            f"{name} must hold class folders or images; it holds the splits {some(classes)}. Open one of them."
        )
    number = {key: i for i, key in enumerate(classes)}
    return torch.tensor([number[key] for key in names]), classes


def no_images(name: str, others: Sequence[str]) -> ImagesError:
    """The error of a place without images; `others` are the files seen there instead."""
    if not others:
        return ImagesError(f"{name} must hold images; it is empty. Check the path, or put images there.")
    endings = sorted({PurePosixPath(other).suffix.lower() or "none" for other in others})
    return ImagesError(
        f"{name} must hold images ({' '.join(SUFFIXES)}); got {len(others)} other files, with endings "
        f"{some(endings, 6)}. Check the path, or convert the files."
    )


def _shared(folders: Sequence[tuple[str, ...]]) -> int:
    """How many leading folders all paths share."""
    first, last = min(folders), max(folders)
    alike = (a == b for a, b in zip(first, last, strict=False))
    return next((i for i, same in enumerate(alike) if not same), min(len(first), len(last)))
