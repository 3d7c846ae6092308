"""Images in Parquet files: the bytes of image files in a column, or paths and addresses of image files.

Hugging Face writes images as {"bytes": ..., "path": ...}, and the names of the classes into the schema. Other columns
are known by their names, as in a CSV file.

A row group is decoded from its start, a few rows at a time, and never held as a whole; so reading forward is fast,
every process needs memory for a few images only, and a damaged row group costs its own images alone.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, final

import numpy as np
from jaxtyping import Int
from torch import Tensor

from dubito.data.cells import ROWS, CellImages, Cursor, parse_cell
from dubito.data.decode import read_content
from dubito.data.files import FileImages, listed_ids
from dubito.data.image_set import PositionIds, some
from dubito.data.labels import LABEL_COLUMNS, PATH_COLUMNS, Listing, to_labels
from dubito.errors import DubitoError, ImagesError, MissingPackageError
from dubito.storage import reading
from dubito.storage.locations import Place, join, names_of, to_readable

PARQUETS = (".parquet", ".pq")
"""Endings, in lower case, of Parquet files."""
_THREADS = 8
_BUFFER = 1 << 20
_REPAIR = "Copy it again, or write it again."


def open_parquet(
    *places: Place, shards: Sequence[str] | None = None, name: str | None = None
) -> "ParquetImages | FileImages":
    """The images of one or several Parquet files, row by row, with the labels of their label column, if there is one.

    Ids of images in a column are the names of a column that gives each its own, else positions in the file. Paths are
    relative to the folder that holds the files.

    Args:
        places: The files.
        shards: A name for each of them, with which positions begin.
        name: What errors call the set; by default the first file.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        tables = list(pool.map(_ParquetTable, places))
    what = f"'{name or places[0]}'"
    schema = tables[0]
    for table in tables[1:]:
        if table.columns != schema.columns:
            raise ImagesError(
                f"Parquet files of one set must have the same columns; '{places[0]}' has {some(schema.columns, 8)}, "
                f"'{table.place}' has {some(table.columns, 8)}. Open them one by one."
            )
    if not sum(table.rows for table in tables):
        raise ImagesError(f"Parquet file {what} must have rows; it has none. Pass one row per image.")
    if schema.images is None:
        return _open_listed(tables, what, name or str(places[0]))
    labels, classes = None, schema.classes
    values = [] if schema.label is None else [cell for table in tables for cell in table.cells(schema.label)]
    if values and values != [-1] * len(values):
        labels, classes = to_labels(values, f"column '{schema.label}' of {what}", classes)
    return ParquetImages(tables, _ids(tables, shards), labels, classes, name=name or str(places[0]))


@final
class ParquetImages(CellImages):
    """A column of images in Parquet files; `open_parquet` makes it."""

    def __init__(
        self,
        tables: "Sequence[_ParquetTable]",
        ids: Sequence[str],
        labels: Int[Tensor, "n"] | None,
        classes: Sequence[str] | None,
        *,
        name: str,
    ) -> None:
        super().__init__(name, ids, labels, classes)
        self.places = [table.place.absolute() for table in tables]
        self.column = str(tables[0].images)
        sizes = [(file, group, rows) for file, table in enumerate(tables) for group, rows in enumerate(table.groups)]
        self._groups = [(file, group) for file, group, rows in sizes]
        self._first = np.cumsum([0, *(rows for _, _, rows in sizes)])

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of the bytes of each image."""
        return [self.content(row)[1] for row in rows]

    def content(self, index: int) -> tuple[bytes | OSError, bytes]:
        """The bytes of an image, or why there are none, and their hash."""
        number = int(np.searchsorted(self._first, index, "right")) - 1
        file, group = self._groups[number]
        place = self.places[file]
        cell = self.cell(number, index - int(self._first[number]), lambda: Cursor(_cells(place, group, self.column)))
        content, hashed = parse_cell(cell)
        return read_content(join(place.parent, content)) if isinstance(content, str) else (content, hashed)


def _cells(place: Place, group: int, column: str) -> Iterator[list[Any]]:
    """The cells of a column in one row group, a few at a time; from damage on, the reason stands for every cell."""
    try:
        for batch in _open(place).iter_batches(ROWS, row_groups=[group], columns=[column], use_threads=False):
            yield batch.column(0).to_pylist()
        reason = "it ends before its last row"
    except DubitoError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error)
    yield from repeat([OSError(f"its row group is damaged: {reason}")] * ROWS)


@final
class _ParquetTable:
    """What the schema of a Parquet file says.

    Attributes:
        place: The file.
        columns: The names of its columns.
        groups: The rows of each row group.
        images: The column that holds the bytes of images, or None.
        label: The column of labels of those images, or None.
        classes: The names of the classes, or None.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        with reading(f"Parquet file '{place}'", _REPAIR, error=ImagesError):
            file = _open(place)
            schema, metadata = file.schema_arrow, file.metadata
            self.groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            known = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            features = known.get("info", {}).get("features", {}) if isinstance(known, dict) else {}
        self.columns = list(schema.names)
        self.texts = [name for name in self.columns if str(schema.field(name).type) in ("string", "large_string")]
        pictures = [name for name in self.columns if _holds_bytes(schema.field(name).type)]
        by_name = [name for known in PATH_COLUMNS for name in pictures if name.lower() == known]
        self.images = next(iter([*by_name, *pictures]), None)
        classes = [name for name in self.columns if isinstance(_feature(features, name).get("names"), list)]
        by_name = [name for known in LABEL_COLUMNS for name in self.columns if name.lower() == known]
        self.label = next(iter([*by_name, *classes]), None)
        names = _feature(features, self.label).get("names")
        self.classes = tuple(map(str, names)) if isinstance(names, list) else None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(self.groups)

    def cells(self, column: str) -> list[Any]:
        """A column from top to bottom."""
        with reading(f"column '{column}' of Parquet file '{self.place}'", _REPAIR, error=ImagesError):
            return list(_open(self.place).read(columns=[column], use_threads=False).column(0).to_pylist())


def _open_listed(tables: Sequence[_ParquetTable], what: str, name: str) -> FileImages:
    """The image files that a column of texts names."""
    header = tuple(column.lower() for column in tables[0].columns)
    listing = Listing(f"Parquet file {what}", header, [])  # which says which columns they are
    column = tables[0].columns[listing.paths]
    if column not in tables[0].texts:
        raise ImagesError(
            f"Parquet file {what} must have a column of image bytes, paths or addresses; its columns are "
            f"{some(tables[0].columns, 8)}. Name it 'image' or 'path'."
        )
    root = tables[0].place
    for _ in names_of([table.place for table in tables])[0].split("/"):
        root = root.parent
    repair = f"Paths are relative to '{root}'."
    paths = [cell for table in tables for cell in table.cells(column)]
    ids = listed_ids(root, paths, f"column '{column}' of {what}", repair)
    label = column if listing.label is None else tables[0].columns[listing.label]
    values = [] if label == column else [cell for table in tables for cell in table.cells(label)]
    named = to_labels(values, f"column '{label}' of {what}") if values else ()
    return FileImages(root, ids, *named, name=name)


def _ids(tables: Sequence[_ParquetTable], shards: Sequence[str] | None) -> Sequence[str]:
    """The names in the first column of names that gives each image its own; else positions in the file."""
    for column in [name for known in PATH_COLUMNS for name in tables[0].texts if name.lower() == known]:
        names = [cell for table in tables for cell in table.cells(column)]
        if all(names) and len(set(names)) == len(names):
            return names
    if shards is None:
        return PositionIds(sum(table.rows for table in tables))
    parts = zip(shards, tables, strict=True)
    return [f"{shard}/{position}" for shard, table in parts if table.rows for position in PositionIds(table.rows)]


def _open(place: Place) -> Any:
    try:
        from pyarrow import parquet  # noqa: PLC0415 (an optional package)
    except ImportError as error:
        raise MissingPackageError(f"'{place}' is read by pyarrow: pip install 'dubito[parquet]'") from error
    return parquet.ParquetFile(to_readable(place), buffer_size=_BUFFER, pre_buffer=False)


def _holds_bytes(kind: Any) -> bool:
    """Whether cells are bytes, or {"bytes": ...} as Hugging Face writes images."""
    if str(kind).startswith("struct<"):
        return any(kind.field(place).name == "bytes" for place in range(kind.num_fields))
    return str(kind) in ("binary", "large_binary")


def _feature(features: Any, name: str | None) -> dict[str, Any]:
    feature = features.get(name) if isinstance(features, dict) else None
    return feature if isinstance(feature, dict) else {}
