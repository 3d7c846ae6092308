from itertools import permutations

import numpy as np
import pytest

from dubito.metrics._ties import in_expected_order, sum_below, tie_groups


def test_tie_groups_by_hand():
    order, ends = tie_groups(np.array([2.0, 1.0, 2.0, 3.0]))
    assert order[0] == 1
    assert sorted(order[1:3]) == [0, 2]
    assert order[3] == 3
    assert ends.tolist() == [1, 3, 4]


def test_negative_zero_is_a_tie_with_zero():
    assert tie_groups(np.array([0.0, -0.0]))[1].tolist() == [2]


def test_one_row():
    assert tie_groups(np.array([5.0]))[1].tolist() == [1]
    assert in_expected_order(np.array([5.0]), np.array([2.0])).tolist() == [2.0]


def test_expected_order_is_the_mean_over_all_orders_of_ties():
    scores, values = np.array([1.0, 1.0, 0.0, 1.0, 2.0]), np.array([3.0, 5.0, 7.0, 10.0, 1.0])
    orders = [p for p in permutations(range(5)) if (np.diff(scores[list(p)]) >= 0).all()]
    assert len(orders) == 6
    expected = np.mean([values[list(p)] for p in orders], axis=0)
    # row 2 first, then three times (3 + 5 + 10) / 3, then row 4
    assert expected.tolist() == [7.0, 6.0, 6.0, 6.0, 1.0]
    assert in_expected_order(scores, values) == pytest.approx(expected, abs=1e-15)


def test_sum_below_shares_the_row_that_a_quantile_cuts():
    # 0.5 of three rows are one and a half: 4 + 6/2
    assert sum_below(np.array([4.0, 6.0, 8.0]), np.array([0.0, 0.5, 1.0])).tolist() == [0.0, 7.0, 18.0]
