"""Uncertainties of a table's rows: from scores, from arrays, with baselines beside."""

import pytest
import torch

from dubito.errors import NotFittedError, TableError, ValueRangeError
from dubito.evaluate.uncertainties import check_fitted_scores, has_both, uncertainties
from dubito.scores import Entropy, Margin, MaxProbability, Neighbours
from dubito.table import Table

TABLE = Table(logit=[[1.0, 0.0], [0.0, 3.0]], name="cache/t")


def test_scores_arrays_and_baselines():
    values = uncertainties({"m": Margin(), "a": [1, 2]}, TABLE, by="by", baselines=("entropy", "max_probability"))
    assert list(values) == ["m", "a", "entropy", "max_probability"]
    assert values["a"].tolist() == [1.0, 2.0]
    assert values["m"].equal(Margin().score(TABLE))
    assert values["entropy"].equal(Entropy().score(TABLE))
    assert values["max_probability"].equal(MaxProbability().score(TABLE))


def test_a_score_of_the_same_name_goes_before_a_baseline():
    values = uncertainties({"entropy": [1, 2]}, TABLE, by="by", baselines=("entropy",))
    assert values["entropy"].tolist() == [1.0, 2.0]


def test_no_logits_no_baselines():
    assert list(uncertainties({"a": [1.0]}, Table(feature=[[1.0]]), by="by", baselines=("entropy",))) == ["a"]


def test_errors():
    with pytest.raises(TableError, match=r"by: score 'a' must have one value per row of cache/t, \(2,\); got \(1,\)"):
        uncertainties({"a": [1.0]}, TABLE, by="by")
    with pytest.raises(ValueRangeError, match="by: score 'a': 1 of 2 values are NaN"):
        uncertainties({"a": [1.0, float("nan")]}, TABLE, by="by")
    with pytest.raises(TableError, match="by: table needs at least 1 row; cache/t has 0"):
        uncertainties({"m": Margin()}, TABLE.rows([]), by="by")
    with pytest.raises(TableError, match="by needs at least one score; got none"):
        uncertainties({}, TABLE, by="by")
    with pytest.raises(TableError, match="'a' must be a fitted score, so that every table can be scored; got list"):
        check_fitted_scores({"m": Margin(), "a": [1.0]}, by="by")
    with pytest.raises(NotFittedError, match=r"neighbours\.score was called before fit"):
        check_fitted_scores({"n": Neighbours()}, by="by")


def test_both_kinds():
    flags = ([True, False], [True, True], [False])
    assert [has_both(torch.tensor(one)) for one in flags] == [True, False, False]
