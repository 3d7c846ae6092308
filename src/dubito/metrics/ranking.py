"""Does the score rank the positives (errors, outliers) above the rest? Higher = more uncertain = positive.

With P(t), N(t) the numbers of positives and negatives with score >= t, t running down over the distinct
scores:

    AUROC      = Pr(s+ > s-) + Pr(s+ = s-) / 2                ties count one half; exact, from integer counts
    AP         = Σ_t ΔP(t) / P · P(t) / (P(t) + N(t))         one step a distinct score, no interpolation
    FPR at TPR = N(t*) / N at the highest t* with P(t*) / P >= tpr                      no interpolation

Rows of equal score enter together. Only the order of scores counts: any range is fine and none is squashed.
"""

import numpy as np
from jaxtyping import Int64

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array, flags, numbers, same_length, tie_groups


def auroc(scores: Array, positives: Array) -> float:
    """The chance that a positive scores above a negative, ties counting one half.

    Args:
        scores: (n) uncertainties of any range.
        positives: (n) what should score high: booleans, or 0 and 1; both must occur.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])  # pairs won: 1 + 1/2 + 1 + 1 of 4
    0.875
    """
    hits, alarms = _counts(scores, positives, "auroc")
    twice_the_area = int((np.diff(alarms) * (hits[1:] + hits[:-1])).sum())
    return twice_the_area / (2 * int(hits[-1]) * int(alarms[-1]))


def average_precision(scores: Array, positives: Array) -> float:
    """The precision at every distinct score, averaged by the recall that the score adds.

    Args:
        scores: (n) uncertainties of any range.
        positives: (n) what should score high: booleans, or 0 and 1; both must occur.

    >>> average_precision([3.0, 2.0, 1.0], [1, 0, 1])  # 1/2 · 1/1 + 1/2 · 2/3
    0.8333333333333333
    """
    hits, alarms = _counts(scores, positives, "average_precision")
    precision = hits[1:] / (hits[1:] + alarms[1:])
    return float((np.diff(hits) * precision).sum() / hits[-1])


def fpr_at_tpr(scores: Array, positives: Array, *, tpr: float = 0.95) -> float:
    """The share of negatives at or above the highest threshold that finds at least `tpr` of the positives.

    Args:
        scores: (n) uncertainties of any range.
        positives: (n) what should score high: booleans, or 0 and 1; both must occur.
        tpr: The true positive rate to reach, in (0, 1].

    >>> fpr_at_tpr([4.0, 3.0, 2.0, 1.0], [1, 0, 1, 0])  # both positives need t = 2, and 3.0 is above it
    0.5
    """
    if not 0 < tpr <= 1:
        raise ValueRangeError(f"fpr_at_tpr: tpr must lie in (0, 1]; got {tpr}. Give a share such as 0.95.")
    hits, alarms = _counts(scores, positives, "fpr_at_tpr")
    first = int(np.argmax(hits / hits[-1] >= tpr))
    return float(alarms[first] / alarms[-1])


def _counts(
    scores: Array, positives: Array, by: str
) -> tuple[Int64[np.ndarray, "levels"], Int64[np.ndarray, "levels"]]:
    """Positives and negatives at or above each distinct score, from none (above the highest) to all."""
    s, y = numbers(scores, f"{by}: scores"), flags(positives, f"{by}: positives")
    same_length(by, scores=len(s), positives=len(y))
    if y.all() or not y.any():
        raise TableError(
            f"{by} needs positives and negatives; got all {len(y)} rows with positives = {int(y[0])}. "
            f"Add rows of the other class: with one class there is nothing to rank."
        )
    order, ends = tie_groups(-s)
    above = np.append(0, ends)
    hits = np.append(0, np.cumsum(y[order]))[above]
    return hits, above - hits
