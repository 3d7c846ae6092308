"""Exact intervals of proportions: those of scipy, and the truth inside as often as stated."""

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from dubito.errors import ValueRangeError
from dubito.metrics import proportion, proportion_bound


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("count", "of"), [(0, 1), (1, 1), (0, 30), (17, 30), (30, 30), (9_998, 10_000)])
def test_intervals_of_proportions_are_those_of_scipy(count, of, confidence):
    expected = binomtest(count, of).proportion_ci(confidence, method="exact")
    result = proportion(count, of, confidence=confidence)
    assert result[:3] == pytest.approx((count / of, expected.low, expected.high), abs=1e-9)
    one_sided = binomtest(count, of, alternative="less").proportion_ci(confidence, method="exact")
    assert proportion_bound(count, of, confidence) == pytest.approx(one_sided.high, abs=1e-9)


@pytest.mark.parametrize("n", [10, 30, 200])
@pytest.mark.parametrize("truth", [0.5, 0.9, 0.98, 0.999])
def test_intervals_of_proportions_hold_the_truth_at_least_as_often_as_stated(n, truth):
    # Over all that n rows can show, by its probability: exact, no simulation.
    counts = np.arange(n + 1)
    holds = [low <= truth <= high for _, low, high, _ in (proportion(int(k), n) for k in counts)]
    assert binom.pmf(counts, n, truth) @ holds >= 0.95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 0), r"proportion: of must be .*; got 0"),
        ((3, 2), r"proportion: count must be .*; got 3"),
    ],
)
def test_proportions_of_nothing(arguments, message):
    with pytest.raises(ValueRangeError, match=message):
        proportion(*arguments)
