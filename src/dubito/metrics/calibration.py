"""Is a confidence of 80 % right 80 % of the time? Calibration errors, named apart; all of them in [0, 1].

With a confidence q_i, a correctness a_i in {0, 1} and rows sorted into groups G_b of size n_b,

    error = Σ_b n_b / n · | mean_{i in G_b} q_i - mean_{i in G_b} a_i |

and the groups decide what is measured:

- `ece`: groups of similar confidence (Guo et al. 2017). binning="width": the bins [0, 1/B], (1/B, 2/B],
  ..., ((B-1)/B, 1]; an edge belongs to the bin below it. binning="mass": B bins of n / B rows each.
- `bucket_calibration_error`: B groups of n / B rows each by *uncertainty* (Kirsch 2024, appendices B.2 and
  B.3). For one value per bucket, use `bucket_curve(scores, confidence - correct).abs()`.
- `adaptive_ece`: `ece` in bins of equal mass (Nixon et al. 2019).
- `top_label_ece`: groups of one predicted class and similar confidence (Gupta & Ramdas 2021, eq. 4): over-confidence in
  one class and under-confidence in another do not cancel. Bins of equal width, within every predicted class.

In groups of equal mass, tied rows count with their mean, as if ordered at random, and a row on the edge of two groups
counts in both by its share.

`class_wise_ece` looks at the probabilities of all classes, not of the predicted one alone: the mean over classes of the
ECE of p_c as a forecast of 1[c = y] (the static calibration error of Nixon et al. 2019). With a threshold, a class's
rows with p_c below it are left out; a class without any other counts with an error of 0.

`smooth_ece` has no bins (Blasiok & Nakkiran 2023): with K_s the Gaussian kernel of standard deviation s, reflected at 0
and 1,

    e(s) = integral over t in [0, 1] of  | 1/n Σ_i (q_i - a_i) K_s(t, q_i) |,      smooth ECE = the s with e(s) = s

e falls with s, so there is one. The reflected kernel is the heat kernel of an interval with insulated ends, for which
cosines are eigenfunctions: cos(πkt) shrinks by exp(-(πks)² / 2). We put the rows onto a grid of 1,024 cells, each row
divided between the two nearest, and halve an interval of s, to about 1e-7.
"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import (
    Array,
    check_order,
    flags,
    in_expected_order,
    integers,
    numbers,
    same_length,
    sum_below,
)
from dubito.table import to_tensor
from dubito.types import finite
from dubito.validate import check_choice, check_classes, check_number

_USUAL = "Ten to fifteen are usual."
_CELLS = 1024
_HALVINGS = 24
_VANISHED = 100.0
"""exp(-100) is nothing, and far from the tiny numbers with which processors are slow."""
_NUMBERS = 2**21
"""Probabilities that are in memory at once, in float64."""


def ece(confidence: Array, correct: Array, *, bins: int = 15, binning: Literal["width", "mass"] = "width") -> float:
    """The expected calibration error over bins of confidence.

    Args:
        confidence: (n) the probability given to the prediction, in [0, 1].
        correct: (n) whether it was right: booleans, or 0 and 1.
        bins: How many.
        binning: "width" cuts [0, 1] into equal parts, "mass" the rows.

    >>> ece([0.7, 0.9, 1.0, 1.0], [1, 1, 1, 0], bins=2)  # one bin: |3.6/4 - 3/4|
    0.15
    """
    gap = _gap(confidence, correct, "ece")
    q = numbers(confidence, "ece: confidence")
    check_number(bins, "[1, inf)", by="ece", what="bins", whole=True, hint=_USUAL)
    check_choice(binning, ("width", "mass"), by="ece", what="binning")
    if binning == "mass":
        return _over_quantiles(q, gap, bins)
    return float(np.abs(np.bincount(_bin_of(q, bins), weights=gap)).sum() / len(gap))


def adaptive_ece(confidence: Array, correct: Array, *, bins: int = 15) -> float:
    """The expected calibration error over bins that hold equally many rows.

    Args:
        confidence: (n) the probability given to the prediction, in [0, 1].
        correct: (n) whether it was right: booleans, or 0 and 1.
        bins: How many.

    >>> adaptive_ece([0.9, 0.1, 0.3, 0.2], [0, 1, 0, 0], bins=2)  # |0.3 - 1| / 4 + |1.2 - 0| / 4
    0.475
    """
    return ece(confidence, correct, bins=bins, binning="mass")


def top_label_ece(confidence: Array, correct: Array, predicted: Array, *, bins: int = 15) -> float:
    """The expected calibration error over bins of confidence within every predicted class.

    Few rows of a class make it large by noise alone: with 1,000 classes, it takes some hundred thousand rows.

    Args:
        confidence: (n) the probability given to the prediction, in [0, 1].
        correct: (n) whether it was right: booleans, or 0 and 1.
        predicted: (n) the predicted class.
        bins: How many, of equal width.

    >>> round(top_label_ece([0.8, 0.8], [1, 0], [0, 1]), 6)  # (|0.8 - 1| + |0.8 - 0|) / 2; ece is |1.6 - 1| / 2
    0.5
    """
    gap = _gap(confidence, correct, "top_label_ece")
    q, classes = numbers(confidence, "top_label_ece: confidence"), integers(predicted, "top_label_ece: predicted")
    same_length("top_label_ece", confidence=len(q), predicted=len(classes))
    check_number(bins, "[1, inf)", by="top_label_ece", what="bins", whole=True, hint=_USUAL)
    place = np.unique(classes.numpy(), return_inverse=True)[1]
    return float(np.abs(np.bincount(place * bins + _bin_of(q, bins), weights=gap)).sum() / len(gap))


def class_wise_ece(logits: Array, labels: Array, *, bins: int = 15, threshold: float = 0.0) -> float:
    """The mean over classes of the calibration error of that class's probability.

    With many classes, most probabilities are near 0 and right about it, which hides the others: a threshold of 0.01 or
    so leaves them out.

    Args:
        logits: (n, c); of probabilities, their logarithms.
        labels: (n) the true class.
        bins: How many, of equal width.
        threshold: Probabilities below it are left out.

    >>> round(class_wise_ece([[0.0, 0.0], [0.0, 0.0]], [1, 1]), 6)  # both classes: |0.5 - 0| and |0.5 - 1|
    0.5
    """
    z, y = to_tensor(logits, "class_wise_ece: logits"), integers(labels, "class_wise_ece: labels")
    if z.ndim != 2 or 0 in z.shape:
        raise TableError(
            f"class_wise_ece: logits must have the axes (n, c), neither of them empty; got shape {tuple(z.shape)}. "
            f"Pass one row per image, one column per class."
        )
    same_length("class_wise_ece", logits=len(z), labels=len(y))
    check_classes(y, z.shape[1], by="class_wise_ece")
    check_number(bins, "[1, inf)", by="class_wise_ece", what="bins", whole=True, hint=_USUAL)
    check_number(threshold, "[0, 1)", by="class_wise_ece", what="threshold", hint="0 keeps all of them.")
    c, step = z.shape[1], max(1, _NUMBERS // z.shape[1])
    gaps, rows = np.zeros(c * bins), np.zeros(c)
    for start in range(0, len(z), step):
        block = finite(z[start : start + step].double(), f"class_wise_ece: logits from row {start} on")
        _add_class_gaps(gaps, rows, block, y[start : start + step], bins, threshold)
    return float((np.abs(gaps.reshape(c, bins)).sum(1) / np.maximum(rows, 1)).mean())


def smooth_ece(confidence: Array, correct: Array) -> float:
    """The calibration error at the one width of a smoothing kernel that equals it: no bins to choose.

    Args:
        confidence: (n) the probability given to the prediction, in [0, 1].
        correct: (n) whether it was right: booleans, or 0 and 1.

    >>> round(smooth_ece([0.7] * 10, [1] * 5 + [0] * 5), 4)  # one confidence: |0.7 - 0.5| at any width
    0.2
    """
    gap = _gap(confidence, correct, "smooth_ece")
    place = numbers(confidence, "smooth_ece: confidence") * _CELLS - 0.5  # among the middles of the cells
    below = np.floor(place)
    share = place - below
    cells = np.bincount(np.clip(below, 0, _CELLS - 1).astype(np.int64), gap * (1 - share), minlength=_CELLS)
    cells += np.bincount(np.clip(below + 1, 0, _CELLS - 1).astype(np.int64), gap * share, minlength=_CELLS)
    spectrum = np.fft.rfft(np.concatenate([cells, cells[::-1]])) / len(gap)
    wave = (np.pi * np.arange(_CELLS + 1)) ** 2 / 2
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        width = (low + high) / 2
        smoothed = np.fft.irfft(spectrum * np.exp(-np.minimum(wave * width**2, _VANISHED)), 2 * _CELLS)[:_CELLS]
        low, high = (width, high) if np.abs(smoothed).sum() > width else (low, width)
    return (low + high) / 2


def bucket_calibration_error(scores: Array, confidence: Array, correct: Array, *, buckets: int = 10) -> float:
    """The calibration error over buckets of uncertainty: does it fit where the score is high?

    Args:
        scores: (n) uncertainties of any range, which sort the rows.
        confidence: (n) the probability given to the prediction, in [0, 1].
        correct: (n) whether it was right: booleans, or 0 and 1.
        buckets: How many, from the most certain n / buckets rows to the least certain.

    >>> bucket_calibration_error([1, 2, 3, 4], [1, 1, 0.5, 0.5], [1, 1, 0, 0], buckets=2)  # (0 + 0.5) / 2
    0.25
    """
    gap = _gap(confidence, correct, "bucket_calibration_error")
    u = numbers(scores, "bucket_calibration_error: scores")
    same_length("bucket_calibration_error", scores=len(u), confidence=len(gap))
    check_number(buckets, "[1, inf)", by="bucket_calibration_error", what="buckets", whole=True, hint=_USUAL)
    return _over_quantiles(u, gap, buckets)


def _bin_of(q: Float64[np.ndarray, "n"], bins: int) -> Int64[np.ndarray, "n"]:
    """The bin of equal width that holds each probability; an edge belongs to the bin below it."""
    return np.searchsorted(np.arange(1, bins) / bins, q)


def _add_class_gaps(
    gaps: Float64[np.ndarray, "_"],
    rows: Float64[np.ndarray, "c"],
    logits: Float[Tensor, "b c"],
    labels: Int64[Tensor, "b"],
    bins: int,
    threshold: float,
) -> None:
    """Add a block's p_c - 1[c = y] to the sum of every class and bin, and its rows to those of every class."""
    p = logits.softmax(1)
    kept = p >= threshold if threshold else None
    gap = p.clone()
    gap[torch.arange(len(p)), labels] -= 1
    above = (p > 1 / bins).nonzero().numpy()  # few: all others are in the first bin
    if kept is not None:
        gap *= kept
        rows += kept.sum(0).numpy()
    else:
        rows += len(p)
    row, which = above.T
    apart, total = gap.numpy()[row, which], gap.sum(0).numpy()
    gaps += np.bincount(which * bins + _bin_of(p.numpy()[row, which], bins), apart, minlength=len(gaps))
    gaps[::bins] += total - np.bincount(which, apart, minlength=len(total))


def _gap(confidence: Array, correct: Array, by: str) -> Float64[np.ndarray, "n"]:
    check_order(by, confidence=confidence, correct=correct)
    q, right = numbers(confidence, f"{by}: confidence"), flags(correct, f"{by}: correct")
    same_length(by, confidence=len(q), correct=len(right))
    if q.min() < 0 or q.max() > 1:
        raise ValueRangeError(
            f"{by}: confidence must lie in [0, 1]; got {q.min():g} to {q.max():g}. "
            f"Pass probabilities, for example `metrics.confidence(logits)`."
        )
    gap: np.ndarray = q - right
    return gap


def _over_quantiles(scores: Float64[np.ndarray, "n"], gap: np.ndarray, buckets: int) -> float:
    edges = np.arange(buckets + 1) / buckets
    return float(np.abs(np.diff(sum_below(in_expected_order(scores, gap), edges))).sum() / len(gap))
