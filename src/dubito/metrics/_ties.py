"""Equal scores have no order: they enter a count together, or each stands for the mean of all.

A curve over ranks is the expectation when tied rows are ordered at random: the value at a rank inside a tie
group is the group's mean. So no result depends on the order in which rows came.
"""

import numpy as np
from jaxtyping import Float64, Int64


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
