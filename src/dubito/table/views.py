"""Views of tables: chosen rows, several tables one after the other, or as the members of an ensemble.

No row is read before it is needed.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dubito.errors import TableError
from dubito.table.columns import compared_names, settings_difference
from dubito.table.provenance import Provenance, check_provenance
from dubito.table.table import Column, Exact, Table, check_table, take

_OF_IMAGES = ("id", "label", "image_index", "epoch")
"""Columns that describe the images and not what the model made of them."""
MEMBERS = "members"
"""What the columns of `ensemble` are called."""
_ONE_ORDER = "Members of one ensemble share their classes, in one order."


def chosen_rows(table: Table, index: Int[Tensor, "k"]) -> Table:
    """Some rows in the order of the indices, each read when it is needed (`Table.rows` reads them at once).

    >>> chosen_rows(Table(loss=[1.0, 2.0, 3.0]), torch.tensor([2, 0])).loss.tolist()
    [3.0, 1.0]
    """
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(table)):
        raise TableError(
            f"rows of {table.name} must be indices from 0 to {len(table) - 1}; "
            f"got {int(index.min())} to {int(index.max())}. Choose among its rows."
        )

    def chosen(column: Column) -> Computed:
        return Computed((len(index), *column.shape[1:]), partial(_chosen, column, index))

    return table.with_only({name: chosen(table.column(name)) for name in table.columns})


def _chosen(column: Column, index: Int[Tensor, "k"], rows: Exact) -> Any:
    return take(column, index[rows])


def concat(tables: Sequence[Table] | Table) -> Table:
    """Several tables one after the other, with the columns that all of them have.

    They must come from one model. If some have augmented epochs, a table without them counts as one epoch, and rows
    with the same `image_index` stay together when images are held out. To train on labelled and unlabelled images
    together, give the unlabelled ones a loss with `with_expected_loss`.

    >>> concat([Table(loss=[1.0], label=[0]), Table(loss=[2.0, 3.0])]).loss.tolist()
    [1.0, 2.0, 3.0]
    """
    tables = _listed(tables, least=1, by="concat")
    for other in tables[1:]:
        both = f"{tables[0].name} and {other.name}"
        logits = "logit" in tables[0] and "logit" in other
        check_provenance(tables[0].provenance, other.provenance, by="concat", of=both, logits=logits)
    provenance = _provenance(tables)
    if any("image_index" in table for table in tables):  # without, crops of one image could not be kept together
        numbers = [torch.arange(len(table)) for table in tables]
        tables = [
            table if "image_index" in table else table.extended(image_index=number, epoch=torch.zeros_like(number))
            for table, number in zip(tables, numbers, strict=True)
        ]
    names = [name for name in tables[0].columns if all(name in table for table in tables)]
    named = {tuple(table.label_names) for table in tables if "label" in table and table.label_names}
    if len({table.label_space for table in tables}) > 1 or len(named) > 1:  # a label is not the same class in all
        names = [name for name in names if name != "label"]
    if not names:
        raise TableError(
            f"concat: {', '.join(table.name for table in tables)} have no column in common. "
            f"Extract them with the same probes."
        )
    for name in names:
        tails = {tuple(table.shape(name)[1:]) for table in tables}
        if len(tails) > 1:
            raise TableError(
                f"concat: column '{name}' must have one width in all tables; got {sorted(tails)}. "
                f"Join tables of one model."
            )
    _check_settings(tables, names)
    columns = {name: Stacked([table.column(name) for table in tables]) for name in names}
    combined = tables[0].with_only(columns, name=" + ".join(table.name for table in tables))
    combined.provenance = provenance
    combined.label_names = next((table.label_names for table in tables if table.label_names), None)
    return combined


def ensemble(tables: Sequence[Table] | Table) -> Table:
    """Tables of the same images, each made by a model of its own, as one explicit ensemble.

    It has the columns `members_logit` (n, m, c), the logits of each model; `logit` (n, c), the logarithm of their mean
    probability, so that scores of logits and `evaluate` see the ensemble's own prediction; and, where the tables have
    them, `label`, `id`, `image_index` and `epoch`. For models that share a transform, one extraction with the probe of
    several models does the same.

    >>> both = ensemble([Table(logit=[[8.0, 0.0]]), Table(logit=[[0.0, 8.0]])])  # two sure models that disagree
    >>> both.shape("members_logit"), [round(p, 3) for p in both.logit.exp()[0].tolist()]
    ((1, 2, 2), [0.5, 0.5])
    """
    tables = _listed(tables, least=2, by="ensemble")
    for table in tables:
        table.require("logit", by="ensemble")
    _check_members(tables)
    labelled = [table for table in tables if "label" in table]
    logits = [table.column("logit") for table in tables]
    n, c = logits[0].shape
    columns: dict[str, Any] = {
        **{name: next((table.column(name) for table in tables if name in table), None) for name in _OF_IMAGES},
        "logit": Computed((n, c), partial(_log_mean, logits)),
        f"{MEMBERS}_logit": Computed((n, len(tables), c), lambda rows: torch.stack([each[rows] for each in logits], 1)),
    }
    members = tuple(table.provenance for table in tables if table.provenance is not None)
    models = ", ".join(str(member.model) for member in members)
    known = len(members) == len(tables)
    return Table(
        name=f"ensemble of {', '.join(table.name for table in tables)}",
        classes=next((table.classes for table in tables if table.classes), None),
        label_space=labelled[0].label_space if labelled else "model",
        label_names=next((table.label_names for table in labelled if table.label_names), None),
        skipped=tables[0].skipped,
        provenance=Provenance(model=f"ensemble of {models}", members=members) if known else None,
        **columns,
    )


def _listed(tables: Sequence[Table] | Table, *, least: int, by: str) -> list[Table]:
    """The tables as a list; TableError for a single one, too few, or what is no table."""
    if isinstance(tables, Table | str) or len(tables) < least:
        got = "a single one" if isinstance(tables, Table | str) else len(tables)
        many = "tables" if least > 1 else "table"
        raise TableError(f"{by} needs a list of at least {least} {many}; got {got}. Pass a list: {by}([a, b]).")
    for table in tables:
        check_table(table, by=by, what="every one of tables")
    return list(tables)


def _check_members(tables: Sequence[Table]) -> None:
    """Raise TableError unless rows, classes and labels are the same. A table that lacks a column is not compared."""
    first = tables[0]
    for other in tables[1:]:
        if len(first) != len(other):
            rows = f"they have {len(first)} and {len(other)} rows"
            skipped = f"{len(first.skipped)} and {len(other.skipped)} skipped"
            raise _unlike(first, other, "images", f"{rows}, {skipped}", "Extract the same images with every model.")
        widths = first.shape("logit")[1], other.shape("logit")[1]
        if widths[0] != widths[1]:
            raise _unlike(first, other, "classes", f"they have {widths[0]} and {widths[1]} logits", _ONE_ORDER)
    named = [table for table in tables if table.classes]
    for other in named[1:]:
        pairs = zip(named[0].classes or (), other.classes or (), strict=False)
        for place, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                difference = f"class {place} is '{ours}' and '{theirs}'"
                raise _unlike(named[0], other, "classes", difference, _ONE_ORDER)
    for column in _OF_IMAGES:
        having = [table for table in tables if column in table]
        for other in having[1:]:
            _check_column(column, having[0], other)


def _unlike(first: Table, other: Table, what: str, difference: str, repair: str) -> TableError:
    return TableError(f"ensemble: {first.name} and {other.name} must have the same {what}; {difference}. {repair}")


def _check_column(column: str, first: Table, other: Table) -> None:
    """Equal in every row; compared block by block."""
    if column == "label" and first.label_space != other.label_space:
        difference = "those of one are the model's classes, those of the other another set's"
        raise _unlike(first, other, "labels", difference, "Extract both with the same labels and label_space.")
    start = 0
    for ours, theirs in zip(first.batches(column), other.batches(column), strict=True):
        one, two = np.asarray(ours.whole(column)), np.asarray(theirs.whole(column))
        if not np.array_equal(one, two):
            row = int((one != two).nonzero()[0][0])
            difference = f"row {start + row} is '{one[row]}' and '{two[row]}'"
            repair = "Extract the same images, in one order, with the same labels."
            raise _unlike(first, other, "labels" if column == "label" else "images", difference, repair)
        start += len(one)


def _provenance(tables: Sequence[Table]) -> Provenance | None:
    """The first table's, with the one task loss that any table knows: rows without losses are of the same task."""
    known = [table.provenance for table in tables if table.provenance is not None]
    losses = sorted({each.task_loss for each in known if each.task_loss})
    if len(losses) > 1:
        raise TableError(
            f"concat: losses of {', '.join(table.name for table in tables)} were made by different task losses "
            f"({', '.join(losses)}), which have no common scale. Join tables of one task loss."
        )
    first = tables[0].provenance
    return first if first is None or not losses else replace(first, task_loss=losses[0])


def _check_settings(tables: Sequence[Table], names: Sequence[str]) -> None:
    """Raise TableError for columns that probes of different settings wrote."""
    first = tables[0]
    for name in compared_names(first, names):
        for other in tables[1:]:
            if difference := settings_difference(first, other, name):
                raise TableError(
                    f"concat: '{name}' of {first.name} and {other.name} were extracted with different settings "
                    f"({difference}), so their numbers cannot be compared. Extract both with the same settings, or "
                    f"select other columns."
                )


@final
@dataclass(frozen=True)
class Computed:
    """A column whose rows are computed when they are read.

    Attributes:
        shape: The shape of the whole column.
        read: Computes some rows.
    """

    shape: tuple[int, ...]
    read: Callable[[Exact], Any]

    def __getitem__(self, rows: Exact) -> Any:
        return self.read(rows)


@final
class Stacked:
    """Columns of the same width one after the other; only those that hold the chosen rows are read."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._starts = [0, *accumulate(column.shape[0] for column in columns)]
        self._ends = self._starts[1:]
        self.shape = (self._ends[-1], *columns[0].shape[1:])

    def __getitem__(self, rows: Exact) -> Any:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            touched = range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1) if start < stop else ()
            parts = []
            for which in touched:
                first, end = self._starts[which], min(stop, self._ends[which])
                parts.append(self._columns[which][max(start - first, 0) : end - first])
            return _concat_rows(parts or [self._columns[0][0:0]])
        if not len(rows):
            return self[0:0]
        owner = torch.searchsorted(torch.tensor(self._ends), rows, right=True)
        chosen = {which: rows[owner == which] - self._starts[which] for which in sorted(set(owner.tolist()))}
        gathered = _concat_rows([take(self._columns[which], of_column) for which, of_column in chosen.items()])
        return take(gathered, owner.argsort(stable=True).argsort())  # back in the order of the rows


def _log_mean(columns: Sequence[Column], rows: Exact) -> Tensor:
    """The logarithm of the mean probability of several columns of logits; one of them is in memory at a time."""
    mean = torch.tensor(-torch.inf, dtype=torch.float64)
    for column in columns:
        logits = torch.as_tensor(column[rows])
        mean = torch.logaddexp(mean, logits.double().log_softmax(-1) - math.log(len(columns)))
    return mean.to(logits.dtype)


def _concat_rows(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)
