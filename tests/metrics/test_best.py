"""Multiple comparisons with the best: by hand, against a simulation of its promise, and where nothing differs."""

import numpy as np
import pytest

from dubito.errors import ValueRangeError
from dubito.metrics import auroc, behind_the_best, paired_draws


def test_two_by_hand():
    """One lead over one rival: q is the quantile of a single standardised difference."""
    draws = np.array([[3.0, 5.0, 4.0, 8.0], [1.0, 2.0, 3.0, 2.0]])
    values = np.array([5.0, 2.0])
    first, second = behind_the_best(values, draws, confidence=0.5)
    # Differences 2, 3, 1, 6: mean 3, standard error sqrt((1 + 0 + 4 + 9) / 3) = 2.1602; medians of the centred ones:
    # of (-1, 0, -2, 3) -0.5, so that the reach of the second is 0; and of (1, 0, 2, -3) 0.5, but the best is itself.
    assert first == (0.0, 0.0, 0.0)
    assert second == pytest.approx((3.0, 3.0, 3.0))
    # The 75 % quantile of (-1, 0, -2, 3) is 0.75.
    assert behind_the_best(values, draws, confidence=0.75)[1] == pytest.approx((3.0, 2.25, 3.75))


def test_equal_orders_are_never_behind_each_other():
    draws = np.array([[0.5, 0.7, 0.6], [0.5, 0.7, 0.6]])
    assert [one.surely for one in behind_the_best(np.array([0.6, 0.6]), draws)] == [False, False]


def test_the_true_best_stays_among_those_not_behind():
    """Ten candidates that are all equal: in at most 5 % of repetitions is a given one told to be behind."""
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(400):
        values = rng.normal(size=10)
        draws = values[:, None] + rng.normal(size=(10, 300))
        told += behind_the_best(values, draws)[0].surely
    assert told / 400 < 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)
    # The naive verdict, each against the luckiest by an interval of its own, is wrong far more often.
    naive = np.mean([(v := rng.normal(size=10)).max() - v[0] > 1.96 * np.sqrt(2) for _ in range(400)])
    assert naive > 0.1


def test_a_clear_winner_is_told():
    rng = np.random.default_rng(1)
    values = np.array([0.9, 0.5, 0.88])
    draws = values[:, None] + 0.02 * rng.normal(size=(3, 500))
    assert [one.surely for one in behind_the_best(values, draws)] == [False, True, False]


def test_confidence_must_be_a_share():
    with pytest.raises(ValueRangeError, match=r"confidence must be in \(0, 1\); got 1.0. 0.95 is usual"):
        behind_the_best(np.array([1.0]), np.ones((1, 3)), confidence=1.0)


def test_paired_draws_share_their_rows_and_leave_out_what_is_undefined():
    y = [0, 1, 0, 1, 1]
    scores = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]
    draws = paired_draws(auroc, scores, y, resamples=200, seed=3)
    assert draws.shape[0] == 3
    assert 150 < draws.shape[1] < 200  # some resamples have one class alone
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_allclose(draws[0] + draws[2], 1, rtol=1e-12)  # the other way round, on the very same rows
