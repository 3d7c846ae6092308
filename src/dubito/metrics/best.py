"""Which of several could be the best? How far each is behind, and whether that is more than noise.

    d_i        = v_b - v_i                                 behind the best on these rows, b = argmax_i v_i
    e_ij       = standard error of v_j - v_i               over resamples that all of them share
    q_i        = quantile of max_j (c_j - c_i) / e_ij      c = resampled values minus their mean
    low, high  = d_i -+ q_i e_ib                           i is behind where low > 0

Which one is the best was found on the same rows, and the more are compared, the further ahead the luckiest seems.
q_i counts both: it is the lead over i of the best of all the others that chance alone gives. So the ones that are not
behind hold the true best with the asked confidence: multiple comparisons with the best (Hsu 1981), here by a paired
bootstrap. Two that order the rows alike have no error between them, and neither is behind the other.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from dubito.errors import ValueRangeError

_SAME = 1e-12
"""What is smaller is rounding."""


class Behind(NamedTuple):
    """How far one is behind the best of the rows at hand. Each end holds with the asked confidence by itself.

    Attributes:
        value: The difference to the best, never negative.
        low: Where the true difference may begin; above 0 where it is more than noise.
        high: Where it may end.
    """

    value: float
    low: float
    high: float

    @property
    def surely(self) -> bool:
        """Whether it is more than noise."""
        return self.low > _SAME

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def behind_the_best(
    values: Float64[np.ndarray, "s"], draws: Float64[np.ndarray, "s b"], *, confidence: float = 0.95
) -> list[Behind]:
    """How far every one of several is behind the best.

    Args:
        values: Of each, higher = better.
        draws: The same on resamples that all of them share, as `paired_draws` gives them.
        confidence: That the true best is among those that are not behind.

    >>> draws = np.array([[0.9, 0.8, 0.9, 0.8], [0.8, 0.9, 0.7, 0.8], [0.1, 0.2, 0.2, 0.1]])
    >>> [one.surely for one in behind_the_best(draws.mean(axis=1), draws)]
    [False, False, True]
    """
    if not 0 < confidence < 1:
        raise ValueRangeError(f"behind_the_best: confidence must be in (0, 1); got {confidence}. 0.95 is usual.")
    best = int(values.argmax())
    centred = draws - draws.mean(axis=1, keepdims=True)
    found = []
    for i, value in enumerate(values):
        lead = centred - centred[i]
        error = lead.std(axis=1, ddof=1)
        others = error > _SAME
        share = (lead[others] / error[others, None]).max(axis=0) if others.any() else np.zeros(1)
        reach = max(0.0, float(np.quantile(share, confidence))) * float(error[best])
        behind = float(values[best] - value)
        found.append(Behind(behind, behind - reach, behind + reach))
    return found
