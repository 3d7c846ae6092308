"""Rejection figures of many bootstrap resamples at once, the same resamples for every order, so that they pair off.

A resample is how often each row was drawn, w (b, n). With rows sorted by uncertainty once, running sums of w and of
w · value say how many rows, and which sum of values, lie at or below each distinct uncertainty; every figure follows:

    sum below quantile q   the running sum of values, at q · n of the running number of rows; in between, linear
    AUROC of errors        pairs of an error and a right answer, ties one half
    AURC                   Σ_i t_i e_i / n over ranks i, t_i = Σ_{k >= i} 1 / k; tied rows expect their mean
    -cov                   of the levels (or of the mean uncertainty in each bucket) with a curve over them

Covariances divide by the number of levels: the levels are a grid, not a sample.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Shaped

from dubito.metrics.bootstrap import area_under_ranks, aurc_weights, chance_after

CURVES = ("accuracy", "nll", "calibration_error")
KINDS = ("bucket", "acceptance")
FIGURES = ("auroc", "aurc", *(f"neg_{kind}_covariance_{curve}" for kind in KINDS for curve in CURVES))
"""What is resampled."""


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
    each, right = (np.diff(total, axis=1, prepend=0.0) for total in (rows, sums[0]))
    wrong = each - right
    ranking = [chance_after(right, wrong), area_under_ranks(each, wrong, aurc_weights(len(doubt)))]
    return np.stack(
        [*ranking, *(-_covariance(against, curve) for curve in (*_absolute(bucket[:3]), *_absolute(accepted)))], axis=1
    )


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


def _covariance(x: Float64[np.ndarray, "b q"], y: Float64[np.ndarray, "b q"]) -> Float64[np.ndarray, "b"]:
    centred = x - x.mean(axis=1, keepdims=True)
    covariance: np.ndarray = (centred * y).mean(axis=1)
    return covariance
