"""ViM: the residual of the feature as one more logit, against the energy of the others.

    u(x) = alpha || R^T (z - o) ||_2 - log sum_y exp(logit_y)
    alpha = mean max_y logit_y / mean || R^T (z - o) ||_2,   both over the images of fit

Wang et al. 2022: the order is that of the probability that the virtual logit has among the others. R and o are those
of `residual.py`. Where the mean largest logit is not positive, as of some models that were trained with a sigmoid for
every class, alpha would not be either, and a larger residual would count as more certain: fit refuses. Set alpha then,
or use `Residual`.

pytorch-ood sums second moments in float32, and so finds another subspace where eigenvalues are close to each other: of
made-up features, 768 for 500 classes, its values are 3e-3 away from those in float64 throughout, and ours 3e-5.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.scores._features import ScoreOfFeatures
from dubito.scores.residual import residual_norm, residual_space
from dubito.scores.softmax import energy
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_number

_NOTHING = 1e-6
"""A residual is rounding if it is a smaller share of the feature."""


def vim(residual: Float64[Tensor, "n"], logits: Float[Tensor, "n c"], alpha: float) -> Float64[Tensor, "n"]:
    """The residual times alpha, minus logsumexp(logits).

    >>> vim(torch.tensor([3.0]).double(), torch.tensor([[-1e9, 4.0]]), 2.0).item()  # 2 * 3 - 4
    2.0
    """
    return alpha * residual + energy(logits)


@final
@dataclass
class ViM(ScoreOfFeatures):
    """The virtual logit of the residual, less the energy of the logits.

    Attributes:
        dimension: Of the principal subspace; None for that of the paper.
        alpha: Factor of the residual; None for the ratio of the means of largest logit and residual.
        origin_: (d) what features are measured from, once fitted.
        residual_: (d, r) orthonormal basis of what the principal subspace leaves.
        alpha_: The factor in use.
    """

    dimension: int | None = None
    alpha: float | None = None

    name = "vim"
    kind = "epistemic"
    needs = ("feature", "logit")
    learns_from = ("feature", "logit")
    learned = ("origin_", "residual_", "alpha_")
    ood_only = True
    reads_size = True

    def __post_init__(self) -> None:
        if self.dimension is not None:
            check_number(self.dimension, "[1, inf)", by=self.name, what="dimension", whole=True)
        if self.alpha is not None:
            check_number(self.alpha, "(0, inf)", by=self.name, what="alpha")

    def learn(self, table: Table) -> None:
        """The residual space, and the ratio of the two means."""
        by = "vim.fit"
        origin, residual = residual_space(table, self.dimension, by=by)
        alpha = _ratio(table, origin, residual, by) if self.alpha is None else float(self.alpha)
        self.origin_, self.residual_, self.alpha_ = origin, residual, alpha

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The score of every row."""
        self.check_width(batch, len(self.origin_))
        return vim(residual_norm(batch.feature, self.origin_, self.residual_), batch.logit, self.alpha_)


def _ratio(table: Table, origin: Float64[Tensor, "d"], residual: Float[Tensor, "d r"], by: str) -> float:
    """Mean largest logit over mean residual."""
    largest = lengths = whole = 0.0
    for batch in finite_batches(table.batches("feature", "logit"), table.name, by=by):
        largest += float(batch.logit.amax(1).sum(dtype=torch.float64)) / len(table)
        lengths += float(residual_norm(batch.feature, origin, residual).sum()) / len(table)
        whole += float((batch.feature - origin.to(batch.feature.dtype)).norm(dim=1).sum()) / len(table)
    if largest <= 0:
        raise ValueRangeError(
            f"{by}: the mean of the largest logits must be positive to scale the residual; got {largest:.3g} from "
            f"{table.name}. Set alpha, or use the score residual."
        )
    if lengths <= _NOTHING * whole:
        raise TableError(
            f"{by}: the features of {table.name} lie in a subspace of {len(origin) - residual.shape[1]} dimensions, "
            f"and leave no residual to scale. Set a smaller dimension."
        )
    return largest / lengths
