"""Activations that ASH and SCALE reshape: how much of their sum the largest hold, and where that means nothing.

With r = (sum of all) / (sum of the largest), ASH-S and SCALE multiply by exp(r). Both suppose activations of a ReLU, of
which none is negative. Where many are, as after the normalisation at the end of a transformer, the sums cancel, and
the score would rank images by what is left of them.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.table import Table
from dubito.types import finite_batches

_MOST_NEGATIVE = 0.05
"""Share of the sum of absolute values: smooth activations such as SiLU reach a few per cent, transformers a half."""


def number_kept(d: int, percentile: float) -> int:
    """How many of d activations are above the percentile, at least one.

    >>> number_kept(10, 0.9), number_kept(8, 0.99)
    (1, 1)
    """
    return max(1, d - round(d * percentile))


def largest(z: Float[Tensor, "n d"], count: int) -> Float[Tensor, "n k"]:
    """The largest numbers of each row, rising.

    >>> largest(torch.tensor([[3.0, 1.0, 2.0, 4.0]]), 2).tolist()
    [[3.0, 4.0]]
    """
    if torch.compiler.is_compiling():  # as for ONNX, which has no numpy
        return z.topk(count, dim=-1).values.flip(-1)
    # numpy sorts all of them in a fraction of the time that torch takes for the largest.
    return torch.from_numpy(np.sort(z.numpy(), axis=-1)[..., -count:])


def sum_ratio(z: Float[Tensor, "n d"], largest: Float[Tensor, "n k"]) -> Float[Tensor, "n 1"]:
    """The sum of all over the sum of the largest; 1 where nothing is positive, so that nothing is divided by zero."""
    kept = largest.sum(-1, keepdim=True)
    positive = kept > 0
    return torch.where(positive, z.sum(-1, keepdim=True) / torch.where(positive, kept, 1.0), 1.0)


def refuse_negative(table: Table, *, by: str) -> None:
    """Raise ValueRangeError for features with so many negative values that their sums mean nothing."""
    below = total = 0.0
    for batch in finite_batches(table.batches("feature"), table.name, by=by):
        below -= float(batch.feature.clamp(max=0).sum(dtype=torch.float64))
        total += float(batch.feature.abs().sum(dtype=torch.float64))
    if below > _MOST_NEGATIVE * total:
        raise ValueRangeError(
            f"{by}: features must be activations of a ReLU or alike, hardly any of them negative; of those of "
            f"{table.name}, {below / total:.0%} by absolute value are, as of a transformer, and the score would "
            f"collapse. Use another score, such as vim or react."
        )
