"""Mahalanobis distance on features of length one, and on features whose length is scaled.

    z' = z (s / ||z||)^power,   0 <= power <= 1
    u(x) = min_c (z' - mu_c)^T Sigma^-1 (z' - mu_c),   relative: less (z' - mu)^T Sigma_0^-1 (z' - mu)

Mueller & Hein 2025 (Mahalanobis++) use power 1, length one: MDS++, and with relative RMDS++. Lengths of features differ
more from image to image, and from class to class, than Gaussians with one covariance allow, and shorter features, as
OOD images have, would be nearer to all means. Power 0 is the classical distance. s, ours, is the geometric mean of the
lengths in fit: one factor for all rows, which changes no order, but keeps features in the units in which
`regularisation` is stated. z' = 0 where z = 0, which is refused in fit, as it has no direction.

power="choose" takes the power with the smallest area under the risk-coverage curve on a fifth of the images, held out:
the risk is that the nearest class is not the label, the coverage that of small u. So it measures on in-distribution
rows what u is for, to be larger where the Gaussians err; of equal powers it takes the largest. The likelihood of rows
held out, E log q(z') + log |det dz'/dz| with log |det dz'/dz| = power d (log s - log ||z||) + log(1 - power), cannot
choose among all powers: it is minus infinity at power 1, whatever the data, as lengths are lost there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.metrics import aurc
from dubito.scores._features import classes_of, held_out, labelled, lengths, unit, with_held_out
from dubito.scores.gaussians import squared_distances
from dubito.scores.mahalanobis import ClassGaussians, ClassScatter, ScoreOfGaussians
from dubito.table import Table
from dubito.validate import check_number, check_seed

_POWERS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Candidates; of equal ones the first is chosen."""


def scaled(z: Float[Tensor, "n d"], power: float, by: str) -> tuple[Float64[Tensor, "n d"], Float64[Tensor, "n"]]:
    """Rows divided by their length to a power, and the logarithms of their lengths.

    >>> scaled(torch.tensor([[3.0, 4.0]]), 1.0, "here")[0].tolist()
    [[0.6, 0.8]]
    """
    z = z.double()
    length = lengths(z, by) if power else torch.linalg.vector_norm(z, dim=1)
    return (z / length[:, None] ** power if power else z), length.log()


@final
@dataclass
class MahalanobisPP(ScoreOfGaussians):
    """The squared Mahalanobis distance to the nearest class mean, of features at length one.

    Attributes:
        power: How far lengths are evened out: 1 to one length, 0 not at all; "choose" on held-out rows.
        relative: Less the distance to the mean of all rows, by the covariance of all rows.
        regularisation: Added to every variance, in units of the features.
        seed: Seed of the rows that "choose" holds out.
        power_: The power that was used, once fitted.
        length_: s, the geometric mean of lengths.
        means_: (c, d) of scaled features.
        factor_: (d, d) Cholesky factor of the precision within classes.
        background_mean_: (d) of all rows.
        background_factor_: (d, d) of all rows.
    """

    power: float | Literal["choose"] = 1.0
    relative: bool = False
    regularisation: float = 1e-5
    seed: int = 0

    name = "mahalanobis_pp"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "label")
    learned = ("power_", "length_", "means_", "factor_", "background_mean_", "background_factor_")

    def __post_init__(self) -> None:
        if self.power != "choose":
            hint = "1 is the paper's; 'choose' chooses on held-out rows."
            check_number(self.power, "[0, 1]", by=self.name, what="power", hint=hint)
        check_number(self.regularisation, "[0, inf)", by=self.name, what="regularisation")
        check_seed(self.seed, by=self.name)

    def learn(self, table: Table) -> None:
        """Means and the scatter around them, in one pass; with "choose" after a fit and a look for every power."""
        classes = classes_of(table, "mahalanobis_pp.fit")
        self.power_ = self._chosen(table, classes) if self.power == "choose" else float(self.power)
        rows = labelled(table, classes, by="mahalanobis_pp.fit")
        self.gaussians, self.length_ = self._fitted(rows, self.power_, len(classes), table.shape("feature")[1])

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row to its nearest class."""
        self.check_width(batch, self.means_.shape[1])
        return self.distance(batch.feature)

    def distance(self, feature: Float[Tensor, "n d"]) -> Float64[Tensor, "n"]:
        """The same from features, unchecked."""
        z = unit(feature.double(), self.power_) * self.length_**self.power_
        return self.gaussians.distances(z, relative=self.relative)

    def _fitted(
        self, rows: Iterable[tuple[Tensor, Tensor]], power: float, c: int, d: int
    ) -> tuple[ClassGaussians, float]:
        """Gaussians of scaled features and s, of features and the places of their classes, batch by batch."""
        by, total, count = "mahalanobis_pp.fit", 0.0, 0
        scatter = ClassScatter(c, d)
        for feature, label in rows:
            z, logs = scaled(feature, power, by)
            scatter.add(z, label)
            total, count = total + float(logs.sum()), count + len(logs)
        s = float(torch.tensor(total / count, dtype=torch.float64).exp()) if power else 1.0
        return scatter.gaussians(regularisation=self.regularisation, by=by, scale=s**power), s

    def _chosen(self, table: Table, classes: Int64[Tensor, "c"]) -> float:
        """The power with the smallest area under the risk-coverage curve of held-out rows."""
        by, d = "mahalanobis_pp.fit", table.shape("feature")[1]
        without, areas = held_out(table, self.seed, by), {}
        for power in _POWERS:
            rest = ((z[~out], label[~out]) for z, label, out in with_held_out(table, classes, without, by=by))
            gaussians, s = self._fitted(rest, power, len(classes), d)
            kept, parts = torch.zeros(len(classes), dtype=torch.bool), []
            for feature, label, out in with_held_out(table, classes, without, by=by):
                kept[label[~out]] = True
                z, _ = scaled(feature[out], power, by)
                least = squared_distances(z * s**power, gaussians.means, gaussians.factor).min(1)
                parts.append((*least, label[out]))
            u, place, truth = (torch.cat(column) for column in zip(*parts, strict=True))
            areas[power] = aurc(u, kept.nonzero()[:, 0][place] != truth)
        return min(areas, key=areas.__getitem__)
