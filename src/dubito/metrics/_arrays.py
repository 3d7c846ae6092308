"""What every metric checks before it counts: one axis, equal lengths, finite numbers, 0 or 1 for a yes or no.

The metrics of one-axis columns count in numpy, not torch: on ten thousand rows, torch's thread pool costs
more than the sum it speeds up.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.table import to_tensor
from dubito.types import finite

Array = Tensor | np.ndarray | Sequence[Any]
"""What metrics take: a tensor, a numpy array or a list."""


def numbers(values: Array, what: str) -> Float64[np.ndarray, "n"]:
    """One finite float64 number a row; `what` names function and argument for the error."""
    return finite(_one_axis(values, what).double(), what).numpy()


def flags(values: Array, what: str) -> Bool[np.ndarray, "n"]:
    """One boolean a row, from booleans or from zeros and ones."""
    given = _one_axis(values, what)
    odd = (given != 0) & (given != 1)
    if odd.any():
        row = int(odd.nonzero()[0, 0])
        raise ValueRangeError(
            f"{what} must be booleans, or 0 and 1; got {given[row].item()} at row {row}. "
            f"Compare first, for example with `labels == 1`."
        )
    return given.bool().numpy()


def integers(values: Array, what: str) -> Int[Tensor, "n"]:
    """One integer a row."""
    given = _one_axis(values, what)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TableError(f"{what} must be integers; got {given.dtype}. Cast them if that is meant.")
    return given.long()


def same_length(what: str, **rows: int) -> None:
    """TableError unless all columns, given as name=number of rows, are equally long."""
    if len(set(rows.values())) > 1:
        came = ", ".join(f"{name} has {n}" for name, n in rows.items())
        raise TableError(f"{what} needs columns of one length; {came}. Give one row per image in each.")


def _one_axis(values: Array, what: str) -> Shaped[Tensor, "n"]:
    given = to_tensor(values, what)
    if given.ndim != 1:
        raise TableError(f"{what} must have one axis, (n,); got shape {tuple(given.shape)}. Give one value a row.")
    if len(given) == 0:
        raise TableError(f"{what} must have at least one row; got none. Look at how the rows were selected.")
    return given
