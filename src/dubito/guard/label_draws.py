"""Which accepted images to label: more of those that are likely wrong, with weights that keep the error rate unbiased.

Accepted images are in strata by their uncertainty, the fifths of the accepted calibration images. Of m images, k are
drawn, image i with the probability

    pi_i = min(1, c (1/4 + 3/4 s_i / mean s)),     s_i = sqrt(P(wrong | stratum of i)),     sum_i pi_i = k

P(wrong | stratum) is estimated from earlier labels, and from the calibration images as if 30 of each stratum had been
labelled. Whatever it is, x_i = drawn_i wrong_i / pi_i has the mean P(wrong). Where errors concentrate at high
uncertainties, fewer labels reveal a broken guarantee than if all pi were equal; where they do not, about as many
(`experiments/watch.py`). The pivotal method (Deville & Tillé 1998) draws exactly k, negatively associated (Brändén &
Jonasson 2012): for functions f_i >= 0 that all rise, or all fall, E prod f_i(x_i) <= prod E f_i(x_i), so bets on all m
images can be settled together.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float64

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

PER_LABEL = 3
"""Images that a label is drawn from."""
PER_DRAW = 5
"""Labels of one draw: bets on its images are settled when all of them are known."""
_STRATA = 5
_WEIGHT = 30.0
_EQUAL = 0.25
"""The part of the probabilities that is equal for all images."""


def strata_of(guard: "Guard") -> tuple[list[float], list[list[float]]]:
    """Edges of the strata in uncertainty, and for each the labels and the errors that it begins with."""
    calibration = guard.calibration
    accepted = calibration.uncertainty <= guard.limits(calibration)
    u = calibration.uncertainty[accepted]
    if calibration.wrong is None or not len(u):
        return [], [[1.0, 0.5]]
    edges = np.quantile(u, np.arange(1, _STRATA) / _STRATA)
    places = np.searchsorted(edges, u)
    labels = np.bincount(places, minlength=_STRATA)
    errors = np.bincount(places, calibration.wrong[accepted], minlength=_STRATA)
    rates = (errors + 0.5) / (labels + 1)
    return edges.tolist(), [[_WEIGHT, _WEIGHT * rate] for rate in rates.tolist()]


def draw(expected: Float64[np.ndarray, "m"], count: int, rng: np.random.Generator) -> dict[int, float]:
    """Places of `count` images and their probabilities pi, from P(wrong) of each.

    >>> draw(np.array([0.1, 0.1, 0.1]), 3, np.random.default_rng(0))
    {0: 1.0, 1: 1.0, 2: 1.0}
    """
    s = np.sqrt(expected)
    probability = _scaled(_EQUAL + (1 - _EQUAL) * s / s.mean(), count)
    drawn = _pivotal(probability, rng)
    return {int(place): float(probability[place]) for place in np.flatnonzero(drawn)}


def largest_weight(rates: Sequence[float], share: float) -> float:
    """An upper bound of 1 / pi for whichever images arrive: one of the safest stratum among images of the riskiest one.

    Args:
        rates: P(wrong) of the strata.
        share: k / m.
    """
    s = np.sqrt(np.array(rates))
    return 1 / (share * float(_EQUAL + (1 - _EQUAL) * s.min() / s.max())) if share < 1 else 1.0


def _scaled(sizes: Float64[np.ndarray, "m"], count: int) -> Float64[np.ndarray, "m"]:
    """min(1, c sizes) with the sum `count`."""
    certain = np.zeros(len(sizes), dtype=bool)
    while True:
        left = count - int(certain.sum())
        scaled = np.where(certain, 1.0, sizes * left / max(sizes[~certain].sum(), 1e-300))
        over = (scaled >= 1 - 1e-12) & ~certain
        if not over.any():
            return scaled
        certain |= over


def _pivotal(probability: Float64[np.ndarray, "m"], rng: np.random.Generator) -> Bool[np.ndarray, "m"]:
    """Two undecided images at a time: one of them is decided, and the other keeps the rest of their probability."""
    p, drawn = probability.copy(), probability >= 1
    undecided = rng.permutation(np.flatnonzero(~drawn)).tolist()
    lots = rng.random(len(undecided)).tolist()
    while len(undecided) > 1:
        i, j = undecided.pop(), undecided.pop()
        both, lot = p[i] + p[j], lots.pop()
        if both < 1:
            kept, _ = (i, j) if lot * both < p[i] else (j, i)
            p[kept] = both
        else:
            winner, kept = (i, j) if lot * (2 - both) < 1 - p[j] else (j, i)
            drawn[winner], p[kept] = True, both - 1
        undecided.append(kept)
    for last in undecided:  # the sum is whole, up to rounding
        drawn[last] = p[last] > 0.5
    return drawn
