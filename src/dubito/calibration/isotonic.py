"""Isotonic regression: the rising curve that fits best, of the top probability or of each class's own.

    Isotonic            q = f(max_c p_c), the rest as in `_top.py`;              no prediction changes
    ClassWiseIsotonic   q_c = (n f_c(p_c) + p_c(T)) / (n + 1), divided by their sum (Zadrozny & Elkan 2002)

with f the least-squares fit to zeros and ones among rising functions, linear between its blocks, as in scikit-learn.
It knows nothing but frequencies, and those of a few rows may be 0 or 1, which no log-likelihood survives. So a last
block of m right rows has (m + 1) / (m + 2) (Laplace's rule of succession), a first one of m wrong rows 1 / (m + 2);
and of classes, most of whose probabilities are 0, one row more is counted whose frequency is the probability itself
(after the temperature).

A class with k rows has at most k + 1 blocks, so that all of them have at most n + c. The probabilities of a few classes
at a time are in memory, at most 2^24 numbers.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from dubito.calibration._blocks import isotonic_blocks
from dubito.calibration._top import TopCalibration, inside, rest_temperature
from dubito.calibration.method import Calibration
from dubito.table import Table

_NUMBERS = 2**24


@final
@dataclass
class Isotonic(TopCalibration):
    """A rising function of the top probability.

    Attributes:
        knots_: Probabilities, rising, once fitted.
        values_: What they become; linear in between.
        temperature_: That of all classes but the predicted one.
    """

    name = "isotonic"
    learned = ("knots_", "values_", "temperature_")

    def learn_top(self, top: Float64[np.ndarray, "n"], right: Bool[np.ndarray, "n"]) -> None:
        """Pool neighbours until their means rise."""
        knots, values = isotonic_blocks(top, right).knots(cautious=True, floor=True)
        self.knots_, self.values_ = torch.from_numpy(knots), torch.from_numpy(values)

    def parts_agree(self) -> bool:
        """A value in (0, 1) for every knot."""
        return self.knots_.shape == self.values_.shape and inside(self.values_)

    def top_probability(self, top: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The value of the curve."""
        value: np.ndarray = np.interp(top, self.knots_.numpy(), self.values_.numpy())
        return value


@final
@dataclass
class ClassWiseIsotonic(Calibration):
    """A rising function of every class's probability, normalised. Predictions may change.

    Attributes:
        knots_: Probabilities, rising within each class, one class after the other, once fitted.
        values_: What they become; linear in between.
        starts_: (c + 1) where each class begins among them.
        rows_: How many rows it was fitted on.
        temperature_: That of the row that is counted in addition.
    """

    name = "class_wise_isotonic"
    learned = ("knots_", "values_", "starts_", "rows_", "temperature_")
    places = ("starts_",)

    def learn(self, table: Table) -> None:
        """One regression for every class, of as many classes at a time as fit into memory."""
        (n, c), label = table.shape("logit"), table.label.numpy()
        step = max(1, _NUMBERS // n)
        curves = []
        for start in range(0, c, step):
            block = np.empty((min(step, c - start), n))
            row = 0
            for batch in table.batches("logit"):
                p = batch.logit.double().softmax(1)[:, start : start + step]
                block[:, row : row + len(p)] = p.T.numpy()
                row += len(p)
            curves += [
                isotonic_blocks(p, label == start + place).knots(cautious=True, floor=False)
                for place, p in enumerate(block)
            ]
        self.knots_, self.values_ = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*curves, strict=True))
        ends: Int64[np.ndarray, "c"] = np.cumsum([len(knots) for knots, _ in curves])
        self.starts_, self.rows_ = torch.from_numpy(np.append(0, ends)), n
        self.temperature_ = rest_temperature(table)

    def parts_agree(self) -> bool:
        """Knots and values of every class, one class after the other."""
        starts, shape = self.starts_, (len(self.values_),)
        if self.knots_.shape != shape or self.values_.shape != shape or starts.shape != (self.classes_ + 1,):
            return False
        ends = (int(starts[0]), int(starts[-1]))
        return ends == (0, *shape) and bool((starts.diff() > 0).all()) and bool((self.values_ >= 0).all())

    def calibrated(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """The logarithm of the normalised values."""
        columns = logits.double().softmax(-1).T.contiguous().numpy()
        knots, values, starts = self.knots_.numpy(), self.values_.numpy(), self.starts_.tolist()
        fitted = np.empty_like(columns)
        for place, (p, start, end) in enumerate(zip(columns, starts[:-1], starts[1:], strict=True)):
            fitted[place] = np.interp(p, knots[start:end], values[start:end])
        prior = (logits.double() / self.temperature_).log_softmax(-1)
        log_q = torch.logaddexp(torch.from_numpy(fitted).T.log() + np.log(self.rows_), prior)
        return log_q.log_softmax(-1)
