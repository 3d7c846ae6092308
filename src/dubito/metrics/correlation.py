"""Do two columns rise together? Only their orders count.

    Spearman = Pearson correlation of the ranks = Σ_i (r_i - r̄)(q_i - q̄) / sqrt(Σ_i (r_i - r̄)² Σ_i (q_i - q̄)²)

r and q are the ranks of the two columns. Equal values share the middle of the ranks that they take up, so that the
order of the rows never counts. A column of one single value has no order, and no correlation.
"""

import numpy as np
from jaxtyping import Float64

from dubito.errors import TableError
from dubito.metrics._arrays import Array, numbers, same_length, tie_groups


def spearman(x: Array, y: Array) -> float:
    """The rank correlation of two columns, from -1 (opposite orders) over 0 to 1 (the same order).

    Args:
        x: (n) numbers of any range, at least two of them different.
        y: (n) likewise.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 90.0, 30.0])  # ranks 1 2 3 4 and 1 2 4 3: 1 - 6 · 2 / (4 · 15)
    0.8
    """
    a, b = numbers(x, "spearman: x"), numbers(y, "spearman: y")
    same_length("spearman", x=len(a), y=len(b))
    left, right = _centred_ranks(a, "x"), _centred_ranks(b, "y")
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))


def _centred_ranks(values: Float64[np.ndarray, "n"], name: str) -> Float64[np.ndarray, "n"]:
    """Ranks minus their mean; equal values share the middle of theirs."""
    order, ends = tie_groups(values)
    if len(ends) == 1:
        raise TableError(
            f"spearman: {name} must hold at least two different values; all {len(values)} rows have {values[0]:g}. "
            f"Add rows that differ: a constant has no order."
        )
    starts = np.concatenate(([0], ends[:-1]))
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((starts + ends - 1) / 2, ends - starts)
    centred: np.ndarray = ranks - (len(values) - 1) / 2
    return centred
