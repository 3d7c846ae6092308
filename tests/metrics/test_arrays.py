from itertools import permutations

import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import (
    flags,
    in_expected_order,
    integers,
    numbers,
    same_length,
    sum_below,
    tie_groups,
)


@pytest.mark.parametrize("values", [[1, 2], np.array([1, 2], dtype=np.uint8), torch.tensor([1.0, 2.0]).half()])
def test_numbers_are_float64(values):
    column = numbers(values, "f: x")
    assert column.dtype == np.float64
    assert column.tolist() == [1.0, 2.0]


def test_numbers_accept_a_graph_and_a_read_only_map():
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    assert numbers(frozen, "f: x").tolist() == [0.0, 1.0, 2.0]
    assert numbers(torch.ones(2, requires_grad=True), "f: x").tolist() == [1.0, 1.0]


def test_numbers_refuse_what_is_no_number():
    with pytest.raises(TableError, match="f: x must be numbers in an array; got list"):
        numbers(["a", "b"], "f: x")
    with pytest.raises(TableError, match=r"f: x must have one axis, \(n,\); got shape \(\). Pass one value per row"):
        numbers(torch.tensor(1.0), "f: x")
    with pytest.raises(ValueRangeError, match="f: x: 1 of 2 values are NaN or infinite, the first at position 1"):
        numbers([1.0, float("nan")], "f: x")


def test_flags_take_booleans_and_zeros_and_ones():
    for values in ([True, False], [1, 0], [1.0, 0.0], np.array([1, 0], dtype=np.uint8)):
        assert flags(values, "f: y").tolist() == [True, False]


@pytest.mark.parametrize(("value", "shown"), [(-1, "-1"), (0.5, "0.5"), (float("nan"), "nan")])
def test_flags_refuse_other_numbers(value, shown):
    with pytest.raises(ValueRangeError) as error:
        flags([0, value], "f: y")
    assert str(error.value) == (
        f"f: y must be booleans, or 0 and 1; got {shown} at row 1. Compare first, for example `labels == 1`."
    )


def test_integers_refuse_floats_and_booleans():
    assert integers(np.array([3, 4], dtype=np.int16), "f: y").tolist() == [3, 4]
    for values, dtype in (([0.0, 1.0], "torch.float64"), ([True, False], "torch.bool")):
        with pytest.raises(TableError, match=f"f: y must be integers; got {dtype}. Cast them if that is meant"):
            integers(values, "f: y")


def test_same_length_names_every_column():
    same_length("f", a=3, b=3)
    with pytest.raises(TableError, match=r"f needs columns of one length; a has 3, b has 3, c has 2\. Pass one row"):
        same_length("f", a=3, b=3, c=2)


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
