"""What every metric does before it counts: check lengths, finite numbers and flags; and treat equal scores alike.

They count in numpy, not torch: on ten thousand rows, torch's thread pool costs more than the sum it speeds up.

Equal scores have no order: they enter a count together, or each stands for the mean of all. A curve over ranks is the
expectation when tied rows are ordered at random: the value at a rank inside a tie group is the group's mean. So no
result depends on the order of the rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.table import to_tensor
from dubito.types import finite

Array = Tensor | np.ndarray | Sequence[Any]
"""What metrics take: a tensor, a numpy array or a list."""


def numbers(values: Array, what: str) -> Float64[np.ndarray, "n"]:
    """One finite float64 number per row; `what` names function and argument for the error."""
    return finite(_one_axis(values, what).double(), what).numpy()


def flags(values: Array, what: str) -> Bool[np.ndarray, "n"]:
    """One boolean per row, from booleans or from zeros and ones."""
    column = _one_axis(values, what)
    odd = ~_are_flags(column)
    if odd.any():
        row = int(odd.nonzero()[0, 0])
        raise ValueRangeError(
            f"{what} must be booleans, or 0 and 1; got {column[row].item()} at row {row}. "
            f"Compare first, for example `labels == 1`."
        )
    return column.bool().numpy()


def integers(values: Array, what: str) -> Int[Tensor, "n"]:
    """One integer per row."""
    column = _one_axis(values, what)
    if column.is_floating_point() or column.is_complex() or column.dtype == torch.bool:
        raise TableError(f"{what} must be integers; got {column.dtype}. Cast them if that is meant.")
    return column.long()


def same_length(what: str, **rows: int) -> None:
    """TableError unless all columns, as name=number of rows, are equally long."""
    if len(set(rows.values())) > 1:
        lengths = ", ".join(f"{name} has {n}" for name, n in rows.items())
        raise TableError(f"{what} needs columns of one length; {lengths}. Pass one row per image in each.")


def check_order(what: str, **arguments: Array) -> None:
    """TableError where two arguments, by name, look swapped: zeros and ones as whole numbers or booleans come first.

    Scores that are meant to be whole numbers pass as floats.
    """
    (first, scores), (second, truth) = ((name, to_tensor(one, f"{what}: {name}")) for name, one in arguments.items())
    if scores.is_floating_point() or not truth.is_floating_point():
        return
    if _are_flags(scores).all() and not _are_flags(truth).all():
        raise TableError(
            f"{what} takes {first} first and {second} second; these look swapped: {first} are {scores.dtype} with "
            f"zeros and ones only, {second} are {truth.dtype}. Swap them, or pass {first} as floats if they are meant."
        )


def _are_flags(column: Shaped[Tensor, "..."]) -> Bool[Tensor, "..."]:
    return (column == 0) | (column == 1)


def _one_axis(values: Array, what: str) -> Shaped[Tensor, "n"]:
    column = to_tensor(values, what)
    if column.ndim != 1:
        raise TableError(f"{what} must have one axis, (n,); got shape {tuple(column.shape)}. Pass one value per row.")
    if len(column) == 0:
        raise TableError(f"{what} must have at least one row; got none. Pass more rows.")
    return column


def tie_groups(scores: Float64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "g"]]:
    """The rows by rising score, and how many of them each distinct score and all below it have."""
    order = np.argsort(scores)
    ordered = scores[order]
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(scores))
    return order, ends


def in_expected_order(scores: Float64[np.ndarray, "n"], values: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """The values by rising score, each replaced by the mean over the rows of equal score."""
    order, ends = tie_groups(scores)
    starts = np.concatenate(([0], ends[:-1]))
    sizes = ends - starts
    means: np.ndarray = np.add.reduceat(values[order], starts) / sizes
    return np.repeat(means, sizes)


def sum_below(ordered: Float64[np.ndarray, "n"], quantiles: Float64[np.ndarray, "q"]) -> Float64[np.ndarray, "q"]:
    """The sum of the first quantile * n ordered values; a row that a quantile cuts counts by its share."""
    n = len(ordered)
    sums: np.ndarray = np.interp(quantiles * n, np.arange(n + 1), np.append(0.0, np.cumsum(ordered)))
    return sums
