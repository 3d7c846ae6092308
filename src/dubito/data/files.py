"""Images that are files: a folder, read in the order of its sorted relative paths, or a list of paths."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.data.decode import decode
from dubito.data.digest import hash_blocks, hash_images
from dubito.data.image_set import ImageSet
from dubito.data.tree import class_folders, is_hidden, is_image, no_images
from dubito.errors import ImagesError

_BLOCK = 1 << 20
_Folder = tuple[int, int]


@final
class FileImages(ImageSet):
    """Image files below a root; ids are their paths relative to it, with forward slashes.

    Only paths travel to worker processes. The digest reads every file's bytes and knows nothing of the root.
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

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the ids and file contents of some images, in this order."""
        return hash_images(self.ids, rows, lambda row: hash_blocks(_blocks(self.root / self.ids[row])))


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


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        # Such a file is one broken image, which extraction lists, and no reason to refuse the others.
        yield f"unreadable: {error.errno}".encode()
