from functools import partial

import numpy as np
import pytest
import torch
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
    brier,
    bucket_calibration_error,
    correct,
    ece,
    excess_aurc,
    fpr_at_tpr,
    gap_to_best,
    interval,
    intervals,
    median_spread,
    neighbour_matches,
    nll,
    r_auroc,
    recall_at_1,
)


def mean(values):
    return float(values.double().mean())


def ranked(n=200, shift=1.0, seed=0):
    rng = np.random.default_rng(seed)
    positives = rng.random(n) < 0.4
    return rng.normal(size=n) + shift * positives, positives


def test_the_ends_are_quantiles_over_resampled_rows():
    scores, positives = ranked(60)
    rng = np.random.default_rng(7)
    draws = [auroc(scores[rows], positives[rows]) for rows in (rng.integers(60, size=60) for _ in range(50))]
    low, high = np.quantile(draws, [0.05, 0.95])
    found = interval(auroc, scores, positives, confidence=0.9, resamples=50, seed=7)
    assert found == Interval(auroc(scores, positives), low, high, 0.9)


def test_the_interval_of_a_mean_is_that_of_the_normal():
    values = np.random.default_rng(0).normal(size=400)
    found = interval(mean, values, resamples=2000)
    half = norm.ppf(0.975) * values.std() / np.sqrt(400)
    assert found.value == pytest.approx(values.mean(), abs=1e-15)
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_about_95_of_100_intervals_hold_the_truth():
    # N(1, 1) against N(0, 1): AUROC = Phi(1 / sqrt 2)
    truth = norm.cdf(1 / np.sqrt(2))
    found = [interval(auroc, *ranked(200, seed=seed), resamples=100, seed=seed) for seed in range(100)]
    assert 88 <= sum(low <= truth <= high for _, low, high, _ in found) <= 99


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
    found = interval(metric, torch.tensor(norm.cdf(scores)), positives.tolist(), resamples=100)
    assert found.value == metric(norm.cdf(scores), positives)
    assert found.low < found.high
    assert found.low - 0.05 < found.value < found.high + 0.05


def test_bucket_calibration_error_has_an_interval():
    scores, positives = ranked(80)
    found = interval(bucket_calibration_error, scores, norm.cdf(scores), positives, resamples=50)
    assert 0 <= found.low < found.high <= 1


@pytest.mark.parametrize("metric", [accuracy, nll, brier])
def test_metrics_of_logits_are_resampled_by_row(metric):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(90, 4)), rng.integers(4, size=90)
    again = np.random.default_rng(3)
    draws = [metric(logits[rows], labels[rows]) for rows in (again.integers(90, size=90) for _ in range(40))]
    found = interval(metric, logits, labels, resamples=40, seed=3)
    assert found.value == metric(logits, labels)
    assert found[1:3] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=1e-12)


def test_neighbours_stay_those_of_the_full_set():
    rng = np.random.default_rng(0)
    features, labels, scores = rng.normal(size=(80, 3)), rng.integers(4, size=80), rng.normal(size=80)
    matches = neighbour_matches(features, labels)
    assert interval(r_auroc, features, labels, scores, resamples=50) == interval(auroc, scores, ~matches, resamples=50)
    found = interval(recall_at_1, features, labels, resamples=50)
    assert found == interval(mean, matches, resamples=50)
    # Labels are noise: a fourth of the neighbours match. Rows drawn twice would find themselves and match.
    assert found.high < 0.5


def test_accuracy_is_the_mean_of_correct_rows():
    logits, labels = torch.eye(3).repeat(10, 1), torch.arange(30) % 2
    assert interval(accuracy, logits, labels, resamples=50) == interval(mean, correct(logits, labels), resamples=50)


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
    found = interval(auroc, [1.0, 2.0, 3.0, 4.0], [0, 0, 1, 0], resamples=200)
    assert found.value == 2 / 3
    assert (found.low, found.high) == (0.0, 1.0)


def test_a_nan_is_drawn_again_too():
    # mean of the rows above zero, undefined where none was drawn
    found = interval(lambda x: float(x[x > 0].mean()), [-1.0, -1.0, 2.0], resamples=100)
    assert found[:3] == (2.0, 2.0, 2.0)


def test_a_metric_that_is_never_defined_on_a_resample_ends_in_an_error():
    def distinct(values):
        if len(values.unique()) < len(values):
            raise TableError("rows must differ")
        return 1.0

    with pytest.raises(TableError, match=r"100 resamples of the 50 rows in succession were not\. Give it more rows"):
        interval(distinct, np.arange(50.0), resamples=3)


def test_what_is_undefined_on_all_rows_is_said_at_once():
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
    once = intervals._ONCE[nll]
    monkeypatch.setitem(intervals._ONCE, nll, (lambda *arrays: calls.append(1) or once[0](*arrays), once[1]))
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
