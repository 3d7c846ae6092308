"""Venn-Abers: two probabilities for every prediction, one of which is calibrated (Vovk & Petej 2014).

    p0 = f0(x),  p1 = f1(x),    x = max_c p_c;    q = p1 / (1 - p0 + p1)

f0 is the isotonic regression of the calibration rows and (x, wrong), f1 that of the rows and (x, right), each refitted
for every x. If calibration rows and new ones are exchangeable, one of the two is perfectly calibrated, whatever the
model: p1 if the prediction is right, p0 if it is wrong. The interval [p0, p1] is narrow where there are many rows of
similar confidence. q is the single probability whose regret in log-loss is lowest (Vovk, Petej & Fedorova 2015).

f1 is constant between distinct scores of the rows, and takes one pass over them (algorithms 1 and 2 there): rows are
steps of (1, label), their running sums lie above a convex hull, and the new row is a step (1, 1) that moves from left
to right through it. Our sums are whole numbers, so that ties are ties. f0 is f1 with both axes reversed.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from dubito.calibration._blocks import tied
from dubito.calibration._top import TopCalibration, inside
from dubito.metrics import confidence
from dubito.table import Table
from dubito.types import finite_batches

_Point = tuple[int, int]


@final
@dataclass
class VennAbers(TopCalibration):
    """An interval for the probability that the prediction is right, and one value of it.

    Attributes:
        knots_: (k) the distinct top probabilities of the calibration rows, rising, once fitted.
        low_: (k + 1) p0 below the first of them, and from each on.
        high_: (k + 1) p1 up to each of them, and beyond the last.
        temperature_: That of all classes but the predicted one.
    """

    name = "venn_abers"
    learned = ("knots_", "low_", "high_", "temperature_")

    def learn_top(self, top: Float64[np.ndarray, "n"], right: Bool[np.ndarray, "n"]) -> None:
        """Both regressions, at every distinct score."""
        level, hits, rows = tied(top, right)
        high = np.append(_with_one_more(hits, rows), 1.0)
        low = np.append(0.0, 1 - _with_one_more((rows - hits)[::-1], rows[::-1])[::-1])
        self.knots_, self.low_, self.high_ = map(torch.from_numpy, (level, low, high))

    def parts_agree(self) -> bool:
        """Both bounds below, between and above the knots."""
        sizes = [tuple(one.shape) for one in (self.low_, self.high_)]
        ordered = self.knots_.ndim == 1 and sizes == [(len(self.knots_) + 1,)] * 2
        return ordered and inside((self.low_ + self.high_) / 2) and bool((self.low_ <= self.high_).all())

    def bounds(self, top: Float64[np.ndarray, "n"]) -> tuple[Float64[np.ndarray, "n"], Float64[np.ndarray, "n"]]:
        """p0 and p1 of top probabilities."""
        knots, low, high = self.knots_.numpy(), self.low_.numpy(), self.high_.numpy()
        return low[np.searchsorted(knots, top, "right")], high[np.searchsorted(knots, top, "left")]

    def top_probability(self, top: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """p1 / (1 - p0 + p1)."""
        low, high = self.bounds(top)
        merged: np.ndarray = high / (1 - low + high)
        return merged

    def interval(self, table: Table) -> Float64[Tensor, "n 2"]:
        """p0 and p1 of every row's prediction.

        >>> table = Table(logit=[[2.0, 0.0], [1.0, 0.0], [3.0, 0.0]], label=[0, 1, 0])
        >>> VennAbers().fit(table).interval(table)[2]  # highest: 2 of 2 are right; with one more, 3 of 3, or 2 of 3
        tensor([0.6667, 1.0000], dtype=torch.float64)
        """
        self._check(table, by=f"{self.name}.interval")
        batches = finite_batches(table.batches("logit"), table.name, by=f"{self.name}.interval")
        both = [np.stack(self.bounds(confidence(batch.logit).numpy()), 1) for batch in batches]
        return torch.from_numpy(np.concatenate(both or [np.zeros((0, 2))]))


def _with_one_more(ones: Int64[np.ndarray, "k"], rows: Int64[np.ndarray, "k"]) -> Float64[np.ndarray, "k"]:
    """The isotonic regression at every group of rows, if that group had one row more, a one.

    Args:
        ones: How many ones each group has, by rising score.
        rows: How many rows.
    """
    x, y = [0, *np.cumsum(rows).tolist()], [0, *np.cumsum(ones).tolist()]
    hull: list[_Point] = []  # from right to left: the last point is the leftmost
    for point in zip(reversed([-1, *x]), reversed([-1, *y]), strict=True):
        _push(hull, point)
    values = np.empty(len(rows))
    for place in range(len(rows)):
        (left, low), (right, high) = hull[-1], hull[-2]
        values[place] = (high - low) / (right - left)
        # The new row moves behind this group, whose end is one to the left of, and one below, where it was.
        point = x[place + 1] - 1, y[place + 1] - 1
        if (point[1] - low) * (right - left) < (high - low) * (point[0] - left):
            hull.pop()
            _push(hull, point)
    return values


def _push(hull: list[_Point], point: _Point) -> None:
    """Add a point to the left of a convex hull, without those that then lie on or above it."""
    x, y = point
    while len(hull) > 1:
        (x1, y1), (x2, y2) = hull[-1], hull[-2]
        if (y1 - y) * (x2 - x) < (y2 - y) * (x1 - x):
            break
        hull.pop()
    hull.append(point)
