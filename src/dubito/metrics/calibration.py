"""Is a confidence of 80 % right 80 % of the time? Two calibration errors, named apart; both in [0, 1].

With a confidence q_i, a correctness a_i in {0, 1} and rows sorted into groups G_b of size n_b,

    error = Σ_b n_b / n · | mean_{i in G_b} q_i - mean_{i in G_b} a_i |

and the groups decide what is measured:

- `ece`: groups of similar confidence (Guo et al. 2017). binning="width": the bins [0, 1/B], (1/B, 2/B],
  ..., ((B-1)/B, 1]; an edge belongs to the bin below it. binning="mass": B bins of n / B rows each.
- `bucket_calibration_error`: B groups of n / B rows each by *uncertainty* (Kirsch 2024, appendices B.2 and
  B.3). For one value per bucket, use `bucket_curve(scores, confidence - correct).abs()`.

In groups of equal mass, tied rows count with their mean, as if ordered at random, and a row on the edge of two groups
counts in both by its share.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float64

from dubito.errors import ValueRangeError
from dubito.metrics._arrays import Array, check_order, flags, in_expected_order, numbers, same_length, sum_below
from dubito.validate import check_choice, check_number

_USUAL = "Ten to fifteen are usual."


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
    inner_edges = np.arange(1, bins) / bins
    return float(np.abs(np.bincount(np.searchsorted(inner_edges, q), weights=gap)).sum() / len(gap))


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
