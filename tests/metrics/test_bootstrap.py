"""The bootstrap: counted resamples are the metric of each, all scores share their draws, intervals hold the truth."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    Interval,
    MedianSpread,
    accuracy,
    augrc,
    aurc,
    auroc,
    average_precision,
    balanced_auroc,
    bootstrap,
    brier,
    bucket_calibration_error,
    correct,
    ece,
    excess_aurc,
    fpr_at_tpr,
    gap_to_best,
    interval,
    median_spread,
    neighbour_matches,
    nll,
    paired_draws,
    paired_errors,
    proportion,
    r_auroc,
    rank_scores,
    recall_at_1,
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
    monkeypatch.setattr(bootstrap, "draw_rows", partial(draw_rows, cells=size))
    result = interval(metric, scores, positives, resamples=150, seed=3)
    assert result == pytest.approx((metric(scores, positives), low, high, 0.95), abs=1e-12)


@pytest.mark.parametrize("metric", COUNTED)
def test_counted_metrics_are_not_called_once_per_resample(metric, monkeypatch):
    chosen, calls = torch.Tensor.index_select, []
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *arguments: calls.append(1) or chosen(*arguments))
    interval(mean, [0.0, 1.0], resamples=20)
    assert len(calls) == 20
    interval(metric, *ranked(50), resamples=20)
    assert len(calls) == 20


def test_ranked_scores_are_the_best_first_with_their_gaps():
    positives = np.arange(200) % 2 == 1
    draw = np.random.default_rng(0)
    scores = {"noise": draw.normal(size=200), "good": positives + 0.3 * draw.normal(size=200)}
    ranked_scores = rank_scores(auroc, scores, positives, resamples=100)
    assert list(ranked_scores) == ["good", "noise"]
    assert [one.rank for one in ranked_scores.values()] == [1, 2]
    assert [one.gap_to_best.surely for one in ranked_scores.values()] == [False, True]
    assert ranked_scores["noise"].value.value == auroc(scores["noise"], positives)
    assert next(iter(rank_scores(aurc, scores, positives, resamples=100))) == "good"  # of AURC, the lowest is the best


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
        result = paired_errors(metric, [one, other], reference, flags, resamples=50, seed=7)
        for u, error in zip((one, other), result, strict=True):
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
    with pytest.raises(TableError, match=r"defined on resamples; it was on 0 of 9\. Pass more rows"):
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


def test_the_ends_are_quantiles_over_resampled_rows():
    scores, positives = ranked(60)
    rng = np.random.default_rng(7)
    draws = [auroc(scores[rows], positives[rows]) for rows in (rng.integers(60, size=60) for _ in range(50))]
    low, high = np.quantile(draws, [0.05, 0.95])
    result = interval(auroc, scores, positives, confidence=0.9, resamples=50, seed=7)
    assert result == Interval(auroc(scores, positives), low, high, 0.9)


def test_the_interval_of_a_mean_is_that_of_the_normal():
    values = np.random.default_rng(0).normal(size=400)
    result = interval(mean, values, resamples=2000)
    half = norm.ppf(0.975) * values.std() / np.sqrt(400)
    assert result.value == pytest.approx(values.mean(), abs=1e-15)
    assert result.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert result.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_about_95_of_100_intervals_hold_the_truth():
    # N(1, 1) against N(0, 1): AUROC = Phi(1 / sqrt 2)
    truth = norm.cdf(1 / np.sqrt(2))
    result = [interval(auroc, *ranked(200, seed=seed), resamples=100, seed=seed) for seed in range(100)]
    assert 88 <= sum(low <= truth <= high for _, low, high, _ in result) <= 99


def test_a_wider_confidence_is_a_wider_interval():
    narrow, wide = (interval(auroc, *ranked(), confidence=share, resamples=200) for share in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


@pytest.mark.parametrize(
    "metric",
    [
        auroc,
        average_precision,
        fpr_at_tpr,
        partial(fpr_at_tpr, tpr=0.8),
        aurc,
        excess_aurc,
        augrc,
        ece,
        partial(ece, binning="mass"),
    ],
)
def test_every_metric_of_two_columns_has_an_interval(metric):
    scores, positives = ranked(80)
    result = interval(metric, torch.tensor(norm.cdf(scores)), positives.tolist(), resamples=100)
    assert result.value == metric(norm.cdf(scores), positives)
    assert result.low < result.high
    assert result.low - 0.05 < result.value < result.high + 0.05


def test_bucket_calibration_error_has_an_interval():
    scores, positives = ranked(80)
    result = interval(bucket_calibration_error, scores, norm.cdf(scores), positives, resamples=50)
    assert 0 <= result.low < result.high <= 1


@pytest.mark.parametrize("metric", [nll, brier])
def test_metrics_of_logits_are_resampled_by_row(metric):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(90, 4)), rng.integers(4, size=90)
    again = np.random.default_rng(3)
    draws = [metric(logits[rows], labels[rows]) for rows in (again.integers(90, size=90) for _ in range(40))]
    result = interval(metric, logits, labels, resamples=40, seed=3)
    assert result.value == metric(logits, labels)
    assert result[1:3] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=1e-12)


def test_neighbours_stay_those_of_the_full_set():
    rng = np.random.default_rng(0)
    features, labels, scores = rng.normal(size=(80, 3)), rng.integers(4, size=80), rng.normal(size=80)
    matches = neighbour_matches(features, labels)
    assert interval(r_auroc, scores, features, labels, resamples=50) == interval(auroc, scores, ~matches, resamples=50)
    result = interval(recall_at_1, features, labels, resamples=50)
    assert result == proportion(int(matches.sum()), 80)
    # Labels are noise: a fourth of the neighbours match. Rows drawn twice would find themselves and match.
    assert result.high < 0.5


def test_accuracy_is_the_proportion_of_correct_rows():
    logits, labels = torch.eye(3).repeat(10, 1), torch.arange(30) % 2
    right = correct(logits, labels)
    assert interval(accuracy, logits, labels) == proportion(int(right.sum()), 30) == interval(bootstrap.mean, right)
    assert interval(bootstrap.mean, right.float()) == proportion(int(right.sum()), 30)


def test_one_seed_one_interval():
    scores, positives = ranked(50)
    run = partial(interval, auroc, scores, positives, resamples=30)
    assert run(seed=1) == run(seed=1) != run(seed=2)
    by_generator = [run(seed=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert by_generator[0] == by_generator[1] != by_generator[2]
    generator = torch.Generator().manual_seed(1)
    assert run(seed=generator) != run(seed=generator)


def test_a_resample_of_one_class_is_drawn_again():
    # With one positive in four, every third resample has none.
    result = interval(auroc, [1.0, 2.0, 3.0, 4.0], [0, 0, 1, 0], resamples=200)
    assert result.value == 2 / 3
    assert (result.low, result.high) == (0.0, 1.0)


def test_a_nan_is_drawn_again_too():
    # mean of the rows above zero, undefined where none was drawn
    result = interval(lambda x: float(x[x > 0].mean()), [-1.0, -1.0, 2.0], resamples=100)
    assert result[:3] == (2.0, 2.0, 2.0)


def test_a_metric_that_is_never_defined_on_a_resample_ends_in_an_error():
    def distinct(values):
        if len(values.unique()) < len(values):
            raise TableError("rows must differ")
        return 1.0

    with pytest.raises(TableError, match=r"100 resamples of the 50 rows in succession were not\. Pass more rows"):
        interval(distinct, np.arange(50.0), resamples=3)


def test_what_is_undefined_on_all_rows_is_reported_at_once():
    with pytest.raises(TableError, match="auroc needs positives and negatives; got all 2 rows"):
        interval(auroc, [1.0, 2.0], [1, 1])
    with pytest.raises(ValueRangeError, match="auroc: scores: 1 of 2 values are NaN"):
        interval(auroc, [1.0, float("nan")], [0, 1])
    with pytest.raises(ValueRangeError, match="interval needs a metric that is defined on these rows; got nan"):
        interval(lambda x: float("nan"), [1.0])


def test_one_row():
    assert interval(aurc, [1.0], [0.5], resamples=5)[:3] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": 0.0}, {"resamples": 0}, {"seed": -1}])
def test_options_outside_their_range_are_errors(options):
    with pytest.raises(ValueRangeError, match=r"interval: \w+ must be a"):
        interval(auroc, [1.0, 2.0], [0, 1], **options)


def test_columns_must_have_one_length():
    with pytest.raises(TableError, match="interval needs columns of one length; array 0 has 2, array 1 has 1"):
        interval(lambda x, y: 0.0, [1.0, 2.0], [1.0])


def test_logits_are_read_once_and_not_once_per_resample(monkeypatch):
    calls = []
    once = bootstrap._ONCE[nll]
    monkeypatch.setitem(bootstrap._ONCE, nll, (lambda *arrays: calls.append(1) or once[0](*arrays), once[1]))
    interval(nll, torch.zeros(10, 3), [0] * 10, resamples=20)
    assert len(calls) == 1


def test_a_positional_option_is_left_to_the_metric():
    scores, positives = ranked(50)
    bound = interval(partial(auroc, scores), positives, resamples=1)
    assert bound.value == auroc(scores, positives)


def test_it_reads_well():
    assert str(Interval(0.87654, 0.8, 0.95, 0.95)) == "0.8765 [0.8000, 0.9500]"


def test_the_gap_of_two_by_hand():
    """One lead over one rival: q is the quantile of a single standardised difference."""
    draws = np.array([[3.0, 5.0, 4.0, 8.0], [1.0, 2.0, 3.0, 2.0]])
    values = np.array([5.0, 2.0])
    first, second = gap_to_best(values, draws, confidence=0.5)
    # Differences 2, 3, 1, 6: mean 3, standard error sqrt((1 + 0 + 4 + 9) / 3) = 2.1602; medians of the centred ones:
    # of (-1, 0, -2, 3) -0.5, so that the reach of the second is 0; and of (1, 0, 2, -3) 0.5, but the best is itself.
    assert first == (0.0, 0.0, 0.0)
    assert second == pytest.approx((3.0, 3.0, 3.0))
    # The 75 % quantile of (-1, 0, -2, 3) is 0.75.
    assert gap_to_best(values, draws, confidence=0.75)[1] == pytest.approx((3.0, 2.25, 3.75))


def test_equal_orders_have_no_gap():
    draws = np.array([[0.5, 0.7, 0.6], [0.5, 0.7, 0.6]])
    assert [one.surely for one in gap_to_best(np.array([0.6, 0.6]), draws)] == [False, False]


def test_the_true_best_stays_among_those_without_a_sure_gap():
    """Ten candidates that are all equal: in at most 5 % of repetitions has a given one a sure gap."""
    rng = np.random.default_rng(0)
    sure = 0
    for _ in range(400):
        values = rng.normal(size=10)
        draws = values[:, None] + rng.normal(size=(10, 300))
        sure += gap_to_best(values, draws)[0].surely
    assert sure / 400 < 0.05 + 2 * np.sqrt(0.05 * 0.95 / 400)
    # The naive verdict, each against the luckiest by an interval of its own, is wrong far more often.
    naive = np.mean([(v := rng.normal(size=10)).max() - v[0] > 1.96 * np.sqrt(2) for _ in range(400)])
    assert naive > 0.1


def test_a_clear_winner():
    rng = np.random.default_rng(1)
    values = np.array([0.9, 0.5, 0.88])
    draws = values[:, None] + 0.02 * rng.normal(size=(3, 500))
    assert [one.surely for one in gap_to_best(values, draws)] == [False, True, False]


def test_confidence_must_be_a_share():
    with pytest.raises(ValueRangeError, match=r"gap_to_best: confidence must be a number in \(0, 1\); got 1.0"):
        gap_to_best(np.array([1.0]), np.ones((1, 3)), confidence=1.0)


def test_median_and_distance_to_the_farther_extreme():
    assert median_spread([3.0, 1.0, 7.0]) == MedianSpread(3.0, 4.0)
    assert median_spread([3.0, -2.0, 4.0]) == MedianSpread(3.0, 5.0)
    assert median_spread([1.0, 2.0]) == MedianSpread(1.5, 0.5)
    assert median_spread([0.5]) == MedianSpread(0.5, 0.0)
    assert str(MedianSpread(0.6084, 0.0041)) == "0.608 ± 0.004"
    with pytest.raises(ValueRangeError, match="at least one value"):
        median_spread([])
