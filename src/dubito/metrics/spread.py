"""How far the probabilities of members scatter, taken in member by member and never kept.

    sum_c Var_m p_mc = mean_m ||p_m - p̄||_2^2,    p̄ = mean_m p_m          from 0 to less than 1

The variance is that of the members at hand, with 1/m. It is summed up by deviations from the running mean (Welford
1962): a mean of squares minus a square of means would leave nothing of the small variances of confident inputs.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics.streaming import check_temperature, summing_device
from dubito.types import finite


class VarianceStream:
    """Takes the logits of members, block by block, and sums up how far their probabilities scatter.

    Args:
        temperature: Logits are divided by it.

    >>> stream = VarianceStream()
    >>> stream.add(torch.tensor([[[80.0, 0.0], [0.0, 80.0]]]))
    >>> stream.variance().tolist()  # both classes are 1 for one member and 0 for the other: 1/4 + 1/4
    [0.5]
    """

    def __init__(self, *, temperature: float = 1.0) -> None:
        self._temperature = check_temperature(temperature)
        self._members = 0

    def add(self, logits: Float[Tensor, "n b c"]) -> None:
        """The logits of some more members."""
        p = (logits.to(summing_device(logits.device)).double() / self._temperature).softmax(-1)
        if self._members == 0:
            self._mean, self._squares = torch.zeros_like(p[:, 0]), torch.zeros_like(p[:, 0, 0])
        elif p[:, 0].shape != self._mean.shape:
            raise TableError(
                f"members must have equal inputs and classes; (n, c) was {tuple(self._mean.shape)} at first and is "
                f"{tuple(p[:, 0].shape)} now. Members of one ensemble share their classes, in one order."
            )
        for one in p.unbind(1):
            self._members += 1
            away = one - self._mean
            self._mean += away / self._members
            self._squares += (away * (one - self._mean)).sum(-1)

    def variance(self) -> Float64[Tensor, "n"]:
        """The variance over members, summed over classes."""
        if self._members == 0:
            raise TableError("no member was given. Add the logits of at least one.")
        return finite(self._squares.clamp_min(0) / self._members, "variance of members")
