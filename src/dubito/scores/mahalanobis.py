"""Mahalanobis distance to the nearest class: Gaussians with one covariance for all classes.

    u(x) = min_c (z - mu_c)^T Sigma^-1 (z - mu_c)
    relative:  the same  -  (z - mu)^T Sigma_0^-1 (z - mu),   one Gaussian mu, Sigma_0 for all rows

Lee et al. 2018, Ren et al. 2021, with Sigma the mean covariance within classes. The relative distance leaves out what
all classes share, which often drowns the rest (Ren et al., eq. 3). Lee et al. also perturb inputs, which is not done
here, and join several layers: `layer_mahalanobis.py`. On features of length one, it is `mahalanobis_pp.py`.

One pass fits it. With p_c the first row of class c, an arbitrary point among its rows,

    sum_i (z_i - mu_y)(z_i - mu_y)^T = sum_i (z_i - p_y)(z_i - p_y)^T - sum_c n_c (mu_c - p_c)(mu_c - p_c)^T

and because p_c is about as far from mu_c as any row, the difference loses no digits, however far apart the classes are.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.heads.linear_logits import add_gram, mirrored
from dubito.scores._features import ScoreOfFeatures, classes_of, labelled
from dubito.scores.gaussians import precision_factor, squared_distances
from dubito.table import Table
from dubito.validate import check_number


@final
@dataclass(frozen=True)
class ClassGaussians:
    """One Gaussian per class with a covariance that all share, and one of all rows.

    Attributes:
        means: (c, d).
        factor: Cholesky factor of the precision within classes.
        background_mean: (d) of all rows.
        background_factor: Cholesky factor of the precision of all rows.
    """

    means: Float64[Tensor, "c d"]
    factor: Float64[Tensor, "d d"]
    background_mean: Float64[Tensor, "d"]
    background_factor: Float64[Tensor, "d d"]

    def distances(self, z: Float64[Tensor, "n d"], *, relative: bool = False) -> Float64[Tensor, "n"]:
        """Squared, of every row to its nearest class; relative: less the distance to all rows.

        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> ClassGaussians(2 * one, one / 3, 2 * one[0], one / 6).distances(5 * one, relative=True).item()
        0.75
        """
        nearest: Tensor = squared_distances(z, self.means, self.factor).amin(1)
        if relative:
            nearest = nearest - squared_distances(z, self.background_mean[None], self.background_factor)[:, 0]
        return nearest


@final
class ClassScatter:
    """Collects labelled rows, in one pass, for Gaussians with one covariance.

    Attributes:
        counts: Rows of every class so far.
    """

    def __init__(self, c: int, d: int) -> None:
        self.counts = torch.zeros(c, dtype=torch.float64)
        self._first = torch.zeros(c, d, dtype=torch.float64)
        self._sums = torch.zeros(c, d, dtype=torch.float64)
        self._products = torch.zeros(d, d, dtype=torch.float64)

    def add(self, z: Float[Tensor, "n d"], label: Int64[Tensor, "n"]) -> None:
        """Count rows; label says where the class of each stands among all classes."""
        known, place = torch.unique(label, return_inverse=True)
        earliest = torch.full((len(known),), len(label)).scatter_reduce_(0, place, torch.arange(len(label)), "amin")
        new = self.counts[known] == 0
        self._first[known[new]] = z[earliest[new]].double()
        z = z.double() - self._first[label]
        self._sums.index_add_(0, label, z)
        add_gram(self._products, z)
        self.counts += torch.bincount(label, minlength=len(self.counts))

    def gaussians(self, *, regularisation: float, by: str, scale: float = 1.0) -> ClassGaussians:
        """Of the rows so far times `scale`; classes without rows are left out."""
        rows, counts = self.counts > 0, self.counts[self.counts > 0]
        shifts = self._sums[rows] / counts[:, None]
        means, total = self._first[rows] + shifts, counts.sum()
        within = mirrored(self._products).addmm_((shifts * counts[:, None]).T, shifts, alpha=-1)
        mean = counts @ means / total
        apart = (means - mean) * counts.sqrt()[:, None]
        overall = torch.addmm(within, apart.T, apart)
        factors = [
            precision_factor(
                scatter * (scale**2 / total), whose=f"{by}: the covariance {of}", regularisation=regularisation
            )
            for scatter, of in ((within, "within classes"), (overall, "of all rows"))
        ]
        return ClassGaussians(scale * means, factors[0], scale * mean, factors[1])


class ScoreOfGaussians(ScoreOfFeatures):
    """A distance to the nearest of `ClassGaussians`, which are kept as the attributes that scores are saved by."""

    means_: Float64[Tensor, "c d"]
    factor_: Float64[Tensor, "d d"]
    background_mean_: Float64[Tensor, "d"]
    background_factor_: Float64[Tensor, "d d"]

    @property
    def gaussians(self) -> ClassGaussians:
        """What was fitted."""
        self.check_fitted()
        return ClassGaussians(self.means_, self.factor_, self.background_mean_, self.background_factor_)

    @gaussians.setter
    def gaussians(self, fitted: ClassGaussians) -> None:
        self.means_, self.background_mean_ = fitted.means, fitted.background_mean
        self.factor_, self.background_factor_ = fitted.factor, fitted.background_factor


@final
@dataclass
class Mahalanobis(ScoreOfGaussians):
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
        """Means and the scatter around them, in one pass."""
        by = "mahalanobis.fit"
        classes = classes_of(table, by)
        scatter = ClassScatter(len(classes), table.shape("feature")[1])
        for z, label in labelled(table, classes, by=by):
            scatter.add(z, label)
        self.gaussians = scatter.gaussians(regularisation=self.regularisation, by=by)

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row to its nearest class."""
        self.check_width(batch, self.means_.shape[1])
        return self.gaussians.distances(batch.feature.double(), relative=self.relative)
