"""KL matching: how far the predicted distribution is from that of every class's typical image.

    u(x) = min_k KL(p || d_k) = sum_y p_y log p_y - max_k sum_y p_y log d_ky,   p = softmax(logits)

Hendrycks et al. 2022. d_k is the mean p of the images that are predicted as class k, so no labels are needed; classes
that are never predicted have none. All divergences from all classes are one product of matrices, in float32, which
finds the nearest class; the divergence from that one is then in float64. Where d_k is zero in float64, the smallest
positive number stands for it, so that the divergence is large but finite.
"""

import math
import sys
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics.shifted import shifted, shifted_blocks
from dubito.scores.softmax import check_two_classes, refuse_one_class
from dubito.table import Table
from dubito.types import Score, finite_batches
from dubito.validate import check_rows

_LOWEST = math.log(sys.float_info.min)


def kl_matching(logits: Float[Tensor, "n c"], log_typical: Float64[Tensor, "k c"]) -> Float64[Tensor, "n"]:
    """The divergence from the nearest typical distribution.

    >>> kl_matching(torch.zeros(1, 2), torch.tensor([[0.5, 0.5], [0.9, 0.1]]).double().log()).item()
    0.0
    """
    _, z = shifted(check_two_classes(logits, "kl_matching"))
    return _divergence(z, log_typical, log_typical.float().T)


def _divergence(
    z: Float64[Tensor, "n c"],
    log_typical: Float64[Tensor, "k c"],
    coarse: Float32[Tensor, "c k"],
    spare: Float64[Tensor, "n c"] | None = None,
) -> Float64[Tensor, "n"]:
    """Of logits less the largest of their row; `coarse` is log_typical, transposed."""
    part = torch.exp(z, out=spare)  # p times its sum, which no comparison of classes depends on
    nearest = (part.float() @ coarse).argmax(-1)
    total = part.sum(-1)
    # Rounding may leave less than nothing where they are equal.
    return (torch.mul(part, z - log_typical[nearest], out=spare).sum(-1) / total - total.log()).clamp(min=0.0)


@final
@dataclass
class KLMatching(Score):
    """The Kullback-Leibler divergence from the nearest of the classes' mean predictions.

    Attributes:
        log_typical_: (k, c) logarithms of the mean predictions, once fitted; one for every class that is predicted.
    """

    name = "kl_matching"
    kind = "epistemic"
    needs = ("logit",)
    learns_from = ("logit",)
    learned = ("log_typical_",)
    ood_only = True

    def learn(self, table: Table) -> None:
        """Mean predictions of the images of every predicted class, streaming."""
        by = "kl_matching.fit"
        check_rows(table, by=by)
        c = table.shape("logit")[1]
        sums, counts = torch.zeros(c, c, dtype=torch.float64), torch.zeros(c, dtype=torch.float64)
        for batch in finite_batches(table.batches("logit"), table.name, by=by):
            predicted = batch.logit.argmax(1)
            sums.index_add_(0, predicted, check_two_classes(batch.logit, by).softmax(-1))
            counts += torch.bincount(predicted, minlength=c)
        seen = counts > 0
        self.log_typical_ = (sums[seen] / counts[seen, None]).log().clamp(min=_LOWEST)

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The divergence of every row."""
        if batch.shape("logit")[1] != (c := self.log_typical_.shape[1]):
            raise TableError(
                f"kl_matching.score: logits must be of {c} classes, as in fit; got {batch.shape('logit')[1]} in "
                f"{batch.name}. Score a table of the same model."
            )
        refuse_one_class(batch.logit, self.name)
        u, coarse = torch.empty(len(batch), dtype=torch.float64), self.log_typical_.float().T
        for rows, _, z, spare in shifted_blocks(batch.logit):
            u[rows] = _divergence(z, self.log_typical_, coarse, spare)
        return u
