"""Mahalanobis distance to the nearest class: Gaussians with one covariance for all (Lee et al. 2018, Ren et al. 2021).

    u(x) = min_c (z - mu_c)^T Sigma^-1 (z - mu_c)
    relative:  the same  -  (z - mu)^T Sigma_0^-1 (z - mu),   one Gaussian mu, Sigma_0 for all rows, without classes

Sigma is the mean covariance within classes. The relative distance leaves out what all classes share, which often drowns
the rest (Ren et al., eq. 3). Lee et al. also perturb inputs and join several layers; that is not done here. Two passes
over the table, in float64.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.scores._features import (
    check_width,
    classes_of,
    finite_features,
    labelled,
    means_of_classes,
    rows_named,
)
from dubito.scores.gaussians import precision_factor, squared_distances
from dubito.table import Table
from dubito.types import Score


def mahalanobis(
    z: Float64[Tensor, "n d"], means: Float64[Tensor, "c d"], factor: Float64[Tensor, "d d"]
) -> Float64[Tensor, "n c"]:
    """Squared distances to every mean, with factor factor^T = Sigma^-1.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> mahalanobis(5 * one, 2 * one, one / 3).item()  # three away, at a deviation of three
    1.0
    """
    middle = means.mean(0)
    return squared_distances((z - middle) @ factor, (means - middle) @ factor)


@final
@dataclass
class Mahalanobis(Score):
    """The squared Mahalanobis distance to the nearest class mean, with one covariance for all classes.

    Attributes:
        relative: Less the distance to the mean of all rows, by the covariance of all rows.
        regularisation: Added to every variance.
        means_: (c, d), once fitted.
        factor_: (d, d) Cholesky factor of the precision within classes.
        background_mean_: (d) of all rows.
        background_factor_: (d, d) of all rows.
    """

    relative: bool = False
    regularisation: float = 1e-5

    name = "mahalanobis"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "label")
    learned = ("means_", "factor_", "background_mean_", "background_factor_")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.regularisation) and self.regularisation >= 0):
            raise ValueRangeError(f"mahalanobis: regularisation must be at least 0; got {self.regularisation}.")

    def learn(self, table: Table) -> None:
        """Class means in a first pass, the scatter around them in a second."""
        with rows_named(table):
            self._learn(table)

    def score(self, table: Table) -> Float[Tensor, "n"]:
        """The distance of every row of a table; see `Score.score`."""
        with rows_named(table):
            return super().score(table)

    def _learn(self, table: Table) -> None:
        classes, d = classes_of(table, "mahalanobis.fit"), table.shape("feature")[1]
        means, counts = means_of_classes(labelled(table, classes, _finite), len(classes), d)
        within = torch.zeros(d, d, dtype=torch.float64)
        for z, label in labelled(table, classes, _finite):
            z = z - means[label]  # noqa: PLW2901
            within.addmm_(z.T, z)
        mean = counts @ means / counts.sum()
        apart = (means - mean) * counts.sqrt()[:, None]
        between = apart.T @ apart
        self.means_, self.background_mean_ = means, mean
        self.factor_ = self._factor(within / len(table), "within classes")
        self.background_factor_ = self._factor((within + between) / len(table), "of all rows")

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row to its nearest class."""
        check_width(batch, self.means_.shape[1], self.name)
        z = finite_features(batch.feature, "mahalanobis.score")
        nearest: Tensor = mahalanobis(z, self.means_, self.factor_).amin(1)
        if self.relative:
            nearest = nearest - mahalanobis(z, self.background_mean_[None], self.background_factor_)[:, 0]
        return nearest

    def _factor(self, covariance: Float64[Tensor, "d d"], which: str) -> Float64[Tensor, "d d"]:
        whose = f"mahalanobis.fit: the covariance {which}"
        return precision_factor(covariance, whose=whose, regularisation=self.regularisation)


def _finite(feature: Float[Tensor, "n d"]) -> Float64[Tensor, "n d"]:
    return finite_features(feature, "mahalanobis.fit")
