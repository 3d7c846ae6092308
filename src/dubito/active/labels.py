"""A table with the labels that people wrote into CSVs.

A label is the name of a class, whole or one of its synonyms (`tench, Tinca tinca` has two), or its number; empty or -1
where there is none yet.
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dubito.active._given import ids_of
from dubito.active.answers import read_answers
from dubito.data.image_set import some
from dubito.errors import DubitoWarning, TableError
from dubito.table import Table


def add_labels(table: Table, *paths: str | Path, classes: Sequence[str] | None = None) -> Table:
    """The table with the labels that stand in CSVs, in place of its own; -1 where there is none.

    Args:
        table: A pool, with labels or without.
        paths: With columns id and label, such as picks that were filled in, or suspects that were corrected.
        classes: Names of the labels in order, where they are classes of your own and not the model's.
    """
    label: Tensor = table.label.clone() if "label" in table else torch.full((len(table),), -1)
    names = _names(table, label, classes)
    numbers = _numbers(paths, names)
    rows = rows_of_ids(table, list(numbers))
    _tell_strangers([name for name in numbers if name not in rows], len(numbers), table)
    before = label.clone()
    for name, (row, *others) in rows.items():
        if others:
            raise TableError(
                f"every id must stand for one image; '{name}' stands for {len(others) + 1} rows of {table.name}. Give "
                f"them ids of their own."
            )
        label[row] = numbers[name]
    # What was computed from other labels is no longer true.
    stale = {"loss", *(key for key in table.columns if key.endswith("_loss"))} if (label != before).any() else set()
    found = table.select(*(key for key in table.columns if key not in stale)).extended(label=label)
    if classes is not None:
        found.label_space, found.label_names = "own", names
    return found


def rows_of_ids(table: Table, names: Sequence[str]) -> dict[str, list[int]]:
    """By id, the rows of a table, for those of these ids that it has."""
    wanted, found = set(names), defaultdict[str, list[int]](list)
    for row, name in enumerate(ids_of(table, np.arange(len(table))) if names else ()):
        if name in wanted:
            found[name].append(row)
    return dict(found)


def _names(table: Table, label: Int[Tensor, "n"], classes: Sequence[str] | None) -> list[str] | None:
    """What labels may be called."""
    known = None if table.label_names is None else list(table.label_names)
    if classes is None:
        return known
    other = table.label_space == "model" or (known is not None and known != list(classes))
    if other and bool((label >= 0).any()):
        raise TableError(
            f"classes must be those of the labels that {table.name} has already, "
            f"{some(known) if known else 'the classes of the model'}; got {some(list(classes))}. Leave out "
            f"classes, or the column label."
        )
    if len(set(map(_plain, classes))) < len(classes) or not classes:
        raise TableError(f"classes must be names that differ, at least one; got {some(list(classes), 8)}.")
    return list(classes)


def _numbers(paths: Sequence[str | Path], names: Sequence[str] | None) -> dict[str, int]:
    """By id, the class."""
    numbers: dict[str, int] = {}
    known = _by_name(names or ())
    for path in paths:
        found = read_answers(path)
        if "label" not in found.header:
            raise TableError(f"'{path}' must have a column label; it has {', '.join(found.header)}. Add one.")
        for name, cell in found.labels.items():
            number = _class(cell, names, known, f"'{path}': the label of '{name}'")
            if numbers.setdefault(name, number) != number:
                raise TableError(
                    f"every image must have one label; '{name}' has {numbers[name]} in an earlier file and {number} in "
                    f"'{path}'. Correct one of them."
                )
    return numbers


def _class(cell: str, names: Sequence[str] | None, known: Mapping[str, set[int]], what: str) -> int:
    found = known.get(_plain(cell), set())
    if len(found) == 1:
        return next(iter(found))
    whole = cell.removesuffix(".0")  # what software for tables makes of whole numbers beside empty cells
    if not found and whole.isdecimal() and (names is None or int(whole) < len(names)):
        return int(whole)
    if names is None:
        raise TableError(
            f"{what} must be a number from 0 on, as nobody knows what the classes are called; got '{cell}'. Give "
            f"their names in order: classes=['cat', 'dog'] (--classes cat,dog)."
        )
    several = f", which stands for {len(found)} of them, {', '.join(map(str, sorted(found)))}" if found else ""
    raise TableError(
        f"{what} must be one of the {len(names)} classes, {some(list(names))}, or a number below {len(names)}; "
        f"got '{cell}'{several}. Correct it, or name classes of your own: classes=['cat', 'dog'] (--classes cat,dog)."
    )


def _by_name(names: Sequence[str]) -> dict[str, set[int]]:
    """Every way to name a class; a whole name goes before a synonym."""
    whole, synonyms = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for number, name in enumerate(names):
        whole[_plain(name)].add(number)
        for part in name.split(","):
            synonyms[_plain(part)].add(number)
    return {**synonyms, **whole}


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def _tell_strangers(strangers: Sequence[str], of: int, table: Table) -> None:
    if strangers:
        warnings.warn(
            f"{len(strangers)} of {of} labelled ids are not in {table.name}: {some(strangers)}. Spreadsheets may "
            f"change names that look like numbers (0012 becomes 12).",
            DubitoWarning,
            stacklevel=3,
        )
