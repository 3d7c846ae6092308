"""Residual: how much of a feature lies outside the subspace that in-distribution features fill.

    u(x) = || R^T (z - o) ||_2,   o = -W^+ b,   R the eigenvectors of mean (z - o)(z - o)^T but the first D

Wang et al. 2022 (ViM). o is where all logits of the last layer are zero, or as near to zero as they get; D is 1,000
for 2,048 features or more, 512 for 768 or more, else half of them, as in the authors' code. The last layer comes from
features and logits (`_last_layer.py`). Features that never vary have weight 0 there, which moves o where the model's
own weights of them are not 0. Directions of W with less than a hundred-thousandth of its largest singular value count
as zero (pytorch-ood: about a ten-thousandth). The products with R are in the precision of the features.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.heads.linear_logits import add_gram, mirrored
from dubito.scores._features import ScoreOfFeatures, mean_feature
from dubito.scores._last_layer import LastLayer, last_layer, once
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_number

_SMALLEST = 1e-10
"""Of the eigenvalues of W^T W, as a share of the largest: those that count."""


def residual_norm(
    z: Float[Tensor, "n d"], origin: Float64[Tensor, "d"], residual: Float[Tensor, "d r"]
) -> Float64[Tensor, "n"]:
    """The length of what the residual directions hold of z - origin.

    >>> residual_norm(torch.tensor([[9.0, 4.0, 5.0]]), torch.ones(3).double(), torch.eye(3)[:, 1:]).item()  # (3, 4)
    5.0
    """
    norm: Tensor = torch.linalg.vector_norm((z - origin.to(z.dtype)) @ residual.to(z.dtype), dim=-1)
    return norm.double()


def usual_dimension(d: int) -> int:
    """That of the principal subspace of d features.

    >>> [usual_dimension(d) for d in (2048, 1280, 64)]
    [1000, 512, 32]
    """
    return 1000 if d >= 2048 else 512 if d >= 768 else d // 2


def residual_space(
    table: Table, dimension: int | None, *, by: str
) -> tuple[Float64[Tensor, "d"], Float[Tensor, "d r"]]:
    """The origin, and an orthonormal basis of what the principal subspace leaves; see above."""
    d = table.shape("feature")[1]
    check_number(
        d, "[2, inf)", by=by, what="the number of features", hint="One has no subspace.", error=TableError, whole=True
    )
    size = usual_dimension(d) if dimension is None else dimension
    hint = f"It is less than the number of features, {d}."
    check_number(size, f"[1, {d})", by=by, what="dimension", hint=hint, error=TableError, whole=True)
    layer = last_layer(table, by=by)
    origin = once("origin", table, lambda: _zero_of(layer))
    vectors = once("principal axes", table, lambda: _axes(table, origin, by))
    return origin, vectors[:, : d - size].float().contiguous()


@final
@dataclass
class Residual(ScoreOfFeatures):
    """The length of a feature outside the principal subspace of in-distribution features.

    Attributes:
        dimension: Of the principal subspace; None for that of the paper.
        origin_: (d) what features are measured from, once fitted.
        residual_: (d, r) orthonormal basis of what the principal subspace leaves.
    """

    dimension: int | None = None

    name = "residual"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "logit")
    learned = ("origin_", "residual_")
    ood_only = True

    def __post_init__(self) -> None:
        if self.dimension is not None:
            check_number(self.dimension, "[1, inf)", by=self.name, what="dimension", whole=True)

    def learn(self, table: Table) -> None:
        """Origin and residual directions."""
        self.origin_, self.residual_ = residual_space(table, self.dimension, by="residual.fit")

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The length of every row's residual."""
        self.check_width(batch, len(self.origin_))
        return residual_norm(batch.feature, self.origin_, self.residual_)


def _zero_of(layer: LastLayer) -> Float64[Tensor, "d"]:
    """-W^+ b, the pseudo-inverse by the eigenvectors of the smaller of W W^T and W^T W."""
    weight, bias = layer
    wide = weight.shape[0] <= weight.shape[1]
    values, vectors = torch.linalg.eigh(weight @ weight.T if wide else weight.T @ weight)
    kept = values > _SMALLEST * values.amax()

    used = vectors[:, kept]
    solved: Tensor = used @ ((used.T @ (bias if wide else weight.T @ bias)) / values[kept])
    return -(weight.T @ solved) if wide else -solved


def _axes(table: Table, origin: Float64[Tensor, "d"], by: str) -> Float64[Tensor, "d d"]:
    """Eigenvectors of mean (z - o)(z - o)^T, the least important first."""
    d = len(origin)
    mean = mean_feature(table, by=by)
    moment = torch.zeros(d, d, dtype=torch.float64)
    for batch in finite_batches(table.batches("feature"), table.name, by=by):
        # Around the mean, so that products in float32 keep their digits; the rest is added in float64.
        add_gram(moment, batch.feature - mean.to(batch.feature.dtype))
    vectors: Tensor = torch.linalg.eigh(
        mirrored(moment) / len(table) + torch.outer(mean - origin, mean - origin)
    ).eigenvectors
    return vectors
