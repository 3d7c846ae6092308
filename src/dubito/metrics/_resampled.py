"""`ranking` and `rejection` of many bootstrap resamples at once: rows are sorted once, then only counted.

A resample leaves the order of the distinct scores as it is and changes only how many rows w_g, and which
sum of values e_g, each of them holds. The ranking metrics are functions of the running sums of both. An area
under a curve of running sums E_k gives every rank a fixed weight, whatever the rows:

    Σ_k E_k / k              = Σ_i t_i e_i,   t_i = Σ_{k >= i} 1 / k         AURC
    Σ_k (E_{k-1} + E_k) / 2n = Σ_i t_i e_i,   t_i = (n - i + 1/2) / n        AUGRC

Tied rows expect the mean e_g / w_g at each of their ranks, so a distinct score adds that mean times the sum
of t over its ranks. `rows` are the drawn rows, one resample a line; NaN stands for "undefined".
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from dubito.metrics._arrays import Array, flags, numbers
from dubito.metrics.ranking import auroc, average_precision, fpr_at_tpr
from dubito.metrics.rejection import augrc, aurc, excess_aurc

Resampled = Callable[[Int64[np.ndarray, "b n"]], Float64[np.ndarray, "b"]]
"""The metric of every resample in a block of them."""


def _auroc(scores: Array, positives: Array) -> Resampled:
    drawn = _ranking(scores, positives)

    def values(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        hit, alarm = drawn(rows)
        found = np.cumsum(hit, axis=1)
        twice_the_area = (alarm * (2 * found - hit)).sum(axis=1)
        return _ratio(twice_the_area, 2 * found[:, -1] * alarm.sum(axis=1))

    return values


def _average_precision(scores: Array, positives: Array) -> Resampled:
    drawn = _ranking(scores, positives)

    def values(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        hit, alarm = drawn(rows)
        found = np.cumsum(hit, axis=1)
        precision = found / np.maximum(np.cumsum(hit + alarm, axis=1), 1)
        area = _ratio((hit * precision).sum(axis=1), found[:, -1])
        return np.where(found[:, -1] < rows.shape[1], area, np.nan)

    return values


def _fpr_at_tpr(scores: Array, positives: Array, *, tpr: float = 0.95) -> Resampled:
    drawn = _ranking(scores, positives)

    def values(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        hit, alarm = drawn(rows)
        found, alarms = np.cumsum(hit, axis=1), np.cumsum(alarm, axis=1)
        enough = _ratio(found, found[:, -1:]) >= tpr
        first = enough.argmax(axis=1)
        rate = _ratio(alarms[np.arange(len(rows)), first], alarms[:, -1])
        return np.where(enough[:, -1], rate, np.nan)

    return values


def _aurc(scores: Array, errors: Array) -> Resampled:
    e = numbers(errors, "aurc: errors")
    return _area(_levels(numbers(scores, "aurc: scores")), e, _aurc_weights(len(e)))


def _excess_aurc(scores: Array, errors: Array) -> Resampled:
    e = numbers(errors, "excess_aurc: errors")
    weights = _aurc_weights(len(e))
    area, best = _area(_levels(numbers(scores, "excess_aurc: scores")), e, weights), _area(_levels(e), e, weights)
    return lambda rows: area(rows) - best(rows)


def _augrc(scores: Array, errors: Array) -> Resampled:
    e = numbers(errors, "augrc: errors")
    n = len(e)
    return _area(_levels(numbers(scores, "augrc: scores")), e, (n - np.arange(1, n + 1) + 0.5) / n)


RESAMPLED: dict[Any, Callable[..., Resampled]] = {
    auroc: _auroc,
    average_precision: _average_precision,
    fpr_at_tpr: _fpr_at_tpr,
    aurc: _aurc,
    excess_aurc: _excess_aurc,
    augrc: _augrc,
}
"""By metric: from its arguments, which it has accepted, to its values on resamples of them."""


def _ranking(scores: Array, positives: Array) -> Callable[[Int64[np.ndarray, "b n"]], tuple[np.ndarray, np.ndarray]]:
    """From rows to the positives and the negatives drawn of every distinct score (b, g), from the highest on."""
    level = _levels(-numbers(scores, "interval: scores"))
    levels = int(level.max()) + 1
    cell = level + levels * flags(positives, "interval: positives")

    def drawn(rows: Int64[np.ndarray, "b n"]) -> tuple[Int64[np.ndarray, "b g"], Int64[np.ndarray, "b g"]]:
        count = np.bincount(_by_line(cell[rows], 2 * levels), minlength=2 * levels * len(rows))
        negative, positive = count.reshape(-1, 2, levels).swapaxes(0, 1)
        return positive, negative

    return drawn


def _area(level: Int64[np.ndarray, "n"], values: Float64[np.ndarray, "n"], weights: np.ndarray) -> Resampled:
    """The mean over ranks of weight times expected value."""
    levels = int(level.max()) + 1
    below = np.append(0.0, np.cumsum(weights))

    def area(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        cell = _by_line(level[rows], levels)
        count = np.bincount(cell, minlength=len(rows) * levels).reshape(-1, levels)
        total = np.bincount(cell, weights=values[rows].ravel(), minlength=count.size).reshape(-1, levels)
        end = np.cumsum(count, axis=1)
        of_ranks = np.diff(below[end], axis=1, prepend=0.0)
        mean: np.ndarray = (total / np.maximum(count, 1) * of_ranks).sum(axis=1) / len(values)
        return mean

    return area


def _aurc_weights(n: int) -> Float64[np.ndarray, "n"]:
    weights: np.ndarray = np.cumsum(1 / np.arange(n, 0, -1))[::-1]
    return weights


def _levels(scores: Float64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
    """How many distinct scores are lower than each row's."""
    level: np.ndarray = np.unique(scores, return_inverse=True)[1]
    return level.astype(np.int64, copy=False)


def _by_line(cell: Int64[np.ndarray, "b n"], cells: int) -> Int64[np.ndarray, "_"]:
    """One number for line and cell together, so that one count does for all lines."""
    cell += cells * np.arange(len(cell))[:, None]
    return cell.ravel()


def _ratio(part: Shaped[np.ndarray, "..."], whole: Shaped[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    with np.errstate(invalid="ignore", divide="ignore"):
        share: np.ndarray = part / whole
    return share
