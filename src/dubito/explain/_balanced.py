"""AUROCs of several scores on balanced sets: drawn several times, and resampled together.

A balanced set has n = min(known, foreign) rows of either table, those of the larger drawn without replacement. The
share of either table does not change what AUROC is on average, so draws differ by chance only: by how much, is told.
A resample draws n rows of either table with replacement, the same rows for every score, so that differences between
scores have intervals of their own, which are narrower than those of the scores suggest. One resample has the noise of
one balanced set; the mean over draws has a little less where one table is larger. Rows of the known table are drawn
alike for every foreign one, because means over foreign tables share its noise.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from dubito.metrics import auroc

_KNOWN, _FOREIGN, _DRAW, _RESAMPLE = range(4)


class Balanced(NamedTuple):
    """AUROCs of s scores: on every draw, and on every resample."""

    rows: int
    drawn: Float64[np.ndarray, "draws s"]
    resampled: Float64[np.ndarray, "resamples s"]


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


def balanced(
    known: Float64[np.ndarray, "s n"],
    foreign: Float64[np.ndarray, "s m"],
    *,
    draws: int,
    resamples: int,
    seed: int,
    number: int = 0,
) -> Balanced:
    """The AUROC of every score, foreign rows being the positives.

    Args:
        known: By score, the uncertainty of every known row.
        foreign: By score, the uncertainty of every foreign row.
        draws: How many balanced sets.
        resamples: How many bootstrap resamples.
        seed: Of both.
        number: Of the foreign table, so that each is drawn in its own way.
    """
    rows = min(known.shape[1], foreign.shape[1])
    positives = np.arange(2 * rows) >= rows
    drawn = []
    for draw in range(draws):
        inside = _generator(seed, _DRAW, draw, _KNOWN).permutation(known.shape[1])[:rows]
        outside = _generator(seed, _DRAW, draw, _FOREIGN + number).permutation(foreign.shape[1])[:rows]
        both = np.concatenate([known[:, inside], foreign[:, outside]], axis=1)
        drawn.append([auroc(scores, positives) for scores in both])
    return Balanced(rows, np.array(drawn), _resampled(known, foreign, rows, resamples, (seed, number)))


def estimate(
    drawn: Float64[np.ndarray, "draws"], resampled: Float64[np.ndarray, "resamples"], confidence: float
) -> Estimate:
    """Mean, interval and spread."""
    low, high = np.quantile(resampled, ((1 - confidence) / 2, (1 + confidence) / 2))
    spread = float(drawn.std(ddof=1)) if len(drawn) > 1 else 0.0
    return Estimate(float(drawn.mean()), float(low), float(high), spread)


def _resampled(
    known: Float64[np.ndarray, "s n"],
    foreign: Float64[np.ndarray, "s m"],
    rows: int,
    resamples: int,
    seeds: tuple[int, int],
) -> Float64[np.ndarray, "resamples s"]:
    """Rows are ranked once; a resample only counts them."""
    levels = [np.unique(np.concatenate(pair), return_inverse=True)[1] for pair in zip(known, foreign, strict=True)]
    n, m = known.shape[1], foreign.shape[1]
    found = np.empty((resamples, len(levels)))
    for resample in range(resamples):
        inside = _generator(seeds[0], _RESAMPLE, resample, _KNOWN).integers(n, size=rows)
        outside = _generator(seeds[0], _RESAMPLE, resample, _FOREIGN + seeds[1]).integers(m, size=rows)
        for score, level in enumerate(levels):
            found[resample, score] = _auroc(level[:n][inside], level[n:][outside])
    return found


def _auroc(inside: Int64[np.ndarray, "n"], outside: Int64[np.ndarray, "n"]) -> float:
    """The chance that a foreign row has the higher level, ties counting one half."""
    top = int(max(inside.max(), outside.max())) + 1
    count = np.bincount(inside, minlength=top)
    below = np.cumsum(count) - count / 2
    return float(below[outside].mean() / len(inside))


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)
