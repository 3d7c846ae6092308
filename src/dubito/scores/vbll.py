"""Variational Bayesian last layer: a classifier on features whose weights have a posterior, learned from labels.

    q(W) = prod_k N(w_k; m_k, diag s_k),   x = (z - mean, 1) scaled,   v_k = s_k^T x^2
    loss = sum_i [ log sum_k exp(m_k^T x_i + v_ik / 2) - m_(y_i)^T x_i ] + KL(q || N(0, I / tau))
    u(x) = 1/2 sum_k p_k (1 - p_k) v_k,   p = softmax(m_k^T x / sqrt(1 + pi v_k / 8))

Harrison, Willes and Snoek 2024 (arXiv 2404.11599), the discriminative classifier: the loss is a bound of the negative
evidence by Jensen's inequality in closed form, and u, the mutual information of label and weights to second order
(`laplace.logit_information`), is its epistemic part. Ours are: diagonal covariances, which the paper also has; no noise
of the logits, which under this bound only raises the loss, so that nothing but its prior would keep it above zero; the
probit approximation of the prediction, where the paper samples; and how it is learned.

The loss is convex in means and variances. At its minimum s_kj = 1 / (tau + sum_i pi_ik x_ij^2), where pi is the
softmax in the loss; this is set after every epoch, from sums over the epoch. In between, the means move by Adam on
shuffled batches of up to 512 rows, with a rate that falls to zero. What is left to gain is estimated from all rows at
the end, as half the squared gradient times the variance, summed over all weights; more than `tolerance` nats per row is
a warning.

There is one row of weights per class that occurs in the labels: of a class without images nothing can be learned. The
labels need not be the model's classes, and the model's own logits are not used. The means start at zero.
"""

import math
import warnings
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.errors import DubitoWarning, TableError
from dubito.heads.stream import Stream
from dubito.scores._features import ScoreOfFeatures, classes_of
from dubito.scores.laplace import logit_information, with_one
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_number, check_seed

_BATCH, _SMALLEST_BATCH, _STEPS = 512, 16, 64
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_WARMUP = 0.1


@final
@dataclass
class VBLL(ScoreOfFeatures):
    """What a Bayesian linear classifier, learned from features and labels, leaves open about the class.

    Attributes:
        prior_precision: tau of the prior on every weight, of features that are scaled to deviation 1 on average.
        epochs: Passes over the rows.
        lr: Learning rate of Adam; it rises over the first tenth of the steps, and then falls to zero.
        tolerance: What may be left to gain per row, in nats, before a warning.
        seed: Seed of the order of rows.
        classes_: (c) labels that occurred.
        shift_: (d) means of the features.
        scale_: The root of their mean variance.
        mean_: (c, d + 1) of the weights, the biases last.
        variance_: (c, d + 1) of the weights.
        left_: What was left to gain at the end, per row, in nats.
    """

    prior_precision: float = 1.0
    epochs: int = 10
    lr: float = 0.02
    tolerance: float = 0.01
    seed: int = 0

    name = "vbll"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "label")
    learned = ("classes_", "shift_", "scale_", "mean_", "variance_", "left_")
    named_only = "it learns a classifier of its own, for minutes with many classes: name it"

    def __post_init__(self) -> None:
        check_number(self.prior_precision, "(0, inf)", by=self.name, what="prior_precision")
        check_number(self.epochs, "[1, inf)", by=self.name, what="epochs", whole=True)
        check_number(self.lr, "(0, inf)", by=self.name, what="lr")
        check_number(self.tolerance, "(0, inf)", by=self.name, what="tolerance")
        check_seed(self.seed, by=self.name)

    def learn(self, table: Table) -> None:
        """Adam for the means, the closed form for the variances after every epoch."""
        classes = classes_of(table, "vbll.fit")
        if len(classes) < 2:
            raise TableError(
                f"vbll.fit needs labels of two classes or more; those of {table.name} are all {int(classes[0])}. "
                f"Fit on images of several classes."
            )
        shift, scale = _shift_and_scale(table)
        mean, variance = self._train(table, classes, shift, scale)
        gradient, _ = _sums(table, classes, shift, scale, mean, variance)
        gradient += self.prior_precision * mean
        left = float((gradient.square() * variance).sum()) / 2 / len(table)
        if not math.isfinite(left) or left > self.tolerance:
            warnings.warn(
                f"vbll.fit: after {self.epochs} epochs, about {left:.2g} nats per row are left to gain on "
                f"{table.name}, more than the tolerance {self.tolerance:g}. Raise epochs, or change lr ({self.lr:g}).",
                DubitoWarning,
                stacklevel=3,
            )
        self.classes_, self.shift_, self.scale_ = classes, shift, scale
        self.mean_, self.variance_, self.left_ = mean, variance, left

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The information in nats, in closed form."""
        self.check_width(batch, len(self.shift_))
        return self.information(batch.feature)

    def information(self, feature: Float[Tensor, "n d"]) -> Float64[Tensor, "n"]:
        """The same from features, unchecked."""
        mean, variance = self._logits(feature)
        return logit_information(mean / (1 + math.pi / 8 * variance).sqrt(), variance)

    def probabilities(self, table: Table) -> Float64[Tensor, "n c"]:
        """The prediction for every row, with a column for each of `classes_`: softmax(m / sqrt(1 + pi v / 8))."""
        self.check_fitted()
        batches = finite_batches(table.batches("feature"), table.name, by="vbll.probabilities")
        parts = [self._logits(batch.feature) for batch in batches]
        return torch.cat([(mean / (1 + math.pi / 8 * variance).sqrt_()).softmax(1) for mean, variance in parts])

    def _logits(self, feature: Float[Tensor, "n d"]) -> tuple[Float64[Tensor, "n c"], Float64[Tensor, "n c"]]:
        """Mean and variance."""
        x = with_one((feature.double() - self.shift_) / self.scale_)
        return x @ self.mean_.T, x.square() @ self.variance_.T

    def _train(
        self, table: Table, classes: Int64[Tensor, "c"], shift: Float64[Tensor, "d"], scale: float
    ) -> tuple[Float64[Tensor, "c e"], Float64[Tensor, "c e"]]:
        """Means and variances; steps in float32, the last variances from all rows in float64."""
        n, c, e = len(table), len(classes), len(shift) + 1
        places = torch.cat([torch.searchsorted(classes, batch.label) for batch in table.batches("label")])
        batch = min(_BATCH, max(_SMALLEST_BATCH, n // _STEPS))
        stream = Stream(table.column("feature"), places.float(), batch, self.seed, table.name)
        steps, total = stream.batches_per_pass, self.epochs * stream.batches_per_pass
        mean = torch.zeros(c, e)
        first, second = torch.zeros_like(mean), torch.zeros_like(mean)
        variance = torch.full_like(mean, 1 / (self.prior_precision + n / c))  # as if all classes were as likely
        middle, curvature = shift.float(), torch.zeros(c, e, dtype=torch.float64)
        for step, (z, place) in enumerate(stream.batches(0, total), start=1):
            x = with_one((z - middle) / scale)
            squares, own = x.square(), (torch.arange(len(x)), place.long())
            p = (x @ mean.T + squares @ variance.T / 2).softmax(1)
            curvature += p.T @ squares
            p[own] -= 1
            gradient = (p.T @ x).div_(len(x)).add_(mean, alpha=self.prior_precision / n)
            first.lerp_(gradient, 1 - _BETAS[0])
            second.lerp_(gradient.square_(), 1 - _BETAS[1])
            unbiased = (second / (1 - _BETAS[1] ** step)).sqrt_().add_(_EPSILON)
            rate = self.lr * min(1.0, step / (_WARMUP * total)) * (1 + math.cos(math.pi * step / total)) / 2
            mean.addcdiv_(first, unbiased, value=-rate / (1 - _BETAS[0] ** step))
            if step % steps == 0:
                variance = (1 / (self.prior_precision + curvature)).float()
                curvature.zero_()
        last, precise = mean.double(), variance.double()
        return last, 1 / (self.prior_precision + _sums(table, classes, shift, scale, last, precise)[1])


def _sums(
    table: Table,
    classes: Int64[Tensor, "c"],
    shift: Float64[Tensor, "d"],
    scale: float,
    mean: Float64[Tensor, "c e"],
    variance: Float64[Tensor, "c e"],
) -> tuple[Float64[Tensor, "c e"], Float64[Tensor, "c e"]]:
    """Over all rows: the gradient of the bound in the means, and the sums pi^T x^2."""
    gradient, curvature = torch.zeros_like(mean), torch.zeros_like(mean)
    for batch in table.batches("feature", "label"):
        x = with_one((batch.feature.double() - shift) / scale)
        squares = x.square()
        p = (x @ mean.T + squares @ variance.T / 2).softmax(1)
        curvature.addmm_(p.T, squares)
        p[torch.arange(len(x)), torch.searchsorted(classes, batch.label)] -= 1
        gradient.addmm_(p.T, x)
    return gradient, curvature


def _shift_and_scale(table: Table) -> tuple[Float64[Tensor, "d"], float]:
    """Means of the features, and the root of their mean variance, in two passes."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in finite_batches(table.batches("feature", "label"), table.name, by="vbll.fit"):
        total = total + batch.feature.double().sum(0)
    mean, squares = total / len(table), 0.0
    for batch in table.batches("feature"):
        squares += float((batch.feature.double() - mean).square().sum())
    return mean, math.sqrt(squares / len(table) / len(mean)) or 1.0
