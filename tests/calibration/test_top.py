"""Isotonic regression, histograms and Venn-Abers: by hand, by scikit-learn, and by refitting for every row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression

from dubito.calibration import ClassWiseIsotonic, Histogram, Isotonic, VennAbers
from dubito.calibration._blocks import isotonic_blocks
from dubito.calibration._top import with_top
from dubito.errors import ValueRangeError
from dubito.metrics import confidence
from dubito.table import Table
from tests.calibration.samples import sample

ROWS = st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=25)


def scores_and_labels(rows):
    scores, ones = zip(*rows, strict=True)
    return np.array(scores) / 8, np.array(ones)


def two_classes(top, right):
    """A table whose top probabilities are `top`, all of them above 1/2."""
    p = torch.tensor(top, dtype=torch.float64)
    return Table(logit=torch.stack([p.log(), (1 - p).log()], 1), label=1 - torch.tensor(right, dtype=torch.long))


@given(ROWS)
@settings(deadline=None, max_examples=100)
def test_blocks_are_scikit_learns(rows):
    scores, ones = scores_and_labels(rows)
    x = np.linspace(0, 1, 33)
    expected = IsotonicRegression(out_of_bounds="clip").fit(scores, ones).predict(x)
    blocks = isotonic_blocks(scores, ones)
    assert np.interp(x, *blocks.knots(cautious=False, floor=False)) == pytest.approx(expected, abs=1e-12)
    assert len(blocks.rows) <= ones.sum() + 1
    assert blocks.rows.sum() == len(rows)


def test_cautious_ends_by_hand():
    blocks = isotonic_blocks(np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), np.array([0, 0, 1, 0, 1, 1], bool))
    # 2 rows wrong: 1 / 4; a block of 1/2; 2 rows right: 3 / 4
    assert blocks.knots(cautious=True, floor=True)[1].tolist() == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    # one right row says 2/3, less than the 3/4 before it, and the curve must not fall
    ones = np.array([1, 1, 1, 0, 1], bool)
    assert isotonic_blocks(np.arange(5.0), ones).knots(cautious=True, floor=True)[1].tolist() == [0.75, 0.75, 0.75]


def test_isotonic_of_a_model_by_hand():
    # 0.6 wrong, 0.7 right and 0.8 wrong share 1/2 less the first; 0.9 and 0.95 are right: 3/4
    table = two_classes([0.6, 0.7, 0.8, 0.9, 0.95], [0, 1, 0, 1, 1])
    p = Isotonic().fit(table).probability(two_classes([0.65, 0.75, 0.85, 0.99], [1, 1, 1, 1]))[:, 0]
    # between 1/3, which 1/2 would cap at (1 wrong row: 1 / 3), and 1/2; then halfway from 1/2 to 3/4; then 3/4.
    assert p[1:].tolist() == pytest.approx([0.5, 0.625, 0.75], abs=1e-4)
    assert p[0] == pytest.approx(0.5, abs=1e-4)  # 5/12 would make the other class the likely one


@pytest.mark.parametrize("seed", range(3))
def test_venn_abers_by_refitting_for_every_row_and_label(seed):
    rng = np.random.default_rng(seed)
    top, right = rng.integers(0, 20, 60) / 20, rng.random(60) < 0.6
    method = VennAbers()
    method.learn_top(top, right)
    x = np.unique(np.concatenate([top, rng.random(20), [0.0, 1.0]]))
    low, high = method.bounds(x)
    for one, p0, p1 in zip(x, low, high, strict=True):
        for label, value in ((0, p0), (1, p1)):
            refitted = IsotonicRegression().fit(np.append(top, one), np.append(right, label))
            assert refitted.predict([one])[0] == pytest.approx(value, abs=1e-12)


@given(ROWS)
@settings(deadline=None, max_examples=60)
def test_venn_abers_intervals_are_ordered_and_rise_whatever_the_ties(rows):
    scores, ones = scores_and_labels(rows)
    method = VennAbers()
    method.learn_top(scores, ones)
    x = np.linspace(0, 1, 33)
    low, high = method.bounds(x)
    assert (low < high).all()
    assert ((low >= 0) & (high <= 1)).all()
    for values in (low, high, method.top_probability(x)):
        assert (np.diff(values) >= -1e-12).all()
    assert ((method.top_probability(x) > 0) & (method.top_probability(x) < 1)).all()


def test_venn_abers_by_hand():
    # Of 0.6 (wrong), 0.8 (right): at 0.8 with one more wrong row {0.8: 1 of 2}, with one more right row {0.8: 2 of 2};
    # q = 1 / (1 - 1/2 + 1) = 2/3.
    table = two_classes([0.6, 0.8], [0, 1])
    method = VennAbers().fit(table)
    assert method.interval(table)[1].tolist() == [0.5, 1.0]
    assert method.probability(table)[1, 0].item() == pytest.approx(2 / 3, abs=1e-12)
    assert method.interval(table)[0].tolist() == [0.0, 0.5]
    assert method.interval(table.rows(slice(0, 0))).shape == (0, 2)


def test_venn_abers_of_a_table_contains_how_often_predictions_are_right():
    table, test = sample(3000, seed=1), sample(3000, seed=2)
    interval = VennAbers().fit(table).interval(test)
    right = (test.logit.argmax(1) == test.label).double().mean()
    assert interval[:, 0].mean() < right + 0.02
    assert right - 0.02 < interval[:, 1].mean()
    assert (interval[:, 1] - interval[:, 0]).median() < 0.05


def test_histogram_by_hand():
    # bins of {0.6, 0.7, 0.8}: (1 + 1) / 5, and of {0.9, 0.9, 0.95}: (3 + 1) / 5
    table = two_classes([0.9, 0.6, 0.7, 0.8, 0.9, 0.95], [1, 0, 1, 0, 1, 1])
    method = Histogram(bins=2).fit(table)
    assert method.values_.tolist() == [0.4, 0.8]
    assert method.edges_.tolist() == pytest.approx([0.85])
    assert method.probability(table)[:, 0].tolist() == pytest.approx([0.8, 0.5, 0.5, 0.5, 0.8, 0.8], abs=1e-4)


def test_histogram_of_equal_confidences_has_one_bin():
    table = two_classes([0.8] * 8, [1, 1, 1, 1, 1, 0, 0, 0])
    method = Histogram(bins=4).fit(table)
    assert method.values_.tolist() == [0.6]  # (5 + 1) / 10
    with pytest.raises(ValueRangeError, match="histogram: bins"):
        Histogram(bins=0)


def test_the_top_probability_is_exact_and_the_prediction_stays():
    logits = torch.tensor([[2.0, 1.9, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    for q in (0.99, 0.5, 0.36):
        p = with_top(logits, logits.argmax(1), torch.full((2,), q, dtype=torch.float64)).exp()
        assert p.amax(1).tolist() == pytest.approx([q, q], abs=1e-12)
        assert p.sum(1).tolist() == pytest.approx([1, 1], abs=1e-12)
        assert p.argmax(1).tolist() == [0, 1]
    # the rest keeps its proportions where it can: e^1.9 : e^0
    p = with_top(logits, logits.argmax(1), torch.tensor([0.8, 0.8], dtype=torch.float64)).exp()
    assert (p[0, 1] / p[0, 2]).item() == pytest.approx(np.exp(1.9), rel=1e-9)
    # below 1/3, another class would be more likely
    assert with_top(logits, logits.argmax(1), torch.full((2,), 0.1).double()).exp().amax(1).tolist() == pytest.approx(
        [1 / 3, 1 / 3], abs=1e-4
    )


class Softmax(ClassifierMixin, BaseEstimator):
    """A classifier of three classes whose features are its logits."""

    def fit(self):
        self.classes_ = np.arange(3)
        return self

    def predict(self, logits):
        return logits.argmax(1)

    def predict_proba(self, logits):
        return torch.from_numpy(logits).softmax(1).numpy()


def test_class_wise_isotonic_is_close_to_scikit_learns():
    table, test = sample(3000, 3, seed=1), sample(500, 3, seed=2)
    theirs = CalibratedClassifierCV(FrozenEstimator(Softmax().fit()), method="isotonic", ensemble=False)
    theirs.fit(table.logit.numpy(), table.label.numpy())
    ours = ClassWiseIsotonic().fit(table).probability(test).numpy()
    # Ours counts one row more.
    assert np.abs(ours - theirs.predict_proba(test.logit.numpy())).max() < 0.01


def test_class_wise_isotonic_by_scikit_learns_regression_of_every_class(monkeypatch):
    monkeypatch.setattr("dubito.calibration.isotonic._NUMBERS", 1000)  # two classes at a time
    table = sample(400, 5, seed=3)
    method, p = ClassWiseIsotonic().fit(table), table.logit.softmax(1)
    prior = (table.logit / method.temperature_).softmax(1)
    columns = []
    for c in range(5):
        curve = IsotonicRegression(out_of_bounds="clip").fit(p[:, c].numpy(), (table.label == c).numpy())
        fitted = curve.predict(p[:, c].numpy())
        last = isotonic_blocks(p[:, c].numpy(), (table.label == c).numpy())
        if last.ones[-1] == last.rows[-1]:
            sure = max((last.rows[-1] + 1) / (last.rows[-1] + 2), (last.ones / last.rows)[-2])
            x, y = last.knots(cautious=True, floor=False)
            assert y[-1] == sure
            fitted = np.interp(p[:, c].numpy(), x, y)
        columns.append(400 * fitted + prior[:, c].numpy())
    expected = np.stack(columns, 1)
    expected /= expected.sum(1, keepdims=True)
    assert method.probability(table).numpy() == pytest.approx(expected, abs=1e-9)


def test_many_classes_have_few_knots():
    generator = torch.Generator().manual_seed(0)
    logit = torch.randn(2000, 200, generator=generator)
    table = Table(logit=logit, label=torch.multinomial(logit.softmax(1), 1, generator=generator)[:, 0])
    method = ClassWiseIsotonic().fit(table)
    assert len(method.knots_) <= 2 * (2000 + 200)


def test_isotonic_is_of_the_top_probability():
    table = sample(500, 4)
    q = confidence(table.logit)
    right = (table.logit.argmax(1) == table.label).numpy()
    expected = IsotonicRegression(out_of_bounds="clip").fit(q.numpy(), right).predict(q.numpy())
    inner = (expected > 0.26) & (expected < 1)
    calibrated = Isotonic().fit(table).probability(table).amax(1).numpy()
    assert calibrated[inner] == pytest.approx(expected[inner], abs=0.01)
