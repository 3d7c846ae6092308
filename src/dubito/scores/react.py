"""ReAct: the energy after activations are clipped where in-distribution images hardly ever go.

    u(x) = - log sum_y exp( (W min(z, t) + b)_y ),   t the 90th percentile of all activations of fit

Sun, Guo, Li 2021. W and b come from features and logits (`_last_layer.py`). t is exact, in two passes and little
memory: every 1,024th number of each sorted block shows between which limits t lies, and the second pass keeps the
numbers between these alone. Between two activations it is linear, as numpy's percentile. The product with W is in
float32.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from dubito.scores._features import ScoreOfFeatures
from dubito.scores._last_layer import energy_of, last_layer
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_number

_STEP = 1024


def react(
    z: Float[Tensor, "n d"], weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"], threshold: float
) -> Float64[Tensor, "n"]:
    """The energy of the logits of clipped features.

    >>> import torch
    >>> react(torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, 1.0]]), torch.zeros(1), 4.0).item()  # - (3 + 4)
    -7.0
    """
    return energy_of(z.clamp(max=threshold), weight, bias)


def percentile_of(blocks: Callable[[], Iterator[Tensor]], share: float) -> float:
    """The value that this share of all numbers is below, in blocks that are read twice; in float32.

    >>> import torch
    >>> percentile_of(lambda: iter([torch.tensor([4.0, -1.0]), torch.tensor([2.0])]), 0.75)  # between 2 and 4
    3.0
    """
    samples, count = [], 0
    for block in blocks():
        samples.append(np.sort(block.flatten().float().numpy())[::_STEP])
        count += block.numel()
    place = share * (count - 1)
    first, second = math.floor(place), math.ceil(place)
    low, high = _limits(samples, first, second)
    below, equal, between = 0, 0, [np.empty(0, np.float32)]
    for block in blocks():
        values = block.flatten().float().numpy()
        below, equal = below + np.count_nonzero(values < low), equal + np.count_nonzero(values == low)
        between.append(values[(values > low) & (values < high)])
    inside = np.sort(np.concatenate(between))

    def ranked(rank: int) -> float:
        beyond = rank - below - equal
        return float(low if beyond < 0 else inside[beyond] if beyond < len(inside) else high)

    return ranked(first) + (place - first) * (ranked(second) - ranked(first))


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


def _limits(samples: list[Float32[np.ndarray, "_"]], first: int, second: int) -> tuple[np.float32, np.float32]:
    """Numbers at or below that of rank `first`, and at or above that of rank `second`, both counted from 0.

    Of each sorted block of numbers, samples are the first and every `_STEP`-th after it. So at most k _STEP numbers are
    below the k-th sample of all (from 0), and at least (k + 1) _STEP - (_STEP - 1) blocks are at or below it.
    """
    ordered = np.sort(np.concatenate(samples))
    k = math.ceil((second + 1 + len(samples) * (_STEP - 1)) / _STEP) - 1
    return ordered[first // _STEP], ordered[k] if k < len(ordered) else np.float32(np.inf)
