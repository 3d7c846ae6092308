"""ReAct: the energy after activations are clipped where in-distribution images hardly ever go.

    u(x) = - log sum_y exp( (W min(z, t) + b)_y ),   t the 90th percentile of all activations of fit

Sun, Guo, Li 2021. W and b come from features and logits (`_last_layer.py`). t is exact, in two passes and little
memory: numbers in float32 are in the order of their bits, so that counts of the upper 16 bits show which of these t
has, and counts of the lower 16 bits among those show the rest. Between two activations it is linear, as numpy's
percentile. The product with W is in float32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.scores._features import ScoreOfFeatures
from dubito.scores._last_layer import energy_of, last_layer
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_number

_HALF = 1 << 16


def react(
    z: Float[Tensor, "n d"], weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"], threshold: float
) -> Float64[Tensor, "n"]:
    """The energy of the logits of clipped features.

    >>> react(torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, 1.0]]), torch.zeros(1), 4.0).item()  # - (3 + 4)
    -7.0
    """
    return energy_of(z.clamp(max=threshold), weight, bias)


def percentile_of(blocks: Callable[[], Iterator[Tensor]], share: float) -> float:
    """The value that this share of all numbers is below, in blocks that are read twice; in float32.

    >>> percentile_of(lambda: iter([torch.tensor([4.0, -1.0]), torch.tensor([2.0])]), 0.75)  # between 2 and 4
    3.0
    """
    upper = torch.zeros(_HALF, dtype=torch.long)
    for block in blocks():
        upper += torch.bincount(_ordered(block) >> 16, minlength=_HALF)
    place = share * (int(upper.sum()) - 1)
    ranks = {math.floor(place), math.ceil(place)}
    ends = upper.cumsum(0)
    starts = ends - upper
    bins = {rank: int(torch.searchsorted(ends, rank, right=True)) for rank in ranks}
    lower = {one: torch.zeros(_HALF, dtype=torch.long) for one in bins.values()}
    for block in blocks():
        keys = _ordered(block)
        for one in lower:
            lower[one] += torch.bincount(keys[keys >> 16 == one] & (_HALF - 1), minlength=_HALF)
    neighbours = [
        _number((one << 16) + int(torch.searchsorted(lower[one].cumsum(0), rank - int(starts[one]), right=True)))
        for rank, one in sorted(bins.items())
    ]
    return neighbours[0] + (place - math.floor(place)) * (neighbours[-1] - neighbours[0])


@final
@dataclass
class ReAct(ScoreOfFeatures):
    """The energy of clipped features.

    Attributes:
        percentile: Of the activations of fit, above which they are clipped; 0.90 in the paper.
        weight_: (c, d) of the last layer, once fitted.
        bias_: (c) of the last layer.
        threshold_: Where activations are clipped.
    """

    percentile: float = 0.9

    name = "react"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "logit")
    learned = ("weight_", "bias_", "threshold_")
    ood_only = True

    def __post_init__(self) -> None:
        check_number(self.percentile, "(0, 1]", by=self.name, what="percentile", hint="The paper takes 0.90.")

    def learn(self, table: Table) -> None:
        """The last layer, and the percentile."""
        by = "react.fit"
        layer = last_layer(table, by=by)

        def blocks() -> Iterator[Tensor]:
            for batch in finite_batches(table.batches("feature"), table.name, by=by):
                yield batch.feature

        self.threshold_ = percentile_of(blocks, self.percentile)
        self.weight_, self.bias_ = layer.weight.float(), layer.bias.float()

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The score of every row."""
        self.check_width(batch, self.weight_.shape[1])
        return react(batch.feature, self.weight_, self.bias_, self.threshold_)


def _ordered(values: Float[Tensor, "..."]) -> Int64[Tensor, "_"]:
    """The bits of numbers in float32 as whole numbers from 0 to 2^32 - 1 in the same order."""
    bits = values.float().flatten().contiguous().view(torch.int32)
    # Of negative numbers, larger bits are farther from zero.
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)


def _number(key: int) -> float:
    """The number that `_ordered` gives this place in the order."""
    bits = torch.tensor(key - (1 << 31), dtype=torch.int32)
    return float((bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32))
