"""Which losses a head learns to rank: those of the labels, or those that the model itself expects.

    observed   L_i = the column `loss`: of the true label                                       (the paper)
    expected   L_i = - sum_y softmax(logit_i / T)_y log softmax(logit_i)_y                       (ours)
    mixed      L_i = (1 - w) observed_i + w expected_i                                           (ours)

The expected loss is the mean of the task loss over labels drawn from the model's own temperature-scaled prediction. It
needs no label, so any folder of images will do, and it is less noisy than the loss of one label. T is what temperature
scaling finds on labelled images; 1 takes the prediction as it is. It is the expectation of cross-entropy: a table whose
losses are known to come from another task loss (BCE, a callable) is refused; use "observed" there.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.choices import Target
from dubito.errors import TableError, ValueRangeError
from dubito.heads.losses import DIRECT_LOSSES
from dubito.heads.recipe import Recipe
from dubito.table import Table
from dubito.table.views import Computed
from dubito.types import finite
from dubito.validate import check_number, check_rows

NEEDS: Mapping[Target, tuple[str, ...]] = MappingProxyType(
    {"observed": ("loss",), "expected": ("logit",), "mixed": ("loss", "logit")}
)
"""The columns of each target."""
_CROSS_ENTROPY = "cross_entropy"


def expected_loss(logits: Float[Tensor, "n c"], temperature: float = 1.0) -> Float[Tensor, "n"]:
    """The cross-entropy that the model expects if labels are drawn from its prediction at temperature T.

    >>> expected_loss(torch.tensor([[0.0, 0.0], [9.0, 0.0]])).round(decimals=3).tolist()  # log 2, and next to nothing
    [0.693, 0.001]
    """
    logits = logits.double()
    return -((logits / temperature).softmax(-1) * logits.log_softmax(-1)).sum(-1)


def with_expected_loss(table: Table, temperature: float = 1.0) -> Table:
    """The table with the expected loss as its loss, to combine unlabelled images with labelled ones (`concat`)."""
    table.require("logit", by="with_expected_loss")
    _check_task_loss(table, "with_expected_loss", "Take its own losses instead")
    check_number(temperature, "(0, inf)", by="with_expected_loss", what="temperature", hint="1 is the model's.")
    logits = table.column("logit")
    losses = Computed((len(table),), lambda rows: expected_loss(logits[rows], temperature).float())
    extended = table.extended(loss=losses)
    if table.provenance is not None:
        extended.provenance = replace(table.provenance, task_loss=_CROSS_ENTROPY)
    return extended


def target_column(table: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    """The losses to learn, one float32 per row, in memory: 4 bytes per row, 4 GB for a billion rows.

    Raises:
        TableError: Fewer than two rows, all losses are the same, or another task loss made them than the target's.
        ValueRangeError: A loss is NaN or infinite, or negative where the head must predict it.
    """
    needs = NEEDS[recipe.target]
    by = f"head.fit with target '{recipe.target}'" if recipe.target != "observed" else "head.fit"
    table.require(*needs, by=by)
    if recipe.target != "observed":
        _check_task_loss(table, by, "Train with target='observed'")
    check_rows(table, by="head.fit", least=2)
    column = torch.empty(len(table))
    start = 0
    for batch in table.batches(*needs):
        column[start : start + len(batch)] = _losses(batch, recipe)
        start += len(batch)
    _check_losses(column, table, recipe)
    return column


def _losses(batch: Table, recipe: Recipe) -> Float[Tensor, "n"]:
    if recipe.target == "observed":
        return batch.loss
    expected = expected_loss(batch.logit, recipe.temperature)
    return expected if recipe.target == "expected" else (1 - recipe.mix) * batch.loss.double() + recipe.mix * expected


def _check_task_loss(table: Table, by: str, repair: str) -> None:
    """Raise TableError for a table whose losses are known not to be cross-entropies."""
    task_loss = (table.provenance.task_loss if table.provenance else None) or _CROSS_ENTROPY
    if task_loss != _CROSS_ENTROPY:
        raise TableError(
            f"{by} takes the expectation of the task loss '{_CROSS_ENTROPY}'; the losses of {table.name} come from "
            f"'{task_loss}'. {repair}, or extract with Forward(task_loss='{_CROSS_ENTROPY}')."
        )


def _check_losses(losses: Float[Tensor, "n"], table: Table, recipe: Recipe) -> None:
    finite(losses, f"head.fit: losses of {table.name}", "Check the label and the logits of that row.")
    low, high = float(losses.min()), float(losses.max())
    if high - low <= recipe.leeway:
        apart = f" by more than the leeway {recipe.leeway}" if recipe.leeway else ""
        raise TableError(
            f"head.fit needs losses that differ{apart}; all {len(table)} of {table.name} lie between {low:g} and "
            f"{high:g}, so there is no order to learn."
        )
    if recipe.loss in DIRECT_LOSSES and low < 0:
        raise ValueRangeError(
            f"head.fit: the {recipe.loss} loss predicts losses of 0 or more; got {low:g} in {table.name}. "
            f"Use loss='ranking', which needs their order alone."
        )
