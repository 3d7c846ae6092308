"""How sure is a metric? A percentile bootstrap: draw n rows with replacement, all columns together, often.

    low, high = the (1 - confidence) / 2 and (1 + confidence) / 2 quantiles of the metric over the resamples

What a row means is fixed before rows are drawn: `r_auroc` and `recall_at_1` resample queries, whose
neighbours stay those of the full set (in a resample, a row drawn twice would find itself), and the metrics
of logits resample one value a row. A resample in which the metric is undefined, such as one with a single
class, is drawn again. The resamples of calibration errors, which noise pushes up, are moved so that their
mean is the value, and end at 0.

The metrics of `ranking` and `rejection` sort the rows once and count a block of resamples at a time
(`_resampled`); any other metric is called once a resample. Both see the same draws.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array, same_length
from dubito.metrics._resampled import RESAMPLED, Resampled
from dubito.metrics.calibration import bucket_calibration_error, ece
from dubito.metrics.classification import accuracy, brier, brier_per_row, correct, nll, nll_per_row
from dubito.metrics.ranking import auroc
from dubito.metrics.retrieval import neighbour_matches, r_auroc, recall_at_1
from dubito.table import Column, to_tensor

Metric = Callable[..., float]

_ATTEMPTS = 100
_DRAWN_AT_ONCE = 2**15
"""Rows of a block of resamples: columns of that length stay in the processor's cache."""


class Interval(NamedTuple):
    """A metric and the interval that holds its true value with the given confidence."""

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


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
            functools.partial. It says "undefined" with a TableError or NaN.
        arrays: What the metric takes, one row per image in each; features may be a column that stays on disk.
        confidence: The share of repetitions whose interval should hold the true value, in (0, 1).
        resamples: How many.
        seed: A number, or a generator of which one number is drawn.

    >>> str(interval(auroc, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0, 0, 1, 0, 1, 1], resamples=200))
    '0.8889 [0.5000, 1.0000]'
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueRangeError(
            f"interval needs a confidence in (0, 1) and at least one resample; "
            f"confidence={confidence}, resamples={resamples} came. 0.95 and 1000 are usual."
        )
    rows, summary = _ONCE.get(metric, (_as_given, metric))
    columns = [to_tensor(column, f"interval: array {i}") for i, column in enumerate(rows(*arrays))]
    same_length("interval", **{f"array {i}": len(column) for i, column in enumerate(columns)})
    value = summary(*columns)
    if not math.isfinite(value):
        raise ValueRangeError(
            f"interval needs a metric that is defined on the rows given; it came as {value}. "
            f"Call it alone on the same arrays to see why."
        )
    rng = np.random.default_rng(_number(seed))
    draws = _draws(_of_rows(summary, columns), len(columns[0]), resamples, rng)
    if metric in _CENTRED or getattr(metric, "func", None) in _CENTRED:
        draws = np.maximum(draws - (draws.mean() - value), 0)
    low, high = np.quantile(draws, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(value, float(low), float(high), confidence)


def paired_errors(
    metric: Metric, scores: Sequence[Array], reference: Array, *arrays: Array, resamples: int = 1000, seed: int = 0
) -> list[float]:
    """The standard error of metric(one, ...) - metric(reference, ...) for each of several scores of the same rows.

    Rows are drawn with replacement, the same for all scores, so that what they have in common cancels.

    Args:
        metric: Of `ranking` or `rejection`, which takes (n) scores first.
        scores: Each (n).
        reference: (n), the scores to compare with.
        arrays: What else the metric takes, (n) each.
        resamples: How many; at least 2.
        seed: Of the draws.

    >>> paired_errors(auroc, [[5, 6, 7, 8]], [1, 2, 3, 4], [0, 1, 0, 1])  # one order, one AUROC
    [0.0]
    """
    if resamples < 2:
        raise ValueRangeError(f"paired_errors needs at least 2 resamples; got {resamples}. 1000 are usual.")
    draws = paired_draws(metric, [reference, *scores], *arrays, resamples=resamples, seed=seed, by="paired_errors")
    return [float((one - draws[0]).std(ddof=1)) for one in draws[1:]]


def paired_draws(
    metric: Metric, scores: Sequence[Array], *arrays: Array, resamples: int = 1000, seed: int = 0, by: str = "draws"
) -> Float64[np.ndarray, "s b"]:
    """The metric of several scores of the same rows, one line a score, on resamples that all of them share.

    Resamples on which the metric is undefined are left out, so that there may be fewer than asked for.

    Args:
        metric: Of `ranking` or `rejection`, which takes (n) scores first.
        scores: Each (n).
        arrays: What else the metric takes, (n) each.
        resamples: How many; at least 2.
        seed: Of the draws.
        by: Who asks, for errors.

    >>> draws = paired_draws(auroc, [[1, 2, 3, 4], [2, 1, 4, 3]], [0, 1, 0, 1], resamples=50)
    >>> len(draws), bool((draws[0] >= draws[1]).all())  # on every resample with both classes
    (2, True)
    """
    rest = [to_tensor(array, f"{by}: array") for array in arrays]
    lined_up = [to_tensor(one, f"{by}: scores") for one in scores]
    same_length(by, **{f"array {i}": len(one) for i, one in enumerate((*rest, *lined_up))})
    of_rows = [_of_rows(metric, [one, *rest]) for one in lined_up]
    rng, n, blocks = np.random.default_rng(seed), len(lined_up[0]), []
    for start in range(0, resamples, size := max(1, _DRAWN_AT_ONCE // n)):
        rows = rng.integers(n, size=(min(size, resamples - start), n))
        blocks.append(np.stack([values(rows) for values in of_rows]))
    draws = np.concatenate(blocks, axis=1)
    defined: np.ndarray = draws[:, np.isfinite(draws).all(axis=0)]
    if defined.shape[1] < 2:
        raise TableError(
            f"{by} needs a metric that is defined on resamples; on {defined.shape[1]} of {resamples} it was. "
            f"Give it more rows, or more rows of the rarer class."
        )
    return defined


def _as_given(*arrays: Array | Column) -> tuple[Array | Column, ...]:
    return arrays


def _mean(values: Shaped[Tensor, "n"]) -> float:
    return float(values.double().mean())


_ONCE: Mapping[Metric, tuple[Callable[..., tuple[Array | Column, ...]], Metric]] = {
    accuracy: (lambda logits, labels: (correct(logits, labels),), _mean),
    nll: (lambda logits, labels: (nll_per_row(logits, labels),), _mean),
    brier: (lambda logits, labels: (brier_per_row(logits, labels),), _mean),
    recall_at_1: (lambda features, labels: (neighbour_matches(features, labels),), _mean),
    r_auroc: (lambda features, labels, scores: (scores, ~neighbour_matches(features, labels)), auroc),
}
"""Metrics in two steps: the columns to resample, computed once on all rows, and the metric of a resample."""


_CENTRED: frozenset[Metric] = frozenset({ece, bucket_calibration_error})
"""Absolute gaps grow with noise, and a resample adds noise of its own: its mean is moved back onto the value."""


def _of_rows(summary: Metric, columns: list[Tensor]) -> Resampled:
    """The metric as a function of drawn rows: counted where it can be, else called once a resample."""
    name, options = getattr(summary, "func", summary), getattr(summary, "keywords", {})
    if name in RESAMPLED and not getattr(summary, "args", ()):
        return RESAMPLED[name](*columns, **options)

    def values(rows: Int64[np.ndarray, "b n"]) -> Float64[np.ndarray, "b"]:
        return np.array([_value(summary, columns, torch.from_numpy(drawn)) for drawn in rows])

    return values


def _value(summary: Metric, columns: list[Tensor], rows: Int64[Tensor, "n"]) -> float:
    try:
        return float(summary(*(column.index_select(0, rows) for column in columns)))
    except TableError:
        return math.nan


def _draws(values: Resampled, n: int, resamples: int, rng: np.random.Generator) -> Float64[np.ndarray, "_"]:
    """The metric of the first `resamples` resamples on which it is defined."""
    found: list[float] = []
    undefined = 0
    while len(found) < resamples:
        block = min(max(1, _DRAWN_AT_ONCE // n), resamples - len(found))
        for value in values(rng.integers(n, size=(block, n))).tolist():
            undefined = 0 if math.isfinite(value) else undefined + 1
            if not undefined:
                found.append(value)
            elif undefined == _ATTEMPTS:
                raise TableError(
                    f"interval needs a metric that is defined on resamples; {_ATTEMPTS} resamples of the {n} rows in "
                    f"succession were not. Give it more rows, or more rows of the rarer class."
                )
    return np.array(found)


def _number(seed: int | torch.Generator) -> int:
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return seed
