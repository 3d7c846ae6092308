"""Images in columns: data frames of pandas and polars, and data sets of Hugging Face.

A column holds paths, URLs, or images (Pillow images, arrays, the bytes of files); another one may hold labels. Which
they are is seen from their names (`PATH_COLUMNS`, `LABEL_COLUMNS` in `labels.py`) and from the types of their cells.
None of the three packages is imported here, except to open a folder that Hugging Face has written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

from jaxtyping import Int
from torch import Tensor

from dubito.data.dataset import DatasetImages
from dubito.data.files import FileImages, listed_ids
from dubito.data.image_set import check_labels, is_null, some
from dubito.data.labels import LABEL_COLUMNS, PATH_COLUMNS, Listing, package_of, read_frame, to_labels
from dubito.errors import ImagesError, MissingPackageError
from dubito.storage import reading
from dubito.storage.locations import Place

Named = tuple[Int[Tensor, "n"] | None, Sequence[str] | None]
_WEB_DATASET = "cls"
"""What WebDataset calls labels."""
_RELATIVE = "Paths are relative to the working folder."


def open_frame(frame: Any) -> FileImages | DatasetImages:
    """The images of a data frame, one per row, with the labels of its label column, if it has one.

    Ids are the paths, or for a column of images those of another column that names them, or positions.
    """
    return open_columns(read_frame(frame))


def open_hugging_face(dataset: Any) -> FileImages | DatasetImages:
    """The images of a Hugging Face data set: its image column, and its label column with the names of its classes.

    Image files are decoded as any other file; a format or transform of the data set is not applied.
    """
    if isinstance(dataset, Mapping):
        raise ImagesError(f"a data set must be one split; this has the splits {some(list(dataset))}. Pass one of them.")
    columns = FeatureColumns.of(dataset.features)
    plain = dataset.with_format(None)
    if columns.image is None:
        header = tuple(dataset.features)
        return open_columns(
            Listing("the data set", tuple(map(str.lower, header)), [list(plain[one]) for one in header])
        )
    cells = _Cells(columns.undecoded(plain).select_columns([columns.image]), columns.image)
    opened = DatasetImages(cells, name="data set of Hugging Face")
    _set_labels(opened, columns.labels([] if columns.label is None else list(plain[columns.label])))
    return opened


def open_saved(folder: Place) -> FileImages | DatasetImages:
    """The images of a folder that a Hugging Face data set was saved in with `save_to_disk`."""
    try:
        load_from_disk = import_module("datasets").load_from_disk
    except ImportError as error:
        raise MissingPackageError(f"'{folder}' is read by the package of Hugging Face: pip install datasets") from error
    with reading(f"data set '{folder}'", "Save it again.", error=ImagesError):
        dataset = load_from_disk(str(folder))
    if isinstance(dataset, Mapping):
        splits = list(dataset)
        raise ImagesError(
            f"a data set must be one split; '{folder}' has the splits {some(splits)}. Open one of them, such as "
            f"'{folder}/{splits[0]}'."
        )
    return open_hugging_face(dataset)


def is_saved(paths: Sequence[str]) -> bool:
    """Whether files in a folder are those that `save_to_disk` of Hugging Face writes, for one split or several."""
    return {"dataset_info.json", "state.json"} <= set(paths) or "dataset_dict.json" in paths


def is_hugging_face(source: Any) -> bool:
    """Whether a source is a data set of Hugging Face; many people's own modules are called datasets, too."""
    return package_of(source) == "datasets" and hasattr(source, "cast_column")


@final
@dataclass(frozen=True)
class FeatureColumns:
    """Which columns of a Hugging Face data set hold images and labels, by its features.

    Attributes:
        images: The columns of images.
        label: The column of labels, or None.
        classes: The names of its classes, or None.
    """

    images: tuple[str, ...]
    label: str | None
    classes: tuple[str, ...] | None

    @staticmethod
    def of(features: Any) -> "FeatureColumns":
        """Those of a data set with these features."""
        images = tuple(name for name in features if type(features[name]).__name__ == "Image")
        classes = [name for name in features if hasattr(features[name], "str2int")]
        by_name = [name for name in features if name.lower() in (*LABEL_COLUMNS, _WEB_DATASET)]
        label = next(iter([*by_name, *classes]), None)
        return FeatureColumns(images, label, tuple(features[label].names) if label in classes else None)

    @property
    def image(self) -> str | None:
        """The first column of images."""
        return next(iter(self.images), None)

    def undecoded(self, dataset: Any) -> Any:
        """The data set with the bytes or paths of image files in place of images."""
        for name in self.images:
            dataset = dataset.cast_column(name, type(dataset.features[name])(decode=False))
        return dataset

    def labels(self, values: list[Any]) -> Named:
        """Class indices and class names from the cells of the column of labels; -1 throughout stands for no labels."""
        if self.label is None or values == [-1] * len(values):
            return None, self.classes
        return to_labels(values, f"column '{self.label}' of the data set", self.classes)


def open_columns(table: Listing) -> FileImages | DatasetImages:
    """The images that columns hold or name, with the labels of the column of labels, if there is one."""
    place = table.label
    named: Named = (None, None)
    if place is not None:
        named = to_labels(table.column(place), f"column '{table.header[place]}' of {table.name}")
    candidates = [table.header.index(name) for name in PATH_COLUMNS if name in table.header] or [table.paths]
    cells = {at: [cell for cell in table.column(at) if not is_null(cell)] for at in candidates}
    texts = [at for at in candidates if cells[at] and all(isinstance(cell, (str, Path)) for cell in cells[at])]
    pictures = [at for at in candidates if at not in texts and cells[at] and not isinstance(cells[at][0], (int, float))]
    if pictures:
        keys = [str(cell) for at in texts[:1] if len(cells[at]) == len(table.column(at)) for cell in cells[at]]
        images = DatasetImages(table.column(pictures[0]), ids=keys or None, name=table.name)
        _set_labels(images, named)
        return images
    at = texts[0] if texts else table.paths
    what = f"column '{table.header[at]}' of {table.name}"
    return FileImages(Path(), listed_ids(Path(), table.column(at), what, _RELATIVE), *named, name=table.name)


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
