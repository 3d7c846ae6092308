"""Spearman's rank correlation: by hand, against scipy, and where it is undefined."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from dubito import metrics
from dubito.errors import TableError, ValueRangeError
from dubito.metrics import interval, spearman


def test_by_hand():
    # ranks 0 1 2 3 and 3 0 1 2: Σ d² = 9 + 1 + 1 + 1 = 12, 1 - 6 · 12 / (4 · 15) = -0.2
    assert spearman([1, 2, 3, 4], [9.0, -4.0, 0.0, 5.0]) == pytest.approx(-0.2, abs=1e-15)


def test_ties_share_the_middle_rank():
    # ranks 0 1.5 1.5 3 and 0 1 2 3, centred -1.5 0 0 1.5 and -1.5 -.5 .5 1.5: 4.5 / sqrt(4.5 · 5)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / 22.5**0.5, abs=1e-15)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_agrees_with_scipy(levels):
    rng = np.random.default_rng(levels)
    x = rng.integers(levels, size=300)
    y = x + rng.integers(levels, size=300)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert 0.3 < spearman(x, y) < 0.95


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=20))
def test_only_the_orders_count(pairs):
    x, y = np.array(pairs, dtype=float).T
    if len(set(x)) < 2 or len(set(y)) < 2:
        with pytest.raises(TableError, match="at least two different values"):
            spearman(x, y)
        return
    value = spearman(x, y)
    assert -1 - 1e-12 <= value <= 1 + 1e-12
    assert spearman(y, x) == pytest.approx(value, abs=1e-12)
    assert spearman(np.exp(x), y) == pytest.approx(value, abs=1e-12)
    assert spearman(-x, y) == pytest.approx(-value, abs=1e-12)
    turned = np.random.default_rng(0).permutation(len(x))
    assert spearman(x[turned], y[turned]) == pytest.approx(value, abs=1e-12)


def test_interval_holds_the_value_and_leaves_out_constant_resamples():
    x = torch.arange(40.0)
    y = x + 12 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    found = interval(spearman, x, y, resamples=100)
    assert found.value == spearman(x, y)
    assert 0 < found.low < found.value < found.high < 1
    # Of three rows one resample in nine is constant; those are drawn again.
    few = interval(spearman, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], resamples=50)
    assert -1 <= few.low <= few.high <= 1


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], TableError, "x must hold at least two different values; all 3 rows have 1"),
        ([1.0, 2.0], [5.0, 5.0], TableError, "y must hold at least two different values; all 2 rows have 5"),
        ([1.0], [2.0], TableError, "a constant has no order"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], TableError, "spearman needs columns of one length; x has 2, y has 3"),
        ([1.0, float("nan")], [1.0, 2.0], ValueRangeError, "spearman: x: 1 of 2 values are NaN"),
        ([[1.0, 2.0]], [1.0, 2.0], TableError, r"spearman: x must have one axis"),
    ],
)
def test_errors(x, y, error, message):
    with pytest.raises(error, match=message):
        spearman(x, y)


def test_is_public():
    assert metrics.spearman is spearman
