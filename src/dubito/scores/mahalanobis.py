"""Mahalanobis distance to the nearest class: Gaussians with one covariance for all classes.

    u(x) = min_c (z - mu_c)^T Sigma^-1 (z - mu_c)
    relative:  the same  -  (z - mu)^T Sigma_0^-1 (z - mu),   one Gaussian mu, Sigma_0 for all rows

Lee et al. 2018, Ren et al. 2021, with Sigma the mean covariance within classes. The relative distance leaves out what
all classes share, which often drowns the rest (Ren et al., eq. 3). Lee et al. also perturb inputs and join several
layers; that is not done here.
"""

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.scores._features import ScoreOfFeatures, classes_of, labelled, means_of_classes
from dubito.scores.gaussians import precision_factor, squared_distances
from dubito.table import Table
from dubito.validate import check_number


@final
@dataclass
class Mahalanobis(ScoreOfFeatures):
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
        check_number(self.regularisation, "[0, inf)", by=self.name, what="regularisation")

    def learn(self, table: Table) -> None:
        """Class means in a first pass, the scatter around them in a second."""
        by, d = "mahalanobis.fit", table.shape("feature")[1]
        classes = classes_of(table, by)
        means, counts = means_of_classes(labelled(table, classes, by=by), len(classes), d)
        within = torch.zeros(d, d, dtype=torch.float64)
        for z, label in labelled(table, classes, by=by):
            z = z - means[label]  # noqa: PLW2901
            within.addmm_(z.T, z)
        mean = counts @ means / counts.sum()
        apart = (means - mean) * counts.sqrt()[:, None]
        overall, factor = within + apart.T @ apart, partial(precision_factor, regularisation=self.regularisation)
        self.means_, self.background_mean_ = means, mean
        self.factor_ = factor(within / len(table), whose=f"{by}: the covariance within classes")
        self.background_factor_ = factor(overall / len(table), whose=f"{by}: the covariance of all rows")

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row to its nearest class."""
        self.check_width(batch, self.means_.shape[1])
        z = batch.feature.double()
        nearest: Tensor = squared_distances(z, self.means_, self.factor_).amin(1)
        if self.relative:
            nearest = nearest - squared_distances(z, self.background_mean_[None], self.background_factor_)[:, 0]
        return nearest
