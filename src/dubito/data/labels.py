"""Labels from outside the images: a CSV file, a DataFrame, a mapping from image to label, or one per image in order.

A key of a CSV, DataFrame or mapping names an image by its id, its file name, its stem or its number: for
`a/00000293.jpg` these are `a/00000293.jpg`, `00000293.jpg`, `00000293` and `293`. The first of the four that fits every
image is used for all. Keys without an image are allowed: one file of labels can serve several subsets.

Beyond one label per image, people annotate sets of labels, and votes for and against labels. Both are read by image,
keyed by the text of its cell; `find_rows` matches such keys with the ids of a table.

    val_id,label,real_labels             ReaL-like: all labels that people accept, none, one or several
    2,970,970 795

    val_id,label,votes_no,votes_maybe,votes_yes      one row for every label that people were asked about
    2,970,0,1,4
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.data.files import is_image
from dubito.data.image_set import Labelled, some
from dubito.errors import ImagesError
from dubito.storage import reading
from dubito.storage.locations import Place, RemotePath, to_place
from dubito.types import Images

LabelValues = Sequence[Any] | Shaped[np.ndarray, "..."] | Tensor
"""One class index or class name per image, in order."""

Labels = Any
"""What `open_images` takes as labels: a CSV file, a DataFrame, a mapping from image to label, or `LabelValues`."""

_PATHS = "path file filename file_name filepath file_path image image_path img url id"
PATH_COLUMNS = tuple(_PATHS.split())
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "target")
"""Names, in lower case, of the columns that name images and that hold labels; the first that is there counts."""
_EXAMPLE = "The first line names the columns, such as: path,label"
_SETS = "real_labels"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf(inity)?)", re.IGNORECASE)


def with_labels(images: Images, labels: Labels, undecoded: Collection[int] = ()) -> Labelled:
    """The images with labels from a CSV file, a DataFrame, a mapping, or a sequence of equal length.

    Args:
        images: The images.
        labels: Their labels.
        undecoded: Rows that nobody will use, and that may lack a label. They get the first one of all, so that every
            row has one.
    """
    what = f"labels file '{labels}'" if _is_file(labels) else "labels"
    if is_series(labels):
        labels = labels.to_list()
    if isinstance(labels, Mapping) or _is_file(labels) or is_frame(labels):
        labels = labels_by_image(labels)
        # Class names are numbered over all keys, so that subsets with one file of labels agree on the numbers.
        numbers, classes = to_labels(list(labels.values()), what)
        keys = [str(key) for key in labels]
        position_of = _match(keys, images.ids)
        optional = set(undecoded)
        if missing := [key for row, key in enumerate(images.ids) if row not in position_of and row not in optional]:
            raise _unmatched(keys, images, missing, what)
        numbers = numbers[[position_of.get(row, 0) for row in range(len(images))]]
    elif undecoded and len(labels) == len(images) - len(undecoded):
        decoded, classes = to_labels(labels, what)
        numbers = decoded[:1].repeat(len(images))
        numbers[sorted(set(range(len(images))).difference(undecoded))] = decoded
    elif len(labels) != len(images):
        raise ImagesError(
            f"labels must be one per image; got {len(labels)} labels for the {len(images)} images of "
            f"'{images.name}'. Pass them in the order of images.ids, or as a mapping from id to label."
        )
    else:
        numbers, classes = to_labels(labels, what)
    # Asked in this order because labels may cost a data set a reading of all its items; class names cost nothing.
    nameless = classes is None and images.classes is not None and images.labels is None
    return Labelled(images, numbers, images.classes if nameless else classes)


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
    if absent := _absent(values):
        raise ImagesError(
            f"{what} must not be missing; {len(absent)} of {len(values)} are, the first at position {absent[0]}. Fill "
            f"them in, or leave those images out."
        )
    if array.ndim == 1 and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64)), known
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat):
        array = array.astype(str)
    if array.ndim != 1 or array.dtype.kind != "U":
        raise ImagesError(
            f"{what} must be one integer or class name per image; got {array.dtype} of shape {array.shape}. "
            f"Pass class indices of shape (n,)."
        )
    texts = [str(text) for text in array]
    if "" in texts:
        raise ImagesError(
            f"{what} must not be empty; {texts.count('')} of {len(texts)} are, the first at position "
            f"{texts.index('')}. Fill them in, or leave those images out."
        )
    decimals = [text for text in texts if not text.removeprefix("-").isdecimal()]
    if not decimals:
        return torch.tensor([int(text) for text in texts]), known
    if all(_NUMBER.fullmatch(text.strip()) for text in texts):
        raise ImagesError(f"{what} must be integers or class names; got '{decimals[0]}'. Write the labels as integers.")
    names = known or tuple(sorted(set(texts)))
    number = {name: i for i, name in enumerate(names)}
    if unknown := sorted(set(texts) - set(number)):
        raise ImagesError(
            f"{what} must be among the {len(names)} class names, {some(names)}; got {some(unknown)}. "
            f"Correct them, or name these classes too."
        )
    return torch.tensor([number[text] for text in texts]), names


def _absent(values: Any) -> list[int]:
    """Places of what stands for nothing in a frame: None, NaN and its relatives, which are not equal to themselves."""
    if not isinstance(values, list):
        return []
    return [place for place, value in enumerate(values) if value is None or (np.ndim(value) == 0 and value != value)]  # noqa: PLR0124


@dataclass(frozen=True)
class Listing:
    """Named columns with one row per image: the cells of a CSV file, as text, or of a data frame, as they are.

    Attributes:
        name: What errors call it.
        header: The names of the columns, in lower case.
        columns: The columns, top to bottom.
    """

    name: str
    header: tuple[str, ...]
    columns: Sequence[list[Any]]

    def column(self, index: int) -> list[Any]:
        """One column, top to bottom."""
        return self.columns[index]

    def position(self, name: str) -> int:
        """Where a column stands that must be there."""
        if name not in self.header:
            got = f"its columns are {some(self.header, 8)}. Rename the one that is meant."
            raise ImagesError(f"{self.name} must have a column '{name}'; {got}")
        return self.header.index(name)

    def names(self, what: str) -> list[str]:
        """The names of the images, each of which must occur once."""
        keys = [str(key) for key in self.column(self.paths)]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise ImagesError(
                f"{what} must name each image once; in column '{self.header[self.paths]}' {len(twice)} of "
                f"{len(set(keys))} names occur more than once: {some(twice)}. Leave one row for each."
            )
        return keys

    @property
    def paths(self) -> int:
        """The position of the column that names images."""
        return path_column(self.header)

    @property
    def label(self) -> int | None:
        """The position of the column of labels."""
        return label_column(self.header)


def path_column(header: Sequence[str]) -> int:
    """Which column names images: the first of `PATH_COLUMNS`, else the first that holds no labels.

    >>> path_column(("label", "File")), path_column(("label", "picture"))
    (1, 1)
    """
    names = [name.lower() for name in header]
    first = 1 if names[0] in LABEL_COLUMNS and len(names) > 1 else 0
    return next((names.index(name) for name in PATH_COLUMNS if name in names), first)


def label_column(header: Sequence[str]) -> int | None:
    """Which column holds labels: the first of `LABEL_COLUMNS`, else the other one of two columns, else None.

    >>> label_column(("id", "Label", "x")), label_column(("id", "truth")), label_column(("id", "x", "y"))
    (1, 1, None)
    """
    names = [name.lower() for name in header]
    other = 1 - path_column(header) if len(names) == 2 else None
    return next((names.index(name) for name in LABEL_COLUMNS if name in names), other)


def read_csv(path: Place) -> Listing:
    """A CSV file with commas, or .tsv with tabs, in UTF-8 but for file names; the first line names the columns."""
    if isinstance(path, Path) and not path.is_file():
        there = "it is a folder" if path.is_dir() else "it is a pipe or device" if path.exists() else "there is none"
        raise ImagesError(f"CSV file '{path}' must be a file; {there}. Check the path.")
    with (
        _reading(path),
        path.open("rb") as binary,
        io.TextIOWrapper(binary, newline="", encoding="utf-8-sig", errors="surrogateescape") as file,
    ):
        reader = csv.reader(file, delimiter="\t" if str(path).lower().endswith(".tsv") else ",")
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    if len(lines) < 2:
        raise ImagesError(
            f"CSV file '{path}' must have a header and at least one row; got {len(lines)} lines. {_EXAMPLE}."
        )
    header = tuple(cell.lower() for cell in lines[0][1])
    if data := [cell for cell in header if is_image(cell) or cell.isdecimal()]:
        raise ImagesError(
            f"CSV file '{path}' must begin with a header; got '{data[0]}', which looks like data. {_EXAMPLE}."
        )
    for number, row in lines[1:]:
        if len(row) != len(header):
            raise ImagesError(
                f"CSV file '{path}' must have {len(header)} cells in every row, as its header has; "
                f"line {number} has {len(row)}. Quote cells that contain commas."
            )
    columns = [list(column) for column in zip(*(row for _, row in lines[1:]), strict=True)]
    with _reading(path):  # names of files may be any bytes, everything else is text
        for place, column in enumerate(columns):
            "".join((header[place], *(column if place != path_column(header) else ()))).encode()
    return Listing(f"CSV file '{path}'", header, columns)


def read_frame(frame: Any) -> Listing:
    """A DataFrame of pandas or polars."""
    header = tuple(str(name).lower() for name in frame.columns)
    if not header or not len(frame):
        got = f"got shape {tuple(frame.shape)}"
        raise ImagesError(f"a DataFrame must have columns and rows; {got}. Pass one row per image.")
    return Listing("the DataFrame", header, [frame[name].to_list() for name in frame.columns])


def is_frame(value: Any) -> bool:
    """Whether a value is a DataFrame of pandas or polars, seen without importing them."""
    return package_of(value) in ("pandas", "polars") and len(getattr(value, "shape", ())) == 2


def is_series(value: Any) -> bool:
    """Whether a value is a column of such a frame."""
    return package_of(value) in ("pandas", "polars") and len(getattr(value, "shape", ())) == 1


def package_of(value: object) -> str:
    """The top-level package that a value's type is from."""
    return type(value).__module__.partition(".")[0]


class Votes(NamedTuple):
    """How many people answered what, when asked whether an image shows a label."""

    no: int
    maybe: int
    yes: int


def read_label_sets(csv: str | Path) -> dict[str, tuple[int, ...]]:
    """The labels that people accept for each image, from a CSV with a column real_labels, such as "970 795", or empty.

    The first of `PATH_COLUMNS` that is there names the image, else the first column.
    """
    path = to_place(csv)
    table = read_csv(path)
    cells = table.column(table.position(_SETS))
    label_sets = [[_whole(part, path, _SETS) for part in cell.split()] for cell in cells]
    return dict(zip(table.names(f"CSV file '{path}'"), map(tuple, label_sets), strict=True))


def read_votes(csv: str | Path) -> dict[str, dict[int, Votes]]:
    """The votes on each image by label, from a CSV with the columns label, votes_no, votes_maybe and votes_yes.

    Images are named as for `read_label_sets`. Images without votes do not occur.
    """
    path = to_place(csv)
    table = read_csv(path)
    columns = {name: table.position(name) for name in ("label", "votes_no", "votes_maybe", "votes_yes")}
    by_image: dict[str, dict[int, Votes]] = {}
    for row in zip(*table.columns, strict=True):
        label, *votes = (_whole(row[column], path, name) for name, column in columns.items())
        of_image = by_image.setdefault(row[table.paths], {})
        if label in of_image:
            raise ImagesError(
                f"CSV file '{path}' must ask about each label of an image once; label {label} of image "
                f"'{row[table.paths]}' comes twice. Add their votes up in one row."
            )
        of_image[label] = Votes(*votes)
    return by_image


def find_rows(keys: Iterable[str], ids: Sequence[str], what: str) -> dict[str, int]:
    """Which row each key names: by id, file name, stem or number, the one way that finds most of them.

    Keys without a row and rows without a key are allowed, and names that two of them share are no match: it is
    unclear which is meant. Not one match is an error.
    """
    listed = list(keys)
    best = _match(listed, ids)
    if not best:
        raise ImagesError(
            f"{what} must name images of the table by id, file name, stem or number; none of the {len(listed)} keys "
            f"({some(listed)}) is one of its {len(ids)} ids ({some(ids)}). Use the same names for both."
        )
    return {listed[position]: row for row, position in best.items()}


def labels_by_image(labels: Labels) -> Mapping[Any, Any]:
    """Labels by the names of images: those of a mapping, a CSV file or a frame."""
    if isinstance(labels, Mapping):
        return labels
    from_file = _is_file(labels)
    if not from_file and not is_frame(labels):
        raise ImagesError(
            f"labels must be a mapping from image to label, a CSV file or a frame; got {type(labels).__name__}. Name "
            f"the image of every label."
        )
    what = f"labels file '{labels}'" if from_file else "labels"
    table = read_csv(to_place(labels)) if from_file else read_frame(labels)
    column = table.label
    if column is None or column == table.paths:
        raise ImagesError(
            f"{what} must have a column of image names and a column 'label'; its columns are {some(table.header, 8)}. "
            f"Name the column of labels 'label'."
        )
    return dict(zip(table.names(what), table.column(column), strict=True))


def _is_file(labels: Labels) -> bool:
    """Whether labels are the path or the address of a file."""
    return isinstance(labels, str | Path | RemotePath)


def _match(keys: Sequence[str], ids: Sequence[str]) -> dict[int, int]:
    """By row the position of its key, under the first way of naming that matches most; shared names match nothing."""
    best: dict[int, int] = {}
    for naming in NAMINGS:
        rows, positions = _unique(map(naming, ids)), _unique(map(naming, keys))
        best = max(best, {row: positions[name] for name, row in rows.items() if name in positions}, key=len)
        if len(best) == len(ids):
            break
    return best


def _unmatched(keys: Sequence[str], images: Images, missing: Sequence[str], what: str) -> ImagesError:
    """Why some images have no label: names stand for several images or keys, or there are no keys for them."""
    for naming in NAMINGS:
        ids, names = Counter(map(naming, images.ids)), Counter(map(naming, keys))
        if ids.keys() <= names.keys():
            shared = [name for name, count in ids.items() if count > 1 or names[name] > 1]
            return ImagesError(
                f"{what} must distinguish the images of '{images.name}'; {len(shared)} names stand for several images "
                f"or labels: {some(shared)}. Use full ids such as '{images.ids[0]}'."
            )
    return ImagesError(
        f"{what} must have a label for each of the {len(images)} images of '{images.name}'; {len(missing)} have none "
        f"of their own under their id, file name, stem or number: {some(missing)} (it names {some(keys, 2)}). "
        f"Add them, or open only the labelled images."
    )


def _stem(key: str) -> str:
    return PurePosixPath(key).stem if is_image(key) else PurePosixPath(key).name


def _number(key: str) -> str:
    stem = _stem(key)
    return str(int(stem)) if stem.isdecimal() else stem


NAMINGS: tuple[Callable[[str], str], ...] = (str, lambda key: PurePosixPath(key).name, _stem, _number)
"""How a key may name an image: its id, its file name, its stem, its number."""


def _unique(names: Iterable[str]) -> dict[str, int]:
    """The position of each name that occurs once."""
    listed = list(names)
    counts = Counter(listed)
    return {name: position for position, name in enumerate(listed) if counts[name] == 1}


def _whole(text: str, path: Place, column: str) -> int:
    if not text.isdecimal():
        raise ImagesError(f"column '{column}' of '{path}' must hold whole numbers from 0; got '{text}'. Correct it.")
    return int(text)


def _reading(path: Place) -> AbstractContextManager[None]:
    return reading(f"CSV file '{path}'", "Save it as text in UTF-8.", error=ImagesError)
