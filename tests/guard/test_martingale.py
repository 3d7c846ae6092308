"""Tests that may be looked at at any time: against sums over all starts, by brute force, and by simulation."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binomtest, kstest

from dubito.guard.martingale import Capital, ExchangeabilityTest, Outcomes, RateInterval, RateTest, tie_breakers


def counts(values: np.ndarray, bins: int = 20) -> np.ndarray:
    return np.bincount((values * bins).astype(int), minlength=bins)


def test_capital_is_spread_over_starts_and_jumps():
    rng = np.random.default_rng(0)
    log_f = rng.normal(0, 0.1, size=(50, 3))
    capital, survival = Capital(3), [math.log(20) / math.log(20 + t) for t in range(51)]
    by_start: list[np.ndarray] = []
    for t, row in enumerate(log_f):
        by_start.append(np.full(3, (survival[t] - survival[t + 1]) / 3))
        by_start = [one * np.exp(row) for one in by_start]
        capital.settle(row)
        assert capital.log_total == pytest.approx(math.log(survival[t + 1] + np.sum(by_start)))
        by_start = [0.997 * one + 0.001 * one.sum() for one in by_start]  # each start jumps by itself
    assert capital.since == max((log_f[start:, bet].sum(), start) for bet in range(3) for start in range(50))[1]


def test_p_values_by_definition():
    rng = np.random.default_rng(0)
    calibration, new = rng.random(50), rng.random(40)
    test = ExchangeabilityTest(counts(calibration))
    seen = list((calibration * 20).astype(int))
    for n, bin_ in enumerate((new * 20).astype(int)):
        seen.append(bin_)
        (u,) = tie_breakers(3, n, 1)
        expected = (np.sum(np.array(seen) > bin_) + u * np.sum(np.array(seen) == bin_)) / len(seen)
        assert test.update(int(bin_), u) == pytest.approx(expected)


def test_p_values_of_exchangeable_images_are_uniform_and_independent():
    rng = np.random.default_rng(1)
    test = ExchangeabilityTest(counts(rng.random(20) ** 2))
    p = np.array([test.update(int(one * 20), rng.random()) for one in rng.random(3000) ** 2])
    assert kstest(p, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(p[:-1], p[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("ordered", [True, False])
def test_bets_are_fair_whatever_came_before(ordered):
    rng = np.random.default_rng(2)
    test = ExchangeabilityTest(np.array([50, 50]), ordered=ordered)
    for _ in range(40):
        test.update(0, rng.random())
    edges = np.linspace(0, 1, 21)
    for bet in range(13 if ordered else 3):
        parts = [
            quad(lambda p, bet=bet: math.exp(test.log_bets(p)[bet]), low, high, limit=200)[0]
            for low, high in pairwise(edges)
        ]
        assert sum(parts) == pytest.approx(1, abs=1e-4)


def test_false_alarms_are_rare_over_the_whole_life():
    alarms = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        test = ExchangeabilityTest(counts(rng.random(60)))
        best = -np.inf
        for one in rng.random(200):
            test.update(int(one * 20), rng.random())
            best = max(best, test.capital.log_total)
        alarms += best >= math.log(10)
    assert binomtest(alarms, 120, 0.1, alternative="greater").pvalue > 0.01


@pytest.mark.parametrize(("power", "most"), [(2.0, 220), (4.0, 80), (0.5, 220)])
def test_changes_are_found_and_dated(power, most):
    rng = np.random.default_rng(0)
    test = ExchangeabilityTest(counts(rng.random(1000), 200))
    for one in rng.random(500):
        test.update(int(one * 200), rng.random())
    assert test.capital.log_total < math.log(100)
    for one in rng.random(most) ** (1 / power):
        test.update(int(one * 200), rng.random())
    assert test.capital.log_total >= math.log(100)
    assert abs(test.capital.since - 500) < 150


def test_classes_have_no_order():
    rng = np.random.default_rng(0)
    test = ExchangeabilityTest(np.full(10, 100), ordered=False)
    for one in [*rng.integers(10, size=300), *rng.choice([3, 7], size=60)]:
        test.update(int(one), rng.random())
    assert test.capital.log_total > math.log(100)
    assert 290 <= test.capital.since <= 310


def test_a_rate_above_its_bound_is_found_and_one_at_it_is_not():
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(200):
        test, best = RateTest(0.1), -np.inf
        for x in rng.random(300) < 0.1:
            test.update(Outcomes.of([bool(x)]))
            best = max(best, test.capital.log_total)
        alarms += best >= math.log(10)
    assert binomtest(alarms, 200, 0.1, alternative="greater").pvalue > 0.01
    test, delays = RateTest(0.1), 0
    expected, rate = test.needed(0.01)
    assert rate == 0.2
    while test.capital.log_total < math.log(100):
        test.update(Outcomes.of([bool(rng.random() < 0.2)]))
        delays += 1
    assert 0.3 * expected < delays < 3 * expected
    assert test.observed == pytest.approx(0.2, abs=0.08)


@pytest.mark.parametrize("kind", ["images", "classes", "rate"])
def test_a_test_that_is_saved_continues_alike(kind):
    def fresh():
        return RateTest(0.05) if kind == "rate" else ExchangeabilityTest(np.full(5, 9), ordered=kind == "images")

    def step(test, n):
        return (
            test.update(Outcomes.of([None if n % 11 == 0 else n % 7 == 0]))
            if kind == "rate"
            else test.update(n % 5, tie_breakers(0, n, 1)[0])
        )

    one, other = fresh(), fresh()
    for n in range(40):
        step(one, n)
        step(other, n)
        other = type(other).from_json(json.loads(json.dumps(other.to_json())))
    assert other.to_json() == one.to_json()


def test_drawn_images_are_settled_together_at_their_fair_value():
    # Of 3 images 2 were drawn, at 1/2 and at 1: x = 2, 0, 0. Bets l = 2/3 (q - r) / (r (1 - 2/3 r)), r = 0.1, q = 0.2:
    # l = (2/3) 0.1 / (0.1 (1 - 0.2/3)) = 0.7143; f = (1 + l 1.9) (1 - 0.1 l)²
    test = RateTest(0.1)
    test.update(Outcomes.of([True, False], [2.0, 1.0], images=3, largest=2.0))
    bet = (2 / 3) / (1 - 0.2 / 3)
    assert test.capital.cusum[2] == pytest.approx(math.log((1 + 1.9 * bet) * (1 - 0.1 * bet) ** 2))
    assert (test.observed, test.known, test.capital.seen) == (pytest.approx(2 / 3), 2, 2)
    test.update(Outcomes.of([True, True], [2.0, 2.0], images=3, largest=2.0))
    assert test.observed == 1.0  # x = 2, 2, 0 on top: 6 / 6 is the most that a rate can be
    test.update(Outcomes.of([True], [2.0], images=1, largest=2.0))
    assert test.observed == 1.0  # 8 / 7


def test_a_missing_outcome_is_right_for_the_lower_bound_and_wrong_for_the_upper_one():
    # r = 0.1, q = 0.2: l = 0.1 / 0.09. 8 outcomes are 0, 2 are missing: f = (1 - 0.1 l)^10, whatever the two are
    test, right, wrong = RateTest(0.1), RateTest(0.1), RateTest(0.1)
    test.update(Outcomes.of([False] * 8 + [None] * 2))
    right.update(Outcomes.of([False] * 10))
    wrong.update(Outcomes.of([False] * 8 + [True] * 2))
    assert test.capital.cusum[2] == pytest.approx(10 * math.log(1 - 0.1 * 0.1 / 0.09))
    assert (test.observed, test.known) == (0.0, 8)
    assert test.interval.at(0.1) == (right.interval.at(0.1)[0], wrong.interval.at(0.1)[1])
    assert wrong.interval.at(0.1)[1] > right.interval.at(0.1)[1] + 0.1
    unknown = RateTest(0.1)
    unknown.update(Outcomes.of([None]))
    assert (unknown.observed, unknown.known) == (None, 0)


def test_the_interval_of_images_that_were_all_drawn_is_where_two_mixtures_reach_two_over_alpha():
    interval = RateInterval()
    for n in range(100):
        interval.update(Outcomes.of([n % 10 == 0]))
    low, high = interval.at(0.05)
    a = 0.01 * 2.0 ** np.arange(11)
    b = a / (1 + a)
    assert np.mean(((1 + a) / (1 + a * low)) ** 10 * (1 / (1 + a * low)) ** 90) == pytest.approx(40, rel=1e-3)
    assert np.mean(((1 - b) / (1 - b * high)) ** 10 * (1 / (1 - b * high)) ** 90) == pytest.approx(40, rel=1e-3)
    assert RateInterval().at(0.05) == (0.0, 1.0)


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_the_interval_holds_at_all_times_at_once(rate):
    rng, missed = np.random.default_rng(0), 0
    for _ in range(100):
        interval, outside = RateInterval(), False
        for n, x in enumerate(rng.random(200) < rate, 1):
            interval.update(Outcomes.of([bool(x)]))
            if n in (5, 20, 50, 100, 200):
                low, high = interval.at(0.1)
                outside |= not low <= rate <= high
        missed += outside
    assert binomtest(missed, 100, 0.1, alternative="greater").pvalue > 0.01
    assert high - low < 0.25


def test_lots_depend_on_their_number_alone():
    assert tie_breakers(0, 5, 3) == tie_breakers(0, 5, 3)
    drawn = [one for seed in (0, 1) for n in range(100) for one in tie_breakers(seed, n, 3)]
    assert len(set(drawn)) == 600
    assert kstest(drawn, "uniform").pvalue > 0.01
