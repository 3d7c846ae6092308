import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import flags, integers, numbers, same_length


@pytest.mark.parametrize("values", [[1, 2], np.array([1, 2], dtype=np.uint8), torch.tensor([1.0, 2.0]).half()])
def test_numbers_are_float64(values):
    given = numbers(values, "f: x")
    assert given.dtype == np.float64
    assert given.tolist() == [1.0, 2.0]


def test_numbers_accept_a_graph_and_a_read_only_map():
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    assert numbers(frozen, "f: x").tolist() == [0.0, 1.0, 2.0]
    assert numbers(torch.ones(2, requires_grad=True), "f: x").tolist() == [1.0, 1.0]


def test_numbers_refuse_what_is_no_number():
    with pytest.raises(TableError, match="f: x must be numbers in an array; got list"):
        numbers(["a", "b"], "f: x")
    with pytest.raises(TableError, match=r"f: x must have one axis, \(n,\); got shape \(\). Give one value a row"):
        numbers(torch.tensor(1.0), "f: x")
    with pytest.raises(ValueRangeError, match="f: x: 1 of 2 values are NaN or infinite, the first at position 1"):
        numbers([1.0, float("nan")], "f: x")


def test_flags_take_booleans_and_zeros_and_ones():
    for values in ([True, False], [1, 0], [1.0, 0.0], np.array([1, 0], dtype=np.uint8)):
        assert flags(values, "f: y").tolist() == [True, False]


@pytest.mark.parametrize(("value", "came"), [(-1, "-1"), (0.5, "0.5"), (float("nan"), "nan")])
def test_flags_refuse_other_numbers(value, came):
    with pytest.raises(ValueRangeError) as error:
        flags([0, value], "f: y")
    assert str(error.value) == (
        f"f: y must be booleans, or 0 and 1; {came} came at row 1. Compare first, for example with `labels == 1`."
    )


def test_integers_refuse_floats_and_booleans():
    assert integers(np.array([3, 4], dtype=np.int16), "f: y").tolist() == [3, 4]
    for values, came in (([0.0, 1.0], "torch.float64"), ([True, False], "torch.bool")):
        with pytest.raises(TableError, match=f"f: y must be integers; {came} came. Cast them if that is meant"):
            integers(values, "f: y")


def test_same_length_names_every_column():
    same_length("f", a=3, b=3)
    with pytest.raises(TableError, match=r"f needs columns of one length; a has 3, b has 3, c has 2\. Give one row"):
        same_length("f", a=3, b=3, c=2)
