"""Does the score rank the positives (errors, outliers) above the rest? Higher = more uncertain = positive.

With P(t), N(t) the positives and negatives with score >= t, t falling over distinct scores, and r, q ranks of columns:

    AUROC      = Pr(s+ > s-) + Pr(s+ = s-) / 2                ties count one half; exact, from integer counts
    AP         = Σ_t ΔP(t) / P · P(t) / (P(t) + N(t))         one step a distinct score, no interpolation
    FPR at TPR = N(t*) / N at the highest t* with P(t*) / P >= tpr                      no interpolation
    Spearman   = Σ_i (r_i - r̄)(q_i - q̄) / sqrt(Σ_i (r_i - r̄)² Σ_i (q_i - q̄)²)           ties share their middle rank

Rows of equal score enter together. Only the order of scores counts: any range is fine and none is squashed.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics._arrays import Array, check_order, flags, numbers, same_length, tie_groups
from dubito.validate import check_number


def auroc(scores: Array, positives: Array) -> float:
    """The chance that a positive scores above a negative, ties counting one half.

    Args:
        scores: (n) uncertainties of any range.
        positives: (n) what should score high: booleans, or 0 and 1; both must occur.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [0, 0, 1, 1])  # pairs won: 1 + 1/2 + 1 + 1 of 4
    0.875
    """
    return float(chance_after(*_counts(scores, positives, "auroc"))[0])


def average_precision(scores: Array, positives: Array) -> float:
    """The precision at every distinct score, averaged by the recall that the score adds.

    Args:
        scores: (n) uncertainties of any range.
        positives: (n) what should score high: booleans, or 0 and 1; both must occur.

    >>> average_precision([3.0, 2.0, 1.0], [1, 0, 1])  # 1/2 · 1/1 + 1/2 · 2/3
    0.8333333333333333
    """
    return float(mean_precision(*_counts(scores, positives, "average_precision"))[0])


def fpr_at_tpr(scores: Array, positives: Array, *, tpr: float = 0.95) -> float:
    """The share of negatives at or above the highest threshold that finds at least `tpr` of the positives.

    Args:
        scores: (n) uncertainties of any range.
        positives: (n) what should score high: booleans, or 0 and 1; both must occur.
        tpr: The true positive rate to reach, in (0, 1].

    >>> fpr_at_tpr([4.0, 3.0, 2.0, 1.0], [1, 0, 1, 0])  # both positives need t = 2, and 3.0 is above it
    0.5
    """
    check_number(tpr, "(0, 1]", by="fpr_at_tpr", what="tpr", hint="0.95 is usual.")
    return float(false_alarms(*_counts(scores, positives, "fpr_at_tpr"), tpr=tpr)[0])


def spearman(x: Array, y: Array) -> float:
    """The rank correlation of two columns, from -1 (opposite orders) over 0 to 1 (the same order).

    Args:
        x: (n) numbers of any range, at least two of them different.
        y: (n) likewise.

    >>> spearman([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 90.0, 30.0])  # ranks 1 2 3 4 and 1 2 4 3: 1 - 6 · 2 / (4 · 15)
    0.8
    """
    a, b = numbers(x, "spearman: x"), numbers(y, "spearman: y")
    same_length("spearman", x=len(a), y=len(b))
    left, right = _centred_ranks(a, "x"), _centred_ranks(b, "y")
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))


def join_ood(
    in_distribution: Float[Tensor, "n"], ood: Float[Tensor, "m"]
) -> tuple[Float[Tensor, "_"], Bool[Tensor, "_"]]:
    """The uncertainties of two tables as one column, and which of its rows are OOD: the positives.

    >>> join_ood(torch.tensor([1.0]), torch.tensor([3.0, 2.0]))
    (tensor([1., 3., 2.]), tensor([False,  True,  True]))
    """
    scores = torch.cat([in_distribution, ood])
    return scores, torch.arange(len(scores)) >= len(in_distribution)


def chance_after(first: Shaped[np.ndarray, "b g"], second: Shaped[np.ndarray, "b g"]) -> Float64[np.ndarray, "b"]:
    """The chance that one of `second` stands after one of `first`, ties counting one half; NaN where either has none.

    Args:
        first: How many stand at each of g ordered levels, per resample.
        second: Likewise.
    """
    before = np.cumsum(first, axis=1)
    twice_the_area = (second * (2 * before - first)).sum(axis=1)
    return _ratio(twice_the_area, 2 * before[:, -1] * second.sum(axis=1))


def mean_precision(hit: Int64[np.ndarray, "b g"], alarm: Int64[np.ndarray, "b g"]) -> Float64[np.ndarray, "b"]:
    """The average precision of resamples, from positives and negatives at each level; NaN where either has none."""
    hits = np.cumsum(hit, axis=1)
    precision = hits / np.maximum(np.cumsum(hit + alarm, axis=1), 1)
    area = _ratio((hit * precision).sum(axis=1), hits[:, -1])
    return np.where(alarm.any(axis=1), area, np.nan)


def false_alarms(
    hit: Int64[np.ndarray, "b g"], alarm: Int64[np.ndarray, "b g"], *, tpr: float = 0.95
) -> Float64[np.ndarray, "b"]:
    """The FPR at a TPR of resamples, from positives and negatives at each level; NaN where either has none."""
    hits, alarms = np.cumsum(hit, axis=1), np.cumsum(alarm, axis=1)
    enough = _ratio(hits, hits[:, -1:]) >= tpr
    rate = _ratio(alarms[np.arange(len(hit)), enough.argmax(axis=1)], alarms[:, -1])
    return np.where(enough[:, -1], rate, np.nan)


def _ratio(part: Shaped[np.ndarray, "..."], whole: Shaped[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    with np.errstate(invalid="ignore", divide="ignore"):
        share: np.ndarray = part / whole
    return share


def _counts(scores: Array, positives: Array, by: str) -> tuple[Int64[np.ndarray, "1 g"], Int64[np.ndarray, "1 g"]]:
    """Positives and negatives at each distinct score, from the highest on."""
    check_order(by, scores=scores, positives=positives)
    s, y = numbers(scores, f"{by}: scores"), flags(positives, f"{by}: positives")
    same_length(by, scores=len(s), positives=len(y))
    if y.all() or not y.any():
        raise TableError(
            f"{by} needs positives and negatives; got all {len(y)} rows with positives = {int(y[0])}. "
            f"Add rows of the other class: with one class there is nothing to rank."
        )
    order, ends = tie_groups(-s)
    hit = np.diff(np.cumsum(y[order])[ends - 1], prepend=0)[None]
    return hit, np.diff(ends, prepend=0)[None] - hit


def _centred_ranks(values: Float64[np.ndarray, "n"], name: str) -> Float64[np.ndarray, "n"]:
    order, ends = tie_groups(values)
    if len(ends) == 1:
        raise TableError(
            f"spearman: {name} must hold different values; all {len(values)} rows have {values[0]:g}. Add rows that "
            f"differ: a constant has no order."
        )
    starts = np.append(0, ends[:-1])
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((starts + ends - 1) / 2, ends - starts) - (len(values) - 1) / 2
    return ranks
