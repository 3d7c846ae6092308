"""What people annotated, beyond one label per image: sets of labels, and votes for and against labels.

    val_id,label,real_labels             ReaL-like: all labels that people accept, none, one or several
    2,970,970 795

    val_id,label,votes_no,votes_maybe,votes_yes      one row for every label that people were asked about
    2,970,0,1,4

Both come out by image, keyed by the text of its cell. `find_rows` matches such keys with the ids of a table as labels
are matched: by id, file name, stem or number.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dubito.data.csv_table import CsvTable, read_csv
from dubito.data.image_set import some
from dubito.data.labels import NAMINGS
from dubito.errors import ImagesError

_SETS = "real_labels"


class Votes(NamedTuple):
    """How many people answered what, when asked whether an image shows a label."""

    no: int
    maybe: int
    yes: int


def read_label_sets(csv: str | Path) -> dict[str, tuple[int, ...]]:
    """The labels that people accept for each image, from a CSV with a column real_labels, such as "970 795".

    The column id, image, path, file or filename names the image, else the first one. An empty cell is an empty set:
    people found no label that fits.
    """
    path = Path(csv).expanduser()
    table = read_csv(path)
    column = _column(table, _SETS)
    label_sets: dict[str, tuple[int, ...]] = {}
    for row in table.rows:
        key, cell = row[table.paths], row[column]
        if key in label_sets:
            raise ImagesError(f"CSV file '{path}' must name each image once; '{key}' comes twice. Leave one row.")
        label_sets[key] = tuple(_whole(part, path, _SETS) for part in cell.split())
    return label_sets


def read_votes(csv: str | Path) -> dict[str, dict[int, Votes]]:
    """The votes on each image by label, from a CSV with the columns label, votes_no, votes_maybe and votes_yes.

    The column id, image, path, file or filename names the image, else the first one. Images without votes
    do not occur.
    """
    path = Path(csv).expanduser()
    table = read_csv(path)
    columns = {name: _column(table, name) for name in ("label", "votes_no", "votes_maybe", "votes_yes")}
    by_image: dict[str, dict[int, Votes]] = {}
    for row in table.rows:
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
    ways = [_by_name(listed, ids, naming) for naming in NAMINGS]
    best = max(ways, key=len)
    if not best:
        raise ImagesError(
            f"{what} must name images of the table by id, file name, stem or number; none of the {len(listed)} keys "
            f"({some(listed)}) is one of its {len(ids)} ids ({some(ids)}). Give both the same names."
        )
    return best


def _by_name(keys: Sequence[str], ids: Sequence[str], naming: Callable[[str], str]) -> dict[str, int]:
    row_of = _unique((naming(name), row) for row, name in enumerate(ids))
    key_of = _unique((naming(key), number) for number, key in enumerate(keys))
    return {keys[number]: row_of[name] for name, number in key_of.items() if name in row_of}


def _unique(pairs: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """By name, without the names that come twice."""
    unique: dict[str, int] = {}
    twice = set()
    for name, position in pairs:
        if name in unique:
            twice.add(name)
        unique[name] = position
    return {name: position for name, position in unique.items() if name not in twice}


def _column(table: CsvTable, name: str) -> int:
    if name not in table.header:
        raise ImagesError(
            f"CSV file '{table.path}' must have a column '{name}'; its columns are {some(table.header, 8)}. "
            f"Rename the one that is meant."
        )
    return table.header.index(name)


def _whole(text: str, path: Path, column: str) -> int:
    if not text.isdecimal():
        raise ImagesError(
            f"column '{column}' of CSV file '{path}' must hold whole numbers from 0; got '{text}'. Correct that row."
        )
    return int(text)
