"""GEN: the generalised entropy of the largest probabilities.

    u(x) = sum_(y of the M largest) p_y^gamma (1 - p_y)^gamma,   p = softmax(logits)

Liu, Lochman, Zach 2023, with their gamma = 0.1 and M = 100; of a model with fewer classes all count. So small a gamma
looks at the tail: at what is left for other classes where the prediction is certain. Therefore 1 - p of the largest p
is the sum of the others, and confident images keep their order, which they lose in pytorch-ood, where every p is at
least 1e-7 away from 0 and 1. It also divides by M, which changes no order.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.scores._activations import largest
from dubito.scores.softmax import ScoreOfLogits, refuse_one_class
from dubito.validate import check_number


def gen(logits: Float[Tensor, "n c"], gamma: float = 0.1, top: int = 100) -> Float64[Tensor, "n"]:
    """The sum over the `top` largest probabilities of (p (1 - p))^gamma.

    >>> gen(torch.zeros(1, 2), gamma=0.5).item()  # 2 (1/4)^(1/2)
    1.0
    """
    refuse_one_class(logits, "gen")
    falling = largest(logits, min(max(top, 2), logits.shape[-1])).flip(-1)
    first, second, predicted = falling[..., :1].double(), falling[..., 1:2], logits.argmax(-1, keepdim=True)
    # Relative to the second largest, the sum of all but the first neither vanishes nor overflows, also in float32.
    others = (logits - second).exp().scatter(-1, predicted, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
    odds = others.log() + second.double() - first
    log_p = falling.double() - first - odds.exp().log1p()
    log_rest = torch.cat([log_p[..., :1] + odds, (-log_p[..., 1:].exp()).log1p()], -1)
    return (gamma * (log_p + log_rest))[..., :top].exp().sum(-1)


@final
@dataclass
class GEN(ScoreOfLogits):
    """The generalised entropy of the largest probabilities.

    Attributes:
        gamma: The power; 0.1 in the paper, and 1 is Gini impurity.
        top: Number of probabilities that count, the largest ones; 100 in the paper.
    """

    gamma: float = 0.1
    top: int = 100

    name = "gen"
    kind = "total"

    def __post_init__(self) -> None:
        check_number(self.gamma, "(0, inf)", by=self.name, what="gamma", hint="The paper takes 0.1.")
        check_number(self.top, "[1, inf)", by=self.name, what="top", whole=True, hint="The paper takes 100.")

    def of_logits(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n"]:
        """The sum over the largest probabilities."""
        return gen(logits, self.gamma, self.top)
