"""Labels that people write into CSV files: read as spreadsheets save them, added to a table, and never overwritten.

A file has a header with a column id and a column label, or their other names in `data/labels.py`; others are one's
own. Commas, semicolons or tabs, any line ends, UTF-8 with or without a byte order mark. A label is the name of a class,
whole or one of its synonyms (`tench, Tinca tinca` has two), or its number; empty or -1 where there is none yet.
"""

import csv
import io
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from dubito.data.image_set import some
from dubito.data.labels import LABEL_COLUMNS, PATH_COLUMNS
from dubito.errors import ArtefactError, DubitoWarning, TableError, UnlabelledError
from dubito.storage import reading, write_csv
from dubito.table import Table

_UNLABELLED = ("", "-1", "-1.0")


def add_labels(table: Table, *paths: str | Path, classes: Sequence[str] | None = None) -> Table:
    """The table with the labels of CSV files in place of its own; -1 where there is none.

    Args:
        table: A pool, with labels or without.
        paths: Files with columns id and label, such as picks that were filled in, or label issues that were corrected.
        classes: Class names in order, where labels are classes of your own and not the model's.
    """
    label: Tensor = table.label.clone() if "label" in table else torch.full((len(table),), -1)
    names = _class_names(table, label, classes)
    numbers = _numbers(paths, names)
    rows = rows_of_ids(table, list(numbers))
    if unknown := [name for name in numbers if name not in rows]:
        warnings.warn(
            f"{len(unknown)} of {len(numbers)} labelled ids are not in {table.name}: {some(unknown)}. Spreadsheets may "
            f"change names that look like numbers (0012 becomes 12).",
            DubitoWarning,
            stacklevel=2,
        )
    before = label.clone()
    for name, (row, *others) in rows.items():
        if others:
            raise TableError(
                f"every id must name one image; '{name}' names {len(others) + 1} of {table.name}. Make ids unique."
            )
        label[row] = numbers[name]
    # Losses were computed from the previous labels.
    stale = {"loss", *(key for key in table.columns if key.endswith("_loss"))} if (label != before).any() else set()
    labelled = table.select(*(key for key in table.columns if key not in stale)).extended(label=label)
    if classes is not None:
        labelled.label_space, labelled.label_names = "own", names
    return labelled


def rows_of_ids(table: Table, names: Sequence[str]) -> dict[str, list[int]]:
    """By id, the rows of a table, for those of these ids that it has."""
    wanted, rows = set(names), defaultdict[str, list[int]](list)
    for row, name in enumerate(table.row_ids() if names else ()):
        if name in wanted:
            rows[name].append(row)
    for name in wanted - rows.keys():
        if any("\udc80" <= letter <= "\udcff" for letter in name):  # bytes that are not UTF-8
            raise ArtefactError(
                f"a file of labels must be a CSV in UTF-8, but for the names of images; {name!a} is none of those of "
                f"{table.name}. Save it as 'CSV UTF-8'."
            )
    return dict(rows)


def without_label(table: Table, rows: Int64[np.ndarray, "k"]) -> Int64[np.ndarray, "w"]:
    """The rows among these that have no label yet: -1, or no column label at all."""
    if "label" not in table or not len(rows):
        return rows
    unlabelled: np.ndarray = rows[table.select("label").rows(torch.from_numpy(rows)).label.numpy() < 0]
    return unlabelled


def require_labels(table: Table, rows: Int64[np.ndarray, "k"], by: str) -> None:
    """Raise UnlabelledError unless all rows have a label."""
    if without := table.row_ids(without_label(table, rows)):
        raise UnlabelledError(
            f"{by}: {len(without)} of {len(rows)} rows of {table.name} have no label yet (-1): {some(without)}. Label "
            f"them, and run the same call again."
        )


@final
@dataclass(frozen=True)
class LabelFile:
    """The content of one file.

    Attributes:
        header: The names of its columns, in lower case.
        lines: By id, the cells by column.
    """

    header: Sequence[str]
    lines: Mapping[str, Mapping[str, str]]

    @property
    def labels(self) -> dict[str, str]:
        """By id, the label, where there is one."""
        labels = {name: cells.get("label", "").strip() for name, cells in self.lines.items()}
        return {name: label for name, label in labels.items() if label not in _UNLABELLED}


def read_labels(path: str | Path) -> LabelFile:
    """Read a file that names images in a column id, or as in other files of labels; ArtefactError if it has none."""
    header, lines = _cells(Path(path))
    if "id" not in header:
        raise ArtefactError(f"'{path}' must have a column id; it has {', '.join(filter(None, header)) or 'none'}.")
    by_id: dict[str, dict[str, str]] = {}
    for number, cells in lines:
        if any(surplus := cells.pop(None, ())):
            raise ArtefactError(
                f"'{path}' must have {len(header)} cells per line, as its header has; line {number}, of "
                f"'{cells['id']}', has {len(header) + len(surplus)}. Quote cells that contain the separator."
            )
        if not any(map(str.strip, cells.values())):
            continue
        first = by_id.setdefault(cells["id"], cells).get("label", "").strip()
        label = cells.get("label", "").strip()
        if first != label:
            raise ArtefactError(
                f"'{path}' must have one label per image; '{cells['id']}' has '{first}' and, in line {number}, "
                f"'{label}'. Keep one line per image."
            )
    return LabelFile(header, by_id)


def write_picks(path: str | Path, picks: Sequence[Mapping[str, Any]]) -> Path:
    """Write picks (id, round, u and rank) as CSV with a column label, and return its path.

    Labels and further columns that people wrote into an earlier file of these picks are kept. A file with labels of
    other images is not replaced.
    """
    place, header = Path(path), ("id", "round", "u", "rank")
    ours = place.is_file() and {"id", "label"} <= set(_cells(place)[0])  # else it is some other file, or none
    earlier = read_labels(place) if ours else LabelFile((), {})
    names = {pick["id"] for pick in picks}
    if lost := [name for name in earlier.labels if name not in names]:
        raise ArtefactError(
            f"'{place}' has labels of {len(lost)} images that are not among these picks: {some(lost)}. It was not "
            f"replaced. Choose another place, or move it away. Save it as 'CSV UTF-8' if a spreadsheet changed names."
        )
    own = ["label", *(key for key in earlier.header if key and key not in (*header, "label"))]
    lines = ({**earlier.lines.get(pick["id"], {}), **pick} for pick in picks)
    return write_csv(place, [[*header, *own], *([line.get(key, "") for key in (*header, *own)] for line in lines)])


def _class_names(table: Table, label: Int[Tensor, "n"], classes: Sequence[str] | None) -> list[str] | None:
    """The names that labels may have."""
    names = None if table.label_names is None else list(table.label_names)
    if classes is None:
        return names
    other = table.label_space == "model" or (names is not None and names != list(classes))
    if other and bool((label >= 0).any()):
        raise TableError(
            f"classes must be those of the labels that {table.name} has already, "
            f"{some(names) if names else 'the classes of the model'}; got {some(list(classes))}. Leave out "
            f"classes, or the column label."
        )
    if len(set(map(_plain, classes))) < len(classes) or not classes:
        raise TableError(f"classes must be at least one name, all different; got {some(list(classes), 8)}.")
    return list(classes)


def _numbers(paths: Sequence[str | Path], names: Sequence[str] | None) -> dict[str, int]:
    """By id, the class."""
    numbers: dict[str, int] = {}
    whole, by_name = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for number, name in enumerate(names or ()):
        whole[_plain(name)].add(number)
        for part in name.split(","):
            by_name[_plain(part)].add(number)
    by_name |= whole  # a whole name takes precedence over a synonym
    for path in paths:
        file = read_labels(path)
        if "label" not in file.header:
            raise TableError(f"'{path}' must have a column label; it has {', '.join(file.header)}. Add one.")
        for name, cell in file.labels.items():
            number = _class(cell, names, by_name, f"'{path}': the label of '{name}'")
            if numbers.setdefault(name, number) != number:
                raise TableError(
                    f"every image must have one label; '{name}' has {numbers[name]} in an earlier file and {number} in "
                    f"'{path}'. Correct one of them."
                )
    return numbers


def _class(cell: str, names: Sequence[str] | None, by_name: Mapping[str, set[int]], what: str) -> int:
    matches = by_name.get(_plain(cell), set())
    if len(matches) == 1:
        return next(iter(matches))
    whole = cell.removesuffix(".0")  # spreadsheets make floats of integers beside empty cells
    if not matches and whole.isdecimal() and (names is None or int(whole) < len(names)):
        return int(whole)
    expected = "a number from 0 on, because the class names are unknown"
    if names is not None:
        expected = f"one of the {len(names)} classes, {some(list(names))}, or a number below {len(names)}"
    several = f", which names {len(matches)} of them, {', '.join(map(str, sorted(matches)))}" if matches else ""
    raise TableError(
        f"{what} must be {expected}; got '{cell}'{several}. Correct it, or name your own classes in order: "
        f"classes=['cat', 'dog']."
    )


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _cells(path: Path) -> tuple[list[str], list[tuple[int, dict[Any, Any]]]]:
    """The names of the columns in lower case, and every line with its number, by column; surplus cells under None."""
    with reading(f"'{path}'", "Labels must be a CSV in UTF-8 with a column id: save it as 'CSV UTF-8'."):
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
        # Spreadsheets separate by semicolons where the comma is the decimal point.
        separator = max(",;\t", key=next(iter(text.splitlines()), "").count)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, restval="")
        header = [cell.strip().lower() for cell in reader.fieldnames or ()]
        for own, names in (("id", PATH_COLUMNS), ("label", LABEL_COLUMNS)):
            if own not in header:  # the names that other files of labels may have
                other = next((name for name in names if name in header), own)
                header = [own if cell == other else cell for cell in header]
        reader.fieldnames = header
        lines = [(reader.line_num, cells) for cells in reader]
        # Names of files may be any bytes, which `write_csv` keeps; everything else is text.
        "".join(cell for _, cells in lines for key, cell in cells.items() if key not in ("id", None)).encode()
    return header, lines
