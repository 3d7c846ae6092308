"""Uncertainties of the softmax family: functions of one row of logits, nothing to learn.

    max_probability  -max_y p_y                     scaled_entropy  H(softmax(0.1 logits))
    entropy          H(p) = -sum_y p_y log p_y      margin          -(p_(1) - p_(2)), the two largest
    max_logit        -max_y logit_y                 energy          -T log sum_y exp(logit_y / T)

with p = softmax(logits). The first three are U_max, U_cool and U_entropy of Pearce et al. 2021 (arXiv 2106.04972); its
cooling scales the features, which is scaling the logits apart from the bias; max_logit is Hendrycks et al. 2022, energy
Liu et al. 2020. All in float64: in float32 a confident softmax is exactly one for many images and their order is lost.

With z_y = logit_y - max_k logit_k and Z = sum_y exp z_y, p_y = exp(z_y) / Z gives an entropy of
log Z - sum_y z_y exp(z_y) / Z, in which nothing cancels. Tables are computed so, block by block (`metrics.shifted`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.metrics.shifted import shifted, shifted_blocks, softmax_blocks
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_number


def max_probability(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """-max p, in [-1, -1/c]."""
    return -check_two_classes(logits, "max_probability").softmax(-1).amax(-1)


def entropy(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """H(p) in nats, in [0, log c]."""
    return _entropy(*shifted(check_two_classes(logits, "entropy")))


def margin(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """Minus the gap between the two largest probabilities, in [-1, 0]."""
    top = check_two_classes(logits, "margin").softmax(-1).topk(2, dim=-1).values
    return top[..., 1] - top[..., 0]


def max_logit(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """-max logit."""
    return -logits.amax(-1).double()


def energy(logits: Float[Tensor, "n c"], temperature: float = 1.0) -> Float[Tensor, "n"]:
    """-T logsumexp(logits / T)."""
    return -temperature * _log_sum(*shifted(logits.double() / temperature))


def _entropy(
    _: Float64[Tensor, "*n"], z: Float64[Tensor, "*n c"], spare: Float64[Tensor, "*n c"] | None = None
) -> Float64[Tensor, "*n"]:
    e = torch.exp(z, out=spare)
    total = e.sum(-1)
    return total.log() - torch.mul(e, z, out=spare).sum(-1) / total


def _log_sum(
    top: Float64[Tensor, "*n"], z: Float64[Tensor, "*n c"], spare: Float64[Tensor, "*n c"] | None = None
) -> Float64[Tensor, "*n"]:
    return top + torch.exp(z, out=spare).sum(-1).log()


class ScoreOfLogits(Score):
    """A function of one row of logits, `of_logits`."""

    needs = ("logit",)
    of_logits: Callable[..., Tensor]

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The function of every row of logits."""
        return self.of_logits(batch.logit)


class ScoreOfSoftmax(Score):
    """A function of the softmax of logits, `of_shifted`: of a row's largest logit, and of all less it."""

    needs = ("logit",)
    of_shifted: Callable[..., Tensor]
    fewest_classes: ClassVar[int] = 2

    @property
    def divisor(self) -> float:
        """What logits are divided by first."""
        return 1.0

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The function of every row of logits, block by block."""
        if self.fewest_classes == 2:
            refuse_one_class(batch.logit, self.name)
        u = torch.empty(len(batch), dtype=torch.float64)
        for rows, *block in shifted_blocks(batch.logit, self.divisor):
            u[rows] = self.of_shifted(*block)
        return u


@final
@dataclass
class MaxProbability(Score):
    """The usual baseline: one minus the confidence, up to a constant."""

    needs = ("logit",)
    name = "max_probability"
    kind = "total"

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """-max p, block by block."""
        refuse_one_class(batch.logit, self.name)
        u = torch.empty(len(batch), dtype=torch.float64)
        for rows, p in softmax_blocks(batch.logit):
            u[rows] = p.amax(1).neg_()
        return u


@final
@dataclass
class Entropy(ScoreOfSoftmax):
    """The entropy of the predicted distribution."""

    name = "entropy"
    kind = "total"
    of_shifted = staticmethod(_entropy)


@final
@dataclass
class ScaledEntropy(ScoreOfSoftmax):
    """The entropy of scaled-down logits, which undoes saturation.

    Attributes:
        scale: Multiplies the logits; 0.1 in the paper.
    """

    scale: float = 0.1

    name = "scaled_entropy"
    kind = "total"
    of_shifted = staticmethod(_entropy)

    def __post_init__(self) -> None:
        check_number(self.scale, "(0, inf)", by=self.name, what="scale", hint="The paper takes 0.1.")

    @property
    def divisor(self) -> float:
        """1 / scale, which divides the logits."""
        return 1 / self.scale


@final
@dataclass
class Margin(ScoreOfLogits):
    """How close the second class comes."""

    name = "margin"
    kind = "total"
    of_logits = staticmethod(margin)


@final
@dataclass
class MaxLogit(ScoreOfLogits):
    """The largest logit, whose size softmax throws away."""

    name = "max_logit"
    kind = "epistemic"
    reads_size = True
    of_logits = staticmethod(max_logit)


@final
@dataclass
class Energy(ScoreOfSoftmax):
    """The free energy of the logits: a smooth max_logit.

    Attributes:
        temperature: T; one in the paper.
    """

    temperature: float = 1.0

    name = "energy"
    kind = "epistemic"
    reads_size = True
    fewest_classes = 1

    def __post_init__(self) -> None:
        check_number(self.temperature, "(0, inf)", by=self.name, what="temperature", hint="The paper takes 1.")

    def of_shifted(self, *block: Float64[Tensor, "..."]) -> Float64[Tensor, "n"]:
        """-T logsumexp, of what was divided by T."""
        return -self.temperature * _log_sum(*block)

    @property
    def divisor(self) -> float:
        """T, which divides the logits."""
        return self.temperature


def check_two_classes(logits: Float[Tensor, "*n c"], by: str) -> Float[Tensor, "*n c"]:
    """The logits in float64; ValueRangeError for a single class."""
    refuse_one_class(logits, by)
    return logits.double()


def refuse_one_class(logits: Float[Tensor, "*n c"], by: str) -> None:
    """Raise ValueRangeError for a single class, whose softmax is always 1 and says nothing."""
    if logits.shape[-1] < 2:
        raise ValueRangeError(
            f"{by} needs at least two classes; got logits of shape {tuple(logits.shape)}. If the "
            f"model has one output for yes or no, add a second logit of zero."
        )
