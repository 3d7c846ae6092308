"""The bootstrap engine: counted resamples are the metric of each, and all scores share their draws."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    augrc,
    aurc,
    auroc,
    average_precision,
    balanced_auroc,
    excess_aurc,
    fpr_at_tpr,
    interval,
    intervals,
    paired_draws,
    paired_errors,
)
from dubito.metrics.bootstrap import draw_counts, draw_rows, resampled

COUNTED = [auroc, average_precision, fpr_at_tpr, partial(fpr_at_tpr, tpr=0.3), aurc, excess_aurc, augrc]

rows_with_ties = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=12)


def mean(values):
    return float(values.double().mean())


def ranked(n=200, shift=1.0, seed=0):
    rng = np.random.default_rng(seed)
    positives = rng.random(n) < 0.4
    return rng.normal(size=n) + shift * positives, positives


@pytest.mark.parametrize("cells", [1, 50, 2**15])
def test_the_size_of_blocks_does_not_change_the_draws(cells):
    expected = np.random.default_rng(4).integers(7, size=(30, 7))
    drawn = np.concatenate(list(draw_rows(7, 30, 4, cells=cells)))
    np.testing.assert_array_equal(drawn, expected)
    np.testing.assert_array_equal(
        np.concatenate(list(draw_counts(7, 30, 4))), [np.bincount(rows, minlength=7) for rows in expected]
    )


def one_by_one(metric, *arrays, draws):
    """The metric called on every resample, NaN where it is undefined."""
    return np.array([called(metric, *(array[rows] for array in arrays)) for rows in draws])


def called(metric, *arrays):
    try:
        return metric(*arrays)
    except TableError:
        return np.nan


def counted(metric, *arrays, draws):
    return resampled(metric, [torch.from_numpy(array) for array in arrays])(draws)


@pytest.mark.parametrize("metric", COUNTED)
@pytest.mark.parametrize("levels", [1, 2, 5, 40, 10**9])
@pytest.mark.parametrize("n", [1, 3, 300])
def test_counted_resamples_are_the_metric_of_each(metric, levels, n):
    rng = np.random.default_rng(levels + n)
    scores, positives = rng.integers(-levels, levels, size=n).astype(float), rng.random(n) < 0.3
    draws = rng.integers(n, size=(60, n))
    expected = one_by_one(metric, scores, positives, draws=draws)
    assert counted(metric, scores, positives, draws=draws) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("metric", COUNTED)
@given(rows_with_ties, st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_counted_resamples_of_few_rows_with_many_ties(metric, rows, seed):
    scores, positives = (np.array(column) for column in zip(*rows, strict=True))
    draws = np.random.default_rng(seed).integers(len(rows), size=(20, len(rows)))
    expected = one_by_one(metric, scores, positives, draws=draws)
    assert counted(metric, scores, positives, draws=draws) == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("metric", [aurc, excess_aurc, augrc])
@pytest.mark.parametrize("levels", [3, 10**9])
def test_counted_resamples_of_losses(metric, levels):
    rng = np.random.default_rng(levels)
    scores, losses = rng.integers(levels, size=2000).astype(float), rng.normal(size=2000)
    losses[:500] = np.round(losses[:500])
    draws = rng.integers(2000, size=(20, 2000))
    expected = one_by_one(metric, scores, losses, draws=draws)
    assert counted(metric, scores, losses, draws=draws) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", COUNTED)
@pytest.mark.parametrize("size", [1, 40, 2**15])
def test_blocks_and_counting_leave_the_draws_as_they_are(metric, size, monkeypatch):
    # One positive in nine: every third resample is undefined for a ranking and drawn again.
    scores, positives = np.arange(9.0) % 4, np.arange(9) == 6
    rng = np.random.default_rng(3)
    values = one_by_one(metric, scores, positives, draws=[rng.integers(9, size=9) for _ in range(400)])
    low, high = np.quantile(values[~np.isnan(values)][:150], [0.025, 0.975])
    monkeypatch.setattr(intervals, "draw_rows", partial(draw_rows, cells=size))
    found = interval(metric, scores, positives, resamples=150, seed=3)
    assert found == pytest.approx((metric(scores, positives), low, high, 0.95), abs=1e-12)


@pytest.mark.parametrize("metric", COUNTED)
def test_counted_metrics_are_not_called_once_per_resample(metric, monkeypatch):
    chosen, calls = torch.Tensor.index_select, []
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *arguments: calls.append(1) or chosen(*arguments))
    interval(mean, [0.0, 1.0], resamples=20)
    assert len(calls) == 20
    interval(metric, *ranked(50), resamples=20)
    assert len(calls) == 20


def test_paired_errors_by_hand():
    # Two rows, of which one is wrong. A resample has both (half of them) or one of them twice. The AURC of scores that
    # are right is 1/4, of wrong ones 3/4; of one row twice it is its error, whatever the scores. So the difference is
    # 1/2 or 0 with equal chance, and its deviation 1/4.
    (error,) = paired_errors(aurc, [[2.0, 1.0]], [1.0, 2.0], [0, 1], resamples=20_000)
    assert error == pytest.approx(0.25, abs=0.002)


def test_paired_errors_against_a_bootstrap_step_by_step():
    rng = np.random.default_rng(1)
    one, other, reference = rng.normal(size=(3, 40))
    flags = rng.random(40) < 0.4
    draws = np.random.default_rng(7).integers(40, size=(50, 40))
    for metric in (aurc, auroc, excess_aurc, spread := (lambda u, e: float(u.double().std() + e.double().mean()))):
        found = paired_errors(metric, [one, other], reference, flags, resamples=50, seed=7)
        for u, error in zip((one, other), found, strict=True):
            tensors = [torch.from_numpy(column) for column in (u, reference, flags)]
            gaps = [metric(a, e) - metric(b, e) for a, b, e in ([t[rows] for t in tensors] for rows in draws)]
            assert error == pytest.approx(np.std(gaps, ddof=1)), spread


def test_what_scores_have_in_common_cancels():
    rng = np.random.default_rng(0)
    u, flags = rng.normal(size=300), rng.random(300) < 0.3
    same, close, far = paired_errors(aurc, [3 * u + 1, u + 0.1 * rng.normal(size=300), rng.normal(size=300)], u, flags)
    assert same == 0
    assert 0 < close < far / 3


def test_paired_errors_that_cannot_be():
    with pytest.raises(ValueRangeError, match=r"paired_errors: resamples must be a whole number, at least 2; got 1\."):
        paired_errors(aurc, [[1.0]], [1.0], [1], resamples=1)
    with pytest.raises(TableError, match="paired_errors needs columns of one length"):
        paired_errors(aurc, [[1.0, 2.0]], [1.0], [1])
    with pytest.raises(TableError, match=r"defined on resamples; it was on 0 of 9\. Give it more rows"):
        paired_errors(auroc, [[1.0, 2.0]], [1.0, 2.0], [1, 1], resamples=9)


def test_paired_draws_share_their_rows_and_leave_out_what_is_undefined():
    y = [0, 1, 0, 1, 1]
    scores = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]
    draws = paired_draws(auroc, scores, y, resamples=200, seed=3)
    assert draws.shape[0] == 3
    assert 150 < draws.shape[1] < 200  # some resamples have one class alone
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_allclose(draws[0] + draws[2], 1, rtol=1e-12)  # the other way round, on the very same rows


def test_balanced_resamples_are_paired():
    rng = np.random.default_rng(0)
    inside, ood = rng.normal(size=(1, 80)), rng.normal(1, size=(1, 50))
    twice = balanced_auroc(np.repeat(inside, 2, 0), np.repeat(ood, 2, 0), draws=3, resamples=30, seed=0)
    assert (twice.resampled[:, 0] == twice.resampled[:, 1]).all()
    assert len(set(twice.resampled[:, 0].tolist())) > 10
    assert (twice.drawn[:, 0] == twice.drawn[:, 1]).all()


def test_in_distribution_rows_are_drawn_alike_for_every_ood_table():
    rng = np.random.default_rng(0)
    inside, same = rng.normal(size=(1, 80)), np.zeros((1, 50))  # all ood rows alike: only the others matter
    first, second = (balanced_auroc(inside, same, draws=3, resamples=30, seed=0, number=number) for number in (0, 1))
    assert (first.resampled == second.resampled).all()
    ood = rng.normal(size=(1, 50))
    first, second = (balanced_auroc(inside, ood, draws=3, resamples=30, seed=0, number=number) for number in (0, 1))
    assert (first.resampled != second.resampled).any()


def test_resampled_values_count_ties():
    inside, ood = np.array([[0.0, 0.0, 1.0]]), np.array([[1.0, 0.0]])
    values = set(balanced_auroc(inside, ood, draws=1, resamples=200, seed=0).resampled[:, 0].round(4).tolist())
    # Two of either side: every pair is won, tied or lost, so the AUROC is a multiple of one eighth.
    assert values <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len(values) == 5
