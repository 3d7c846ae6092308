import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    adaptive_ece,
    bucket_calibration_error,
    bucket_curve,
    class_wise_ece,
    ece,
    interval,
    smooth_ece,
    top_label_ece,
)


def sample(n=400, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.random(n)
    return q, rng.random(n) < q**2


def test_ece_by_hand():
    # bins [0, 1/2] and (1/2, 1]: |0.2 + 0.5 - 1| + |0.75 + 1.0 - 1|, over 4 rows
    assert ece([0.2, 0.5, 0.75, 1.0], [0, 1, 1, 0], bins=2) == pytest.approx((0.3 + 0.75) / 4, abs=1e-15)


def test_ece_keeps_its_last_bin():
    # Confidence 1, always wrong. An implementation that drops the last bin, or leaves out its edge, says 0.
    assert ece([1.0, 1.0, 1.0], [0, 0, 0]) == 1.0
    assert ece([0.99, 0.99], [0, 0]) == pytest.approx(0.99, abs=1e-15)


def test_ece_keeps_zero_in_its_first_bin():
    # [0, 1/15] has 0.0 (right) and 0.05 (wrong): |0.05 - 1| / 2
    assert ece([0.0, 0.05], [1, 0]) == pytest.approx(0.475, abs=1e-15)


@pytest.mark.parametrize(("bins", "edge"), [(10, 3), (15, 9), (3, 1), (7, 5), (12, 7)])
def test_an_edge_belongs_to_the_bin_below(bins, edge):
    q = edge / bins
    # Together with a right row just below it, the wrong row on the edge cancels: |2q - 1| / 2 ...
    below, above = q - 0.5 / bins, q + 0.5 / bins
    together = abs(q + below - 1) / 2
    assert ece([q, below], [0, 1], bins=bins) == pytest.approx(together, abs=1e-12)
    # ... with a right row just above it, in another bin, it does not.
    apart = (q + abs(above - 1)) / 2
    assert ece([q, above], [0, 1], bins=bins) == pytest.approx(apart, abs=1e-12)


@pytest.mark.parametrize("bins", [1, 2, 7, 15, 40])
def test_ece_by_a_loop_over_bins(bins):
    q, right = sample()
    q = np.round(q, 2)  # many on edges
    expected = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = (q <= high) & ((q > low) | (b == 0))
        if inside.any():
            expected += inside.mean() * abs(q[inside].mean() - right[inside].mean())
    assert ece(q, right, bins=bins) == pytest.approx(expected, abs=1e-12)


def test_ece_of_equal_mass_by_hand():
    # bins {0.1, 0.2} and {0.3, 0.9}: |0.3 - 1| / 4 + |1.2 - 0| / 4; equal width puts 0.3 with the first two
    q, right = [0.9, 0.1, 0.3, 0.2], [0, 1, 0, 0]
    assert ece(q, right, bins=2, binning="mass") == pytest.approx((0.7 + 1.2) / 4, abs=1e-15)
    assert ece(q, right, bins=2, binning="width") == pytest.approx((0.4 + 0.9) / 4, abs=1e-15)


def test_equal_mass_without_ties_is_a_split_of_the_sorted_rows():
    q, right = sample(400)
    order = np.argsort(q)
    parts = zip(np.split(q[order], 8), np.split(right[order], 8), strict=True)
    expected = np.mean([abs(a.mean() - b.mean()) for a, b in parts])
    assert ece(q, right, bins=8, binning="mass") == pytest.approx(expected, abs=1e-12)


def test_equal_mass_with_all_rows_tied_is_one_gap():
    # However rows are cut, each bin expects three right of four at 0.5. Cutting in the given order says 0.5.
    assert ece([0.5] * 4, [1, 1, 1, 0], bins=4, binning="mass") == 0.25


def test_bucket_error_by_hand():
    # by score: rows 2, 0 | 3, 1. |0.9 + 0.8 - 2| / 4 + |0.7 + 0.6 - 1| / 4
    u, q, right = [2.0, 9.0, 1.0, 5.0], [0.8, 0.6, 0.9, 0.7], [1, 0, 1, 1]
    assert bucket_calibration_error(u, q, right, buckets=2) == pytest.approx((0.3 + 0.3) / 4, abs=1e-15)
    # one bucket is the gap of the means: |3.0 - 3| / 4
    assert bucket_calibration_error(u, q, right, buckets=1) == pytest.approx(0.0, abs=1e-15)


def test_bucket_error_shares_a_row_between_buckets():
    # three rows in two buckets of 1.5: |0.5 + (1 - 1) / 2| and |(1 - 1) / 2 - 0.25|, over 3
    error = bucket_calibration_error([1, 2, 3], [0.5, 1.0, 0.75], [0, 1, 1], buckets=2)
    assert error == pytest.approx((0.5 + 0.25) / 3, abs=1e-15)


def test_bucket_error_is_not_the_ece():
    # Too confident where the score says certain, not enough where it says uncertain: by confidence, both rows
    # share a bin and cancel.
    u, q, right = [1.0, 2.0], [0.5, 0.5], [0, 1]
    assert bucket_calibration_error(u, q, right, buckets=2) == 0.5
    assert ece(q, right) == 0.0


def test_bucket_error_is_the_mean_of_its_curve():
    q, right = sample()
    u = np.random.default_rng(1).integers(20, size=len(q))
    curve = bucket_curve(u, q - right).abs()
    assert bucket_calibration_error(u, q, right) == pytest.approx(float(curve.mean()), abs=1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), min_size=1, max_size=30),
    st.randoms(),
)
@settings(deadline=None, max_examples=60)
def test_order_of_rows_never_counts(rows, random):
    def errors(rows):
        q, u, right = (np.array(column) for column in zip(*rows, strict=True))
        by_confidence = [ece(q / 6, right, bins=4, binning=binning) for binning in ("width", "mass")]
        return [*by_confidence, bucket_calibration_error(u, q / 6, right, buckets=4)]

    shuffled = random.sample(rows, len(rows))
    assert errors(rows) == pytest.approx(errors(shuffled), abs=1e-12)
    assert all(0 <= error <= 1 for error in errors(rows))


def test_one_row():
    assert ece([0.75], [1]) == ece([0.75], [1], binning="mass") == 0.25
    assert bucket_calibration_error([3.0], [0.75], [1]) == pytest.approx(0.25, abs=1e-15)


def test_tensors_and_lists_agree():
    q, right = sample(30)
    assert ece(torch.tensor(q), torch.tensor(right)) == ece(q.tolist(), right.tolist())
    assert type(ece(q, right)) is type(bucket_calibration_error(q, q, right)) is float


def test_arguments_that_do_not_fit_are_errors():
    with pytest.raises(ValueRangeError, match=r"ece: confidence must lie in \[0, 1\]; got 0.5 to 1.5. Pass prob"):
        ece([0.5, 1.5], [0, 1])
    with pytest.raises(ValueRangeError, match=r"bucket_calibration_error: confidence must lie in .* got -1 to 0.5"):
        bucket_calibration_error([1, 2], [0.5, -1.0], [0, 1])
    with pytest.raises(ValueRangeError, match="ece: correct must be booleans, or 0 and 1; got 7 at row 0"):
        ece([0.5], [7])
    with pytest.raises(ValueRangeError, match="ece: confidence: 1 of 1 values are NaN"):
        ece([float("nan")], [1])
    with pytest.raises(ValueRangeError, match="bucket_calibration_error: scores: 1 of 1 values are NaN"):
        bucket_calibration_error([float("nan")], [0.5], [1])
    with pytest.raises(ValueRangeError, match=r"ece: bins must be a whole number, at least 1; got 0\. Ten to fifteen"):
        ece([0.5], [1], bins=0)
    with pytest.raises(
        ValueRangeError,
        match=r"bucket_calibration_error: buckets must be a whole number, at least 1; got -3\. Ten to fifteen",
    ):
        bucket_calibration_error([1.0], [0.5], [1], buckets=-3)
    with pytest.raises(TableError, match="ece needs columns of one length; confidence has 2, correct has 1"):
        ece([0.5, 0.5], [1])
    with pytest.raises(TableError, match=r"bucket_calibration_error needs columns .* scores has 1, confidence has 2"):
        bucket_calibration_error([0.5], [0.5, 0.5], [1, 0])
    with pytest.raises(TableError, match="ece: confidence must have at least one row; got none"):
        ece([], [])


def test_adaptive_ece_is_ece_in_bins_of_equal_mass():
    q, right = sample()
    assert adaptive_ece(q, right, bins=7) == ece(q, right, bins=7, binning="mass") != ece(q, right, bins=7)


def test_top_label_ece_by_hand():
    # class 0: |0.9 - 1| in one bin and |0.3 - 1| in another; class 1: |0.9 + 0.8 - 0|, over 4 rows.
    # All classes in one bin above 1/2 would cancel: |2.6 - 1|.
    q, right, predicted = [0.9, 0.3, 0.9, 0.8], [1, 1, 0, 0], [0, 0, 1, 1]
    assert top_label_ece(q, right, predicted, bins=2) == pytest.approx((0.1 + 0.7 + 1.7) / 4, abs=1e-15)


def test_top_label_ece_is_the_mean_of_the_ece_of_every_predicted_class():
    (q, right), predicted = sample(), np.random.default_rng(1).integers(0, 3, 400) * 7 - 2
    groups = [predicted == one for one in (-2, 5, 12)]
    expected = sum(group.mean() * ece(q[group], right[group]) for group in groups)
    assert top_label_ece(q, right, predicted) == pytest.approx(expected, abs=1e-12)
    assert top_label_ece(q, right, np.zeros(400, int)) == pytest.approx(ece(q, right), abs=1e-12)


@pytest.mark.parametrize("threshold", [0.0, 0.2])
@pytest.mark.parametrize("bins", [1, 4, 15])
def test_class_wise_ece_by_a_loop(threshold, bins, monkeypatch):
    monkeypatch.setattr("dubito.metrics.calibration._NUMBERS", 70)  # 14 rows at a time
    rng = np.random.default_rng(0)
    z, y = 2 * rng.normal(size=(100, 5)), rng.integers(0, 5, 100)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    errors = []
    for c in range(5):
        kept = p[:, c] >= threshold
        errors.append(ece(p[kept, c], y[kept] == c, bins=bins))
    assert class_wise_ece(z, y, bins=bins, threshold=threshold) == pytest.approx(np.mean(errors), abs=1e-12)


def test_class_wise_ece_of_classes_below_the_threshold_and_of_wrong_inputs():
    # class 1 has no row with p >= 0.5 and counts as 0: (|1 - 0| + 0) / 2
    assert class_wise_ece([[50.0, 0.0]], [1], threshold=0.5) == pytest.approx(0.5, abs=1e-12)
    for wrong, words in (([0.0, 1.0], r"\(n, c\)"), ([[0.0, np.nan]], "NaN")):
        with pytest.raises((TableError, ValueRangeError), match=words):
            class_wise_ece(wrong, [0] * len(wrong))
    with pytest.raises(ValueRangeError, match="threshold"):
        class_wise_ece([[0.0, 1.0]], [0], threshold=1.0)


def smoothed(q, right, width):
    """e(s), with the kernel as a sum over reflections and the integral on a fine grid."""
    t = (np.arange(4000) + 0.5) / 4000
    images = np.concatenate([2 * k + sign * q for k in (-2, -1, 0, 1, 2) for sign in (1, -1)])
    gap = np.tile(q - right, 10) / len(q)
    kernel = np.exp(-np.square((t[:, None] - images) / width) / 2) / (width * np.sqrt(2 * np.pi))
    return np.abs(kernel @ gap).mean()


@pytest.mark.parametrize(("shape", "n"), [(lambda q: q**2, 400), (lambda q: q, 100), (lambda q: 1 - q, 50)])
def test_smooth_ece_is_the_width_that_equals_its_error(shape, n):
    rng = np.random.default_rng(2)
    q = rng.random(n)
    right = rng.random(n) < shape(q)
    width = smooth_ece(q, right)
    assert smoothed(q, right, width) == pytest.approx(width, rel=2e-3)


def test_smooth_ece_at_the_ends():
    assert smooth_ece([1.0, 1.0], [0, 0]) == pytest.approx(1.0, abs=1e-6)
    assert smooth_ece([0.0, 1.0], [0, 1]) == pytest.approx(0.0, abs=1e-6)
    # two confidences that err by as much in either direction, far apart: neither cancels where the kernel is narrow
    assert 0.15 < smooth_ece([0.1, 0.9], [1, 0]) <= 0.9


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.booleans()), min_size=1, max_size=20))
@settings(deadline=None, max_examples=30)
def test_smooth_ece_ignores_the_order_of_rows_and_is_at_most_the_mean_gap(rows):
    q, right = map(np.array, zip(*rows, strict=True))
    value = smooth_ece(q, right)
    assert value == pytest.approx(smooth_ece(q[::-1].copy(), right[::-1].copy()), abs=1e-7)
    assert 0 <= value <= np.abs(q - right).mean() + 1e-6


@pytest.mark.parametrize("metric", [adaptive_ece, smooth_ece, lambda q, right: top_label_ece(q, right, [0] * len(q))])
def test_further_calibration_errors_refuse_what_ece_refuses(metric):
    for q, right, words in (([1.2], [1], "must lie in"), ([np.nan], [1], "NaN"), ([], [], "at least one row")):
        with pytest.raises((TableError, ValueRangeError), match=words):
            metric(q, right)


@pytest.mark.parametrize("metric", [adaptive_ece, smooth_ece])
def test_intervals_of_calibration_errors_hold_their_value(metric):
    found = interval(metric, *map(torch.from_numpy, sample()), resamples=50)
    assert found.low < found.value < found.high
