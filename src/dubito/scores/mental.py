"""The mental model: softmax confidence from the feature's length and its angle to the nearest class weight alone.

    a(z)    = ||z|| (1 / (K - 1) + max_i cos(z, w_i))
    U(z)    = -1 / (1 + (K - 1) exp(-a(z)))                                    (Pearce et al. 2021, eq. 7, prop. 6)
    u(x)    = log(K - 1) - a(z)  =  log((1 - p) / p),  p = -U(z)

`score_batch` gives u, the log-odds against the predicted class: the same order as U, which in floating point becomes -1
for all confident images (a above 37). It is what max p would be if the weights were an optimal simplex without biases,
and so shows the two parts of a confidence: how strong the features are, and how familiar their combination.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.cache.disk import model_identity
from dubito.errors import ModelError
from dubito.scores._features import ScoreOfFeatures
from dubito.scores._last_layer import last_layer
from dubito.table import Table
from dubito.types import Classifier


def mental_log_odds(z: Float[Tensor, "n d"], weights: Float[Tensor, "c d"]) -> Float64[Tensor, "n"]:
    """log((1 - p) / p) of the mental model; grows with the uncertainty and never saturates.

    >>> mental_log_odds(torch.tensor([[3.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).item()  # -3 (1 + 1)
    -6.0
    """
    z, others = z.double(), len(weights) - 1
    directions = torch.nn.functional.normalize(weights.double(), dim=1)
    # ||z|| max cos is the largest product with a direction: a feature of zeros needs no angle.
    strength: Tensor = z.norm(dim=1) / others + (z @ directions.T).amax(1)
    return math.log(others) - strength


def mental_probability(z: Float[Tensor, "n d"], weights: Float[Tensor, "c d"]) -> Float64[Tensor, "n"]:
    """The largest class probability p = -U(z) by eq. 7, between 0 and 1."""
    return torch.sigmoid(-mental_log_odds(z, weights))


@final
@dataclass
class MentalModel(ScoreOfFeatures):
    """Log-odds against the predicted class, from ||z|| and max cos(z, w_i) alone.

    `MentalModel.of(classifier)` takes the weights of the classifier itself. `fit` finds them from features and logits
    by least squares, which is exact where the logits are linear in the features; features that never vary get weight 0.

    Attributes:
        weights_: (c, d) of the classifying layer, once fitted.
    """

    name = "mental"
    kind = "total"
    needs = ("feature",)
    learns_from = ("feature", "logit")
    learned = ("weights_",)

    @classmethod
    def of(cls, classifier: Classifier) -> "MentalModel":
        """With the weights of the classifier's own last layer; it must have seen a batch."""
        weight, _ = classifier.head()
        score = cls()
        score.weights_ = _usable(weight.detach().cpu().double(), f"mental: the head of {classifier.name}")
        score.provenance_ = model_identity(classifier)
        return score

    def learn(self, table: Table) -> None:
        """Least squares of the logits on the features."""
        instead = "take the weights of the model itself: MentalModel.of(classifier)"
        layer = last_layer(table, by="mental.fit", instead=instead)
        self.weights_ = _usable(layer.weight, f"mental.fit: the weights from {table.name}")

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The log-odds of every row."""
        self.check_width(batch, self.weights_.shape[1])
        return mental_log_odds(batch.feature, self.weights_)


def _usable(weights: Float64[Tensor, "c d"], what: str) -> Float64[Tensor, "c d"]:
    if len(weights) < 2:
        raise ModelError(f"{what} must be of two classes or more; got {len(weights)}. Use a model with more classes.")
    empty = (weights.norm(dim=1) == 0).nonzero()[:, 0]
    if len(empty):
        raise ModelError(f"{what} must have a direction for every class; those of class {int(empty[0])} are all zero.")
    return weights
