"""Images in the cells of a column that is read forward: those of Parquet files and of streams.

A cell is the bytes of an image file or, as Hugging Face writes images, {"bytes": ..., "path": ...}.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, final

from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.data.archives import unwrap
from dubito.data.decode import LIMIT, decode, hash_content, too_large
from dubito.data.image_set import ImageSet, hash_bytes
from dubito.errors import BrokenImageError
from dubito.storage import encode
from dubito.threads import Local

ROWS = 16
"""Cells that are read at once."""


class CellImages(ImageSet):
    """Images whose cells every thread of every process reads forward, with a cursor of its own."""

    def __init__(
        self, name: str, ids: Sequence[str], labels: Int[Tensor, "n"] | None, classes: Sequence[str] | None
    ) -> None:
        super().__init__(name, ids, labels, classes)
        self._local = Local()

    def read(self, index: int) -> Image.Image:
        """The image as RGB."""
        return unwrap(self.read_hashed(index)[0])

    def read_hashed(self, index: int) -> tuple[Image.Image | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of its bytes, from one reading."""
        content, hashed = self.content(index)
        try:
            return decode(content, f"{self.ids[index]} of {self.name}"), hashed
        except BrokenImageError as broken:
            return broken, hashed

    @abstractmethod
    def content(self, index: int) -> tuple[bytes | OSError, bytes]:
        """The bytes of an image, or why there are none, and their hash."""

    def cell(self, column: Hashable, row: int, cursor: "Callable[[], Cursor]") -> Any:
        """The cell of a row of a column, from this thread's cursor.

        Args:
            column: Which column it is, if there are several.
            row: The row.
            cursor: Makes a cursor that begins at the row or before it, where there is none that does.
        """
        # One that a forked process has inherited stays as it is: closing it could wait for threads that are not there.
        cursors: dict[int, tuple[Hashable, Cursor]] = self._local.__dict__.setdefault("cursors", {})
        process = os.getpid()
        of, current = cursors.pop(process, (None, None))
        if current is None or of != column or row < current.first:
            current = cursor()
        value = current.cell(row)
        cursors[process] = column, current  # unless it has failed
        return value


@final
class Cursor:
    """The cells of a column from some row on.

    Args:
        parts: The cells, some at a time; a part without any is the end.
        first: The row of the first of them.
    """

    def __init__(self, parts: Iterator[list[Any]], first: int = 0) -> None:
        self._parts, self._cells, self.first = parts, list[Any](), first

    def cell(self, row: int) -> Any:
        """One cell, at or behind `first`."""
        while row >= self.first + len(self._cells):
            self.first += len(self._cells)
            self._cells = next(self._parts, [])
            if not self._cells:
                raise OSError("the column has ended before it")
        return self._cells[row - self.first]


def parse_cell(cell: Any) -> tuple[bytes | str | OSError, bytes]:
    """The bytes of an image, its path, or why there is neither; and a hash of the cell."""
    path = cell.get("path") if isinstance(cell, dict) else None
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if content is None and path:
        return str(path), hash_bytes(encode(str(path)))
    if content is None or isinstance(content, OSError):
        return content or OSError("it has neither bytes nor a path"), hash_bytes(b"unreadable")
    return (content if len(content) <= LIMIT else too_large()), hash_content(content)
