"""NCI: how well a feature points along the weights of its predicted class, and how long it is.

    u(x) = - w_y . (z - mu) / ||z - mu||_2  -  alpha ||z||_1,   y the predicted class

Liu and Qin 2025: features of trained networks collapse onto the weights of their classes, and those of OOD images lie
near the origin. As logits are linear in features, w_y . (z - mu) = logit_y - mean logit_y: the means of features and
logits in fit are all that there is to learn. Fit checks that they are linear (`_last_layer.py`).

alpha sets how much the length counts. OpenOOD chooses it on OOD images, from 0.0001 to 0.01. Here nothing is known of
these, so by default alpha makes both terms vary alike on the images of fit: it is the ratio of their standard
deviations, whatever the number and scale of the features. This rule is ours. (pytorch-ood leaves the second term out
unless alpha is set.)
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.scores._features import ScoreOfFeatures, mean_feature
from dubito.scores._last_layer import recovered
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_number

_NEAREST = 1e-8
"""A feature that is the mean itself counts as so far away from it."""


def alignment(
    z: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], mean: Float64[Tensor, "d"], mean_logit: Float64[Tensor, "c"]
) -> Float64[Tensor, "n"]:
    """The larger, the better a feature points along its class: w_y . (z - mu) / ||z - mu||.

    >>> z, mean = torch.tensor([[3.0, 4.0]]), torch.zeros(2).double()
    >>> alignment(z, torch.tensor([[10.0, 0.0]]), mean, mean).item()  # 10 / 5
    2.0
    """
    top, predicted = logits.max(-1)
    away: Tensor = torch.linalg.vector_norm(z - mean.to(z.dtype), dim=-1)
    return (top.double() - mean_logit[predicted]) / away.double().clamp(min=_NEAREST)


def length(z: Float[Tensor, "n d"]) -> Float64[Tensor, "n"]:
    """The sum of absolute values, ||z||_1."""
    return z.abs().sum(-1).double()


def nci(
    z: Float[Tensor, "n d"],
    logits: Float[Tensor, "n c"],
    mean: Float64[Tensor, "d"],
    mean_logit: Float64[Tensor, "c"],
    alpha: float,
) -> Float64[Tensor, "n"]:
    """Minus the alignment, and minus alpha times the length."""
    return -alignment(z, logits, mean, mean_logit) - alpha * length(z)


@final
@dataclass
class NCI(ScoreOfFeatures):
    """Minus the alignment of a feature with the weights of its class, and minus its length.

    Attributes:
        alpha: Weight of the length; None makes both terms vary alike on the images of fit.
        mean_: (d) of the features, once fitted.
        mean_logit_: (c) of the logits.
        alpha_: The weight in use.
    """

    alpha: float | None = None

    name = "nci"
    kind = "epistemic"
    needs = ("feature", "logit")
    learns_from = ("feature", "logit")
    learned = ("mean_", "mean_logit_", "alpha_")
    ood_only = True
    reads_size = True

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check_number(self.alpha, "[0, inf)", by=self.name, what="alpha", hint="0 leaves the length out.")

    def learn(self, table: Table) -> None:
        """The two means, and the ratio of deviations."""
        by = "nci.fit"
        recovered(table, by=by).check_linear(table.name, by=by, repair="or use a score of logits alone, such as gen")
        mean, total = mean_feature(table, by=by), torch.zeros((), dtype=torch.float64)
        for batch in finite_batches(table.batches("logit"), table.name, by=by):
            total = total + batch.logit.sum(0, dtype=torch.float64)
        mean_logit = total / len(table)
        alpha = _balance(table, mean, mean_logit) if self.alpha is None else float(self.alpha)
        self.mean_, self.mean_logit_, self.alpha_ = mean, mean_logit, alpha

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The score of every row."""
        self.check_width(batch, len(self.mean_))
        return nci(batch.feature, batch.logit, self.mean_, self.mean_logit_, self.alpha_)


def _balance(table: Table, mean: Float64[Tensor, "d"], mean_logit: Float64[Tensor, "c"]) -> float:
    """The standard deviation of the alignment over that of the length; 0 where all features are equally long."""
    along, lengths = torch.empty(len(table), dtype=torch.float64), torch.empty(len(table), dtype=torch.float64)
    start = 0
    for batch in table.batches("feature", "logit"):
        rows = slice(start, start + len(batch))
        along[rows], lengths[rows] = alignment(batch.feature, batch.logit, mean, mean_logit), length(batch.feature)
        start += len(batch)
    spread = float(lengths.std(correction=0))
    return float(along.std(correction=0)) / spread if spread > 0 else 0.0
