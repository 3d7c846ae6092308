"""The classifying layer, recovered from a table: the least-squares map from features to logits.

    W = (sum_i y_i z_i^T) (sum_i z_i z_i^T)^+,   b = mean y - W mean z,   z_i and y_i in the sums without their means

Exact where the logits are linear in the features and there are more rows than independent features. Features that never
vary get weight 0. Rows are read twice, block by block, and not kept; sums are in float64.

Whether the logits are linear at all follows from what the map misses, as a share of their deviation. Both variances
count their degrees of freedom, n - rank - 1 and n - 1: with hardly more rows than features, anything is linear in them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.table import Table
from dubito.types import finite

Pairs = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Reads the rows anew: features (n, d) and logits (n, c) block by block, finite, in float64."""
_LARGEST_MISS = 0.2
"""Share of the logits' deviation: half precision costs a thousandth, a head that is not linear most of it."""
_RANK = 1e-12
"""Directions with a smaller share of the largest variance are those of dead features."""
_PANELS = 4
_INDEPENDENT = 1e-9
"""Features that keep a larger share, once what the others explain is taken off, are independent beyond doubt."""


@final
class LinearLogits(NamedTuple):
    """The map, and how well it fits.

    Attributes:
        weight: (c, d).
        bias: (c).
        rank: Number of independent features.
        rows: Number of rows that were read.
        missed: Deviation of the logits that the map misses, as a share; None with too few rows to know.
    """

    weight: Float64[Tensor, "c d"]
    bias: Float64[Tensor, "c"]
    rank: int
    rows: int
    missed: float | None

    def check_linear(self, of: str, *, by: str, repair: str) -> None:
        """Raise TableError for logits that another layer must have made, or one that is not linear."""
        if self.missed is not None and self.missed > _LARGEST_MISS:
            raise TableError(
                f"{by}: logits must be linear in the features; a linear layer misses those of {of} by "
                f"{self.missed:.0%} of their deviation. Pass features and logits of the same layer and model, {repair}."
            )


def linear_logits(pairs: Pairs) -> LinearLogits:
    """The best logits = W z + b.

    >>> z = torch.tensor([[0.0], [1.0], [2.0]]).double()
    >>> layer = linear_logits(lambda: iter([(z, 3 * z + 1)]))
    >>> round(layer.weight.item(), 6), round(layer.bias.item(), 6), layer.rank
    (3.0, 1.0, 1)
    """
    n, z_mean, y_mean = 0, torch.zeros(()), torch.zeros(())
    for feature, logit in pairs():
        n, z_mean, y_mean = n + len(feature), z_mean + feature.sum(0), y_mean + logit.sum(0)
    z_mean, y_mean = z_mean / n, y_mean / n
    d, c = len(z_mean), len(y_mean)
    zz, zy = torch.zeros(d, d, dtype=torch.float64), torch.zeros(d, c, dtype=torch.float64)
    total = 0.0
    for feature, logit in pairs():
        z, y = feature - z_mean, logit - y_mean
        add_gram(zz, z)
        zy.addmm_(z.T, y)
        total += float(y.square().sum())
    weight, rank = _solved(mirrored(zz), zy)
    left = max(total - float((weight * zy.T).sum()), 0.0)
    missed = None
    if n > rank + 1:
        missed = math.sqrt((left / (n - rank - 1)) / (total / (n - 1))) if total > 0 else 1.0
    return LinearLogits(weight, y_mean - weight @ z_mean, rank, n, missed)


def _solved(zz: Float64[Tensor, "d d"], zy: Float64[Tensor, "d c"]) -> tuple[Float64[Tensor, "c d"], int]:
    """The smallest W with W zz = zy^T, and the rank of zz."""
    weight, alive = torch.zeros(zy.T.shape, dtype=torch.float64), zz.diagonal() > _RANK * zz.diagonal().amax()
    # Cholesky takes a tenth of the time of eigenvalues, and serves unless features depend on each other.
    factor, failed = torch.linalg.cholesky_ex(zz[alive][:, alive])
    if (
        not int(failed)
        and bool(alive.any())
        and float(factor.diagonal().amin()) ** 2 > _INDEPENDENT * zz.diagonal().amax()
    ):
        weight[:, alive] = torch.cholesky_solve(zy[alive], factor).T
        return weight, int(alive.sum())
    values, vectors = torch.linalg.eigh(zz)
    kept = values > _RANK * values.amax()
    return ((vectors[:, kept] / values[kept]) @ (vectors[:, kept].T @ zy)).T.contiguous(), int(kept.sum())


def add_gram(upper: Float64[Tensor, "d d"], z: Float[Tensor, "n d"]) -> None:
    """Add z^T z to the upper half of a matrix, in which the lower half is without meaning: 5/8 of the products.

    Products are in the precision of z, and their sums over blocks of rows in float64.
    """
    edges = torch.linspace(0, z.shape[1], _PANELS + 1).round().long().tolist()
    for low, high in pairwise(edges):
        part, beside = z[:, low:high].T, z[:, low:]
        if z.dtype == upper.dtype:
            upper[low:high, low:].addmm_(part, beside)
        else:
            upper[low:high, low:] += part @ beside


def mirrored(upper: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
    """The symmetric matrix with this upper half."""
    return upper.triu() + upper.triu(1).T


def centred_layer(
    batches: Callable[[], Iterable[Table]], name: str, *, by: str, repair: str
) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c"]]:
    """Weight and bias that map features to logits less their mean over classes, which no probability depends on.

    Args:
        batches: Reads the rows anew, with the columns `feature` and `logit`.
        name: What errors call the table.
        by: The function that the user called.
        repair: What else the user can do if the logits are not linear in the features.
    """

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches():
            logit = finite(batch.logit, f"{by}: logits of {name}").double()
            feature = finite(batch.feature, f"{by}: features of {name}").double()
            yield feature, logit - logit.mean(dim=1, keepdim=True)

    layer = linear_logits(pairs)
    layer.check_linear(name, by=by, repair=repair)
    return layer.weight.float(), layer.bias.float()
