"""fDBD: how far a feature is from the decision boundaries, for its distance from the mean feature.

    u(x) = - mean_(k != y) (logit_y - logit_k) / ||w_y - w_k||_2  /  ||z - mu||_2,   y the predicted class

Liu and Qin 2024: the distance to the boundary between y and k is that in the space of features. mu is the mean feature
of fit, and the weights w come from features and logits (`_last_layer.py`). Two classes with the same weights have no
boundary between them: they are left out of the mean for each other (pytorch-ood divides by zero). The logits are those
of the table. A feature that is mu itself counts as 1e-8 away from it.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.scores._features import ScoreOfFeatures, mean_feature
from dubito.scores._last_layer import last_layer
from dubito.table import Table

_NEAREST = 1e-8
_EQUAL = 1e-4
"""Weights are the same if their distance is a smaller share of the longest: they are as exact as logits are stored."""


def fdbd(
    z: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], mean: Float64[Tensor, "d"], share: Float[Tensor, "c c"]
) -> Float64[Tensor, "n"]:
    """Minus the mean distance to the boundaries over the distance to the mean; `share` is that of `boundary_shares`.

    >>> share = boundary_shares(torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double())  # 5 apart
    >>> fdbd(torch.tensor([[2.0, 0.0]]), torch.tensor([[6.0, 0.0]]), torch.zeros(2).double(), share).item()  # 6 / 5 / 2
    -0.6...
    """
    top, predicted = logits.max(-1, keepdim=True)
    weights = share.to(logits.dtype)[predicted[:, 0]]
    boundary = ((top - logits) * weights).sum(-1, dtype=torch.float64)
    away: Tensor = torch.linalg.vector_norm(z - mean.to(z.dtype), dim=-1)
    return -boundary / away.double().clamp(min=_NEAREST)


def boundary_shares(weight: Float64[Tensor, "c d"]) -> Float64[Tensor, "c c"]:
    """For classes y and k, 1 / ||w_y - w_k|| over the number of classes that have a boundary with y; 0 without one."""
    distances = torch.cdist(weight, weight, compute_mode="use_mm_for_euclid_dist")
    apart = distances > _EQUAL * weight.norm(dim=1).amax()
    apart.fill_diagonal_(False)
    inverse = torch.where(apart, 1 / torch.where(apart, distances, 1.0), 0.0)
    shares: Tensor = inverse / apart.sum(1, keepdim=True).clamp(min=1)
    return shares


@final
@dataclass
class FDBD(ScoreOfFeatures):
    """Minus the mean distance to the decision boundaries, for the feature's distance from the mean.

    Attributes:
        mean_: (d) of the features, once fitted.
        share_: (c, c) what a difference of two logits adds to the mean distance.
    """

    name = "fdbd"
    kind = "epistemic"
    needs = ("feature", "logit")
    learns_from = ("feature", "logit")
    learned = ("mean_", "share_")
    ood_only = True

    def learn(self, table: Table) -> None:
        """The mean feature, and the distances between the classes' weights."""
        by = "fdbd.fit"
        share = boundary_shares(last_layer(table, by=by).weight)
        if not share.any():
            raise TableError(
                f"{by} needs a boundary between two classes; the last layer of {table.name} has the same weights for "
                f"all {len(share)}. Use a model with more classes, or another score."
            )
        self.mean_, self.share_ = mean_feature(table, by=by), share.float()

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The score of every row."""
        self.check_width(batch, len(self.mean_))
        return fdbd(batch.feature, batch.logit, self.mean_, self.share_)
