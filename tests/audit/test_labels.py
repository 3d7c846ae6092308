"""Shifts and orders of labels: those that are there are found, and chance is not taken for one."""

import pytest
import torch
from scipy.stats import beta, hypergeom

from dubito.audit import labels as subject
from dubito.audit.finding import NotChecked
from dubito.audit.labels import _permutation_p, check_chance, check_counting, check_order
from dubito.cache.labels import agreement
from tests.audit.drawn import numbers


def test_the_best_shift_is_found_among_all():
    labels = numbers(60, 90)
    predicted = labels + 7
    predicted[:20] = numbers(20, 100, seed=1)
    result = check_counting(predicted, labels, 100, None)
    assert result.outcome[0].evidence["shift"] == 7
    assert result.outcome[0].evidence["accuracy_then"] >= 40 / 60
    assert torch.equal(result.labels, labels + 7)


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


@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0), (0, 2, 1)])
def test_exchanged_classes_are_no_shift(order):
    """[1, 2, 0] is a shift by one for two labels of three; it would make a fourth class of the last."""
    labels = numbers(90, 3)
    predicted = torch.tensor(order)[labels]
    counted = check_counting(predicted, labels, 3, None)
    assert counted.outcome == []
    result = check_order(predicted, labels, None, than=counted.labels)
    moved = {str(label): answer for label, answer in enumerate(order) if label != answer}
    assert result.outcome[0].evidence["order"] == moved
    assert torch.equal(result.labels, predicted)


def test_exchanged_classes_that_count_from_one():
    """1 -> 2, 2 -> 0, 3 -> 1: minus two is right for two labels of three, and makes -1 of the first."""
    labels = numbers(90, 3) + 1
    predicted = torch.tensor([9, 2, 0, 1])[labels]
    counted = check_counting(predicted, labels, 3, None)
    assert [finding.what.partition(" ")[2] for finding in counted.outcome] == [
        "of 90 labels are 3 or more, up to 3; the model's are 0..2."
    ]
    finding = check_order(predicted, labels, None, than=counted.labels).outcome[0]
    assert "Label -> class: 1 -> 2, 2 -> 0, 3 -> 1." in finding.what


@pytest.mark.parametrize(("start", "c"), [(1, 3), (0, 4), (2, 3)], ids=["from one", "background", "from two"])
def test_a_shift_within_the_classes_goes_before_the_same_order(start, c):
    """Both are right on all images; the shift is the plainer word."""
    labels, first = numbers(90, 3) + start, c - 3
    predicted = labels - start + first
    counted = check_counting(predicted, labels, c, None)
    assert counted.outcome[0].evidence["shift"] == first - start
    assert counted.outcome[0].evidence["labels_outside_then"] == 0
    assert "no class" not in counted.outcome[0].repair
    assert check_order(predicted, labels, None, than=counted.labels).outcome == []


def test_an_order_goes_before_a_shift_that_explains_clearly_less():
    """0 -> 1, 1 -> 2, 2 -> 4 of five: plus one stays within the classes, but is right on two thirds only."""
    labels = numbers(90, 3)
    predicted = torch.tensor([1, 2, 4])[labels]
    assert check_counting(predicted, labels, 5, None).outcome == []
    assert check_order(predicted, labels, None).outcome[0].evidence["order"] == {"0": 1, "1": 2, "2": 4}


def test_a_shift_says_which_labels_it_leaves_without_a_class():
    """Label 0 stands for no class, and the model's four are 1 .. 4."""
    labels = torch.cat([torch.arange(1, 5).repeat(15), torch.zeros(3, dtype=torch.long)])
    predicted = torch.cat([labels[:60] - 1, torch.tensor([0, 1, 3])])
    finding = check_counting(predicted, labels, 4, None).outcome[0]
    assert finding.evidence["labels_outside_then"] == 3
    assert finding.repair.endswith("Leave out images that then have no class (3, of label 0).")


def test_one_class_in_another_place():
    labels = numbers(90, 3)
    finding = check_order(torch.tensor([0, 1, 4])[labels], labels, None, ["ant", "bee", "cow"]).outcome[0]
    assert finding.what.startswith(
        "Labels and model seem to order their classes differently (1 differ): accuracy on images"
    )
    assert finding.what.endswith("Label -> class: 2 (cow) -> 4.")


def two_classes(n: int, positives: int, hits: int, alarms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels: so many positives, so many of them found, so many false alarms."""
    labels, predicted = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    labels[:positives] = 1
    predicted[:hits] = 1
    predicted[positives : positives + alarms] = 1
    return predicted, labels


def test_random_predictions_are_found():
    outcomes = [check_chance(numbers(500, 10, 100 + seed), numbers(500, 10, seed), 10) for seed in range(20)]
    wrong = [outcome for outcome in outcomes if isinstance(outcome, list) and outcome]
    assert len(wrong) >= 19
    assert all(outcome[0].severity == "wrong" for outcome in wrong)
    assert "% confidence); predictions unrelated to the labels would give" in wrong[0][0].what


def test_a_fair_model_on_few_images_is_not_called_wrong():
    """Twenty images, 15 of them right: p = 0.035, which proves nothing in either direction."""
    outcome = check_chance(*two_classes(20, 10, hits=8, alarms=3), 2)
    assert outcome == NotChecked("20 images are too few to distinguish an accuracy of 75.0 % from chance, 50.0 %")


def test_a_fair_model_of_a_rare_class_is_not_called_wrong():
    """Five positives in 500: three found and three false alarms. Ignoring the counts, that looks like chance."""
    assert check_chance(*two_classes(500, 5, hits=3, alarms=3), 2) == []


@pytest.mark.parametrize(("positives", "hits", "alarms"), [(5, 1, 3), (2, 0, 1)])
def test_a_rare_class_that_is_missed_proves_nothing(positives, hits, alarms):
    outcome = check_chance(*two_classes(500, positives, hits=hits, alarms=alarms), 2)
    assert isinstance(outcome, NotChecked)
    assert outcome.reason.startswith("500 images are too few")


@pytest.mark.parametrize("positives", [1, 20, 50])
def test_predictions_that_are_all_the_most_common_label_are_left_to_the_check_for_one_class(positives):
    """However many positives are missed: a permutation of equal predictions is always the same."""
    outcome = check_chance(*two_classes(500, positives, hits=0, alarms=0), 2)
    assert outcome == NotChecked(
        "every prediction is the most common label, so any permutation of them would be as right"
    )


def test_no_better_than_chance_is_wrong_with_few_images_too():
    [finding] = check_chance(*two_classes(40, 20, hits=9, alarms=11), 2)
    assert finding.evidence["accuracy"] == pytest.approx(0.45)
    assert finding.evidence["by_chance"] == pytest.approx(0.5)
    # Clopper and Pearson: the largest p with P(X <= 18) >= 0.01.
    assert finding.evidence["at_most"] == pytest.approx(beta.ppf(0.99, 19, 22), rel=1e-9)


@pytest.mark.parametrize(("hits", "alarms"), [(8, 3), (6, 4), (10, 9)])
def test_permuting_is_the_hypergeometric_test_for_two_classes(hits, alarms):
    """Right are 2 found + constant, and found is hypergeometric: 20 images, 10 positives, so many predicted."""
    predicted, labels = two_classes(20, 10, hits=hits, alarms=alarms)
    exact = hypergeom.sf(hits - 1, 20, 10, hits + alarms)
    assert _permutation_p(predicted, labels, int((predicted == labels).sum())) == pytest.approx(exact, abs=0.015)


def test_permuting_does_not_depend_on_its_blocks(monkeypatch):
    predicted, labels = numbers(60, 3, 1), numbers(60, 3)
    one = _permutation_p(predicted, labels, 24)
    monkeypatch.setattr(subject, "_BLOCK", 700)
    assert _permutation_p(predicted, labels, 24) == one


def test_agreement_by_hand():
    # Labels 0 0 1, predictions 0 1 1: (2 * 1 + 1 * 2) / 9.
    assert agreement(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])) == pytest.approx(4 / 9)


def test_one_class_for_skewed_labels_is_chance():
    labels = torch.ones(100, dtype=torch.long)
    labels[:10] = 3
    assert check_chance(torch.full((100,), 3), labels, 5)[0].evidence["by_chance"] == pytest.approx(0.1)


def test_a_mediocre_model_is_better_than_chance():
    labels = numbers(300, 10)
    predicted = labels.clone()
    predicted[:120] = (labels[:120] + 1) % 10
    assert check_chance(predicted, labels, 10) == []


def test_one_class_only():
    labels = torch.full((30,), 2)
    assert check_chance(torch.full((30,), 2), labels, 10) == []
    assert check_chance(torch.full((30,), 3), labels, 10)[0].evidence["by_chance"] == pytest.approx(0.1)


def test_too_few_images_at_all():
    expected = NotChecked("needs 20 images and more than one class; got 19 images and 2 classes")
    assert check_chance(numbers(19, 2), numbers(19, 2), 2) == expected
