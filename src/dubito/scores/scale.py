"""SCALE: the energy after every feature is scaled by how little of its sum the largest activations hold.

    u(x) = - log sum_y exp( e^r (logit_y - b_y) + b_y ),   r = sum_j z_j / (sum of the z_j above the percentile)

Xu et al. 2024, with their percentile, 0.85. W (e^r z) + b needs no product: W z is what the logits are above the biases
b, which come from features and logits (`_last_layer.py`). Features with many negative values are refused, because the
sums cancel there and the score collapses. The number of activations above the percentile is rounded as in pytorch-ood.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Float64
from torch import Tensor

from dubito.scores._activations import largest, number_kept, refuse_negative, sum_ratio
from dubito.scores._features import ScoreOfFeatures
from dubito.scores._last_layer import last_layer
from dubito.scores.softmax import energy
from dubito.table import Table
from dubito.validate import check_number


def scale(
    z: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], bias: Float64[Tensor, "c"], percentile: float = 0.85
) -> Float64[Tensor, "n"]:
    """The energy of the logits of scaled features.

    >>> import torch
    >>> z, bias = torch.tensor([[1.0, 1.0]]), torch.zeros(1).double()
    >>> scale(z, torch.tensor([[3.0]]), bias, 0.5).item()  # r = 2 / 1: - 3 e^2
    -22.16...
    """
    ratio = sum_ratio(z, largest(z, number_kept(z.shape[-1], percentile))).double()
    return energy(ratio.exp() * (logits.double() - bias) + bias)


@final
@dataclass
class SCALE(ScoreOfFeatures):
    """The energy of scaled features.

    Attributes:
        percentile: Activations above it make the sum that the whole is compared with; 0.85 in the paper.
        bias_: (c) of the last layer, once fitted.
        width_: Number of features.
    """

    percentile: float = 0.85

    name = "scale"
    kind = "epistemic"
    needs = ("feature", "logit")
    learns_from = ("feature", "logit")
    learned = ("bias_", "width_")
    ood_only = True

    def __post_init__(self) -> None:
        check_number(self.percentile, "[0, 1)", by=self.name, what="percentile", hint="The paper takes 0.85.")

    def learn(self, table: Table) -> None:
        """The biases of the last layer."""
        by = "scale.fit"
        refuse_negative(table, by=by)
        self.bias_, self.width_ = last_layer(table, by=by).bias, table.shape("feature")[1]

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The score of every row."""
        self.check_width(batch, self.width_)
        return scale(batch.feature, batch.logit, self.bias_, self.percentile)
