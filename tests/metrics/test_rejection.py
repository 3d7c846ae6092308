from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    acceptance_curve,
    augrc,
    aurc,
    auroc,
    bucket_curve,
    excess_aurc,
    risk_coverage,
)

AREAS = [aurc, excess_aurc, augrc]
CURVES = [bucket_curve, acceptance_curve]

rows_of_loss = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=6)
rows_of_error = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40)


def split(rows):
    return tuple(np.array(column, dtype=float) for column in zip(*rows, strict=True))


def over_tie_orders(scores, errors, area):
    """The mean of an area over every order of the rows in which scores do not fall."""
    orders = [list(p) for p in permutations(range(len(scores))) if (np.diff(scores[list(p)]) >= 0).all()]
    return np.mean([area(errors[order]) for order in orders])


def plain_aurc(errors):
    return np.mean([errors[:k].mean() for k in range(1, len(errors) + 1)])


def plain_augrc(errors):
    n = len(errors)
    return np.trapezoid([errors[:k].sum() / n for k in range(n + 1)], np.arange(n + 1) / n)


def test_risk_coverage_by_hand():
    coverage, risk = risk_coverage([3.0, 1.0, 2.0, 2.0], [1, 0, 1, 0])
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    # the two tied rows expect half an error each: 0, 1/2 / 2, 1/3, 2/4
    assert risk.tolist() == pytest.approx([0, 0.25, 1 / 3, 0.5], abs=1e-15)


def test_areas_by_hand():
    scores, errors = [1, 2, 3, 4], [0, 1, 0, 1]
    # risks 0, 1/2, 1/3, 2/4
    assert aurc(scores, errors) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4, abs=1e-15)
    # best order 0, 0, 1, 1: risks 0, 0, 1/3, 2/4
    assert excess_aurc(scores, errors) == pytest.approx((1 / 2) / 4, abs=1e-15)
    # joint 0, 0, 1/4, 1/4, 2/4: trapezoids (0 + 1/8 + 1/4 + 3/8) / 4; the sum of right ends would be (1 / 4)
    assert augrc(scores, errors) == pytest.approx((0 + 1 / 8 + 1 / 4 + 3 / 8) / 4, abs=1e-15)


@given(rows_of_loss)
@settings(deadline=None, max_examples=60)
def test_areas_are_means_over_all_orders_of_ties(rows):
    scores, errors = split(rows)
    assert aurc(scores, errors) == pytest.approx(over_tie_orders(scores, errors, plain_aurc), abs=1e-12)
    assert augrc(scores, errors) == pytest.approx(over_tie_orders(scores, errors, plain_augrc), abs=1e-12)
    best = min(plain_aurc(errors[list(p)]) for p in permutations(range(len(errors))))
    assert excess_aurc(scores, errors) == pytest.approx(aurc(scores, errors) - best, abs=1e-12)


@given(rows_of_error.filter(lambda rows: len({wrong for _, wrong in rows}) == 2))
@settings(deadline=None, max_examples=60)
def test_augrc_is_the_published_function_of_auroc_and_accuracy(rows):
    scores, errors = split(rows)
    a = 1 - errors.mean()
    expected = (1 - auroc(scores, errors)) * a * (1 - a) + (1 - a) ** 2 / 2
    assert augrc(scores, errors) == pytest.approx(expected, abs=1e-12)


@given(rows_of_error, st.randoms())
@settings(deadline=None, max_examples=60)
def test_order_of_rows_never_counts(rows, random):
    shuffled = random.sample(rows, len(rows))
    for area in AREAS:
        assert area(*split(rows)) == area(*split(shuffled))
    for curve in CURVES:
        assert torch.equal(curve(*split(rows)), curve(*split(shuffled)))


@pytest.mark.parametrize("metric", [*AREAS, *CURVES])
def test_only_the_order_of_scores_counts(metric):
    rng = np.random.default_rng(0)
    scores, errors = rng.integers(9, size=200).astype(float), rng.normal(size=200)
    assert torch.equal(torch.as_tensor(metric(scores, errors)), torch.as_tensor(metric(-np.exp(50 - scores), errors)))


def test_areas_of_extreme_scores():
    errors = np.array([0.0] * 6 + [1.0] * 2)
    assert excess_aurc(errors, errors) == pytest.approx(0.0, abs=1e-15)
    # a score that says nothing: the risk is the error rate at every coverage, the joint chance half of it
    assert aurc(np.zeros(8), errors) == pytest.approx(0.25, abs=1e-15)
    assert augrc(np.zeros(8), errors) == pytest.approx(0.125, abs=1e-15)
    assert aurc(-errors, errors) > 0.25 > aurc(errors, errors)


def test_one_row():
    assert risk_coverage([1.0], [0.5]).risk.tolist() == [0.5]
    assert aurc([1.0], [0.5]) == 0.5
    assert excess_aurc([1.0], [0.5]) == 0.0
    assert augrc([1.0], [0.5]) == 0.25
    assert bucket_curve([1.0], [0.5]).tolist() == pytest.approx([0.5] * 10, abs=1e-12)


def test_curves_by_hand():
    scores, values = [4.0, 3.0, 2.0, 1.0], [10.0, 8.0, 2.0, 4.0]
    quantiles = (0.25, 0.75, 1.0)
    # by rising score 4 | 2, 8 | 10
    assert bucket_curve(scores, values, quantiles).tolist() == [4.0, 5.0, 10.0]
    # 4, then (4 + 2 + 8) / 3, then 24 / 4
    assert acceptance_curve(scores, values, quantiles).tolist() == pytest.approx([4, 14 / 3, 6], abs=1e-12)


def test_a_row_that_a_quantile_cuts_counts_by_its_share():
    # two halves of three rows: (1 + 4/2) / 1.5 and (4/2 + 7) / 1.5
    assert bucket_curve([1, 2, 3], [1, 4, 7], (0.5, 1.0)).tolist() == [2.0, 6.0]
    assert acceptance_curve([1, 2, 3], [1, 4, 7], (0.5,)).tolist() == [2.0]


def test_tied_rows_expect_their_mean_in_every_bucket():
    assert bucket_curve([0, 0, 0, 0], [1, 0, 0, 0], (0.25, 0.5, 1.0)).tolist() == [0.25] * 3


def test_deciles_of_distinct_scores_are_a_split_of_the_sorted_rows():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=200), rng.normal(size=200)
    parts = np.split(values[np.argsort(scores)], 10)
    assert bucket_curve(scores, values).numpy() == pytest.approx([part.mean() for part in parts], abs=1e-12)
    accepted = [np.concatenate(parts[: k + 1]).mean() for k in range(10)]
    assert acceptance_curve(scores, values).numpy() == pytest.approx(accepted, abs=1e-12)


def test_acceptance_is_the_risk_at_that_coverage():
    rng = np.random.default_rng(0)
    scores, errors = rng.integers(6, size=20), rng.random(20) < 0.4
    risk = risk_coverage(scores, errors).risk
    assert acceptance_curve(scores, errors).numpy() == pytest.approx(risk[1::2].numpy(), abs=1e-12)


@pytest.mark.parametrize("area", AREAS)
def test_tensors_arrays_and_lists_give_one_python_float(area):
    scores, errors = [0.5, 0.25, 1.0], [True, False, True]
    given_as = {
        area(scores, errors),
        area(np.array(scores), np.array(errors)),
        area(torch.tensor(scores).half(), errors),
    }
    assert len(given_as) == 1
    assert type(given_as.pop()) is float


@pytest.mark.parametrize("metric", [risk_coverage, *AREAS, *CURVES])
def test_arguments_that_do_not_fit_are_errors(metric):
    name, column = metric.__name__, "values" if metric in CURVES else "errors"
    with pytest.raises(TableError, match=f"{name} needs columns of one length; scores has 2, {column} has 1"):
        metric([1.0, 2.0], [1])
    with pytest.raises(TableError, match=f"{name}: scores must have at least one row; got none"):
        metric([], [])
    with pytest.raises(ValueRangeError, match=f"{name}: scores: 1 of 2 values are NaN or infinite"):
        metric([1.0, float("nan")], [0, 1])
    with pytest.raises(ValueRangeError, match=f"{name}: {column}: 1 of 2 values are NaN or infinite"):
        metric([1.0, 2.0], [0, float("inf")])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("quantiles", [(), (0.0, 1.0), (0.5, 0.5), (0.6, 0.4), (0.5, 1.1), (float("nan"),)])
def test_quantiles_must_rise_within_their_range(curve, quantiles):
    with pytest.raises(
        ValueRangeError, match=rf"{curve.__name__}: quantiles must rise .*; got \[.*\]. Pass upper ends"
    ):
        curve([1.0, 2.0], [0, 1], quantiles)
