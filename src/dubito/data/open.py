"""One way in for every source of images: `open_images`."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from dubito.choices import nearest
from dubito.data.arrays import ArrayImages, open_npz
from dubito.data.dataset import DatasetImages
from dubito.data.files import SUFFIXES, ArchiveImages, FileImages, is_image, open_folder
from dubito.data.image_set import ImageSet, some
from dubito.data.labels import Labels, read_csv, to_labels, with_labels
from dubito.errors import ImagesError
from dubito.types import Images

_ACCEPTED = "a folder, an image, a .csv, .zip or .npz file, an array, a tensor, or a torch Dataset with a length"


def open_images(source: Any, labels: Labels | None = None) -> Images:
    """An ordered set of images from wherever they are.

    Args:
        source: One of

            - a folder of images, flat or with one sub-folder per class;
            - one image file;
            - a .csv of paths and labels, a .zip of images, an .npz of arrays ("file.npz#test" is one part);
            - a uint8 array or tensor (n,h,w,3) or (n,h,w) of pixels, or a float one (n,...) of model inputs;
            - a map-style torch Dataset, or another sequence of images;
            - anything that fulfils `Images` already, which is returned as it is.
        labels: Labels for the images instead of the source's own: a CSV file, a mapping from id, file name or
            stem to label, or one label per image in order. Labels are class indices or class names.

    Raises:
        ImagesError: There is no such place, it holds no images, or labels do not match.

    >>> images = open_images(np.zeros((2, 8, 8, 3), np.uint8), labels=["dog", "cat"])
    >>> len(images), images.labels.tolist(), images.classes
    (2, [1, 0], ('cat', 'dog'))
    """
    images = _open(source)
    return images if labels is None else with_labels(images, labels)


def open_csv(path: Path) -> FileImages:
    """The image files that a CSV lists, in its order, by paths relative to its folder.

    Paths are in the column path, file, filename, image or id, else in the first; labels, if any, in the column label,
    else in the other one of two columns.
    """
    table = read_csv(path)
    ids = [Path(cell).as_posix() for cell in table.column(table.paths)]
    root = path.parent
    missing = [key for key in ids if not (root / key).is_file()]
    if missing:
        raise ImagesError(
            f"CSV file '{path}' must list files that exist; {len(missing)} of {len(ids)} in column "
            f"'{table.header[table.paths]}' do not: {some(missing)}. Paths are relative to '{root}'; "
            f"if the CSV only labels images that are elsewhere, open those and pass it as labels=."
        )
    column = table.label
    labels = () if column is None else to_labels(table.column(column), f"column '{table.header[column]}' of '{path}'")
    return FileImages(root, ids, *labels, name=str(path))


def _open(source: Any) -> Images:
    if isinstance(source, (str, Path)):
        return _open_path(str(source))
    if isinstance(source, (ImageSet, Images)):
        return source
    if isinstance(source, (np.ndarray, Tensor)):
        floats = source.is_floating_point() if isinstance(source, Tensor) else source.dtype.kind == "f"
        return ArrayImages(inputs=source) if floats else ArrayImages(images=source)
    if isinstance(source, IterableDataset):
        raise ImagesError(
            f"images must be readable in any order; got {type(source).__name__}, an IterableDataset, which is read "
            f"from front to back only. Pass a map-style Dataset, or list(dataset) if it fits in memory."
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (dict, bytes)):
        return DatasetImages(source)
    got = f"got {type(source).__name__}. Pass one of those (of a DataLoader, its dataset)."
    raise ImagesError(f"images must come from {_ACCEPTED}; {got}")


def _open_path(source: str) -> Images:
    if not source.strip():
        raise ImagesError("images must be a folder or file; got an empty text. Pass its path.")
    path, part = Path(source).expanduser(), None
    if not path.exists() and ".npz#" in source:
        before, part = source.rsplit("#", 1)
        path = Path(before).expanduser()
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        there = next(folder for folder in path.parents if folder.is_dir())
        missing = path.relative_to(there).parts[0]
        near = nearest(missing, [entry.name for entry in there.iterdir()], cutoff=0.6, or_first=False)
        likely = some([str(there / name) for name in near])
        hint = f"Did you mean {likely}?" if near else f"Look in '{there.resolve()}'."
        raise ImagesError(f"images must be an existing folder or file; '{path}' does not exist. {hint}")
    if is_image(path.name):
        return FileImages(path.parent, [path.name], name=source)
    openers = {".npz": lambda file: open_npz(file, part), ".csv": open_csv, ".zip": ArchiveImages}
    if opener := openers.get(path.suffix.lower()):
        return opener(path)
    raise ImagesError(
        f"images must come from {_ACCEPTED}; got '{path}'. "
        f"Image files end in {' '.join(SUFFIXES)}; put others into one of those."
    )
