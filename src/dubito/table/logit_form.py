"""What rows that should be logits really are: logits, or what a softmax has made of them.

Rows of probabilities are not negative and sum to 1; rows of log-probabilities have a log-sum-exp of 0.
"""

import warnings
from typing import TYPE_CHECKING, Literal

from jaxtyping import Float
from torch import Tensor

from dubito.errors import DubitoWarning, TableError

if TYPE_CHECKING:
    from dubito.table.table import Table

Form = Literal["probabilities", "log_probabilities"]
_TOLERANCE = 1e-3
_ROWS, _FEWEST = 64, 8
"""How many rows are read, and the fewest that decide: a single row of logits may have a log-sum-exp of 0 by chance."""


def form_of(logits: Float[Tensor, "n c"]) -> Form | None:
    """What rows that should be logits really are; None for logits.

    >>> import torch
    >>> form_of(torch.tensor([[2.0, -1.0]]).log_softmax(1)), form_of(torch.tensor([[2.0, -1.0]]))
    ('log_probabilities', None)
    """
    if len(logits) == 0 or logits.shape[1] < 2:
        return None
    rows = logits.double()
    if bool((rows >= 0).all()) and bool((rows.sum(-1) - 1).abs().max() < _TOLERANCE):
        return "probabilities"
    if bool(rows.logsumexp(-1).abs().max() < _TOLERANCE):
        return "log_probabilities"
    return None


def check_size_of_logits(table: "Table", *, by: str) -> None:
    """Raise TableError for a table of log-probabilities, whose log-sum-exp is 0 in every row; a few rows are read."""
    if form_of(_first(table)) == "log_probabilities":
        raise TableError(
            f"{by} needs logits before the softmax, because it reads their size; column 'logit' of {table.name} holds "
            f"log-probabilities, whose log-sum-exp is 0 for every image. Pass the model's logits, or use a score of "
            f"probabilities, such as max_probability."
        )


def warn_of_probabilities(table: "Table") -> None:
    """Warn of a table of probabilities, of which a second softmax would be taken; a few rows are read.

    Rows of zeros and a one are taken for logits: they show which class is predicted, and nothing else.
    """
    first = _first(table)
    if form_of(first) == "probabilities" and bool((first != first.round()).any()):
        warnings.warn(
            f"column 'logit' of {table.name} must hold logits; its rows are not negative and sum to 1, as "
            f"probabilities do, and a second softmax of these is nearly flat. Pass the model's logits, or the "
            f"logarithms of the probabilities.",
            DubitoWarning,
            stacklevel=2,  # one place for all callers, so that it is shown once
        )


def _first(table: "Table") -> Float[Tensor, "n c"]:
    """The logits of the first rows; none where there are too few to know their form."""
    first: Tensor = table.select("logit").rows(slice(_ROWS)).logit
    return first if len(first) >= _FEWEST else first[:0]
