"""A CSV file with a header, read whole: the one place that knows how such files can be wrong."""

import csv
from dataclasses import dataclass
from pathlib import Path

from dubito.data.tree import is_image
from dubito.errors import ImagesError

_PATH_COLUMNS = ("path", "file", "filename", "image", "id")
_EXAMPLE = "The first line names the columns, such as: path,label"


@dataclass(frozen=True)
class CsvTable:
    """The cells of a CSV file, as text."""

    path: Path
    header: tuple[str, ...]
    rows: list[list[str]]

    def column(self, index: int) -> list[str]:
        """One column, top to bottom."""
        return [row[index] for row in self.rows]

    @property
    def paths(self) -> int:
        """The position of the column that names images: path, file, filename, image or id, else the first."""
        first = 1 if self.header[0] == "label" and len(self.header) > 1 else 0
        return next((self.header.index(name) for name in _PATH_COLUMNS if name in self.header), first)

    @property
    def label(self) -> int | None:
        """The position of the column label, else of the other one of two columns, else None."""
        if "label" in self.header:
            return self.header.index("label")
        return 1 - self.paths if len(self.header) == 2 else None


def read_csv(path: Path) -> CsvTable:
    """A CSV file with commas, in UTF-8 but for file names; the first line names the columns, in capitals or not."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except (OSError, csv.Error) as error:
        raise _unreadable(path, error) from error
    if len(lines) < 2:
        raise ImagesError(
            f"CSV file '{path}' must have a header and at least one row; got {len(lines)} lines. {_EXAMPLE}."
        )
    header = tuple(cell.lower() for cell in lines[0][1])
    looks_like_data = [cell for cell in header if is_image(cell) or cell.isdecimal()]
    if looks_like_data:
        raise ImagesError(
            f"CSV file '{path}' must begin with a header; got '{looks_like_data[0]}', which looks "
            f"like data. {_EXAMPLE}."
        )
    for number, row in lines[1:]:
        if len(row) != len(header):
            raise ImagesError(
                f"CSV file '{path}' must have {len(header)} cells in every row, as its header has; "
                f"line {number} has {len(row)}. Quote cells that contain commas."
            )
    table = CsvTable(path, header, [row for _, row in lines[1:]])
    try:  # names of files may be any bytes, everything else is text
        "".join(
            cell for row in (header, *table.rows) for place, cell in enumerate(row) if place != table.paths
        ).encode()
    except UnicodeEncodeError as error:
        raise _unreadable(path, error) from error
    return table


def _unreadable(path: Path, error: Exception) -> ImagesError:
    return ImagesError(f"CSV file '{path}' must be readable text in UTF-8; reading it gave: {error}. Save it as UTF-8.")
