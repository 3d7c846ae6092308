"""Thresholds by hand: quantiles that are items, ties kept, classes apart."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from dubito.errors import TableError, ValueRangeError
from dubito.search import Rule, Thresholds


@pytest.mark.parametrize(
    ("quantile", "threshold"),
    [(0.9, 9.0), (0.91, 10.0), (0.85, 9.0), (1.0, 10.0), (0.1, 1.0), (0.01, 1.0), (0.3, 3.0), (0.7, 7.0)],
)
def test_at_least_the_share_is_kept_and_no_more_than_needed(quantile, threshold):
    u = np.random.default_rng(0).permutation(np.arange(1.0, 11.0))  # 1, 2, ..., 10
    rule = Rule(quantile)
    result = rule.thresholds(u, None)
    assert result == Thresholds(threshold)
    assert rule.keeps(u, None, result).sum() == threshold  # as many as the threshold says: they are 1 to 10


def test_it_is_the_inverted_distribution_of_numpy():
    u = np.random.default_rng(1).normal(size=237)
    for quantile in np.linspace(0.013, 0.987, 31):
        expected = np.quantile(u, quantile, method="inverted_cdf")
        assert Rule(float(quantile)).thresholds(u, None).overall == expected


def test_ties_are_kept():
    u = np.array([1.0, 2.0, 2.0, 2.0, 3.0])
    rule = Rule(0.4)  # the second of five is a 2, and so are two more
    assert rule.keeps(u, None, rule.thresholds(u, None)).tolist() == [True, True, True, True, False]


def test_classes_have_their_own():
    u = np.array([1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0])
    labels = np.array([7, 7, 7, 7, 2, 2, 2, 2])
    rule = Rule(0.75, per_class=True)
    result = rule.thresholds(u, labels)
    assert result == Thresholds(20.0, {2: 30.0, 7: 3.0})
    assert rule.keeps(u, labels, result).tolist() == [True, True, True, False] * 2
    assert result.of(2, np.array([7, 2])).tolist() == [3.0, 30.0]
    assert Thresholds.from_json(json.loads(json.dumps(asdict(result)))) == result


@pytest.mark.parametrize(
    ("clean", "items", "queries"),
    [("both", True, True), ("items", True, False), ("queries", False, True), ("none", False, False)],
)
def test_what_is_cleaned(clean, items, queries):
    rule = Rule(0.5, clean)
    u = np.array([1.0, 2.0])
    assert (rule.cleans_items, rule.refuses_queries) == (items, queries)
    assert rule.keeps(u, None, rule.thresholds(u, None)).tolist() == [True, not items]


@pytest.mark.parametrize("quantile", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_is_a_share(quantile):
    with pytest.raises(
        ValueRangeError, match=r"quantile must be a number in \(0, 1\]; got .* It is the share of items that is kept"
    ):
        Rule(quantile)


def test_errors():
    with pytest.raises(TableError, match=r"per_class=True needs the class of every item; got no labels. Pass labels"):
        Rule(per_class=True).thresholds(np.array([1.0]), None)
    with pytest.raises(
        ValueRangeError,
        match=r"none of class 5. Add some, pass refuse_above=..., or build the index with per_class=False.",
    ):
        Thresholds(1.0, {2: 1.0}).of(2, np.array([2, 5]))
