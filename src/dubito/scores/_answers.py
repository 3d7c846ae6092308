"""What a model answered, beside the labels that tell whether it was right; and tables whose labels cannot tell that."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import correct
from dubito.table import Table
from dubito.types import finite


def check_own_classes(table: Table, *, by: str) -> None:
    """Raise TableError where labels are not the model's own classes: no answer is right or wrong then."""
    table.require("logit", "label", by=by)
    if table.label_space != "model":
        raise TableError(
            f"{by} needs labels of the model's own classes; those of {table.name} are another set's. "
            f"Give images of the classes that the model was trained for."
        )


def answers(
    table: Table, *, by: str, repair: str = "Give labelled images."
) -> Iterator[tuple[Float[Tensor, "b c"], Int64[Tensor, "b"]]]:
    """Logits and labels, block by block.

    Raises:
        TableError: There are no rows; `repair` says what to do.
        ValueRangeError: Logits are not finite, or labels are no columns of them.
    """
    if len(table) == 0:
        raise TableError(f"{by} needs labelled rows; {table.name} has none. {repair}")
    for batch in table.batches("logit", "label"):
        finite(batch.logit, f"{by}: logits of {table.name}")
        lowest, highest, c = int(batch.label.min()), int(batch.label.max()), batch.logit.shape[1]
        if lowest < 0 or highest >= c:
            raise ValueRangeError(
                f"{by}: labels must be classes of the logits, 0 to {c - 1}; got {lowest} to {highest} in "
                f"{table.name}. Give labels in the order of the logits' columns."
            )
        yield batch.logit, batch.label


def errors_of(table: Table, *, by: str, repair: str = "Give labelled images.") -> Bool[Tensor, "n"]:
    """Which rows are answered wrong.

    >>> errors_of(Table(logit=[[1.0, 0.0], [0.0, 2.0]], label=[0, 0]), by="here").tolist()
    [False, True]
    """
    check_own_classes(table, by=by)
    return torch.cat([~correct(logit, label) for logit, label in answers(table, by=by, repair=repair)])
