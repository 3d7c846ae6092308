"""Streaming data sets of Hugging Face (`load_dataset(..., streaming=True)`), which are read from front to back only.

When a stream is opened, one pass over it counts its rows, collects ids and labels, and hashes the cell of every image;
no image is decoded. After that, every thread of every process reads forward with a cursor of its own, which starts
again where a row lies behind it. Several processes that decode would each read the whole stream, so by default there is
one (`forward_only`), and rows are best read in order.

Labels are from another pass than images, so every cell must have the hash that it had when the stream was opened. A
stream whose order changes, as by shuffling without a seed, is an error, and never an image with another one's label.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, final

from jaxtyping import Int
from torch import Tensor

from dubito.data.cells import ROWS, CellImages, Cursor, parse_cell
from dubito.data.dataset import DatasetImages
from dubito.data.decode import read_content
from dubito.data.files import FileImages
from dubito.data.frames import FeatureColumns, is_hugging_face, open_columns
from dubito.data.image_set import Hashes, PositionIds
from dubito.data.labels import PATH_COLUMNS, Listing, label_column, path_column
from dubito.errors import DubitoError, ImagesError, first_words
from dubito.storage.locations import to_place
from dubito.threads import kept_random_states

_NAMES = (*PATH_COLUMNS, "__key__")
"""Columns that may name images; the last one is WebDataset's."""
_STREAM = "streaming data set of Hugging Face"


def is_stream(source: Any) -> bool:
    """Whether a source is a data set of Hugging Face without a length."""
    return is_hugging_face(source) and not hasattr(source, "__len__")


def open_streaming(dataset: Any) -> "StreamImages | FileImages | DatasetImages":
    """The images of a streaming data set: its image column, and its label column with the names of its classes.

    Ids are those of a column that names each image, else positions. Without a column of images, a column of paths or
    URLs names them.
    """
    with kept_random_states(), _errors_of(_STREAM):
        # Whoever iterates over a data set changes its state: this copy is never iterated over, only copied again.
        plain = _typed(_copied(dataset).with_format(None))
        kinds = {key: str(getattr(feature, "dtype", "")) for key, feature in plain.features.items()}
        columns = FeatureColumns.of(plain.features)
        image = columns.image or next((key for key, kind in kinds.items() if kind.endswith("binary")), None)
        if image is None:
            return open_columns(_listing(plain))
        names = [key for known in _NAMES for key in kinds if key.lower() == known and kinds[key].endswith("string")]
        noted = [*names, *([columns.label] if columns.label else [])]
        stream = columns.undecoded(plain)
        cells = _CellHashes(image)
        values = _read_columns(stream.select_columns([image, *noted]), noted, cells)
    n = len(cells.hashes)
    unique = (values[key] for key in names if all(values[key]) and len(set(values[key])) == n)
    labels, classes = columns.labels(values[columns.label] if columns.label else [])
    return StreamImages(stream.select_columns([image]), cells, next(unique, PositionIds(n)), labels, classes)


@final
class StreamImages(CellImages):
    """A column of images of a stream; `open_streaming` makes it."""

    forward_only, draws = True, True

    def __init__(
        self,
        dataset: Any,
        cells: "_CellHashes",
        ids: Sequence[str],
        labels: Int[Tensor, "n"] | None,
        classes: Sequence[str] | None,
    ) -> None:
        super().__init__(_STREAM, ids, labels, classes)
        self._dataset, self._cells = dataset, cells

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of the bytes of each image; bytes in the stream itself were hashed when it was opened."""
        if not self._cells.paths:
            return [self._cells.hashes[row] for row in rows]
        with kept_random_states():
            return [self.content(row)[1] for row in rows]

    def content(self, index: int) -> tuple[bytes | OSError, bytes]:
        """The bytes of an image, or why there are none, and their hash; ImagesError where it is another image."""
        with _errors_of(f"row {index} of a {self.name}"):
            content, hashed = parse_cell(self.cell(None, index, lambda: self._cursor(index)))
        if hashed != self._cells.hashes[index]:
            raise ImagesError(
                f"row {index} of a {self.name} is another image than when it was opened. The stream must have the same "
                f"rows in the same order each time: shuffle it with a seed; if its files have changed, open it again."
            )
        return read_content(to_place(content)) if isinstance(content, str) else (content, hashed)

    def _cursor(self, first: int) -> Cursor:
        own = _copied(self._dataset)
        # In a worker process, iter(own) would leave out the rows of other workers; batches are not divided.
        batches = (own.skip(first) if first else own).iter(ROWS)
        return Cursor((batch[self._cells.column] for batch in batches), first)


@final
class _CellHashes:
    """The hash of every cell of a column, in order.

    Attributes:
        column: The name of the column.
        hashes: The hashes of its cells.
        paths: Whether there are cells that hold the path of an image instead of its bytes.
    """

    def __init__(self, column: str) -> None:
        self.column, self.paths, self.hashes = column, False, Hashes()

    def add(self, cells: Sequence[Any]) -> None:
        """Append the hashes of further cells."""
        for cell in cells:
            content, hashed = parse_cell(cell)
            self.paths |= isinstance(content, str)
            self.hashes.append(hashed)


def _read_columns(dataset: Any, names: Sequence[str], cells: _CellHashes | None = None) -> dict[str, list[Any]]:
    """Some columns of a stream from top to bottom; hashes of another one are added to `cells`."""
    values: dict[str, list[Any]] = {name: [] for name in names}
    for batch in _copied(dataset).iter(ROWS):
        for name in names:
            values[name] += batch[name]
        if cells is not None:
            cells.add(batch[cells.column])
    return values


def _listing(dataset: Any) -> Listing:
    """The columns of a stream that name images and hold their labels."""
    header = tuple(dataset.features)
    label = label_column(header)
    names = [header[path_column(header)], *([] if label is None else [header[label]])]
    values = _read_columns(dataset.select_columns(names), names)
    if not values[names[0]]:
        raise ImagesError(f"a {_STREAM} must have rows; it has none. Pass one row per image.")
    return Listing("the data set", tuple(map(str.lower, names)), list(values.values()))


def _typed(dataset: Any) -> Any:
    """The data set with features; where it does not know them, those of its first row."""
    if dataset.features is not None:
        return dataset
    first = list(_copied(dataset).take(1))
    return dataset.cast(import_module("datasets").Dataset.from_list(first).features)


def _copied(dataset: Any) -> Any:
    """The same stream with a state of its own: iterators of one data set share theirs."""
    # A data set refers to the file systems of the process. In another thread, a copy of these would be added to them.
    shared = {id(value): value for key, value in vars(dataset).items() if key.endswith("__hffs_cache")}
    return copy.deepcopy(dataset, shared)


@contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Turn whatever a stream raises into one error for all images."""
    try:
        yield
    except DubitoError:
        raise
    except Exception as error:  # code of the user runs, and every file system has errors of its own
        raise ImagesError(
            f"{what} cannot be read ({type(error).__name__}: {first_words(error)}). Check the data set and the "
            f"network, then run the same call again: what an extraction has finished is kept."
        ) from error
