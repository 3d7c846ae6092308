"""Cells that are read forward: cursors that begin again, and what a cell may hold."""

from collections.abc import Iterator

import pytest

from dubito.data.cells import CellImages, Cursor, parse_cell
from dubito.data.image_set import PositionIds
from dubito.errors import StoreError


class Column(CellImages):
    """A column of numbers, two at a time, that fails where it is told to."""

    def __init__(self, n: int, *failing: int) -> None:
        super().__init__("a column", PositionIds(n), None, None)
        self.n, self.failing, self.begun = n, list(failing), list[int]()

    def content(self, index: int) -> tuple[bytes | OSError, bytes]:
        content = b"%d" % self.cell(None, index, lambda: self._cursor(index))
        return content, content

    def contents(self, rows):
        return [self.content(row)[1] for row in rows]

    def _cursor(self, first: int) -> Cursor:
        self.begun.append(first)
        return Cursor(self._parts(first), first)

    def _parts(self, first: int) -> Iterator[list[int]]:
        for row in range(first, self.n, 2):
            if row in self.failing:
                self.failing.remove(row)
                raise StoreError("the store does not answer")
            yield list(range(row, min(row + 2, self.n)))


def test_one_cursor_reads_forward_and_another_one_begins_for_a_row_behind_it() -> None:
    column = Column(9)
    assert column.contents([0, 1, 2, 7, 6, 8, 3]) == [b"0", b"1", b"2", b"7", b"6", b"8", b"3"]
    assert column.begun == [0, 3]


def test_a_cursor_that_has_failed_is_never_used_again() -> None:
    column = Column(9, 4)
    assert column.contents([0, 3]) == [b"0", b"3"]
    with pytest.raises(StoreError):
        column.content(4)
    assert column.contents([4, 5]) == [b"4", b"5"]


def test_a_column_that_ends_too_early() -> None:
    with pytest.raises(OSError, match="the column has ended before it"):
        Column(3).cell(None, 5, lambda: Cursor(iter([[0, 1], [2]])))


@pytest.mark.parametrize(
    ("cell", "content"),
    [
        (b"bytes", b"bytes"),
        ({"bytes": b"bytes", "path": "a.jpg"}, b"bytes"),
        ({"bytes": None, "path": "a.jpg"}, "a.jpg"),
    ],
)
def test_a_cell_holds_bytes_or_a_path(cell: object, content: object) -> None:
    assert parse_cell(cell)[0] == content


@pytest.mark.parametrize("cell", [None, {}, {"bytes": None, "path": None}, OSError("damaged")])
def test_a_cell_without_either_says_why(cell: object) -> None:
    content, hashed = parse_cell(cell)
    assert isinstance(content, OSError)
    assert hashed == parse_cell(None)[1]
