"""Uncertainties of a table's rows: from scores, from arrays, with baselines beside."""

import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.scored import both, fitted, scored, some_rows
from dubito.metrics import Interval
from dubito.result import aligned, cell
from dubito.scores import Entropy, Margin, MaxProbability
from dubito.table import Table

TABLE = Table(logit=[[1.0, 0.0], [0.0, 3.0]], name="cache/t")


def test_scores_arrays_and_baselines():
    found = scored("by", {"m": Margin(), "a": [1, 2]}, TABLE, beside=("entropy", "max_probability"))
    assert list(found) == ["m", "a", "entropy", "max_probability"]
    assert found["a"].tolist() == [1.0, 2.0]
    assert found["m"].equal(Margin().score(TABLE))
    assert found["entropy"].equal(Entropy().score(TABLE))
    assert found["max_probability"].equal(MaxProbability().score(TABLE))


def test_a_given_name_goes_before_a_baseline():
    assert scored("by", {"entropy": [1, 2]}, TABLE, beside=("entropy",))["entropy"].tolist() == [1.0, 2.0]


def test_no_logits_no_baselines():
    assert list(scored("by", {"a": [1.0]}, Table(feature=[[1.0]]), beside=("entropy",))) == ["a"]


def test_errors():
    with pytest.raises(TableError, match=r"by: score 'a' must have one value a row of cache/t, \(2,\); got \(1,\)"):
        scored("by", {"a": [1.0]}, TABLE)
    with pytest.raises(ValueRangeError, match="by: score 'a': 1 of 2 values are NaN"):
        scored("by", {"a": [1.0, float("nan")]}, TABLE)
    with pytest.raises(TableError, match="by needs at least one row; cache/t has none"):
        scored("by", {"m": Margin()}, TABLE.rows([]))
    with pytest.raises(TableError, match=r'by: table must be a table; the path "cache/t" came\. Open it'):
        some_rows("by", "cache/t")
    with pytest.raises(TableError, match="'a' must be a fitted score, so that every table can be scored; got list"):
        fitted("by", {"m": Margin(), "a": [1.0]})


def test_both():
    assert [both(torch.tensor(flags)) for flags in ([True, False], [True, True], [False])] == [True, False, False]


def test_text():
    assert aligned([["a", "long"], ["wide", "b"]]) == ["a     long", "wide  b"]
    assert [cell(None), cell(0.12345), cell(Interval(0.5, 0.25, 0.75, 0.95))] == ["-", "0.123", "0.500 [0.250, 0.750]"]
