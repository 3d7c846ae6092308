"""Thresholds: coverage, errors and bounds against counting, and risk targets against the guard's own test."""

import numpy as np
import pytest
from scipy.stats import beta

from dubito.errors import GuardError
from dubito.explore.thresholds import risk_target, threshold_curve
from dubito.guard.thresholds import risk_threshold

ALL = np.ones(5, dtype=bool)


def test_every_threshold_is_counted_by_hand():
    u = np.array([0.1, 0.4, 0.2, 0.4, 0.3], dtype=np.float32)
    wrong = np.array([False, True, False, False, True])
    curve = threshold_curve(u, wrong, ALL)
    assert curve["thresholds"] == pytest.approx([0.1, 0.2, 0.3, 0.4])  # the two equal ones are accepted together
    assert (curve["accepted"], curve["errors"], curve["judged"]) == ([1, 2, 3, 5], [0, 0, 1, 2], [1, 2, 3, 5])
    # One-sided Clopper-Pearson: the 95 % quantile of Beta(e + 1, k - e).
    expected = beta.ppf(0.95, [1, 1, 2, 3], [1, 2, 2, 3])
    np.testing.assert_allclose(curve["bound"], expected, rtol=1e-9)


def test_images_without_labels_count_as_accepted_and_not_as_right():
    u = np.arange(4, dtype=np.float32)
    labelled = np.array([True, False, True, False])
    curve = threshold_curve(u, np.array([False, True, True, True]), labelled)
    assert (curve["accepted"], curve["judged"], curve["errors"]) == ([1, 2, 3, 4], [1, 1, 2, 2], [0, 0, 1, 1])
    without = threshold_curve(u, labelled, np.zeros(4, dtype=bool))
    assert without["errors"] is without["bound"] is None
    assert "Without labels" in without["words"]


def test_many_images_have_a_thousand_steps_and_the_one_that_is_asked_for():
    u = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    wrong = np.zeros(len(u), dtype=bool)
    curve = threshold_curve(u, wrong, ~wrong, at=0.123)
    assert 1000 <= len(curve["thresholds"]) <= 1001
    largest = float(u[u <= np.float32(0.123)].max())
    assert largest in curve["thresholds"]
    assert curve["accepted"][curve["thresholds"].index(largest)] == int((u <= np.float32(0.123)).sum())
    assert curve["accepted"][-1] == len(u)


def test_what_is_never_accepted_has_no_threshold():
    curve = threshold_curve(np.array([1.0, np.inf], dtype=np.float32), np.zeros(2, bool), np.ones(2, bool))
    assert (curve["thresholds"], curve["accepted"], curve["rows"]) == ([1.0], [1], 2)
    assert threshold_curve(np.array([np.inf], dtype=np.float32), ALL[:1], ALL[:1])["thresholds"] == []


def test_a_risk_target_is_the_guards_own_test():
    draw = np.random.default_rng(0)
    u = draw.random(500).astype(np.float32)
    wrong = draw.random(500) < u / 2
    target = risk_target(u, wrong, np.ones(500, bool), risk=0.2)
    expected = risk_threshold(u.astype(np.float64), wrong, risk=0.2, confidence=0.95)
    assert (target["accepted"], target["errors"]) == expected[1:3]
    assert (u <= np.float32(target["threshold"])).sum() == target["accepted"]  # as the page compares
    assert "at most 20 % of those accepted are wrong (confidence 95 %)" in target["words"]


def test_an_infeasible_risk_says_what_is_feasible():
    u, wrong = np.arange(200, dtype=np.float32), np.arange(200) % 5 == 0
    with pytest.raises(GuardError, match=r"With these images, .* feasible at confidence 0.95"):
        risk_target(u, wrong, np.ones(200, bool), risk=0.01)
    with pytest.raises(GuardError, match="needs labels of the model's classes"):
        risk_target(u, wrong, np.zeros(200, bool), risk=0.1)
