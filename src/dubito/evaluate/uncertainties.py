"""The uncertainty of every row of a table, from fitted scores or from arrays, next to the classifier's own."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics import Array
from dubito.scores import Entropy, MaxProbability
from dubito.table import Table, to_tensor
from dubito.types import Score, finite
from dubito.validate import check_rows

BASELINES: Mapping[str, type[Score]] = {Entropy.name: Entropy, MaxProbability.name: MaxProbability}
"""What the classifier's logits say without any further score."""


def uncertainties(
    scores: Mapping[str, Array | Score], table: Table, *, by: str, baselines: tuple[str, ...] = ()
) -> dict[str, Float[Tensor, "n"]]:
    """The uncertainty of every row, by score; then that of the baselines, if the table has logits.

    Args:
        scores: Fitted scores or arrays (n,), by name.
        table: The table to score.
        by: The function that the user called.
        baselines: Names in BASELINES; one that is among the scores is not computed again.
    """
    check_rows(table, by=by)
    check_any_scores(scores, by=by)
    values = {name: uncertainty(score, table, by=by, name=name) for name, score in scores.items()}
    if "logit" in table:
        values |= {name: BASELINES[name]().score(table) for name in baselines if name not in values}
    return values


def uncertainty(score: Array | Score, table: Table, *, by: str, name: str) -> Float[Tensor, "n"]:
    """The uncertainty of every row by one fitted score; an array is returned if it has one finite number per row."""
    if isinstance(score, Score):
        return score.score(table)
    u = finite(to_tensor(score, f"{by}: score '{name}'").double(), f"{by}: score '{name}'")
    if u.shape != torch.Size([len(table)]):
        raise TableError(
            f"{by}: score '{name}' must have one value per row of {table.name}, ({len(table)},); "
            f"got {tuple(u.shape)}. Score the same table."
        )
    return u


def check_fitted_scores(scores: Mapping[str, Any], *, by: str) -> None:
    """Raise TableError for an array where several tables are to be scored, NotFittedError before anything runs."""
    check_any_scores(scores, by=by)
    for name, score in scores.items():
        if not isinstance(score, Score):
            raise TableError(
                f"{by}: '{name}' must be a fitted score, so that every table can be scored; "
                f"got {type(score).__name__}. Pass the score itself."
            )
        score.check_fitted()


def check_any_scores(scores: Mapping[str, Any], *, by: str) -> None:
    """Raise TableError if there are no scores."""
    if not scores:
        raise TableError(f"{by} needs at least one score; got none. Give some by name: {{'entropy': Entropy()}}.")


def has_both(flags: Bool[Tensor, "n"]) -> bool:
    """Whether there are positives and negatives; without both, nothing can be ranked."""
    return bool(flags.any()) and not bool(flags.all())
