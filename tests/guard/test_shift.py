from itertools import combinations

import numpy as np
import pytest
import torch

from dubito.guard import Guard, Observations, find_shift
from dubito.guard.shift import LEVEL, hypergeometric_p, sets_p

from .world import blobs

pytestmark = pytest.mark.usefixtures("one_thread")


def observed(u, predicted=None, density=None):
    u = np.asarray(u, dtype=np.float64)
    predicted = np.zeros(len(u), dtype=np.int64) if predicted is None else np.asarray(predicted)
    return Observations(u, predicted, density)


def test_the_p_value_counts_all_ways_to_choose_the_new_images():
    """Of 7 images, 3 are new; those of a set are 0, 1, 2 and 3."""
    chosen = [sum(one < 4 for one in new) for new in combinations(range(7), 3)]
    for x in range(4):
        tail = min(np.mean([c <= x for c in chosen]), np.mean([c >= x for c in chosen]))
        assert hypergeometric_p([x], [4], 3, 7)[0] == pytest.approx(min(1, 2 * tail))


def test_sets_that_can_never_differ_cost_nothing():
    """Of 40 images, 20 are new, all 10 of one class; 30 other classes of one image each allow no p below 1."""
    x, size = np.array([10] + [1, 0] * 5 + [0] * 20), np.array([10] + [1] * 30)
    p, best = sets_p(x, size, 20, 40)
    assert best == 0
    assert p == pytest.approx(hypergeometric_p([10], [10], 20, 40)[0])


def test_false_alarms_are_as_rare_as_the_level_says():
    """Uncertainties with ties, classes of all frequencies: 400 draws of images that are alike."""
    draw = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        u = draw.normal(size=150).round(1)
        predicted = draw.geometric(0.2, size=150)
        both = [observed(u[part], predicted[part], u[part] ** 2) for part in (slice(0, 100), slice(100, 150))]
        alarms += find_shift(*both, threshold=0.0, level=0.1).detected
    assert 0 < alarms <= 0.1 * 400


def test_few_images_raise_no_alarm_whatever_they_are():
    calibration = observed(np.arange(100.0), density=np.arange(100.0))
    for n in (0, 1, 4):
        extreme = observed(np.full(n, np.inf), np.full(n, 7), np.full(n, 1e9))
        assert not find_shift(calibration, extreme, threshold=50.0).detected
    five = observed(np.full(5, np.inf), np.full(5, 7), np.full(5, 1e9))
    assert find_shift(calibration, five, threshold=50.0).detected


def test_each_test_finds_its_own_shift():
    calibration = observed(np.arange(200.0), np.arange(200) % 4, np.arange(200.0))
    like = {"u": np.arange(0, 200, 2.0), "predicted": np.arange(100) % 4, "density": np.arange(1, 200, 2.0)}
    assert not find_shift(calibration, observed(**like), threshold=100.0).detected
    shifts = {
        "acceptance": {"u": np.arange(100.0)},
        "density": {"density": np.arange(0, 100, 1.0)},  # more usual than the calibration images
        "classes": {"predicted": np.arange(100) % 2},
    }
    for name, change in shifts.items():
        shift = find_shift(calibration, observed(**like | change), threshold=100.0, classes=["a", "b, c", "d", "e"])
        assert [test.name for test in shift.tests if test.rejected] == [name]
        assert shift.findings()[0] == "These images are not like those: the guarantee says nothing about them."
        assert shift.to_dict()["detected"]
    assert " is predicted for 0 % of them and for 25 % of the calibration images (p = 1e-09)." in shift.findings()[1]


def test_a_shift_in_words():
    calibration, new = observed(np.arange(100.0)), observed(np.arange(50, 150.0))
    shift = find_shift(calibration, new, threshold=74.0)
    assert shift.tests[0].finding == (
        "25 % of them and 75 % of the calibration images are accepted; 0 % of them and 50 % of the calibration images "
        "are among the least uncertain 25 % of both together"
    )
    assert str(shift).startswith("100 images: not like the 100 calibration images")


def test_without_a_density_the_others_are_tested():
    shift = Guard.fit(None, blobs(300), 0.3, scores=["entropy"], novel=0.0).decide(blobs(100, seed=1)).shift
    assert [test.name for test in shift.tests] == ["acceptance", "classes"]
    assert (shift.images, shift.calibrated_on, shift.level) == (100, 260, LEVEL)


def test_a_guard_raises_no_alarm_for_its_own_kind():
    """60 guards, fitted and tried on images of one kind: at level 0.01, more than 4 alarms have probability 0.0002."""
    alarms = 0
    for seed in range(60):
        guard = Guard.fit(None, blobs(300, seed=seed), 0.3, scores=["max_probability"], sets=False)
        alarms += guard.decide(blobs(150, seed=1000 + seed)).shift.detected
    assert alarms <= 4


def test_one_class_alone_is_not_like_the_mixture():
    guard, new = Guard.fit(None, blobs(300), 0.3), blobs(300, seed=1)
    only = guard.decide(new.rows(new.label == 2))
    assert [test.name for test in only.shift.tests if test.rejected] == ["classes"]
    assert "Class 2 is predicted for" in str(only)
    assert torch.equal(only.accept, guard.decide(new).accept[new.label == 2])  # verdicts stay as they are
