"""Mahalanobis distance over several layers of a network.

    u_l(x) = min_c (z'_l - mu_lc)^T Sigma_l^-1 (z'_l - mu_lc),   z'_l as in `mahalanobis_pp.py`, of layer l
    u(x)   = sum_l (u_l(x) - m_l) / s_l,     combine="max": the largest of these

Lee et al. 2018, section 2.2: OOD images near a class at the last layer may be far from all at an earlier one. They
weigh layers by a logistic regression on OOD images, and perturb inputs; neither is done here. m_l and s_l are the mean
and the standard deviation of u_l on a fifth of the images, which the Gaussians have not seen: in-distribution images
alone put the layers on one scale. The sum is the default, because noise of single layers averages out.

The column `layers` holds all layers side by side; their widths are in the notes of the layers probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.scores._features import ScoreOfFeatures, classes_of, held_out, unit, with_held_out
from dubito.scores.gaussians import squared_distances
from dubito.scores.mahalanobis import ClassScatter
from dubito.scores.mahalanobis_pp import scaled
from dubito.table import Table
from dubito.validate import check_choice, check_number, check_seed

Combine = Literal["sum", "max"]


@final
@dataclass
class LayerMahalanobis(ScoreOfFeatures):
    """Mahalanobis distances of several layers, standardised on in-distribution images and added up.

    Attributes:
        combine: "sum" of the standardised distances, or their "max".
        power: Of the length of each layer's features, see `MahalanobisPP`; 0 for the classical distance.
        regularisation: Added to every variance, in units of the features.
        widths: Number of features of each layer; by default as the layers probe has recorded.
        seed: Seed of the rows that are held out.
        widths_: (l) once fitted, with the tensors of all layers one after the other.
        lengths_: (l) geometric means of lengths.
        means_: (c, d) of scaled features.
        factors_: (d_1^2 + ... + d_l^2) Cholesky factors of the precisions.
        centres_: (l) mean distance of held-out rows.
        scales_: (l) its standard deviation.
    """

    combine: Combine = "sum"
    power: float = 1.0
    regularisation: float = 1e-5
    widths: Sequence[int] | None = None
    seed: int = 0

    name = "layer_mahalanobis"
    kind = "epistemic"
    needs = ("layers",)
    learns_from = ("layers", "label")
    learned = ("widths_", "lengths_", "means_", "factors_", "centres_", "scales_")
    own_probe = True

    def __post_init__(self) -> None:
        check_choice(self.combine, get_args(Combine), by=self.name, what="combine")
        check_number(self.power, "[0, 1]", by=self.name, what="power")
        check_number(self.regularisation, "[0, inf)", by=self.name, what="regularisation")
        check_seed(self.seed, by=self.name)
        if self.widths is not None:
            self.widths = tuple(self.widths)
            for width in self.widths:
                check_number(width, "[1, inf)", by=self.name, what="widths", whole=True)

    def learn(self, table: Table) -> None:
        """Gaussians of all layers in one pass over four fifths of the images, standardised on the others."""
        by = "layer_mahalanobis.fit"
        widths, out = self._widths(table), held_out(table, self.seed, by)
        classes = classes_of(table, by)
        scatters = [ClassScatter(len(classes), width) for width in widths]
        logs = torch.zeros(len(widths), dtype=torch.float64)
        for z, label, held in with_held_out(table, classes, out, by=by, column="layers"):
            for number, part in enumerate(torch.split(z, widths, dim=1)):
                rows, lengths = scaled(part, self.power, f"{by}: layer {number}")
                scatters[number].add(rows[~held], label[~held])
                logs[number] += lengths[~held].sum()
        self.lengths_ = (logs / int((~out).sum())).exp() if self.power else torch.ones_like(logs)
        fitted = [
            scatter.gaussians(
                regularisation=self.regularisation, by=f"{by}: layer {number}", scale=float(s) ** self.power
            )
            for number, (scatter, s) in enumerate(zip(scatters, self.lengths_, strict=True))
        ]
        self.widths_ = torch.tensor(widths)
        self.means_ = torch.cat([one.means for one in fitted], dim=1)
        self.factors_ = torch.cat([one.factor.flatten() for one in fitted])
        parts = [self._distances(z[held]) for z, _, held in with_held_out(table, classes, out, by=by, column="layers")]
        distances = torch.cat(parts)
        spread = distances.std(0, correction=0)
        self.centres_, self.scales_ = distances.mean(0), torch.where(spread > 0, spread, 1.0)

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The sum, or the largest, of the standardised distances of every row."""
        self.check_width(batch, self.means_.shape[1])
        distances = (self._distances(batch.whole("layers").double()) - self.centres_) / self.scales_
        return distances.sum(1) if self.combine == "sum" else distances.amax(1)

    def _distances(self, z: Float64[Tensor, "n d"]) -> Float64[Tensor, "n l"]:
        """Squared, of every row to its nearest class in every layer."""
        widths = self.widths_.tolist()
        factors = torch.split(self.factors_, [width**2 for width in widths])
        pairs = zip(torch.split(z, widths, dim=1), torch.split(self.means_, widths, dim=1), strict=True)
        columns = []
        for number, (part, means) in enumerate(pairs):
            factor = factors[number].view(widths[number], widths[number])
            rows = unit(part, self.power) * self.lengths_[number] ** self.power
            columns.append(squared_distances(rows, means, factor).amin(1))
        return torch.stack(columns, dim=1)

    def _widths(self, table: Table) -> list[int]:
        """Of the layers, as they were passed or recorded; TableError unless they fit the column."""
        probe = (table.provenance.probes if table.provenance else {}).get("layers") or {}
        widths = self.widths or (probe.get("notes") or {}).get("widths")
        total = table.shape("layers")[1]
        if not widths or sum(widths) != total:
            got = f"got widths {list(widths)}, of sum {sum(widths)}" if widths else "no widths are recorded"
            raise TableError(
                f"layer_mahalanobis.fit: the widths of the layers must add up to the {total} columns of 'layers' in "
                f"{table.name}; {got}. Extract with the layers probe, or pass widths=[...], one number per layer."
            )
        return [int(width) for width in widths]
