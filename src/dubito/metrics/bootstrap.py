"""The one bootstrap engine: draw n rows with replacement, count them, and compute a metric on many resamples at once.

A resample leaves the order of the distinct scores as it is and changes only how many rows w_g, and which sum of values
e_g, each of them holds. The ranking metrics are functions of the running sums of both. An area under a curve of running
sums E_k gives every rank a fixed weight, whatever the rows:

    Σ_k E_k / k              = Σ_i t_i e_i,   t_i = Σ_{k >= i} 1 / k         AURC
    Σ_k (E_{k-1} + E_k) / 2n = Σ_i t_i e_i,   t_i = (n - i + 1/2) / n        AUGRC

Tied rows have the expected value e_g / w_g at each of their ranks, so a distinct score adds that mean times the sum of
t over its ranks. Any other metric is called once per resample. All scores that are compared see the same draws.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics._arrays import Array, flags, numbers, same_length
from dubito.metrics.ranking import auroc, average_precision, chance_after, false_alarms, fpr_at_tpr, mean_precision
from dubito.metrics.rejection import augrc, aurc, excess_aurc
from dubito.table import to_tensor
from dubito.validate import check_bootstrap

Metric = Callable[..., float]
Resampled = Callable[[Int64[np.ndarray, "b n"]], Float64[np.ndarray, "b"]]
"""The metric of every resample in a block of them, from the drawn rows; NaN where it is undefined."""

_CELLS = 2**15
"""Rows of a block of resamples: columns of that length stay in the processor's cache."""
_IN_DISTRIBUTION, _OOD, _DRAW, _RESAMPLE = range(4)


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
            f"Give it more rows, or more rows of the rarer class."
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


class BalancedAuroc(NamedTuple):
    """AUROCs of s scores on balanced sets of `rows` images from either side: on every draw, and on every resample."""

    rows: int
    drawn: Float64[np.ndarray, "draws s"]
    resampled: Float64[np.ndarray, "resamples s"]


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

    A draw takes rows without replacement, a resample with replacement: the same rows for every score, so differences
    between scores have intervals of their own. In-distribution rows are drawn alike for every OOD table, because means
    over OOD tables share their noise.

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


_COUNTED: dict[Any, Callable[..., Resampled]] = {
    auroc: partial(_ranking, chance_after),
    average_precision: partial(_ranking, mean_precision),
    fpr_at_tpr: partial(_ranking, false_alarms),
    aurc: _area,
    excess_aurc: _excess_aurc,
    augrc: lambda scores, errors: _area(scores, errors, lambda n: (n - np.arange(1, n + 1) + 0.5) / n),
}
"""By metric: from its arguments, which it has accepted, to its values on resamples of them."""
