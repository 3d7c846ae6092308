"""Draws of images to label: as many as requested, each with its probability, and bets on them that stay fair."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from dubito.guard import Guard
from dubito.guard.label_draws import draw, largest_weight, strata_of
from dubito.guard.martingale import Outcomes, RateTest

from .world import blobs


def test_probabilities_by_hand():
    # sqrt = 0.1, 0.3, 0.2 of mean 0.2: 1/4 + 3/4 (1/2, 3/2, 1) = 0.625, 1.375, 1; their sum is 3, for one of three / 3
    rng = np.random.default_rng(0)
    places = [draw(np.array([0.01, 0.09, 0.04]), 1, rng) for _ in range(1500)]
    probabilities = {place: p for one in places for place, p in one.items()}
    assert [probabilities[place] for place in range(3)] == pytest.approx([0.625 / 3, 1.375 / 3, 1 / 3])
    counts = [sum(place in one for one in places) for place in range(3)]
    assert chisquare(counts, [1500 * probabilities[place] for place in range(3)]).pvalue > 0.001


@pytest.mark.parametrize(("images", "count"), [(15, 5), (7, 6), (5, 5), (1, 1), (40, 1)])
def test_as_many_as_requested_with_their_probabilities(images, count):
    rng = np.random.default_rng(1)
    expected = rng.random(images) ** 4 + 1e-3
    drawn = [draw(expected, count, rng) for _ in range(800)]
    assert {len(one) for one in drawn} == {count}
    # the sum of 1 / pi over the drawn images is unbiased for the number of images
    assert np.mean([sum(1 / p for p in one.values()) for one in drawn]) == pytest.approx(images, rel=0.06)
    assert all(
        1 / p <= largest_weight(expected.tolist(), count / images) * (1 + 1e-9) for one in drawn for p in one.values()
    )


def test_strata_are_fifths_of_the_accepted_calibration_images():
    guard = Guard.fit(None, blobs(1500, noise=1.6), risk=0.2, scores=["entropy"], sets=False)
    edges, strata = strata_of(guard)
    u, wrong = guard.calibration.uncertainty, guard.calibration.wrong
    accepted = u <= guard.threshold.value
    parts = np.bincount(np.searchsorted(edges, u[accepted]))
    assert len(edges) == 4
    assert parts.min() > accepted.sum() / 5 - 3
    first = accepted & (u <= edges[0])
    assert strata[0] == pytest.approx([30, 30 * (wrong[first].sum() + 0.5) / (first.sum() + 1)])
    rates = [errors / labels for labels, errors in strata]
    assert rates[-1] > 2 * rates[0]


def test_false_alarms_and_intervals_of_drawn_labels():
    """At a rate of exactly the bound, with errors where the uncertainty is high, alarms are as rare as guaranteed."""
    rng, alarms, outside = np.random.default_rng(0), 0, 0
    by_stratum = np.array([0.01, 0.02, 0.05, 0.12, 0.3])  # mean 0.1
    for _ in range(100):
        test, alarm, missed = RateTest(0.1), False, False
        for _ in range(25):
            stratum = rng.integers(5, size=15)
            wrong = rng.random(15) < by_stratum[stratum]
            drawn = draw(by_stratum[stratum], 5, rng)
            y, weights = [bool(wrong[place]) for place in drawn], [1 / p for p in drawn.values()]
            largest = largest_weight(by_stratum.tolist(), 1 / 3)
            test.update(Outcomes.of(y, weights, images=15, largest=largest))
            low, high = test.interval.at(0.1)
            alarm |= test.capital.log_total >= math.log(10)
            missed |= not low <= 0.1 <= high
        alarms, outside = alarms + alarm, outside + missed
    assert binomtest(alarms, 100, 0.1, alternative="greater").pvalue > 0.01
    assert binomtest(outside, 100, 0.1, alternative="greater").pvalue > 0.01
    assert high - low < 0.25
