"""Methods that calibrate the probability of the predicted class alone, and what becomes of the other classes.

    q = f(max_c p_c),      p = softmax(z)
    rest:  (1 - q) r_c,    r = softmax(z / T) of the other classes alone

The prediction never changes. Where the others would be as likely as q, they are mixed with the uniform distribution as
far as it takes; and q is at least 1 / c, because no lower one can be that of the most likely class. T is the
temperature of `dubito.scores.temperature`, of at most 10,000 rows, and 1 where the likelihood has no maximum: q does
not depend on it.
"""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from dubito.calibration.method import Calibration
from dubito.errors import ValueRangeError
from dubito.metrics import confidence, labelled_logits
from dubito.scores.temperature import fit_temperature
from dubito.table import Table, chosen_rows

_MOST = 10_000
_APART = 1e-5
"""By how much, relative to it, the top probability exceeds all others: float32 logarithms tell them apart."""


class TopCalibration(Calibration):
    """A map of the top probability; subclasses learn it and apply it."""

    keeps_predictions: ClassVar[bool] = True
    temperature_: float

    def learn(self, table: Table) -> None:
        """The map from top probabilities and whether they were right, and the temperature of the rest."""
        pairs = [
            (confidence(logits), logits.argmax(1) == label)
            for logits, label in labelled_logits(table, by=f"{self.name}.fit")
        ]
        top, right = (torch.cat(parts).numpy() for parts in zip(*pairs, strict=True))
        self.learn_top(top, right)
        self.temperature_ = rest_temperature(table)

    @abstractmethod
    def learn_top(self, top: Float64[np.ndarray, "n"], right: Bool[np.ndarray, "n"]) -> None:
        """Learn the map."""

    @abstractmethod
    def top_probability(self, top: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The calibrated probability, inside (0, 1), of a top probability."""

    def calibrated(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """The logarithm of q at the predicted class, and of the rest by temperature."""
        predicted = logits.argmax(-1)
        q = self.top_probability(confidence(logits).numpy()) if len(logits) else np.zeros(0)
        return with_top(logits.double() / self.temperature_, predicted, torch.from_numpy(q))


def inside(values: Float64[Tensor, "k"]) -> bool:
    """Whether all of a list of probabilities are between 0 and 1, both excluded."""
    return values.ndim == 1 and len(values) > 0 and bool(((values > 0) & (values < 1)).all())


def rest_temperature(table: Table) -> float:
    """The temperature of checked rows, drawn from a large table; 1 where the likelihood has no maximum."""
    if len(table) > _MOST:
        drawn = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:_MOST]
        table = chosen_rows(table.select("logit", "label"), drawn.sort().values)
    try:
        return fit_temperature(table)
    except ValueRangeError:
        return 1.0


def with_top(
    logits: Float64[Tensor, "n c"], predicted: Int64[Tensor, "n"], q: Float64[Tensor, "n"]
) -> Float64[Tensor, "n c"]:
    """Log-probabilities with q at the predicted class, which stays the most likely one.

    >>> with_top(torch.tensor([[0.7, 0.2, 0.1]]).double().log(), torch.tensor([0]), torch.tensor([0.4]).double()).exp()
    tensor([[0.4000, 0.4000, 0.2000]], dtype=torch.float64)
    """
    c, own = logits.shape[1], predicted[:, None]
    q = q.clamp(min=(1 + _APART) / c)
    rest = logits.scatter(1, own, -torch.inf).log_softmax(1)
    highest, most = rest.amax(1).exp(), q / (1 - q) * (1 - _APART)
    rows = (highest > most).nonzero()[:, 0]
    uniform = ((highest - most)[rows] / (highest[rows] - 1 / (c - 1))).clamp(0, 1)[:, None]
    rest[rows] = torch.logaddexp(rest[rows] + torch.log1p(-uniform), uniform.log() - np.log(c - 1))
    return rest.add_(torch.log1p(-q)[:, None]).scatter_(1, own, q.log()[:, None])
