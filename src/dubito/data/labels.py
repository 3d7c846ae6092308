"""Labels from outside the images: a CSV file, a mapping from image to label, or one label per image in order.

A key of a CSV or mapping names an image by its id, its file name, its stem or its number: for
`a/00000293.jpg` these are `a/00000293.jpg`, `00000293.jpg`, `00000293` and `293`. The first of the four that
fits every image is used for all. Keys without an image are allowed: one file of labels can serve several
subsets.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.data.csv_table import read_csv
from dubito.data.image_set import Labelled, some
from dubito.data.tree import is_image
from dubito.errors import ImagesError
from dubito.types import Images

LabelValues = Sequence[Any] | Shaped[np.ndarray, "..."] | Tensor
"""One class index or class name per image, in order."""

Labels = str | Path | Mapping[Any, Any] | LabelValues
"""What `open_images` takes as labels."""


def with_labels(images: Images, labels: Labels) -> Labelled:
    """The images with labels from a CSV file, a mapping, or a sequence of equal length."""
    if isinstance(labels, (str, Path)):
        what = f"labels file '{labels}'"
        return _by_key(images, _read(Path(labels).expanduser(), what), what)
    if isinstance(labels, Mapping):
        return _by_key(images, {str(key): value for key, value in labels.items()}, "labels")
    if len(labels) != len(images):
        raise ImagesError(
            f"labels must be one per image; got {len(labels)} labels for the {len(images)} images of "
            f"'{images.name}'. Give them in the order of images.ids, or as a mapping from id to label."
        )
    return _labelled(images, *to_labels(labels, "labels"))


def to_labels(
    values: Any, what: str, classes: Sequence[str] | None = None
) -> tuple[Int[Tensor, "n"], tuple[str, ...] | None]:
    """Class indices and class names.

    Args:
        values: A sequence, array or tensor (n) of integers, of integers as text, or of class names.
        what: What an error calls them.
        classes: The class names in order, if known; without them, sorted names count 0..k-1.
    """
    known = None if classes is None else tuple(classes)
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except ValueError as error:
        raise ImagesError(f"{what} must be one integer or class name per image; {error}.") from error
    if array.ndim == 1 and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64)), known
    if array.ndim != 1 or array.dtype.kind != "U":
        raise ImagesError(
            f"{what} must be one integer or class name per image; got {array.dtype} of shape {array.shape}. "
            f"Give class indices of shape (n,)."
        )
    texts = [str(text) for text in array]
    if "" in texts:
        raise ImagesError(
            f"{what} must not be empty; {texts.count('')} of {len(texts)} are, the first at position "
            f"{texts.index('')}. Fill them in, or leave those images out."
        )
    if all(map(_is_integer, texts)):
        return torch.tensor([int(text) for text in texts]), known
    if all(map(_is_number, texts)):
        decimal = next(text for text in texts if not _is_integer(text))
        raise ImagesError(f"{what} must be integers or class names; got '{decimal}'. Write the labels as integers.")
    return _number_names(texts, what, known or tuple(sorted(set(texts))))


def _number_names(
    texts: Sequence[str], what: str, classes: tuple[str, ...]
) -> tuple[Int[Tensor, "n"], tuple[str, ...]]:
    number = {name: i for i, name in enumerate(classes)}
    unknown = sorted(set(texts) - set(number))
    if unknown:
        raise ImagesError(
            f"{what} must be among the {len(classes)} class names, {some(classes)}; got {some(unknown)}. "
            f"Correct them, or name these classes too."
        )
    return torch.tensor([number[text] for text in texts]), classes


def _by_key(images: Images, labels: Mapping[str, Any], what: str) -> Labelled:
    # Class names are numbered over all keys, so that subsets with one file of labels agree on the numbers.
    numbers, classes = to_labels(list(labels.values()), what)
    number_of = dict(zip(labels, numbers.tolist(), strict=True))
    return _labelled(images, torch.tensor(_match(number_of, images, what)), classes)


def _labelled(images: Images, numbers: Int[Tensor, "n"], classes: tuple[str, ...] | None) -> Labelled:
    # Asked in this order because labels may cost a data set a reading of all its items; class names cost nothing.
    nameless = classes is None and images.classes is not None and images.labels is None
    return Labelled(images, numbers, images.classes if nameless else classes)


def _read(path: Path, what: str) -> dict[str, str]:
    """The column that names images as keys; the column `label`, or else the second one, as values."""
    if not path.is_file():
        raise ImagesError(f"{what} must be a CSV file; there is none. Check the path.")
    table = read_csv(path)
    column = 1 if table.label is None and table.paths == 0 else table.label
    if column is None or column == table.paths or column >= len(table.header):
        raise ImagesError(
            f"{what} must have a column of image names and a column 'label'; its columns are {some(table.header, 8)}. "
            f"Name the column of labels 'label'."
        )
    keys = table.column(table.paths)
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ImagesError(
            f"{what} must name each image once; in column '{table.header[table.paths]}' {len(twice)} of "
            f"{len(set(keys))} names occur more than once: {some(twice)}. Leave one row for each."
        )
    return dict(zip(keys, table.column(column), strict=True))


def _match(labels: Mapping[str, int], images: Images, what: str) -> list[int]:
    """The label of each image in order, by the first way of naming that fits all."""
    fewest: Sequence[str] = images.ids
    clashing: list[str] = []
    for naming in NAMINGS:
        names = [naming(key) for key in images.ids]
        keys = Counter(naming(key) for key in labels)
        missing = [key for key, name in zip(images.ids, names, strict=True) if name not in keys]
        fewest = min(fewest, missing, key=len)
        if missing:
            continue
        clashing = [name for name, count in Counter(names).items() if count > 1 or keys[name] > 1]
        if not clashing:
            label = {naming(key): value for key, value in labels.items()}
            return [label[name] for name in names]
    if clashing:
        raise ImagesError(
            f"{what} must distinguish the images of '{images.name}'; {len(clashing)} names stand for several "
            f"images or labels: {some(clashing)}. Use full ids such as '{images.ids[0]}'."
        )
    raise ImagesError(
        f"{what} must have a label for each of the {len(images)} images of '{images.name}'; {len(fewest)} "
        f"have none under their id, file name, stem or number: {some(fewest)} (it names "
        f"{some(list(labels), 2)}). Add them, or open only the labelled images."
    )


def _file_name(key: str) -> str:
    return PurePosixPath(key).name


def _stem(key: str) -> str:
    return PurePosixPath(key).stem if is_image(key) else PurePosixPath(key).name


def _number(key: str) -> str:
    stem = _stem(key)
    return str(int(stem)) if stem.isdecimal() else stem


NAMINGS: tuple[Callable[[str], str], ...] = (str, _file_name, _stem, _number)
"""How a key may name an image: its id, its file name, its stem, its number."""


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
