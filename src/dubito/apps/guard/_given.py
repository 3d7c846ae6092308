"""What a guard is given, checked: labels that are the model's classes, finite logits, rows that are independent."""

from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from dubito.errors import GuardError, TableError, ValueRangeError
from dubito.metrics import correct
from dubito.table import Table
from dubito.types import finite
from dubito.views import chosen_rows

_LEARN, _CHOOSE, _CHOOSE_ALONE = 0.15, 0.15, 0.2
"""Shares of a table: for scores to learn from, to choose on; and to choose on where nothing must be learned."""


class Split(NamedTuple):
    """Rows of a table, each for one purpose.

    Attributes:
        learn: What scores learn from; None where they have a table of their own, or nothing to learn.
        choose: Which scores are chosen on, and thresholds to try are taken from.
        calibrate: What the promise rests on: seen once, when everything else is fixed.
    """

    learn: Table | None
    choose: Table
    calibrate: Table


def errors_of(table: Table, *, by: str) -> Bool[Tensor, "n"]:
    """Which rows are predicted wrong; TableError or ValueRangeError where that cannot be told."""
    table.require("logit", "label", by=by)
    if table.label_space != "model":
        raise TableError(
            f"{by} needs labels of the model's own classes; those of {table.name} are another set's, so that nobody "
            f"can tell which answers are wrong. Give images of the classes that the model was trained for."
        )
    if len(table) == 0:
        raise TableError(f"{by} needs labelled rows; {table.name} has none.")
    parts = []
    for batch in table.batches("logit", "label"):
        finite(batch.logit, f"{by}: logits of {table.name}")
        lowest, highest, c = int(batch.label.min()), int(batch.label.max()), batch.logit.shape[1]
        if lowest < 0 or highest >= c:
            raise ValueRangeError(
                f"{by}: labels must be classes of the logits, 0 to {c - 1}; {lowest} to {highest} came in "
                f"{table.name}. Give labels in the order of the logits' columns."
            )
        parts.append(~correct(batch.logit, batch.label))
    return torch.cat(parts)


def split_rows(table: Table, *, learn: bool, seed: int) -> Split:
    """Cut a table at random into rows to learn from (if asked for), to choose on, and to calibrate on."""
    check_independent(table)
    if len(table) < 3:
        raise GuardError(f"a guard needs at least three rows, one for each purpose; {table.name} has {len(table)}.")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    first = max(1, round(_LEARN * len(table))) if learn else 0
    last = first + max(1, round((_CHOOSE if learn else _CHOOSE_ALONE) * len(table)))
    parts = [chosen_rows(table, rows.sort().values) for rows in (order[:first], order[first:last], order[last:])]
    return Split(parts[0] if learn else None, parts[1], parts[2])


def check_independent(table: Table) -> None:
    """Raise GuardError for several augmented rows of one photograph, which are no independent images."""
    if "photo" in table and int(table.whole("photo").unique().numel()) < len(table):
        raise GuardError(
            f"{table.name} has several augmented rows of each photograph; they are not independent, and a guarantee "
            f"would count each photograph several times. Extract every image once, without epochs=... ."
        )
