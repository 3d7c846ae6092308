"""Rejection figures of many bootstrap resamples at once, the same resamples for every order, so that they pair off.

A resample is how often each row was drawn, w (b, n). With rows sorted by uncertainty once, running sums of w and of
w · value say how many rows, and which sum of values, lie at or below each distinct uncertainty; every figure follows:

    sum below quantile q   the running sum of values, at q · n of the running number of rows; in between, linear
    AUROC of errors        pairs of an error and a right answer, ties one half
    AURC                   Σ_i t_i e_i / n over ranks i, t_i = Σ_{k >= i} 1 / k; tied rows expect their mean
    -cov                   of the levels (or of the mean uncertainty in each bucket) with a curve over them

Covariances divide by the number of levels: the levels are a grid, not a sample.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Shaped

CURVES = ("accuracy", "nll", "calibration_error")
KINDS = ("bucket", "acceptance")
FIGURES = ("auroc", "aurc", *(f"neg_{kind}_covariance_{curve}" for kind in KINDS for curve in CURVES))
"""What is resampled."""

_CELLS = 2**21
"""Of a block of resamples times rows."""


class Ranked(NamedTuple):
    """One order of the rows, and what is known of each."""

    uncertainty: Float64[np.ndarray, "n"]
    correct: Float64[np.ndarray, "n"]
    nll: Float64[np.ndarray, "n"]
    gap: Float64[np.ndarray, "n"]


def figures_of(
    order: Ranked,
    drawn: Shaped[np.ndarray, "b n"],
    levels: Float64[np.ndarray, "q"],
    *,
    against_uncertainty: bool = False,
) -> Float64[np.ndarray, "b f"]:
    """FIGURES of every resample; NaN where undefined.

    Args:
        order: An uncertainty of every row, and its values.
        drawn: How often each row was drawn, one resample a line, n draws in each.
        levels: Rising in (0, 1], the last 1.
        against_uncertainty: Whether covariances are with the mean uncertainty in the bucket that ends at a level,
            instead of the level itself.
    """
    by_doubt = np.argsort(order.uncertainty, kind="stable")
    doubt = order.uncertainty[by_doubt]
    ends = np.append(np.flatnonzero(doubt[1:] != doubt[:-1]), len(doubt) - 1)
    count = drawn[:, by_doubt].astype(np.float64)
    rows = np.cumsum(count, axis=1)[:, ends]
    columns = (order.correct, order.nll, order.gap, order.uncertainty)
    sums = [np.cumsum(count * column[by_doubt], axis=1)[:, ends] for column in columns]
    below = [_below(rows, total, levels) for total in sums]
    width = np.diff(levels, prepend=0.0) * len(doubt)
    bucket = [np.diff(total, axis=1, prepend=0.0) / width for total in below]
    accepted = [total / (levels * len(doubt)) for total in below[:3]]
    against = bucket[3] if against_uncertainty else np.broadcast_to(levels, bucket[3].shape)
    ranking = [_auroc(rows, sums[0]), _aurc(rows, rows - sums[0])]
    return np.stack(
        [*ranking, *(-_covariance(against, curve) for curve in (*_absolute(bucket[:3]), *_absolute(accepted)))], axis=1
    )


def draws(n: int, resamples: int, seed: int) -> Iterator[Int64[np.ndarray, "b n"]]:
    """How often each of n rows is drawn, a block of resamples at a time."""
    rng = np.random.default_rng(seed)
    block = max(1, _CELLS // n)
    for start in range(0, resamples, block):
        lines = min(block, resamples - start)
        cell = rng.integers(n, size=(lines, n)) + n * np.arange(lines)[:, None]
        yield np.bincount(cell.ravel(), minlength=lines * n).reshape(lines, n)


def _absolute(curves: Sequence[Float64[np.ndarray, "b q"]]) -> list[Float64[np.ndarray, "b q"]]:
    """The calibration error is the size of the gap; accuracy and NLL are as they are."""
    return [*curves[:2], np.abs(curves[2])]


def _below(
    rows: Float64[np.ndarray, "b g"], sums: Float64[np.ndarray, "b g"], levels: Float64[np.ndarray, "q"]
) -> Float64[np.ndarray, "b q"]:
    n = rows[0, -1]
    found = np.empty((len(rows), len(levels)))
    for line, (count, total) in enumerate(zip(rows, sums, strict=True)):
        found[line] = np.interp(levels * n, np.append(0.0, count), np.append(0.0, total))
    return found


def _auroc(rows: Float64[np.ndarray, "b g"], right: Float64[np.ndarray, "b g"]) -> Float64[np.ndarray, "b"]:
    wrong = np.diff(rows - right, axis=1, prepend=0.0)
    below = right - np.diff(right, axis=1, prepend=0.0) / 2
    pairs = right[:, -1] * (rows[:, -1] - right[:, -1])
    with np.errstate(invalid="ignore"):
        share: np.ndarray = (wrong * below).sum(axis=1) / np.where(pairs > 0, pairs, np.nan)
    return share


def _aurc(rows: Float64[np.ndarray, "b g"], wrong: Float64[np.ndarray, "b g"]) -> Float64[np.ndarray, "b"]:
    n = int(rows[0, -1])
    below = np.append(0.0, np.cumsum(np.cumsum(1 / np.arange(n, 0, -1))[::-1]))
    of_ranks = np.diff(below[rows.astype(np.int64)], axis=1, prepend=0.0)
    count = np.diff(rows, axis=1, prepend=0.0)
    errors = np.diff(wrong, axis=1, prepend=0.0)
    area: np.ndarray = (errors / np.maximum(count, 1) * of_ranks).sum(axis=1) / n
    return area


def _covariance(x: Float64[np.ndarray, "b q"], y: Float64[np.ndarray, "b q"]) -> Float64[np.ndarray, "b"]:
    centred = x - x.mean(axis=1, keepdims=True)
    covariance: np.ndarray = (centred * y).mean(axis=1)
    return covariance
