"""Whose losses a head learns to rank: those of given labels, or those that the model expects of itself.

    given      L_i = the column `loss`: of the true label                                       (the paper)
    expected   L_i = - sum_y softmax(logit_i / T)_y log softmax(logit_i)_y                       (ours)
    mixed      L_i = (1 - w) given_i + w expected_i                                              (ours)

The expected loss is the mean of the task loss over labels drawn from the model's own temperature-scaled prediction. It
needs no label, so any folder of photographs serves; and it is less noisy than one drawn label. T is what temperature
scaling finds on labelled images; 1 believes the model as it is. It is the expectation of cross-entropy: a table whose
losses are known to come from another task loss (BCE, a callable) is refused, "given" being the target there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.choices import Target
from dubito.errors import TableError, ValueRangeError
from dubito.heads._scratch import scratch_column
from dubito.heads.losses import DIRECT_LOSSES
from dubito.heads.recipe import Recipe
from dubito.table import Column, Exact, Table

NEEDS: Mapping[Target, tuple[str, ...]] = MappingProxyType(
    {"given": ("loss",), "expected": ("logit",), "mixed": ("loss", "logit")}
)
"""The columns of each target."""
_CROSS_ENTROPY = "cross_entropy"
_CHECKED_AT_ONCE = 1 << 20


def expected_loss(logits: Float[Tensor, "n c"], temperature: float = 1.0) -> Float[Tensor, "n"]:
    """The cross-entropy that the model expects if labels are drawn from its prediction at temperature T.

    >>> expected_loss(torch.tensor([[0.0, 0.0], [9.0, 0.0]])).round(decimals=3).tolist()  # log 2, and next to nothing
    [0.693, 0.001]
    """
    logits = logits.double()
    return -((logits / temperature).softmax(-1) * logits.log_softmax(-1)).sum(-1)


def with_expected_loss(table: Table, temperature: float = 1.0) -> Table:
    """The table with the expected loss as its loss: unlabelled photographs beside labelled ones (`concat`)."""
    table.require("logit", by="with_expected_loss")
    _check_task_loss(table, "with_expected_loss", "Take its own losses instead")
    if not 0 < temperature < math.inf:
        raise ValueRangeError(f"with_expected_loss: temperature must be positive; got {temperature}. 1 is the model's.")
    found = table.extended(loss=_Expected(table.column("logit"), temperature))
    if table.provenance is not None:
        found.provenance = replace(table.provenance, task_loss=_CROSS_ENTROPY)
    return found


@final
class _Expected:
    """The expected losses of a column of logits, computed when rows are asked for."""

    def __init__(self, logits: Column, temperature: float) -> None:
        self._logits, self._temperature = logits, temperature
        self.shape = (logits.shape[0],)

    def __getitem__(self, rows: Exact) -> Float[Tensor, "n"]:
        return expected_loss(self._logits[rows], self._temperature).float()


def target_column(table: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    """The losses to learn, float32, one a row; on disk behind a memory map, so that memory does not grow with rows.

    Raises:
        TableError: Fewer than two rows, all losses are the same, or another task loss made them than the target's.
        ValueRangeError: A loss is NaN or infinite, or negative where the head must predict it.
        DiskFullError: The folder for temporary files cannot take the column.
    """
    needs = NEEDS[recipe.target]
    by = f"head.fit with target '{recipe.target}'" if recipe.target != "given" else "head.fit"
    table.require(*needs, by=by)
    if recipe.target != "given":
        _check_task_loss(table, by, "Train with target='given'")
    if len(table) < 2:
        raise TableError(
            f"head.fit needs at least two rows, to learn which of two images is harder; {table.name} has {len(table)}. "
            f"Fit on more images."
        )
    column = scratch_column(len(table), f"head.fit: the losses of {table.name}")
    start = 0
    for batch in table.batches(*needs):
        column[start : start + len(batch)] = _TARGETS[recipe.target](batch, recipe).float()
        start += len(batch)
    return _checked(column, table, recipe)


def _mixed(batch: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    expected = expected_loss(batch.logit, recipe.temperature)
    return (1 - recipe.mix) * batch.loss.double() + recipe.mix * expected


_TARGETS: Mapping[str, Callable[[Table, Recipe], Tensor]] = MappingProxyType(
    {
        "given": lambda batch, _: batch.loss,
        "expected": lambda batch, recipe: expected_loss(batch.logit, recipe.temperature),
        "mixed": _mixed,
    }
)


def _check_task_loss(table: Table, by: str, repair: str) -> None:
    """Raise TableError where the table knows that something else than cross-entropy made its losses."""
    made_by = (table.provenance.task_loss if table.provenance else None) or _CROSS_ENTROPY
    if made_by != _CROSS_ENTROPY:
        raise TableError(
            f"{by} expects a model of the task loss '{_CROSS_ENTROPY}', whose expectation it takes; the losses of "
            f"{table.name} were made by '{made_by}'. {repair}, or extract with Forward(task_loss='{_CROSS_ENTROPY}')."
        )


def _checked(column: Float[Tensor, "n"], table: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    _check_finite(column, table)
    low, high = float(column.min()), float(column.max())
    if high - low <= recipe.leeway:
        raise TableError(
            "head.fit needs losses that differ"
            + (f" by more than the leeway {recipe.leeway}" if recipe.leeway else "")
            + f"; all {len(table)} of {table.name} lie between {low:g} and {high:g}, so there is no order to learn."
        )
    if recipe.loss in DIRECT_LOSSES and low < 0:
        raise ValueRangeError(
            f"head.fit: the {recipe.loss} loss predicts losses of 0 or more; got {low:g} in {table.name}. "
            f"Use loss='ranking', which needs their order alone."
        )
    return column


def _check_finite(column: Float[Tensor, "n"], table: Table) -> None:
    parts = torch.split(column, _CHECKED_AT_ONCE)  # so that memory does not grow with rows
    bad = [int((~part.isfinite()).sum()) for part in parts]
    if any(bad):
        number = next(number for number, count in enumerate(bad) if count)
        first = number * _CHECKED_AT_ONCE + int((~parts[number].isfinite()).nonzero()[0, 0])
        raise ValueRangeError(
            f"head.fit: {sum(bad)} of the {len(column)} losses of {table.name} are NaN or infinite, the first in row "
            f"{first}. Such a loss has no place in an order: look at the label and the logits of that row."
        )
