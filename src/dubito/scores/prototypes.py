"""Distance to the nearest class prototype, for few images per class.

    z' = z / ||z||,   m_c = mean of the n_c rows of class c,   m = mean of all rows
    W   = sum_i ||z'_i - m_y||^2 / (n - c)                                     spread within classes
    B   = (sum_c n_c ||m_c - m||^2 / (c - 1) - W) / n_0                        spread of the classes' true means
    l_c = B / (B + W / n_c),    mu_c = m + l_c (m_c - m)                       prototype
    t_c = W (1 + l_c / n_c)                                                    typical squared distance
    u(x) = min_c ||z' - mu_c||^2 / t_c                                         z' = 0 where z = 0

A mean of few images is noisy by W / n_c. Under Gaussians, mu_c is its best estimate: the empirical Bayes estimate of a
random-effects model (James & Stein 1961; Efron & Morris 1973), with B and W by the analysis of variance for unequal
classes, n_0 = (n - sum_c n_c^2 / n) / (c - 1). l_c W / n_c is what remains uncertain about mu_c, so that t_c is the
squared distance to expect of another image of the class, and u is about one for it. Without it, classes of fewer
images would seem farther away. Distances to class means go back to Snell et al. 2017 (prototypical networks); the
shrinkage and the typical distance are ours. W is the same for all classes: that of a class by itself is too noisy.

With one image in every class, W is unknown; prototypes are the images themselves, and u is the squared distance to the
nearest one. Unlike a covariance, of d (d + 1) / 2 numbers, all of this can be estimated from two images per class.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.scores._features import ScoreOfFeatures, classes_of, labelled, lengths, means_of_classes, unit
from dubito.scores.gaussians import squared_distances
from dubito.table import Table

_NOTHING = 1e-24
"""A squared distance of features at length one that is no more than rounding."""


def typical_distance(
    feature: Float[Tensor, "n d"], prototypes: Float64[Tensor, "c d"], typical: Float64[Tensor, "c"]
) -> Float64[Tensor, "n"]:
    """The squared distance to the nearest prototype, each in units of what is typical for it.

    >>> rows = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    >>> typical_distance(rows, rows.new_tensor([[0.0, 0.0], [1.0, 1.0]]), rows.new_tensor([0.5, 4.0])).item()  # 2, 1/4
    0.25
    """
    nearest: Tensor = (squared_distances(unit(feature.double()), prototypes) / typical).amin(1)
    return nearest


@final
@dataclass
class Prototypes(ScoreOfFeatures):
    """The squared distance to the nearest class prototype, relative to what is typical for that class.

    Attributes:
        prototypes_: (c, d) shrunk class means of features at length one, once fitted.
        typical_: (c) squared distance to expect of another image of the class.
        shrinkage_: (c) weight of a class's own mean, 1 for no shrinkage.
    """

    name = "prototypes"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "label")
    learned = ("prototypes_", "typical_", "shrinkage_")

    def learn(self, table: Table) -> None:
        """Class means in a first pass, spreads in a second."""
        by, d = "prototypes.fit", table.shape("feature")[1]
        classes = classes_of(table, by)
        c = len(classes)

        def rows() -> Iterator[tuple[Tensor, Tensor]]:
            return labelled(table, classes, lambda z: z.double() / lengths(z.double(), by)[:, None], by=by)

        means, counts = means_of_classes(rows(), c, d)
        squares = sum(float((z - means[label]).square().sum()) for z, label in rows())
        n, mean = counts.sum(), counts @ means / counts.sum()
        within = squares / (float(n) - c) if n > c else 0.0
        if within <= _NOTHING:  # of one image per class, or of equal ones
            self.prototypes_, self.typical_, self.shrinkage_ = means, torch.ones_like(counts), torch.ones_like(counts)
            return
        weight = torch.ones_like(counts)
        if c > 1:
            per_class = (n - counts.square().sum() / n) / (c - 1)
            apart = counts @ (means - mean).square().sum(1) / (c - 1)
            between = ((apart - within) / per_class).clamp(min=0)
            weight = between / (between + within / counts)
        self.prototypes_ = mean + weight[:, None] * (means - mean)
        self.typical_, self.shrinkage_ = within * (1 + weight / counts), weight

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row."""
        self.check_width(batch, self.prototypes_.shape[1])
        return typical_distance(batch.feature, self.prototypes_, self.typical_)
