"""Distances to the training features: far from everything the model has seen.

    neighbours   || z/||z|| - z_(k)/||z_(k)|| ||_2,   z_(k) the k-th nearest of a bank in cosine similarity
    mahalanobis  min_c (z - mu_c)^T Sigma^-1 (z - mu_c)
                 relative:  the same  -  (z - mu)^T Sigma_0^-1 (z - mu),   one Gaussian mu, Sigma_0 for all rows

Neighbours: Sun et al. 2022; exact search by faiss, batch by batch. Mahalanobis: Lee et al. 2018, Ren et al. 2021, with
Sigma the mean covariance within classes. The relative distance leaves out what all classes share, which often drowns
the rest (Ren et al., eq. 3). Lee et al. also perturb inputs and join several layers; that is not done here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import faiss
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.scores.gaussians import precision_factor, squared_distances
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_number

_AT_ONCE = 8192


def kth_distance(queries: Float[Tensor, "n d"], bank: Float[Tensor, "b d"], k: int) -> Float[Tensor, "n"]:
    """Euclidean distance to the k-th nearest row of the bank; both normalised to length one."""
    arrays = queries.float().contiguous().numpy(), bank.float().contiguous().numpy()
    _, index = faiss.knn(*arrays, k, metric=faiss.METRIC_INNER_PRODUCT)
    # From the two vectors, not from their product: near zero, sqrt(2 - 2 cos) would be nothing but rounding.
    kth = bank[torch.from_numpy(index[:, -1])]
    distance: Tensor = torch.linalg.vector_norm(queries.double() - kth.double(), dim=-1)
    return distance


class ScoreOfFeatures(Score):
    """A score that reads one column of features, which must be finite and as wide as in fit."""

    def batches(self, table: Table) -> Iterator[Table]:
        """Rows of the features; ValueRangeError names the row where one is not finite."""
        return finite_batches(table, self.needs[0], by=f"{self.name}.score")

    def check_width(self, batch: Table, width: int) -> None:
        """Raise TableError for features of another width than those that were learned from."""
        if batch.shape("feature")[1] != width:
            raise TableError(
                f"{self.name}.score: features must be {width} wide, as in fit; got {batch.shape('feature')[1]} in "
                f"{batch.name}. Score a table of the same model."
            )


@final
@dataclass
class Neighbours(ScoreOfFeatures):
    """The k-th nearest neighbour's distance on normalised features.

    Attributes:
        k: Which neighbour. One is sensitive to single odd training images, many blur small classes.
        bank_size: Keep this many rows, drawn at random; None keeps all. A fiftieth often serves as well.
        seed: Of that draw.
        bank_: (b, d) normalised features, once fitted.
    """

    k: int = 10
    bank_size: int | None = None
    seed: int = 0

    name = "neighbours"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature",)
    learned = ("bank_",)

    def learn(self, table: Table) -> None:
        """Keep the normalised features."""
        size = len(table) if self.bank_size is None else min(self.bank_size, len(table))
        hint = f"The bank has {size} rows: fit on more images or choose a smaller k."
        check_number(self.k, f"[1, {size}]", by="neighbours.fit", what="k", whole=True, hint=hint, error=TableError)
        keep = torch.randperm(len(table), generator=torch.Generator().manual_seed(self.seed))[:size].sort().values
        bank = torch.empty(size, table.shape("feature")[1])
        for start in range(0, size, _AT_ONCE):
            rows = keep[start : start + _AT_ONCE]
            bank[start : start + len(rows)] = _normalised(table.select("feature").rows(rows).feature, "fit")
        self.bank_ = bank

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The distance of every row."""
        self.check_width(batch, self.bank_.shape[1])
        return kth_distance(_normalised(batch.feature, "score"), self.bank_, self.k)


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


def finite_batches(table: Table, column: str, *more: str, by: str) -> Iterator[Table]:
    """Batches of a table; ValueRangeError names the row whose features, in `column`, are not finite."""
    start = 0
    for batch in table.batches(column, *more):
        check_finite(batch.whole(column), range(start, start + len(batch)), table.name, by=by)
        start += len(batch)
        yield batch


def check_finite(feature: Float[Tensor, "n d"], rows: Sequence[int], name: str, *, by: str) -> None:
    """Raise ValueRangeError for NaN and infinity in these rows of the table of that name."""
    bad = ~torch.isfinite(feature)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueRangeError(
            f"{by}: features must be finite; feature {column} of row {int(rows[row])} of {name} is "
            f"{float(feature[row, column])}. Look at that image's feature."
        )


def classes_of(table: Table, where: str) -> Int64[Tensor, "c"]:
    """The labels that occur, in order; TableError if there are none."""
    classes = torch.empty(0, dtype=torch.long)
    for batch in table.batches("label"):
        classes = torch.unique(torch.cat([classes, batch.label]))
    if len(classes) == 0:
        raise TableError(f"{where} needs labelled rows; {table.name} has none. Fit on in-distribution images.")
    return classes


def labelled(
    table: Table, classes: Int64[Tensor, "c"], prepare: Callable[[Tensor], Tensor] = Tensor.double, *, by: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepared features (n, d), and where each row's label stands among the classes (n)."""
    for batch in finite_batches(table, "feature", "label", by=by):
        yield prepare(batch.feature), torch.searchsorted(classes, batch.label)


def means_of_classes(
    pairs: Iterator[tuple[Tensor, Tensor]], c: int, d: int
) -> tuple[Float64[Tensor, "c d"], Float64[Tensor, "c"]]:
    """The mean of every class, and how many rows it has."""
    sums, counts = torch.zeros(c, d, dtype=torch.float64), torch.zeros(c, dtype=torch.float64)
    for z, label in pairs:
        sums.index_add_(0, label, z)
        counts += torch.bincount(label, minlength=c)
    return sums / counts[:, None], counts


def _normalised(feature: Float[Tensor, "n d"], verb: str) -> Float[Tensor, "n d"]:
    norm = torch.linalg.vector_norm(feature, dim=-1)
    bad = ~torch.isfinite(norm) | (norm == 0)
    if bool(bad.any()):
        raise ValueRangeError(
            f"neighbours.{verb}: features must be finite and not all zero; row {int(bad.nonzero()[0, 0])} of the batch "
            f"is not. Look at that image's feature."
        )
    normalised: Tensor = (feature / norm[:, None]).float()
    return normalised
