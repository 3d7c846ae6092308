"""Images that are files: a folder, read in the order of its sorted relative paths, or the paths that a CSV lists."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.data.csv_table import read_csv
from dubito.data.decode import decode, unreadable
from dubito.data.digest import hash_bytes, in_threads
from dubito.data.image_set import ImageSet, some
from dubito.data.labels import to_labels
from dubito.data.tree import class_folders, is_hidden, is_image, no_images
from dubito.errors import BrokenImageError, ImagesError

_Folder = tuple[int, int]


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
        return in_threads(lambda row: _hash_file(self.root / self.ids[row]), rows)

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of the file's bytes, from one reading of the file."""
        path = self.root / self.ids[index]
        try:
            content = path.read_bytes()
        except OSError as error:
            return unreadable(str(path), error), _hash_unreadable(error)
        try:
            return decode(content, str(path)), hash_bytes(content)
        except BrokenImageError as broken:
            return broken, hash_bytes(content)


def open_folder(root: Path) -> FileImages:
    """All images in a folder and its sub-folders, with labels if they lie in class folders (see `tree`).

    Hidden files, `__MACOSX` and files that are no images are passed over. Links are followed, but never in a
    circle.
    """
    try:
        paths = sorted(_walk(root, "", frozenset()))
    except OSError as error:
        raise ImagesError(
            f"folder '{root}' must be readable; listing it gave: {error}. Repair its permissions, or move the images."
        ) from error
    ids = [path for path in paths if is_image(path)]
    if not ids:
        raise no_images(f"folder '{root}'", paths)
    return FileImages(root, ids, *class_folders(ids, f"folder '{root}'"))


def _walk(folder: Path, prefix: str, above: frozenset[_Folder]) -> Iterator[str]:
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


def open_csv(path: Path) -> FileImages:
    """The image files that a CSV lists, in its order.

    Paths are in the column path, file, filename, image or id, else in the first; they are relative to the CSV's
    folder. Labels are in the column label, else in the other one of two columns; else the set has no labels.
    """
    table = read_csv(path)
    ids = [Path(cell).as_posix() for cell in table.column(table.paths)]
    root = path.parent
    missing = [key for key in ids if not (root / key).is_file()]
    if missing:
        raise ImagesError(
            f"CSV file '{path}' must list files that exist; {len(missing)} of {len(ids)} in column "
            f"'{table.header[table.paths]}' do not: {some(missing)}. Paths are relative to '{root}'; "
            f"if the CSV only labels images that are elsewhere, open those and give it as labels=."
        )
    if table.label is None:
        return FileImages(root, ids, name=str(path))
    labels, classes = to_labels(table.column(table.label), f"column '{table.header[table.label]}' of '{path}'")
    return FileImages(root, ids, labels, classes, name=str(path))


def _hash_file(path: Path) -> bytes:
    try:
        return hash_bytes(path.read_bytes())
    except OSError as error:
        return _hash_unreadable(error)


def _hash_unreadable(error: OSError) -> bytes:
    """Such a file is one broken image, which extraction lists, and no reason to refuse the others."""
    return hash_bytes(f"unreadable: {error.errno}".encode())
