"""Histogram binning of the top probability: in every bin, how often the prediction was right (Zadrozny & Elkan 2001).

    q = (right_b + 1) / (rows_b + 2),     bins of equally many rows; those of equal confidence stay together

The fraction is Laplace's rule of succession, so that a bin without errors does not have the probability 1. The
curve need not rise: two images may change their order, but no prediction changes (`_top.py`).
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float64

from dubito.calibration._blocks import tied
from dubito.calibration._top import TopCalibration, inside
from dubito.validate import check_number


@final
@dataclass
class Histogram(TopCalibration):
    """The share of right predictions in bins of confidence.

    Attributes:
        bins: How many, where there are as many rows and distinct confidences.
        edges_: Between bins, rising, once fitted; an edge belongs to the bin below it.
        values_: What each bin's confidence becomes.
        temperature_: That of all classes but the predicted one.
    """

    bins: int = 15

    name = "histogram"
    learned = ("edges_", "values_", "temperature_")

    def __post_init__(self) -> None:
        check_number(self.bins, "[1, inf)", by=self.name, what="bins", whole=True, hint="Ten to fifteen are usual.")

    def learn_top(self, top: Float64[np.ndarray, "n"], right: Bool[np.ndarray, "n"]) -> None:
        """Cut the rows, and count."""
        level, hits, rows = tied(top, right)
        middle = np.cumsum(rows) - rows / 2
        bin_of = np.minimum(middle * self.bins / len(top), self.bins - 1).astype(np.int64)
        starts = np.flatnonzero(np.append(True, bin_of[1:] != bin_of[:-1]))
        self.edges_ = torch.from_numpy((level[starts[1:] - 1] + level[starts[1:]]) / 2)
        right_in, rows_in = np.add.reduceat(hits, starts), np.add.reduceat(rows, starts)
        self.values_ = torch.from_numpy((right_in + 1) / (rows_in + 2))

    def parts_agree(self) -> bool:
        """A value in (0, 1) for every bin."""
        return self.edges_.ndim == 1 and len(self.edges_) + 1 == len(self.values_) and inside(self.values_)

    def top_probability(self, top: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The value of the bin."""
        values: np.ndarray = self.values_.numpy()[np.searchsorted(self.edges_.numpy(), top)]
        return values
