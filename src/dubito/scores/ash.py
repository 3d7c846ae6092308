"""ASH-S: the energy after the small activations are set to zero and the others are scaled up by what was lost.

    u(x) = - log sum_y exp( e^r (W z')_y + b_y ),   z' = z where it is above its row's percentile, else 0
    r = sum_j z_j / sum_j z'_j

Djurisic et al. 2023, the variant S, with their percentile for ImageNet, 0.90. The authors reshape feature maps before
the last pooling or features after it, by model; here it is always the feature. W and b come from features and logits
(`_last_layer.py`). Features with many negative values are refused, because the sums cancel there and the score
collapses. The product with W is in float32. How many activations are kept is rounded as in pytorch-ood. All that tie
with the last of them are kept as well, as often in half precision: the score then depends neither on the order of
features nor on the runtime.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.scores._activations import largest, number_kept, refuse_negative, sum_ratio
from dubito.scores._features import ScoreOfFeatures
from dubito.scores._last_layer import energy_of, last_layer
from dubito.table import Table
from dubito.validate import check_number


def ash(
    z: Float[Tensor, "n d"], weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"], percentile: float = 0.9
) -> Float64[Tensor, "n"]:
    """The energy of the logits of pruned and scaled features.

    >>> ash(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 5.0]]), torch.zeros(1), 0.5).item()  # - 3 e^(4 / 3)
    -11.38...
    """
    pruned = torch.where(z >= largest(z, number_kept(z.shape[-1], percentile))[..., :1], z, 0.0)
    return energy_of(pruned * sum_ratio(z, pruned).exp(), weight, bias)


@final
@dataclass
class ASH(ScoreOfFeatures):
    """The energy of pruned and scaled features.

    Attributes:
        percentile: Activations up to it are set to zero; 0.90 in the paper.
        weight_: (c, d) of the last layer, once fitted.
        bias_: (c) of the last layer.
    """

    percentile: float = 0.9

    name = "ash"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "logit")
    learned = ("weight_", "bias_")
    ood_only = True

    def __post_init__(self) -> None:
        check_number(self.percentile, "[0, 1)", by=self.name, what="percentile", hint="The paper takes 0.90.")

    def learn(self, table: Table) -> None:
        """Recover the last layer."""
        by = "ash.fit"
        refuse_negative(table, by=by)
        layer = last_layer(table, by=by)
        self.weight_, self.bias_ = layer.weight.float(), layer.bias.float()

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The score of every row."""
        self.check_width(batch, self.weight_.shape[1])
        return ash(batch.feature, self.weight_, self.bias_, self.percentile)
