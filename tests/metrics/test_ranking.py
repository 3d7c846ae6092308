import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import auroc, average_precision, fpr_at_tpr, interval, spearman

METRICS = [auroc, average_precision, fpr_at_tpr]

# Few distinct scores, so nearly every row is tied; both classes occur.
tied_rows = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40).filter(
    lambda rows: len({positive for _, positive in rows}) == 2
)


def split(rows):
    scores, positives = zip(*rows, strict=True)
    return np.array(scores, dtype=float), np.array(positives)


def tied_sample(n=500, levels=7, seed=0):
    rng = np.random.default_rng(seed)
    positives = rng.random(n) < 0.3
    scores = rng.integers(levels, size=n) + positives * rng.integers(3, size=n)
    return scores.astype(float), positives


def test_auroc_by_hand():
    # positives 2, 2, 5; negatives 1, 2, 3: wins of 2: 1 + 1/2 + 0, of 2: the same, of 5: 3; 6 of 9
    assert auroc([2, 2, 5, 1, 2, 3], [1, 1, 1, 0, 0, 0]) == 6 / 9


def test_average_precision_by_hand():
    # t=4: P=1, N=0, step 1/3 · 1; t=3: P=1, N=1, no step; t=2 (one of each): P=2, N=2, step 1/3 · 2/4;
    # t=1: P=3, N=2, step 1/3 · 3/5. Linear interpolation of the curve would give another sum.
    assert average_precision([4, 3, 2, 2, 1], [1, 0, 1, 0, 1]) == pytest.approx((1 + 0.5 + 0.6) / 3, abs=1e-15)


def test_fpr_at_tpr_by_hand():
    scores, positives = [5, 4, 4, 3, 2, 1], [1, 1, 0, 0, 1, 0]
    # two of three positives need t = 4, and the negative tied there comes along: 1 of 3
    assert fpr_at_tpr(scores, positives, tpr=0.6) == 1 / 3
    # the default 0.95 needs all three: t = 2, negatives 4 and 3: 2 of 3
    assert fpr_at_tpr(scores, positives) == 2 / 3


def test_fpr_at_tpr_reaches_a_rate_that_is_met_exactly():
    # 55 of 100 positives come before the only negative; 55 / 100 == 0.55, but in floating point
    assert 0.55 * 100 > 55
    scores = -np.arange(101.0)
    positives = np.ones(101, dtype=bool)
    positives[55] = False
    assert fpr_at_tpr(scores, positives, tpr=0.55) == 0.0
    assert fpr_at_tpr(scores, positives, tpr=0.56) == 1.0


@given(tied_rows)
@settings(deadline=None, max_examples=100)
def test_auroc_is_the_share_of_pairs_won(rows):
    scores, positives = split(rows)
    above, below = scores[positives][:, None], scores[~positives][None, :]
    assert auroc(scores, positives) == ((above > below) + 0.5 * (above == below)).mean()


@given(tied_rows)
@settings(deadline=None, max_examples=100)
def test_references_of_sklearn(rows):
    scores, positives = split(rows)
    assert auroc(scores, positives) == pytest.approx(roc_auc_score(positives, scores), abs=1e-12)
    expected = average_precision_score(positives, scores)
    assert average_precision(scores, positives) == pytest.approx(expected, abs=1e-12)
    false, true, _ = roc_curve(positives, scores, drop_intermediate=False)
    for rate in (0.3, 0.5, 0.95, 1.0):
        assert fpr_at_tpr(scores, positives, tpr=rate) == false[np.argmax(true >= rate)]


@pytest.mark.parametrize("metric", METRICS)
def test_order_of_rows_never_counts(metric):
    scores, positives = tied_sample()
    shuffled = np.random.default_rng(1).permutation(len(scores))
    assert metric(scores, positives) == metric(scores[shuffled], positives[shuffled])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("rising", [lambda s: 1e6 * s - 3e8, lambda s: -np.exp(-s), lambda s: s / 1e3])
def test_only_the_order_of_scores_counts(metric, rising):
    scores, positives = tied_sample()
    assert metric(scores, positives) == metric(rising(scores), positives)


def test_large_scores_are_not_squashed():
    # A sigmoid makes 1.0 of all four and 0.5 of the result.
    assert auroc([100.0, 200.0, 300.0, 400.0], [0, 0, 1, 1]) == 1.0
    assert auroc([-400.0, -300.0, -200.0, -100.0], [1, 1, 0, 0]) == 0.0


def test_negated_scores_turn_the_auroc_round():
    scores, positives = tied_sample()
    assert auroc(-scores, positives) == pytest.approx(1 - auroc(scores, positives), abs=1e-15)


def test_all_scores_equal():
    positives = [1, 0, 0, 0]
    assert auroc([7.0] * 4, positives) == 0.5
    assert average_precision([7.0] * 4, positives) == 0.25
    assert fpr_at_tpr([7.0] * 4, positives) == 1.0


@pytest.mark.parametrize("metric", METRICS)
def test_tensors_arrays_and_lists_give_one_python_float(metric):
    scores, positives = tied_sample(50)
    given_as = [
        metric(scores, positives),
        metric(scores.tolist(), positives.tolist()),
        metric(torch.tensor(scores).requires_grad_(), torch.tensor(positives).long()),
        metric(scores.astype(np.float16), positives.astype(np.float32)),
    ]
    assert type(given_as[0]) is float
    assert len(set(given_as)) == 1


@pytest.mark.parametrize("metric", METRICS)
def test_one_class_is_an_error(metric):
    output = (
        f"{metric.__name__} needs positives and negatives; got all 3 rows with positives = 1. "
        "Add rows of the other class: with one class there is nothing to rank."
    )
    with pytest.raises(TableError) as error:
        metric([1.0, 2.0, 3.0], [1, 1, 1])
    assert str(error.value) == output
    with pytest.raises(TableError, match="got all 1 rows with positives = 0"):
        metric([1.0], [False])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_without_a_rank_are_an_error(metric, bad):
    with pytest.raises(ValueRangeError, match=rf"{metric.__name__}: scores: 1 of 3 values are NaN or infinite"):
        metric([1.0, bad, 3.0], [0, 1, 1])


@pytest.mark.parametrize("metric", METRICS)
def test_arguments_that_do_not_fit_are_errors(metric):
    name = metric.__name__
    with pytest.raises(TableError, match=f"{name} needs columns of one length; scores has 3, positives has 2"):
        metric([1.0, 2.0, 3.0], [0, 1])
    with pytest.raises(TableError, match=f"{name}: scores must have at least one row; got none"):
        metric([], [])
    with pytest.raises(TableError, match=rf"{name}: scores must have one axis, \(n,\); got shape \(2, 1\)"):
        metric([[1.0], [2.0]], [0, 1])
    with pytest.raises(ValueRangeError, match=f"{name}: positives must be booleans, or 0 and 1; got 2 at row 1"):
        metric([1.0, 2.0], [0, 2])


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_fpr_at_tpr_refuses_a_rate_outside_its_range(rate):
    with pytest.raises(ValueRangeError, match=r"fpr_at_tpr: tpr must be a number in \(0, 1\]; got"):
        fpr_at_tpr([1.0, 2.0], [0, 1], tpr=rate)


def test_spearman_by_hand():
    # ranks 0 1 2 3 and 3 0 1 2: Σ d² = 9 + 1 + 1 + 1 = 12, 1 - 6 · 12 / (4 · 15) = -0.2
    assert spearman([1, 2, 3, 4], [9.0, -4.0, 0.0, 5.0]) == pytest.approx(-0.2, abs=1e-15)


def test_tied_ranks_share_the_middle():
    # ranks 0 1.5 1.5 3 and 0 1 2 3, centred -1.5 0 0 1.5 and -1.5 -.5 .5 1.5: 4.5 / sqrt(4.5 · 5)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / 22.5**0.5, abs=1e-15)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_spearman_agrees_with_scipy(levels):
    rng = np.random.default_rng(levels)
    x = rng.integers(levels, size=300)
    y = x + rng.integers(levels, size=300)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert 0.3 < spearman(x, y) < 0.95


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=20))
def test_only_the_orders_count_for_spearman(pairs):
    x, y = np.array(pairs, dtype=float).T
    if len(set(x)) < 2 or len(set(y)) < 2:
        with pytest.raises(TableError, match="must hold different values"):
            spearman(x, y)
        return
    value = spearman(x, y)
    assert -1 - 1e-12 <= value <= 1 + 1e-12
    assert spearman(y, x) == pytest.approx(value, abs=1e-12)
    assert spearman(np.exp(x), y) == pytest.approx(value, abs=1e-12)
    assert spearman(-x, y) == pytest.approx(-value, abs=1e-12)
    turned = np.random.default_rng(0).permutation(len(x))
    assert spearman(x[turned], y[turned]) == pytest.approx(value, abs=1e-12)


def test_an_interval_of_spearman_holds_the_value_and_leaves_out_constant_resamples():
    x = torch.arange(40.0)
    y = x + 12 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    value, low, high, _ = interval(spearman, x, y, resamples=100)
    assert value == spearman(x, y)
    assert 0 < low < value < high < 1
    # Of three rows one resample in nine is constant; those are drawn again.
    _, low, high, _ = interval(spearman, [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], resamples=50)
    assert -1 <= low <= high <= 1


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], TableError, "x must hold different values; all 3 rows have 1"),
        ([1.0, 2.0], [5.0, 5.0], TableError, "y must hold different values; all 2 rows have 5"),
        ([1.0], [2.0], TableError, "a constant has no order"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], TableError, "spearman needs columns of one length; x has 2, y has 3"),
        ([1.0, float("nan")], [1.0, 2.0], ValueRangeError, "spearman: x: 1 of 2 values are NaN"),
        ([[1.0, 2.0]], [1.0, 2.0], TableError, r"spearman: x must have one axis"),
    ],
)
def test_spearman_is_undefined(x, y, error, message):
    with pytest.raises(error, match=message):
        spearman(x, y)
