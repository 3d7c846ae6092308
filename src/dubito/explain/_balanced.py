"""Means of AUROCs over balanced sets (`metrics.balanced_auroc`), with their bootstrap intervals."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from dubito.metrics.bootstrap import percentiles


class Estimate(NamedTuple):
    """A mean over balanced draws, its bootstrap interval, and the standard deviation over the draws."""

    value: float
    low: float
    high: float
    spread: float

    def __str__(self) -> str:
        return f"{points(self.value)} [{points(self.low)}, {points(self.high)}]"


def points(share: float) -> str:
    """A share in per cent, one decimal, without a minus zero.

    >>> points(0.8571), points(-0.0001)
    ('85.7', '0.0')
    """
    return f"{round(100 * share, 1) + 0.0:.1f}"


def estimate(
    drawn: Float64[np.ndarray, "draws"], resampled: Float64[np.ndarray, "resamples"], confidence: float
) -> Estimate:
    """Mean, interval and spread."""
    low, high = percentiles(resampled, confidence).tolist()
    spread = float(drawn.std(ddof=1)) if len(drawn) > 1 else 0.0
    return Estimate(float(drawn.mean()), low, high, spread)
