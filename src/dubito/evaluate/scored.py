"""The uncertainties of a table's rows, from fitted scores or from arrays, with the classifier's own beside them."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics import Array
from dubito.scores import Entropy, MaxProbability
from dubito.table import Table, check_table, to_tensor
from dubito.types import Score, finite

BASELINES: Mapping[str, type[Score]] = {Entropy.name: Entropy, MaxProbability.name: MaxProbability}
"""What the classifier says by itself, without a score of its own."""


def scored(
    by: str, scores: Mapping[str, Array | Score], table: Table, *, beside: tuple[str, ...] = ()
) -> dict[str, Float[Tensor, "n"]]:
    """By name, the uncertainty of every row; after them the baselines `beside`, where the table has logits."""
    some_rows(by, table)
    some_scores(by, scores)
    found = {name: uncertainty(by, name, score, table) for name, score in scores.items()}
    if "logit" in table:
        found |= {name: BASELINES[name]().score(table) for name in beside if name not in found}
    return found


def uncertainty(by: str, name: str, score: Array | Score, table: Table) -> Float[Tensor, "n"]:
    """Of every row, by a fitted score; or the given array, if it has one finite number a row."""
    if isinstance(score, Score):
        return score.score(table)
    u = finite(to_tensor(score, f"{by}: score '{name}'").double(), f"{by}: score '{name}'")
    if u.shape != torch.Size([len(table)]):
        raise TableError(
            f"{by}: score '{name}' must have one value a row of {table.name}, ({len(table)},); "
            f"{tuple(u.shape)} came. Score the same table."
        )
    return u


def some_rows(by: str, table: Any) -> None:
    """Raise TableError for a table without rows, or for what is none."""
    check_table(table, by=by)
    if len(table) == 0:
        raise TableError(f"{by} needs at least one row; {table.name} has none. Look at how its rows were chosen.")


def fitted(by: str, scores: Mapping[str, Any]) -> None:
    """Raise TableError for an array where several tables are to be scored, NotFittedError before anything is run."""
    some_scores(by, scores)
    for name, score in scores.items():
        if not isinstance(score, Score):
            raise TableError(
                f"{by}: '{name}' must be a fitted score, so that every table can be scored; "
                f"{type(score).__name__} came. Pass the score itself."
            )
        score.check_fitted()


def both(flags: Bool[Tensor, "n"]) -> bool:
    """Whether there are positives and negatives: without one of them nothing can be ranked."""
    return bool(flags.any()) and not bool(flags.all())


def some_scores(by: str, scores: Mapping[str, Any]) -> None:
    """Raise TableError for no scores."""
    if not scores:
        raise TableError(f"{by} needs at least one score; got none. Give some by name: {{'entropy': Entropy()}}.")
