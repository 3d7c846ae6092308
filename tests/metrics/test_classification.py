import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import accuracy, brier, brier_per_row, confidence, correct, nll, nll_per_row

METRICS = [accuracy, nll, brier]


def sample(n=200, c=5, seed=0):
    rng = np.random.default_rng(seed)
    return 3 * rng.normal(size=(n, c)), rng.integers(c, size=n)


def test_by_hand():
    logits, labels = [[math.log(3), 0.0], [0.0, math.log(4)]], [0, 0]
    # probabilities (3/4, 1/4) and (1/5, 4/5)
    assert accuracy(logits, labels) == 1 / 2
    assert nll(logits, labels) == pytest.approx((-math.log(3 / 4) - math.log(1 / 5)) / 2, abs=1e-15)
    # summed over classes: 2 · (1/4)² and 2 · (4/5)²; the mean over classes would be half of that
    assert brier(logits, labels) == pytest.approx((2 / 16 + 2 * 16 / 25) / 2, abs=1e-15)


def test_references():
    logits, labels = sample()
    p = softmax(logits, axis=1)
    assert accuracy(logits, labels) == accuracy_score(labels, p.argmax(1))
    assert nll(logits, labels) == pytest.approx(log_loss(labels, p, labels=range(5)), abs=1e-12)
    assert brier(logits, labels) == pytest.approx(
        brier_score_loss(labels, p, labels=range(5), scale_by_half=False), abs=1e-12
    )
    assert confidence(logits).numpy() == pytest.approx(p.max(1), abs=1e-15)
    assert nll_per_row(logits, labels).numpy() == pytest.approx(
        -log_softmax(logits, axis=1)[np.arange(200), labels], abs=1e-12
    )


@pytest.mark.parametrize(("metric", "per_row"), [(accuracy, correct), (nll, nll_per_row), (brier, brier_per_row)])
def test_a_metric_is_the_mean_of_its_rows(metric, per_row):
    logits, labels = sample(20_000, 3)  # more than two blocks
    rows = per_row(logits, labels)
    assert rows.shape == (20_000,)
    assert metric(logits, labels) == pytest.approx(float(rows.double().mean()), abs=1e-15)
    alone = torch.cat([per_row(logits[i : i + 1], labels[i : i + 1]) for i in (0, 8191, 8192, 19_999)])
    assert torch.equal(rows[[0, 8191, 8192, 19_999]], alone)


def test_worst_and_best_brier():
    assert brier([[1000.0, 0.0]], [0]) == 0.0
    assert brier([[1000.0, 0.0]], [1]) == 2.0


def test_small_probabilities_keep_their_logarithm():
    # softmax underflows to zero at 800, log-softmax does not
    assert nll([[800.0, 0.0]], [1]) == 800.0


def test_float16_logits_are_counted_in_float64():
    # log(1 + e^-10) = 4.54e-5, below float16's resolution at 1
    assert nll(torch.tensor([[10.0, 0.0]]).half(), [0]) == pytest.approx(math.log1p(math.exp(-10)), rel=1e-12)


def test_tied_logits_go_to_the_lowest_class():
    assert correct([[1.0, 1.0, 0.0]] * 2, [0, 1]).tolist() == [True, False]


@pytest.mark.parametrize("metric", METRICS)
def test_order_of_rows_never_counts(metric):
    logits, labels = sample()
    order = np.random.default_rng(1).permutation(len(labels))
    assert metric(logits[order], labels[order]) == pytest.approx(metric(logits, labels), abs=1e-15)


@pytest.mark.parametrize("metric", METRICS)
def test_tensors_arrays_and_lists_give_one_python_float(metric):
    logits, labels = sample(10)
    as_tensor = metric(torch.tensor(logits, requires_grad=True), torch.tensor(labels))
    assert type(as_tensor) is float
    assert as_tensor == metric(logits, labels) == metric(logits.tolist(), labels.tolist())


@pytest.mark.parametrize("metric", METRICS)
def test_arguments_that_do_not_fit_are_errors(metric):
    name = {"accuracy": "correct"}.get(metric.__name__, metric.__name__)
    with pytest.raises(TableError, match=rf"{name}: logits must have the axes \(n, c\).*shape \(2,\) came. Give one"):
        metric([1.0, 2.0], [0, 1])
    with pytest.raises(TableError, match=rf"{name}: logits must have the axes .* shape \(0, 2\) came"):
        metric(torch.zeros(0, 2), [])
    with pytest.raises(TableError, match=f"{name} needs columns of one length; logits has 1, labels has 2"):
        metric([[1.0, 2.0]], [0, 1])
    with pytest.raises(TableError, match=f"{name}: labels must be integers; got torch.float64"):
        metric([[1.0, 2.0]], [0.0])
    for label, came in ((2, "2 to 2"), (-1, "-1 to -1")):
        with pytest.raises(ValueRangeError, match=f"{name}: labels must be classes of the logits, 0 to 1; {came} came"):
            metric([[1.0, 2.0]], [label])
    with pytest.raises(ValueRangeError, match=f"{name}: logits from row 0 on: 1 of 2 values are NaN or infinite"):
        metric([[1.0, float("nan")]], [0])


def test_confidence_checks_its_logits():
    with pytest.raises(TableError, match="confidence: logits must have the axes"):
        confidence([1.0, 2.0])
    with pytest.raises(ValueRangeError, match="confidence: logits from row 0 on: 1 of 2 values are NaN or inf"):
        confidence([[1.0, float("inf")]])
