"""Accuracy at chance: the burden of proof lies with the finding, and the exact test is that of scipy."""

import pytest
import torch
from scipy.stats import beta, hypergeom

from dubito.audit import labels as subject
from dubito.audit.finding import NotChecked
from dubito.audit.labels import _permutation_p, check_chance
from dubito.cache.order import agreement
from tests.audit.drawn import numbers


def two_classes(n: int, positives: int, found: int, alarms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels: so many positives, so many of them found, so many false alarms."""
    labels, predicted = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    labels[:positives] = 1
    predicted[:found] = 1
    predicted[positives : positives + alarms] = 1
    return predicted, labels


def test_random_predictions_are_found():
    found = [check_chance(numbers(500, 10, 100 + seed), numbers(500, 10, seed), 10) for seed in range(20)]
    wrong = [outcome for outcome in found if isinstance(outcome, list) and outcome]
    assert len(wrong) >= 19
    assert all(outcome[0].severity == "wrong" for outcome in wrong)
    assert "% confidence); predictions unrelated to the labels would give" in wrong[0][0].what


def test_a_fair_model_on_few_images_is_not_called_wrong():
    """Twenty images, 15 of them right: p = 0.035, which proves nothing in either direction."""
    outcome = check_chance(*two_classes(20, 10, found=8, alarms=3), 2)
    assert outcome == NotChecked("20 images are too few to distinguish an accuracy of 75.0 % from chance, 50.0 %")


def test_a_fair_model_of_a_rare_class_is_not_called_wrong():
    """Five positives in 500: three found and three false alarms. Ignoring the counts, that looks like chance."""
    assert check_chance(*two_classes(500, 5, found=3, alarms=3), 2) == []


@pytest.mark.parametrize(("positives", "found", "alarms"), [(5, 1, 3), (2, 0, 1)])
def test_a_rare_class_that_is_missed_proves_nothing(positives, found, alarms):
    outcome = check_chance(*two_classes(500, positives, found=found, alarms=alarms), 2)
    assert isinstance(outcome, NotChecked)
    assert outcome.reason.startswith("500 images are too few")


@pytest.mark.parametrize("positives", [1, 20, 50])
def test_predictions_that_are_all_the_most_common_label_are_left_to_the_check_for_one_class(positives):
    """However many positives are missed: a permutation of equal predictions is always the same."""
    outcome = check_chance(*two_classes(500, positives, found=0, alarms=0), 2)
    assert outcome == NotChecked(
        "every prediction is the most common label, so any permutation of them would be as right"
    )


def test_no_better_than_chance_is_wrong_with_few_images_too():
    [finding] = check_chance(*two_classes(40, 20, found=9, alarms=11), 2)
    assert finding.evidence["accuracy"] == pytest.approx(0.45)
    assert finding.evidence["by_chance"] == pytest.approx(0.5)
    # Clopper and Pearson: the largest p with P(X <= 18) >= 0.01.
    assert finding.evidence["at_most"] == pytest.approx(beta.ppf(0.99, 19, 22), rel=1e-9)


@pytest.mark.parametrize(("found", "alarms"), [(8, 3), (6, 4), (10, 9)])
def test_permuting_is_the_hypergeometric_test_for_two_classes(found, alarms):
    """Right are 2 found + constant, and found is hypergeometric: 20 images, 10 positives, so many predicted."""
    predicted, labels = two_classes(20, 10, found=found, alarms=alarms)
    exact = hypergeom.sf(found - 1, 20, 10, found + alarms)
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
