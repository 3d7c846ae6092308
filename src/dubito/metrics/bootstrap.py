"""How sure is a metric, and which of several scores could be the best? Intervals by the bootstrap.

    low, high = the (1 - confidence) / 2 and (1 + confidence) / 2 quantiles of the metric over resamples of the rows

The mean of a column of zeros and ones, such as an accuracy, is a proportion and needs no resamples: its interval is
exact (`proportions`). The bootstrap fails there: resamples of 30 rows that are all right are all right, too, and its
interval would be [1, 1].

The unit of resampling is fixed before rows are drawn: `r_auroc` and `recall_at_1` resample queries, whose neighbours
stay those of the full set (in a resample, a row drawn twice would find itself), and the metrics of logits resample one
value per row. `interval` draws again where the metric is undefined, as with a single class. Resamples of calibration
errors, which noise pushes up, are shifted so that their mean is the value, and clipped at 0.

Several scores are compared with the best of them on the same draws (`gap_to_best`):

    d_i        = v_b - v_i                                 gap to the best on these rows, b = argmax_i v_i
    e_ij       = standard error of v_j - v_i               over resamples that all of them share
    q_i        = quantile of max_j (c_j - c_i) / e_ij      c = resampled values minus their mean
    low, high  = d_i -+ q_i e_ib                           i is worse than the best where low > 0

The best was chosen on the same rows, and the more are compared, the further ahead the luckiest seems. q_i accounts for
both: it is the lead over i of the best of all the others that chance alone gives. So those without a sure gap contain
the true best with the given confidence: multiple comparisons with the best (Hsu 1981), here by a paired bootstrap. Two
scores that order the rows alike have no error between them, and no gap.

A resample leaves the order of the distinct scores as it is and changes only how many rows w_g, and which sum of values
e_g, each of them holds. The ranking metrics are functions of the running sums of both, computed on many resamples at
once. An area under a curve of running sums E_k gives every rank a fixed weight, whatever the rows:

    Σ_k E_k / k              = Σ_i t_i e_i,   t_i = Σ_{k >= i} 1 / k         AURC
    Σ_k (E_{k-1} + E_k) / 2n = Σ_i t_i e_i,   t_i = (n - i + 1/2) / n        AUGRC

Tied rows have the expected value e_g / w_g at each of their ranks, so a distinct score adds that mean times the sum of
t over its ranks. Any other metric is called once per resample.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array, flags, numbers, same_length
from dubito.metrics.calibration import (
    adaptive_ece,
    bucket_calibration_error,
    class_wise_ece,
    ece,
    smooth_ece,
    top_label_ece,
)
from dubito.metrics.classification import accuracy, brier, brier_per_row, correct, nll, nll_per_row
from dubito.metrics.proportions import Interval, proportion
from dubito.metrics.ranking import auroc, average_precision, chance_after, false_alarms, fpr_at_tpr, mean_precision
from dubito.metrics.rejection import augrc, aurc, excess_aurc
from dubito.metrics.retrieval import neighbour_matches, r_auroc, recall_at_1
from dubito.table import Column, to_tensor
from dubito.validate import check_bootstrap

Metric = Callable[..., float]
Resampled = Callable[[Int64[np.ndarray, "b n"]], Float64[np.ndarray, "b"]]
"""The metric of every resample in a block of them, from the drawn rows; NaN where it is undefined."""

_CELLS = 2**15
"""Rows of a block of resamples: columns of that length stay in the processor's cache."""
FEWEST = 10
"""Images of the rarer class (wrong or right, OOD or in-distribution) below which every gap may be zero. A bootstrap of
two of them called the best of eight equal scores better than another one in 28 of 100 trials, where 5 were allowed."""
_ATTEMPTS = 100
_SAME = 1e-12
"""Smaller differences are rounding."""
_IN_DISTRIBUTION, _OOD, _DRAW, _RESAMPLE = range(4)


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


class RankedScore(NamedTuple):
    """One of several scores by one metric.

    Attributes:
        rank: 1 for the best on these images.
        value: The metric, with an interval of its own.
        gap_to_best: How much worse it is than the best, with an interval that accounts for all comparisons.
    """

    rank: int
    value: Interval
    gap_to_best: GapToBest


class MedianSpread(NamedTuple):
    """A value over several seeds: the median, and its distance to the farther of minimum and maximum."""

    median: float
    distance: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ± {self.distance:.3f}"


class BalancedAuroc(NamedTuple):
    """AUROCs of s scores on balanced sets of `rows` images from either side: on every draw, and on every resample."""

    rows: int
    drawn: Float64[np.ndarray, "draws s"]
    resampled: Float64[np.ndarray, "resamples s"]


def interval(
    metric: Metric,
    *arrays: Array | Column,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int | torch.Generator = 0,
) -> Interval:
    """A metric with its interval: `interval(auroc, scores, positives)`; exact for proportions, else by the bootstrap.

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
            f"interval needs a metric that is defined on these rows; got {value}. Call it alone on them to see why."
        )
    if summary is mean and bool(((columns[0] == 0) | (columns[0] == 1)).all()):
        return proportion(int(columns[0].sum()), len(columns[0]), confidence=confidence)
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


def rank_scores(
    metric: Metric,
    scores: Mapping[str, Array],
    positives: Array,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    by: str = "rank_scores",
) -> dict[str, RankedScore]:
    """Several scores of the same rows by one metric, the best first, on resamples that all of them share.

    Args:
        metric: A metric of `ranking` or `rejection`, which takes (n) scores first.
        scores: Uncertainties by name, (n) each.
        positives: The metric's other argument, (n).
        confidence: Confidence of every interval.
        resamples: Number of resamples, at least 2.
        seed: Seed of the draws.
        by: The function that the user called, for errors.

    >>> scores = {"fair": [2.0, 1.0, 4.0, 3.0], "good": [1.0, 2.0, 3.0, 4.0]}
    >>> list(rank_scores(auroc, scores, [0, 1, 0, 1], resamples=50))
    ['good', 'fair']
    """
    sign, names = -1.0 if metric in _LOWER_IS_BETTER else 1.0, list(scores)
    draws = paired_draws(metric, list(scores.values()), positives, resamples=resamples, seed=seed, by=by)
    exact = np.array([metric(one, positives) for one in scores.values()])
    gaps = gap_to_best(sign * exact, sign * draws, confidence=confidence)
    is_positive = flags(positives, f"{by}: positives")
    if min(is_positive.sum(), (~is_positive).sum()) < FEWEST:
        gaps = [gap._replace(low=min(gap.low, 0.0)) for gap in gaps]
    low, high = percentiles(draws, confidence)
    return {
        names[i]: RankedScore(rank, Interval(float(exact[i]), float(low[i]), float(high[i]), confidence), gaps[i])
        for rank, i in enumerate(np.argsort(-sign * exact, kind="stable").tolist(), start=1)
    }


def median_spread(values: Iterable[float]) -> MedianSpread:
    """The median of several seeds and its distance to the farther extreme (Kirchhof et al. 2024, section 4.1).

    >>> str(median_spread([0.61, 0.605, 0.608, 0.612, 0.607]))  # 0.612 is farther away than 0.605
    '0.608 ± 0.004'
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueRangeError("median_spread needs at least one value; got none. Pass one value per seed.")
    median = statistics.median(ordered)
    return MedianSpread(median, max(median - ordered[0], ordered[-1] - median))


def mean(values: Shaped[Tensor, "n"]) -> float:
    """The mean of a column, as a metric for `interval`."""
    return float(values.double().mean())


def draw_rows(
    n: int, resamples: int, seed: int | np.random.Generator, *, cells: int = _CELLS
) -> Iterator[Int64[np.ndarray, "b n"]]:
    """Rows of `resamples` bootstrap resamples of n rows, a block of resamples at a time.

    Args:
        n: Number of rows.
        resamples: Number of resamples.
        seed: Seed of the draws, or a generator to continue. The size of blocks does not change what is drawn.
        cells: Most rows of one block, over all of its resamples.
    """
    rng = np.random.default_rng(seed)
    size = max(1, cells // n)
    for start in range(0, resamples, size):
        yield rng.integers(n, size=(min(size, resamples - start), n))


def draw_counts(n: int, resamples: int, seed: int) -> Iterator[Int64[np.ndarray, "b n"]]:
    """How often each of n rows occurs in each resample: the same draws as `draw_rows`."""
    for rows in draw_rows(n, resamples, seed, cells=2**21):
        yield np.bincount(_by_line(rows, n), minlength=len(rows) * n).reshape(-1, n)


def percentiles(
    draws: Float64[np.ndarray, "... b"], confidence: float, *, method: Literal["linear", "nearest"] = "linear"
) -> Float64[np.ndarray, "2 ..."]:
    """The (1 - confidence) / 2 and (1 + confidence) / 2 quantiles over the last axis.

    >>> percentiles(np.array([0.0, 1.0, 2.0, 3.0, 4.0]), 0.5).tolist()
    [1.0, 3.0]
    """
    ends: np.ndarray = np.quantile(draws, ((1 - confidence) / 2, (1 + confidence) / 2), axis=-1, method=method)
    return ends


def paired_draws(
    metric: Metric, scores: Sequence[Array], *arrays: Array, resamples: int = 1000, seed: int = 0, by: str = "draws"
) -> Float64[np.ndarray, "s b"]:
    """The metric of several scores of the same rows, one line per score, on resamples that all of them share.

    Resamples on which the metric is undefined are left out, so there may be fewer than `resamples`.

    Args:
        metric: A metric of `ranking` or `rejection`, which takes (n) scores first.
        scores: Uncertainties, (n) each.
        arrays: The metric's other arguments, (n) each.
        resamples: Number of resamples, at least 2.
        seed: Seed of the draws.
        by: The function that the user called, for errors.

    >>> draws = paired_draws(auroc, [[1, 2, 3, 4], [2, 1, 4, 3]], [0, 1, 0, 1], resamples=50)
    >>> len(draws), bool((draws[0] >= draws[1]).all())  # on every resample with both classes
    (2, True)
    """
    check_bootstrap(by=by, resamples=resamples, seed=seed, least=2)
    rest = [to_tensor(array, f"{by}: array") for array in arrays]
    columns = [to_tensor(one, f"{by}: scores") for one in scores]
    same_length(by, **{f"array {i}": len(one) for i, one in enumerate((*rest, *columns))})
    of_rows = [resampled(metric, [one, *rest]) for one in columns]
    blocks = [np.stack([values(rows) for values in of_rows]) for rows in draw_rows(len(columns[0]), resamples, seed)]
    draws = np.concatenate(blocks, axis=1)
    defined: np.ndarray = draws[:, np.isfinite(draws).all(axis=0)]
    if defined.shape[1] < 2:
        raise TableError(
            f"{by} needs a metric that is defined on resamples; it was on {defined.shape[1]} of {resamples}. "
            f"Pass more rows, or more rows of the rarer class."
        )
    return defined


def paired_errors(
    metric: Metric, scores: Sequence[Array], reference: Array, *arrays: Array, resamples: int = 1000, seed: int = 0
) -> list[float]:
    """The standard error of metric(one, ...) - metric(reference, ...) for each of several scores of the same rows.

    Args:
        metric: A metric of `ranking` or `rejection`, which takes (n) scores first.
        scores: Uncertainties, (n) each.
        reference: The uncertainties to compare with, (n).
        arrays: The metric's other arguments, (n) each.
        resamples: Number of resamples, at least 2.
        seed: Seed of the draws.

    >>> paired_errors(auroc, [[5, 6, 7, 8]], [1, 2, 3, 4], [0, 1, 0, 1])  # one order, one AUROC
    [0.0]
    """
    draws = paired_draws(metric, [reference, *scores], *arrays, resamples=resamples, seed=seed, by="paired_errors")
    return [float((one - draws[0]).std(ddof=1)) for one in draws[1:]]


def balanced_auroc(
    in_distribution: Float64[np.ndarray, "s n"],
    ood: Float64[np.ndarray, "s m"],
    *,
    draws: int,
    resamples: int,
    seed: int,
    number: int = 0,
) -> BalancedAuroc:
    """The AUROC of every score on sets of min(n, m) rows of either table, OOD rows being the positives.

    A draw takes rows without replacement, a resample with replacement: the same rows for every score, and the same
    in-distribution rows for every OOD table, because means over OOD tables share their noise.

    Args:
        in_distribution: By score, the uncertainty of every in-distribution row.
        ood: By score, the uncertainty of every out-of-distribution row.
        draws: Number of balanced sets.
        resamples: Number of bootstrap resamples.
        seed: Seed of both.
        number: Number of the OOD table, so that each is drawn in its own way.
    """
    n, m = in_distribution.shape[1], ood.shape[1]
    rows, both = min(n, m), np.concatenate([in_distribution, ood], axis=1)
    positives = np.arange(2 * rows) >= rows

    def generators(kind: int, place: int) -> tuple[np.random.Generator, np.random.Generator]:
        keys = (seed, kind, place, _IN_DISTRIBUTION), (seed, kind, place, _OOD + number)
        return np.random.default_rng(keys[0]), np.random.default_rng(keys[1])

    drawn = []
    for draw in range(draws):
        inside, outside = generators(_DRAW, draw)
        chosen = np.concatenate([inside.permutation(n)[:rows], n + outside.permutation(m)[:rows]])
        drawn.append([auroc(scores[chosen], positives) for scores in both])
    of_rows = [resampled(auroc, [torch.from_numpy(scores), torch.arange(n + m) >= n]) for scores in both]
    blocks, step = [], max(1, _CELLS // (2 * rows))
    for start in range(0, resamples, step):
        pairs = (generators(_RESAMPLE, resample) for resample in range(start, min(start + step, resamples)))
        block = np.stack([np.append(a.integers(n, size=rows), n + b.integers(m, size=rows)) for a, b in pairs])
        blocks.append(np.stack([values(block) for values in of_rows], axis=1))
    return BalancedAuroc(rows, np.array(drawn), np.concatenate(blocks))


def resampled(metric: Metric, columns: Sequence[Tensor]) -> Resampled:
    """The metric as a function of drawn rows: counted where it can be, else called once per resample."""
    name, options = getattr(metric, "func", metric), getattr(metric, "keywords", {})
    if name in _COUNTED and not getattr(metric, "args", ()):
        return _COUNTED[name](*columns, **options)

    def value(rows: Int64[Tensor, "n"]) -> float:
        try:
            return float(metric(*(column.index_select(0, rows) for column in columns)))
        except TableError:
            return math.nan

    return lambda rows: np.array([value(drawn) for drawn in torch.from_numpy(rows)])


def area_under_ranks(
    count: Shaped[np.ndarray, "b g"], total: Shaped[np.ndarray, "b g"], weights: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "b"]:
    """The mean over n ranks of weight times expected value.

    Args:
        count: Rows at each of g ordered levels, per resample.
        total: Sums of their values.
        weights: The weight of each rank.
    """
    below = np.append(0.0, np.cumsum(weights))
    of_ranks = np.diff(below[np.cumsum(count, axis=1).astype(np.int64)], axis=1, prepend=0.0)
    mean: np.ndarray = (total / np.maximum(count, 1) * of_ranks).sum(axis=1) / len(weights)
    return mean


def aurc_weights(n: int) -> Float64[np.ndarray, "n"]:
    """The weight of each of n ranks in AURC, Σ_{k >= i} 1 / k."""
    return np.cumsum(1 / np.arange(n, 0, -1))[::-1]


def _excess_aurc(scores: Array, errors: Array) -> Resampled:
    area, best = (_area(order, errors) for order in (scores, errors))
    return lambda rows: area(rows) - best(rows)


def _ranking(
    metric: Callable[..., Float64[np.ndarray, "b"]], scores: Array, positives: Array, **options: Any
) -> Resampled:
    """The metric of the positives and the negatives drawn of every distinct score (b, g), from the highest on."""
    level = _levels(-numbers(scores, "interval: scores"))
    levels = int(level.max()) + 1
    cell = level + levels * flags(positives, "interval: positives")

    def values(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        count = np.bincount(_by_line(cell[rows], 2 * levels), minlength=2 * levels * len(rows))
        negative, positive = count.reshape(-1, 2, levels).swapaxes(0, 1)
        return metric(positive, negative, **options)

    return values


def _area(scores: Array, errors: Array, weights: Callable[[int], Float64[np.ndarray, "n"]] = aurc_weights) -> Resampled:
    level, values = _levels(numbers(scores, "interval: scores")), numbers(errors, "interval: errors")
    levels, of_ranks = int(level.max()) + 1, weights(len(values))

    def area(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        cell = _by_line(level[rows], levels)
        count = np.bincount(cell, minlength=len(rows) * levels).reshape(-1, levels)
        total = np.bincount(cell, weights=values[rows].ravel(), minlength=count.size).reshape(-1, levels)
        return area_under_ranks(count, total, of_ranks)

    return area


def _levels(scores: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """How many distinct scores are lower than each row's."""
    level: np.ndarray = np.unique(scores, return_inverse=True)[1]
    return level.astype(np.int64, copy=False)


def _by_line(cell: Int64[np.ndarray, "b n"], cells: int) -> Int64[np.ndarray, "_"]:
    """One number for line and cell together, so that one count does for all lines."""
    cell += cells * np.arange(len(cell))[:, None]
    return cell.ravel()


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
                        f"in succession were not. Pass more rows, or more rows of the rarer class."
                    )
    return np.array(draws)


_COUNTED: dict[Any, Callable[..., Resampled]] = {
    auroc: partial(_ranking, chance_after),
    average_precision: partial(_ranking, mean_precision),
    fpr_at_tpr: partial(_ranking, false_alarms),
    aurc: _area,
    excess_aurc: _excess_aurc,
    augrc: lambda scores, errors: _area(scores, errors, lambda n: (n - np.arange(1, n + 1) + 0.5) / n),
}
"""By metric: from its arguments, which it has accepted, to its values on resamples of them."""
_ONCE: Mapping[Metric, tuple[Callable[..., tuple[Array | Column, ...]], Metric]] = {
    accuracy: (lambda logits, labels: (correct(logits, labels),), mean),
    nll: (lambda logits, labels: (nll_per_row(logits, labels),), mean),
    brier: (lambda logits, labels: (brier_per_row(logits, labels),), mean),
    recall_at_1: (lambda features, labels: (neighbour_matches(features, labels),), mean),
    r_auroc: (lambda scores, features, labels: (scores, ~neighbour_matches(features, labels)), auroc),
}
"""Metrics in two steps: the columns to resample, computed once on all rows, and the metric of a resample."""


_LOWER_IS_BETTER: frozenset[Metric] = frozenset({aurc, excess_aurc, augrc, fpr_at_tpr})
_CENTRED: frozenset[Metric] = frozenset(
    {ece, adaptive_ece, top_label_ece, class_wise_ece, smooth_ece, bucket_calibration_error}
)
"""Absolute gaps grow with noise, and a resample adds noise of its own: its mean is moved back onto the value."""
