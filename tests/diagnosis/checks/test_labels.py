"""Shifts and orders of labels: those that are there are found, and chance is not taken for one."""

import pytest
import torch

from dubito.diagnosis.checks.finding import NotChecked
from dubito.diagnosis.checks.labels import check_counting, check_order
from tests.diagnosis.checks.drawn import numbers


def test_the_best_shift_is_found_among_all():
    labels = numbers(60, 90)
    predicted = labels + 7
    predicted[:20] = numbers(20, 100, seed=1)
    found = check_counting(predicted, labels, 100, None)
    assert found.outcome[0].evidence["shift"] == 7
    assert found.outcome[0].evidence["accuracy_then"] >= 40 / 60
    assert torch.equal(found.labels, labels + 7)


@pytest.mark.parametrize("seed", range(20))
def test_answers_at_random_have_no_best_shift_and_no_order(seed):
    labels, predicted = numbers(200, 10, seed), numbers(200, 10, 100 + seed)
    assert check_counting(predicted, labels, 10, None).outcome == []
    assert check_order(predicted, labels, None).outcome == []


def test_one_answer_for_skewed_labels_is_no_shift():
    """Nine tenths of the labels are 1 and every answer is 3: a shift by two would be right nine times of ten."""
    labels = torch.ones(100, dtype=torch.long)
    labels[:10] = 3
    predicted = torch.full((100,), 3)
    assert check_counting(predicted, labels, 5, None).outcome == []
    assert check_order(predicted, labels, None).outcome == []


def test_a_mediocre_model_is_not_relabelled():
    """Right on six of ten, and otherwise mostly one class beside: no shift and no order is better."""
    labels = numbers(300, 10)
    predicted = labels.clone()
    predicted[:120] = (labels[:120] + 1) % 10
    assert check_counting(predicted, labels, 10, None).outcome == []
    assert check_order(predicted, labels, None).outcome == []


def test_order_is_judged_on_images_that_it_was_not_read_from():
    """One image a class in each half would fit any answers perfectly: it must not count."""
    labels, predicted = torch.arange(50).repeat(4), numbers(200, 50, seed=3)
    assert check_order(predicted, labels, None).outcome == []
    assert isinstance(check_order(predicted[:50], labels[:50], None).outcome, NotChecked)


def test_shifted_labels_may_fall_below_zero():
    labels = torch.cat([numbers(60, 9) + 1, torch.zeros(4, dtype=torch.long)])
    shifted = check_counting((labels - 1).clamp(min=0), labels, 10, None)
    assert shifted.labels.min() == -1
    assert check_order((labels - 1).clamp(min=0), shifted.labels, None).outcome == []


def test_order_names_classes():
    labels = torch.arange(3).repeat(20)
    names = ["ant", "bee", "cow"]
    finding = check_order(torch.tensor([1, 2, 0])[labels], labels, names).outcome[0]
    assert "Label -> class: 0 -> 1 (bee), 1 -> 2 (cow), 2 -> 0 (ant)." in finding.what


def test_numbered_folders_are_read_as_numbers_only_where_that_is_another_order():
    names = sorted(str(k) for k in range(12))  # 0, 1, 10, 11, 2 ...
    labels = numbers(100, 12)
    predicted = torch.tensor([int(name) for name in names])[labels]
    finding = check_counting(predicted, labels, 12, names).outcome[0]
    assert finding.evidence["folder_numbers"]
    assert finding.evidence["shift"] == 0
    assert check_counting(labels, labels, 12, [f"{k:02}" for k in range(12)]).outcome == []


def test_labels_outside_the_classes():
    labels = torch.tensor([0, 1, 2, 3, 12] * 10)
    finding = check_counting(labels % 10, labels, 10, None).outcome[0]
    assert finding.what == "10 of 50 labels are 10 or more, up to 12; the model's are 0..9."
