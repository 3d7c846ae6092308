"""Isotonic regression of zeros and ones, in whole numbers: which rows share a value, and how many of them are ones.

The least-squares fit that rises with the scores pools neighbours until means rise (pool adjacent violators). Rows of
equal score share a value, and so do neighbours whose labels are all the same; so there are at most two groups for
every one before pooling begins, and at most as many blocks as ones, plus one. Means are compared by whole numbers.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float64, Int64


@final
@dataclass(frozen=True)
class Blocks:
    """Blocks of rows with one value each, by rising score.

    Attributes:
        low: Lowest score of each block.
        high: Highest score of each block.
        ones: How many of its rows are ones.
        rows: How many rows it has.
    """

    low: Float64[np.ndarray, "b"]
    high: Float64[np.ndarray, "b"]
    ones: Int64[np.ndarray, "b"]
    rows: Int64[np.ndarray, "b"]

    def knots(self, *, cautious: bool, floor: bool) -> tuple[Float64[np.ndarray, "k"], Float64[np.ndarray, "k"]]:
        """Points to interpolate between: both ends of every block, with its mean.

        Args:
            cautious: A last block of ones alone has the value (m + 1) / (m + 2) of Laplace's rule of succession for m
                rows, unless the block before it has a higher one.
            floor: A first block of zeros alone has 1 / (m + 2), in the same way.
        """
        value = self.ones / self.rows
        if cautious and self.ones[-1] == self.rows[-1]:
            sure = (self.rows[-1] + 1) / (self.rows[-1] + 2)
            value[-1] = max(sure, value[-2]) if len(value) > 1 else sure
        if floor and self.ones[0] == 0:
            sure = 1 / (self.rows[0] + 2)
            value[0] = min(sure, value[1]) if len(value) > 1 else sure
        x, y = np.stack([self.low, self.high], 1).ravel(), np.repeat(value, 2)
        first = np.append(True, x[1:] != x[:-1])  # blocks of one score have one point
        return x[first], y[first]


def tied(
    scores: Float64[np.ndarray, "n"], ones: Bool[np.ndarray, "n"]
) -> tuple[Float64[np.ndarray, "g"], Int64[np.ndarray, "g"], Int64[np.ndarray, "g"]]:
    """The distinct scores, rising, with how many ones and how many rows each has."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    hits = np.add.reduceat(ones[order].astype(np.int64), starts)
    return ordered[starts], hits, np.diff(np.append(starts, len(ordered)))


def isotonic_blocks(scores: Float64[np.ndarray, "n"], ones: Bool[np.ndarray, "n"]) -> Blocks:
    """The blocks of the isotonic regression of zeros and ones on scores.

    >>> blocks = isotonic_blocks(np.array([0.1, 0.2, 0.3, 0.4]), np.array([False, True, False, True]))
    >>> (blocks.ones / blocks.rows).tolist()  # 0.2 and 0.3 are in the wrong order, and share 1/2
    [0.0, 0.5, 1.0]
    """
    level, hits, rows = tied(scores, ones)
    pure = np.where(hits == 0, 0, np.where(hits == rows, 1, -1 - np.arange(len(hits))))
    starts = np.flatnonzero(np.append(True, pure[1:] != pure[:-1]))
    merged = (np.add.reduceat(hits, starts).tolist(), np.add.reduceat(rows, starts).tolist(), starts.tolist())
    stack: list[tuple[int, int, int]] = []
    for hit, row, start in zip(*merged, strict=True):
        while stack and stack[-1][0] * row >= hit * stack[-1][1]:
            earlier = stack.pop()
            hit, row, start = hit + earlier[0], row + earlier[1], earlier[2]  # noqa: PLW2901
        stack.append((hit, row, start))
    first = np.array([one[2] for one in stack])
    last = np.append(first[1:] - 1, len(level) - 1)
    return Blocks(level[first], level[last], np.array([one[0] for one in stack]), np.array([one[1] for one in stack]))
