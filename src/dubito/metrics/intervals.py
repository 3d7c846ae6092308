"""How sure is a metric? A percentile bootstrap: draw n rows with replacement, all columns together, often.

    low, high = the (1 - confidence) / 2 and (1 + confidence) / 2 quantiles of the metric over the resamples

What a row means is fixed before rows are drawn: `r_auroc` and `recall_at_1` resample queries, whose
neighbours stay those of the full set (in a resample, a row drawn twice would find itself), and the metrics
of logits resample one value a row. A resample in which the metric is undefined, such as one with a single
class, is drawn again. The resamples of calibration errors, which noise pushes up, are moved so that their
mean is the value, and end at 0.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array, same_length
from dubito.metrics.calibration import bucket_calibration_error, ece
from dubito.metrics.classification import accuracy, brier, brier_per_row, correct, nll, nll_per_row
from dubito.metrics.ranking import auroc
from dubito.metrics.retrieval import neighbour_matches, r_auroc, recall_at_1
from dubito.table import to_tensor

Metric = Callable[..., float]

_ATTEMPTS = 100


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
    *arrays: Array,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int | torch.Generator = 0,
) -> Interval:
    """A metric with its bootstrap interval: `interval(auroc, scores, positives)`.

    Args:
        metric: A metric of this package, or any function of tensors that returns a float; with options, as a
            functools.partial. It says "undefined" with a TableError or NaN.
        arrays: What the metric takes, one row an image in each.
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
    draws = np.array([_draw(summary, columns, rng) for _ in range(resamples)])
    if metric in _CENTRED or getattr(metric, "func", None) in _CENTRED:
        draws = np.maximum(draws - (draws.mean() - value), 0)
    low, high = np.quantile(draws, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(value, float(low), float(high), confidence)


def _as_given(*arrays: Array) -> tuple[Array, ...]:
    return arrays


def _mean(values: Shaped[Tensor, "n"]) -> float:
    return float(values.double().mean())


_ONCE: Mapping[Metric, tuple[Callable[..., tuple[Array, ...]], Metric]] = {
    accuracy: (lambda logits, labels: (correct(logits, labels),), _mean),
    nll: (lambda logits, labels: (nll_per_row(logits, labels),), _mean),
    brier: (lambda logits, labels: (brier_per_row(logits, labels),), _mean),
    recall_at_1: (lambda features, labels: (neighbour_matches(features, labels),), _mean),
    r_auroc: (lambda features, labels, scores: (scores, ~neighbour_matches(features, labels)), auroc),
}
"""Metrics in two steps: the columns to resample, computed once on all rows, and the metric of a resample."""


_CENTRED: frozenset[Metric] = frozenset({ece, bucket_calibration_error})
"""Absolute gaps grow with noise, and a resample adds noise of its own: its mean is moved back onto the value."""


def _draw(summary: Metric, columns: list[Tensor], rng: np.random.Generator) -> float:
    n = len(columns[0])
    for _ in range(_ATTEMPTS):
        rows = torch.from_numpy(rng.integers(n, size=n))
        try:
            value = summary(*(column.index_select(0, rows) for column in columns))
        except TableError:
            continue
        if math.isfinite(value):
            return value
    raise TableError(
        f"interval needs a metric that is defined on resamples; {_ATTEMPTS} resamples of the {n} rows in "
        f"succession were not. Give it more rows, or more rows of the rarer class."
    )


def _number(seed: int | torch.Generator) -> int:
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return seed
