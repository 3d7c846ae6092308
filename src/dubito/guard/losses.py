"""Tests of the mean of bounded losses, for guarantees about costs in place of errors: bets at fixed stakes.

    E_k = mean_j prod_(i <= k) (1 + c_j (r - l_i) / (1 - r)),     0 < c_j < 1,   l in [0, 1]

tests that the mean of independent losses is r or more: then every factor has a mean of 1 at most, so E_k does, too, and
P(E_k >= 1 / delta) <= delta by Markov's inequality. This is the capital process of Waudby-Smith & Ramdas (2024, section
4), but the stakes c_j are a fixed grid, with equal weights, in place of ones that follow the losses: a product of fixed
stakes does not depend on the order of its factors, so the tests of k = s, s + 1, ... images are running sums, and the
proof of `dubito.guard.thresholds` holds word for word, with E_k >= 1 / delta in place of p_k <= delta. Losses that vary
little are tested more sharply than by Hoeffding's and Bentkus's inequalities. For losses of 0 and 1 alone, the exact
binomial test is sharper still, and is used.

A bound of the mean is where the tests turn: E_k rises with r, so all r above some r* are rejected, and the mean is
below r* with probability 1 - delta.
"""

import math

import numpy as np
from jaxtyping import Float64

from dubito.metrics import Interval

STAKES = 0.95 * 2.0 ** (-np.arange(14) / 2)
"""c_j: the largest suits losses of nearly zero, the smallest a hundred thousand images."""
_STEPS = 50


def log_evidence(losses: Float64[np.ndarray, "n"], mean: float) -> Float64[np.ndarray, "k"]:
    """Log E_k for k = 0 ... n that the mean of the losses, each in [0, 1], is below `mean`.

    >>> log_evidence(np.zeros(2), 0.5).round(2).tolist()  # the mean over stakes of log (1 + c) and of log (1 + c)^2
    [0.0, 0.21, 0.46]
    """
    total = np.full(len(losses) + 1, -np.inf)
    for stake in STAKES:
        capital = np.append(0.0, np.cumsum(np.log1p(stake * (mean - losses) / (1 - mean))))
        np.logaddexp(total, capital, out=total)
    return np.asarray(total - math.log(len(STAKES)), dtype=np.float64)


def fewest_images(mean: float, confidence: float, full: int) -> int:
    """How many images show a mean loss below `mean` although `full` of them have a loss of 1, and the others none.

    >>> fewest_images(0.05, 0.95, 0), fewest_images(0.05, 0.95, 8)
    (109, 401)
    """
    low, high = full, 2 * full + 2
    while not _shown(mean, confidence, full, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _shown(mean, confidence, full, middle) else (middle, high)
    return high


def mean_bound(losses: Float64[np.ndarray, "n"], confidence: float) -> float:
    """The one-sided upper bound of the mean of independent losses, each in [0, 1]."""
    low, high = float(losses.mean()), 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if middle >= 1.0:
            break
        low, high = (low, middle) if _evidence(losses, middle) >= -math.log(1 - confidence) else (middle, high)
    return high


def mean_interval(losses: Float64[np.ndarray, "n"], confidence: float) -> Interval:
    """The mean of independent losses, each in [0, 1], with its interval: half of the error on either side."""
    one_sided = (1 + confidence) / 2
    low, high = 1 - mean_bound(1 - losses, one_sided), mean_bound(losses, one_sided)
    return Interval(float(losses.mean()), low, high, confidence)


def _evidence(losses: Float64[np.ndarray, "n"], mean: float) -> float:
    """The logarithm of E_n for one mean."""
    capitals = [float(np.log1p(stake * (mean - losses) / (1 - mean)).sum()) for stake in STAKES]
    return float(np.logaddexp.reduce(capitals)) - math.log(len(STAKES))


def _shown(mean: float, confidence: float, full: int, images: int) -> bool:
    capital = full * np.log1p(-STAKES) + (images - full) * np.log1p(STAKES * mean / (1 - mean))
    return bool(np.logaddexp.reduce(capital) - math.log(len(STAKES)) >= -math.log(1 - confidence))
