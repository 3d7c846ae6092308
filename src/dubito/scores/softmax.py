"""Uncertainties of the softmax family: functions of one row of logits, nothing to learn.

    max_probability  -max_y p_y                     scaled_entropy  H(softmax(0.1 logits))
    entropy          H(p) = -sum_y p_y log p_y      margin          -(p_(1) - p_(2)), the two largest
    max_logit        -max_y logit_y                 energy          -T log sum_y exp(logit_y / T)

with p = softmax(logits). The first three are U_max, U_cool and U_entropy of Pearce et al. 2021 (arXiv 2106.04972); its
cooling scales the features, which is scaling the logits apart from the bias; max_logit is Hendrycks et al. 2022, energy
Liu et al. 2020. All in float64: in float32 a confident softmax is exactly one for many images and their order is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_number


def max_probability(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """-max p, in [-1, -1/c]."""
    return -check_two_classes(logits, "max_probability").softmax(-1).amax(-1)


def entropy(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """H(p) in nats, in [0, log c]."""
    log_p = check_two_classes(logits, "entropy").log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def margin(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """Minus the gap between the two largest probabilities, in [-1, 0]."""
    top = check_two_classes(logits, "margin").softmax(-1).topk(2, dim=-1).values
    return top[..., 1] - top[..., 0]


def max_logit(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """-max logit."""
    return -logits.double().amax(-1)


def energy(logits: Float[Tensor, "n c"], temperature: float = 1.0) -> Float[Tensor, "n"]:
    """-T logsumexp(logits / T)."""
    return -temperature * (logits.double() / temperature).logsumexp(-1)


class ScoreOfLogits(Score):
    """A function of one row of logits, `of_logits`."""

    needs = ("logit",)
    of_logits: Callable[..., Tensor]

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The function of every row of logits."""
        return self.of_logits(batch.logit)


@final
@dataclass
class MaxProbability(ScoreOfLogits):
    """The usual baseline: one minus the confidence, up to a constant."""

    name = "max_probability"
    kind = "total"
    of_logits = staticmethod(max_probability)


@final
@dataclass
class Entropy(ScoreOfLogits):
    """The entropy of the predicted distribution."""

    name = "entropy"
    kind = "total"
    of_logits = staticmethod(entropy)


@final
@dataclass
class ScaledEntropy(ScoreOfLogits):
    """The entropy of scaled-down logits, which undoes saturation.

    Attributes:
        scale: Multiplies the logits; 0.1 in the paper.
    """

    scale: float = 0.1

    name = "scaled_entropy"
    kind = "total"

    def __post_init__(self) -> None:
        check_number(self.scale, "(0, inf)", by=self.name, what="scale", hint="The paper takes 0.1.")

    def of_logits(self, logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
        """H(softmax(scale * logits))."""
        return entropy(self.scale * logits.double())


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
    of_logits = staticmethod(max_logit)


@final
@dataclass
class Energy(ScoreOfLogits):
    """The free energy of the logits: a smooth max_logit.

    Attributes:
        temperature: T; one in the paper.
    """

    temperature: float = 1.0

    name = "energy"
    kind = "epistemic"

    def __post_init__(self) -> None:
        check_number(self.temperature, "(0, inf)", by=self.name, what="temperature", hint="The paper takes 1.")

    def of_logits(self, logits: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
        """-T logsumexp(logits / T)."""
        return energy(logits, self.temperature)


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
