"""How sure is a metric, and which of several scores could be the best? Percentile and paired bootstrap intervals.

    low, high = the (1 - confidence) / 2 and (1 + confidence) / 2 quantiles of the metric over resamples of the rows

The unit of resampling is fixed before rows are drawn: `r_auroc` and `recall_at_1` resample queries, whose neighbours
stay those of the full set (in a resample, a row drawn twice would find itself), and the metrics of logits resample one
value per row. A resample in which the metric is undefined, such as one with a single class, is drawn again. Resamples
of calibration errors, which noise pushes up, are shifted so that their mean is the value, and clipped at 0.

Several scores are compared with the best of them (`gap_to_best`):

    d_i        = v_b - v_i                                 gap to the best on these rows, b = argmax_i v_i
    e_ij       = standard error of v_j - v_i               over resamples that all of them share
    q_i        = quantile of max_j (c_j - c_i) / e_ij      c = resampled values minus their mean
    low, high  = d_i -+ q_i e_ib                           i is worse than the best where low > 0

The best was chosen on the same rows, and the more are compared, the further ahead the luckiest seems. q_i accounts for
both: it is the lead over i of the best of all the others that chance alone gives. So those without a sure gap contain
the true best with the given confidence: multiple comparisons with the best (Hsu 1981), here by a paired bootstrap. Two
scores that order the rows alike have no error between them, and no gap.

Over several seeds of one training, `median_spread` summarises a value as Kirchhof et al. (2024, section 4.1) do.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array, same_length
from dubito.metrics.bootstrap import Metric, Resampled, draw_rows, percentiles, resampled
from dubito.metrics.calibration import bucket_calibration_error, ece
from dubito.metrics.classification import accuracy, brier, brier_per_row, correct, nll, nll_per_row
from dubito.metrics.ranking import auroc
from dubito.metrics.retrieval import neighbour_matches, r_auroc, recall_at_1
from dubito.table import Column, to_tensor
from dubito.validate import check_bootstrap

_ATTEMPTS = 100
_SAME = 1e-12
"""Smaller differences are rounding."""


class Interval(NamedTuple):
    """A metric and the interval that holds its true value with the given confidence."""

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


class GapToBest(NamedTuple):
    """How much worse one score is than the best on the rows at hand. Each end holds with the confidence by itself.

    Attributes:
        value: The difference to the best, never negative.
        low: Lower end of the interval; above 0 where the gap is more than noise.
        high: Upper end of the interval.
    """

    value: float
    low: float
    high: float

    @property
    def surely(self) -> bool:
        """Whether the gap is more than noise."""
        return self.low > _SAME

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


class MedianSpread(NamedTuple):
    """A value over several seeds: the median, and its distance to the farther of minimum and maximum."""

    median: float
    distance: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {self.distance:.3f}"


def median_spread(values: Iterable[float]) -> MedianSpread:
    """The median of several seeds, and its distance to the farther of minimum and maximum.

    >>> str(median_spread([0.61, 0.605, 0.608, 0.612, 0.607]))  # 0.612 is farther away than 0.605
    '0.608 ± 0.004'
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueRangeError("median_spread needs at least one value; got none. Give one value per seed.")
    median = statistics.median(ordered)
    return MedianSpread(median, max(median - ordered[0], ordered[-1] - median))


def interval(
    metric: Metric,
    *arrays: Array | Column,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int | torch.Generator = 0,
) -> Interval:
    """A metric with its bootstrap interval: `interval(auroc, scores, positives)`.

    Args:
        metric: A metric of this package, or any function of tensors that returns a float; with options, as a
            functools.partial. It reports "undefined" with a TableError or NaN.
        arrays: The metric's arguments, one row per image in each; features may be a column that stays on disk.
        confidence: The share of repetitions whose interval should hold the true value, in (0, 1).
        resamples: Number of resamples.
        seed: Seed of the bootstrap, or a generator from which one is drawn.

    >>> str(interval(auroc, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0, 0, 1, 0, 1, 1], resamples=200))
    '0.8889 [0.5000, 1.0000]'
    """
    check_bootstrap(by="interval", confidence=confidence, resamples=resamples, seed=seed)
    rows, summary = _ONCE.get(metric, (lambda *columns: columns, metric))
    columns = [to_tensor(column, f"interval: array {i}") for i, column in enumerate(rows(*arrays))]
    same_length("interval", **{f"array {i}": len(column) for i, column in enumerate(columns)})
    value = summary(*columns)
    if not math.isfinite(value):
        raise ValueRangeError(
            f"interval needs a metric that is defined on these rows; got {value}. "
            f"Call it alone on the same arrays to see why."
        )
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    draws = _defined_draws(resampled(summary, columns), len(columns[0]), resamples, seed)
    if metric in _CENTRED or getattr(metric, "func", None) in _CENTRED:
        draws = np.maximum(draws - (draws.mean() - value), 0)
    low, high = percentiles(draws, confidence).tolist()
    return Interval(value, low, high, confidence)


def gap_to_best(
    values: Float64[np.ndarray, "s"], draws: Float64[np.ndarray, "s b"], *, confidence: float = 0.95
) -> list[GapToBest]:
    """How much worse each of several scores is than the best of them.

    Args:
        values: The metric of each score, higher = better.
        draws: The same on resamples that all scores share, from `paired_draws`.
        confidence: The probability that the true best is among those without a sure gap.

    >>> draws = np.array([[0.9, 0.8, 0.9, 0.8], [0.8, 0.9, 0.7, 0.8], [0.1, 0.2, 0.2, 0.1]])
    >>> [one.surely for one in gap_to_best(draws.mean(axis=1), draws)]
    [False, False, True]
    """
    check_bootstrap(by="gap_to_best", confidence=confidence)
    best = int(values.argmax())
    centred = draws - draws.mean(axis=1, keepdims=True)
    gaps = []
    for i, value in enumerate(values):
        lead = centred - centred[i]
        error = lead.std(axis=1, ddof=1)
        others = error > _SAME
        share = (lead[others] / error[others, None]).max(axis=0) if others.any() else np.zeros(1)
        reach = max(0.0, float(np.quantile(share, confidence))) * float(error[best])
        gap = float(values[best] - value)
        gaps.append(GapToBest(gap, gap - reach, gap + reach))
    return gaps


def mean(values: Shaped[Tensor, "n"]) -> float:
    """The mean of a column, as a metric for `interval`."""
    return float(values.double().mean())


_ONCE: Mapping[Metric, tuple[Callable[..., tuple[Array | Column, ...]], Metric]] = {
    accuracy: (lambda logits, labels: (correct(logits, labels),), mean),
    nll: (lambda logits, labels: (nll_per_row(logits, labels),), mean),
    brier: (lambda logits, labels: (brier_per_row(logits, labels),), mean),
    recall_at_1: (lambda features, labels: (neighbour_matches(features, labels),), mean),
    r_auroc: (lambda features, labels, scores: (scores, ~neighbour_matches(features, labels)), auroc),
}
"""Metrics in two steps: the columns to resample, computed once on all rows, and the metric of a resample."""


_CENTRED: frozenset[Metric] = frozenset({ece, bucket_calibration_error})
"""Absolute gaps grow with noise, and a resample adds noise of its own: its mean is moved back onto the value."""


def _defined_draws(values: Resampled, n: int, resamples: int, seed: int) -> Float64[np.ndarray, "_"]:
    """The metric of the first `resamples` resamples on which it is defined."""
    rng = np.random.default_rng(seed)
    draws: list[float] = []
    undefined = 0
    while len(draws) < resamples:
        for rows in draw_rows(n, resamples - len(draws), rng):
            for value in values(rows).tolist():
                undefined = 0 if math.isfinite(value) else undefined + 1
                if not undefined:
                    draws.append(value)
                elif undefined == _ATTEMPTS:
                    raise TableError(
                        f"interval needs a metric that is defined on resamples; {_ATTEMPTS} resamples of the {n} rows "
                        f"in succession were not. Give it more rows, or more rows of the rarer class."
                    )
    return np.array(draws)
