import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    accuracy,
    brier,
    brier_per_row,
    confidence,
    correct,
    labelled_logits,
    nll,
    nll_per_row,
    table_accuracy,
    wrong_predictions,
)
from dubito.table import Table
from dubito.validate import check_model_labels

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
    with pytest.raises(
        TableError, match=rf"{name}: logits must have the axes \(n, c\), .*; got shape \(2,\)\. Pass one row"
    ):
        metric([1.0, 2.0], [0, 1])
    with pytest.raises(TableError, match=rf"{name}: logits must have the axes .* got shape \(0, 2\)"):
        metric(torch.zeros(0, 2), [])
    with pytest.raises(TableError, match=f"{name} needs columns of one length; logits has 1, labels has 2"):
        metric([[1.0, 2.0]], [0, 1])
    with pytest.raises(TableError, match=f"{name}: labels must be integers; got torch.float64"):
        metric([[1.0, 2.0]], [0.0])
    for label, classes in ((2, "2 to 2"), (-1, "-1 to -1")):
        with pytest.raises(TableError, match=f"{name}: the labels must be classes from 0 to 1; got {classes}"):
            metric([[1.0, 2.0]], [label])
    with pytest.raises(ValueRangeError, match=f"{name}: logits from row 0 on: 1 of 2 values are NaN or infinite"):
        metric([[1.0, float("nan")]], [0])


def test_confidence_checks_its_logits():
    with pytest.raises(TableError, match="confidence: logits must have the axes"):
        confidence([1.0, 2.0])
    with pytest.raises(ValueRangeError, match="confidence: logits from row 0 on: 1 of 2 values are NaN or inf"):
        confidence([[1.0, float("inf")]])


LOGIT = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])


def test_a_row_is_wrong_where_another_class_has_the_highest_logit() -> None:
    assert wrong_predictions(Table(logit=LOGIT, label=[0, 0, 1]), by="here").tolist() == [False, True, False]


def test_logits_and_labels_are_in_the_order_of_the_rows() -> None:
    table = Table(logit=LOGIT, label=[0, 2, 1])
    logits, labels = zip(*labelled_logits(table, by="here"), strict=True)
    assert torch.equal(torch.cat(logits), LOGIT)
    assert torch.cat(labels).tolist() == [0, 2, 1]


def test_labels_of_another_set_are_refused() -> None:
    table = Table(logit=LOGIT, label=[0, 0, 1], label_space="own", name="birds")
    for call in (check_model_labels, wrong_predictions):
        with pytest.raises(TableError, match="here needs labels of the model's own classes; those of birds are anoth"):
            call(table, by="here")


def test_without_rows_the_repair_is_given() -> None:
    table = Table(logit=LOGIT[:0], label=torch.zeros(0, dtype=torch.long))
    with pytest.raises(TableError, match=r"here needs labelled rows; table in memory has none\. Take others\."):
        wrong_predictions(table, by="here", repair="Take others.")


@pytest.mark.parametrize(("label", "classes"), [([0, 1, 3], "0 to 3"), ([-1, 0, 1], "-1 to 1")])
def test_labels_beyond_the_classes_are_refused(label: list[int], classes: str) -> None:
    with pytest.raises(TableError, match=f"here: the labels of table in .* classes from 0 to 2; got {classes}"):
        wrong_predictions(Table(logit=LOGIT, label=label), by="here")


def test_logits_that_are_no_numbers_are_refused() -> None:
    logit = LOGIT.clone()
    logit[1, 1] = torch.nan
    with pytest.raises(ValueRangeError, match="here: logits of table in memory"):
        wrong_predictions(Table(logit=logit, label=[0, 0, 1]), by="here")


def test_the_accuracy_of_a_table_needs_labels_of_the_models_classes() -> None:
    assert table_accuracy(Table(logit=LOGIT, label=[0, 0, 1])) == pytest.approx(2 / 3)
    assert table_accuracy(Table(logit=LOGIT)) is None
    assert table_accuracy(Table(logit=LOGIT, label=[0, 0, 1], label_space="own")) is None
