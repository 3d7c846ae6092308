"""What remains wrong when the most uncertain rows are rejected? Curves over the share that is accepted.

Accept the k rows of lowest score; e_i is the error of a row (0 or 1, or any finite loss) and E_k the sum over the k:

    risk_k = E_k / k  at coverage k / n
    AURC   = 1/n Σ_k risk_k                                     (Geifman & El-Yaniv 2017)
    excess = AURC - AURC of the best order, by rising error     (E-AURC, Geifman et al. 2019)
    AUGRC  = 1/n Σ_k (E_{k-1} + E_k) / 2n                       (Traub et al. 2024)

AUGRC is the area, by trapezoids, under the chance that a row is both accepted and wrong; with 0/1 errors
and accuracy a it equals (1 - AUROC) a (1 - a) + (1 - a)² / 2.

Ties: every quantity is its expectation when rows of equal score are ordered at random, so the order of rows never
counts. Bucket and acceptance curves (Kirsch 2024, appendix B.3) are the mean of any column between two quantiles of the
score, and below one; a row that a quantile cuts counts by its share, so buckets hold equal mass for every n.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.metrics._arrays import Array, check_order, in_expected_order, numbers, same_length, sum_below

DECILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class RiskCoverage(NamedTuple):
    """A curve over k = 1 ... n: the mean error of the k most certain rows, and their share k / n of all."""

    coverage: Float64[Tensor, "n"]
    risk: Float64[Tensor, "n"]


def risk_coverage(scores: Array, errors: Array) -> RiskCoverage:
    """The mean error of the most certain rows, for every number of them.

    Args:
        scores: (n) uncertainties of any range; rows are accepted from the lowest on.
        errors: (n) 0 and 1, booleans, or any finite loss.

    >>> risk_coverage([1, 2, 3], [0, 1, 1]).risk.tolist()
    [0.0, 0.5, 0.6666666666666666]
    """
    ordered = _by_certainty(scores, errors, "risk_coverage", "errors")
    accepted = np.arange(1, len(ordered) + 1)
    return RiskCoverage(torch.from_numpy(accepted / len(ordered)), torch.from_numpy(np.cumsum(ordered) / accepted))


def aurc(scores: Array, errors: Array) -> float:
    """The area under the risk-coverage curve: the mean risk over all coverages.

    >>> aurc([1, 2], [0, 1])  # (0/1 + 1/2) / 2
    0.25
    """
    return _aurc(_by_certainty(scores, errors, "aurc", "errors"))


def excess_aurc(scores: Array, errors: Array) -> float:
    """The area that a perfect order of the same errors would save: 0 is best.

    >>> excess_aurc([2, 1], [0, 1])  # (1/1 + 1/2) / 2 - (0/1 + 1/2) / 2
    0.5
    """
    ordered = _by_certainty(scores, errors, "excess_aurc", "errors")
    return _aurc(ordered) - _aurc(np.sort(numbers(errors, "excess_aurc: errors")))


def augrc(scores: Array, errors: Array) -> float:
    """The area under the generalised risk-coverage curve: accepted and wrong, over all coverages.

    >>> augrc([1, 2], [0, 1])  # trapezoids of 0, 0, 1/2: (0 + 1/4) / 2
    0.125
    """
    ordered = _by_certainty(scores, errors, "augrc", "errors")
    n = len(ordered)
    joint = np.append(0.0, np.cumsum(ordered)) / n
    return float((joint[1:] + joint[:-1]).sum() / (2 * n))


def bucket_curve(scores: Array, values: Array, quantiles: Sequence[float] = DECILES) -> Float64[Tensor, "q"]:
    """The mean value in each bucket of uncertainty: between the quantile before (0 at first) and this one.

    Args:
        scores: (n) uncertainties of any range.
        values: (n) anything with a mean: errors, `nll_per_row`, a confidence minus a correctness.
        quantiles: The upper ends of the buckets, rising in (0, 1].

    >>> bucket_curve([1, 2, 3, 4], [0, 0, 0, 1], quantiles=(0.5, 1.0)).tolist()
    [0.0, 0.5]
    """
    q = _rising(quantiles, "bucket_curve")
    ordered = _by_certainty(scores, values, "bucket_curve", "values")
    edges = np.append(0.0, q)
    return torch.from_numpy(np.diff(sum_below(ordered, edges)) / (np.diff(edges) * len(ordered)))


def acceptance_curve(scores: Array, values: Array, quantiles: Sequence[float] = DECILES) -> Float64[Tensor, "q"]:
    """The mean value over all rows up to each quantile of uncertainty; at 1 the mean of all.

    Args:
        scores: (n) uncertainties of any range.
        values: (n) anything with a mean: errors, `nll_per_row`, a confidence minus a correctness.
        quantiles: The shares of rows to accept, rising in (0, 1].

    >>> acceptance_curve([1, 2, 3, 4], [0, 0, 0, 1], quantiles=(0.5, 1.0)).tolist()
    [0.0, 0.25]
    """
    q = _rising(quantiles, "acceptance_curve")
    ordered = _by_certainty(scores, values, "acceptance_curve", "values")
    return torch.from_numpy(sum_below(ordered, q) / (q * len(ordered)))


def _by_certainty(scores: Array, values: Array, by: str, name: str) -> Float64[np.ndarray, "n"]:
    check_order(by, **{"scores": scores, name: values})
    u, v = numbers(scores, f"{by}: scores"), numbers(values, f"{by}: {name}")
    same_length(by, **{"scores": len(u), name: len(v)})
    return in_expected_order(u, v)


def _aurc(ordered: Float64[np.ndarray, "n"]) -> float:
    return float((np.cumsum(ordered) / np.arange(1, len(ordered) + 1)).mean())


def _rising(quantiles: Sequence[float], by: str) -> Float64[np.ndarray, "q"]:
    q = np.asarray(quantiles, dtype=np.float64)
    edges = np.append(0.0, q)
    if q.size == 0 or not (np.diff(edges) > 0).all() or edges[-1] > 1:
        raise ValueRangeError(
            f"{by}: quantiles must rise within (0, 1]; got {list(quantiles)}. Pass upper ends such as (0.5, 1.0)."
        )
    return q
