"""Images in columns: data frames of pandas and polars, and data sets of Hugging Face.

A column holds paths, URLs, or images (Pillow images, arrays, the bytes of files); another one may hold labels. Which
they are is seen from their names (`PATH_COLUMNS`, `LABEL_COLUMNS` in `labels.py`) and from the types of their cells.
None of the three packages is imported here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from dubito.data.dataset import DatasetImages
from dubito.data.files import FileImages, listed_ids
from dubito.data.image_set import check_labels, some
from dubito.data.labels import LABEL_COLUMNS, PATH_COLUMNS, Listing, package_of, read_frame, to_labels
from dubito.errors import ImagesError

Named = tuple[Int[Tensor, "n"] | None, Sequence[str] | None]
_RELATIVE = "Paths are relative to the working folder."


def open_frame(frame: Any) -> FileImages | DatasetImages:
    """The images of a data frame, one per row, with the labels of its label column, if it has one.

    Ids are the paths, or for a column of images those of another column that names them, or positions.
    """
    return _open_columns(read_frame(frame))


def open_hugging_face(dataset: Any) -> FileImages | DatasetImages:
    """The images of a Hugging Face data set: its image column, and its label column with the names of its classes.

    Image files are decoded as any other file; a format or transform of the data set is not applied.
    """
    if isinstance(dataset, Mapping):
        raise ImagesError(f"a data set must be one split; this has the splits {some(list(dataset))}. Pass one of them.")
    if not hasattr(dataset, "__len__"):
        raise ImagesError(
            "images must be readable in any order; got a streaming data set of Hugging Face, which is read from front "
            "to back only. Open its files instead, which are read in place, such as "
            "'hf://datasets/OWNER/NAME/data/train-*.parquet', or load it with streaming=False, or take some: "
            "datasets.Dataset.from_generator(data.take(n).__iter__, features=data.features)."
        )
    features, plain = dataset.features, dataset.with_format(None)
    header = tuple(features)
    images = [name for name in header if type(features[name]).__name__ == "Image"]
    for name in images:
        plain = plain.cast_column(name, type(features[name])(decode=False))
    classes = [name for name in header if hasattr(features[name], "str2int")]
    label = next((name for name in header if name.lower() in LABEL_COLUMNS), None) or next(iter(classes), None)
    if not images:
        columns = [list(plain[name]) for name in header]
        return _open_columns(Listing("the data set", tuple(map(str.lower, header)), columns))
    opened = DatasetImages(_Cells(plain.select_columns(images[:1]), images[0]), name="data set of Hugging Face")
    if label is not None:
        names = tuple(features[label].names) if label in classes else None
        values = list(plain[label])
        known = to_labels(values, f"column '{label}' of the data set", names) if values != [-1] * len(values) else None
        _set_labels(opened, known or (None, names))
    else:
        _set_labels(opened, (None, None))
    return opened


def is_hugging_face(source: Any) -> bool:
    """Whether a source is a data set of Hugging Face; many people's own modules are called datasets, too."""
    return package_of(source) == "datasets" and hasattr(source, "cast_column")


def _open_columns(table: Listing) -> FileImages | DatasetImages:
    place = table.label
    named: Named = (None, None)
    if place is not None:
        named = to_labels(table.column(place), f"column '{table.header[place]}' of {table.name}")
    candidates = [table.header.index(name) for name in PATH_COLUMNS if name in table.header] or [table.paths]
    texts = [at for at in candidates if all(isinstance(cell, (str, Path)) for cell in table.column(at))]
    pictures = [at for at in candidates if at not in texts and not isinstance(table.column(at)[0], (int, float))]
    if pictures:
        keys = [str(cell) for at in texts[:1] for cell in table.column(at)]
        images = DatasetImages(table.column(pictures[0]), ids=keys or None, name=table.name)
        _set_labels(images, named)
        return images
    paths = [str(cell) for cell in table.column(texts[0] if texts else table.paths)]
    what = f"column '{table.header[texts[0] if texts else table.paths]}' of {table.name}"
    return FileImages(Path(), listed_ids(Path(), paths, what, _RELATIVE), *named, name=table.name)


def _set_labels(images: DatasetImages, named: Named) -> None:
    labels, classes = named
    check_labels(labels, len(images), classes, images.name)
    images.labels, images.classes = labels, classes


class _Cells:
    """One column of a data set, read cell by cell."""

    def __init__(self, dataset: Any, column: str) -> None:
        self.dataset, self.column = dataset, column

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index][self.column]
