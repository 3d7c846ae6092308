import re
from dataclasses import replace

import numpy as np
import pytest

from dubito.errors import GuardError, ValueRangeError
from dubito.guard import Guarantee
from dubito.guard.costs import CostMatrix
from dubito.guard.guarantee import smallest_feasible
from dubito.guard.thresholds import risk_threshold


def test_the_smallest_feasible_risk_passes_and_the_next_does_not() -> None:
    rng = np.random.default_rng(0)
    u = rng.random(600)
    wrong = rng.random(600) < 0.3 * u
    guarantee = Guarantee("risk", 0.0005, 0.95)
    lowest = smallest_feasible(guarantee, (u, wrong))
    assert lowest is not None
    assert risk_threshold(u, wrong, risk=lowest, confidence=0.95).accepted > 0
    with pytest.raises(GuardError):
        risk_threshold(u, wrong, risk=lowest - 0.001, confidence=0.95)
    assert smallest_feasible(guarantee, (u, wrong | True)) is None


def test_whether_more_images_would_help() -> None:
    wrong = np.ones(100, bool)
    feasible = Guarantee("risk", 0.05, 0.95).feasible((np.arange(100.0), wrong), 100)
    assert feasible.startswith(
        "With these images, no risk is feasible at confidence 0.95. More images of this kind may not"
    )
    u, wrong = np.zeros(100), np.arange(100) < 1
    many = np.zeros(400), np.tile(wrong, 4)
    assert Guarantee("risk", 0.01, 0.95).feasible(many, 800).endswith("more are wrong.")
    assert Guarantee("risk", 0.01, 0.95).feasible((u, wrong), 200).endswith("0.95.")  # 100 are too few to show that


def with_costs(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """u uniform in [0, 1]; with probability u^2 a loss that is uniform in [0, 0.6]."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    return u, 0.6 * rng.random(n) * (rng.random(n) < u**2)


def test_two_costs_are_tested_as_errors() -> None:
    u, loss = with_costs(1500, 2)
    wrong = loss > 0.3
    guarantee = Guarantee("cost", 0.5, 0.9, largest=5.0, two_costs=True)
    assert guarantee.threshold((u, 5.0 * wrong)) == Guarantee("risk", 0.1, 0.9).threshold((u, wrong))


def test_the_smallest_feasible_cost_is_reported_in_its_own_unit() -> None:
    u, loss = with_costs(1500, 1)
    strict = Guarantee("cost", 0.01, 0.9, largest=5.0)
    with pytest.raises(
        GuardError, match=r"at most 0\.01, where the largest is 5, needs at least \d+ calibration images"
    ):
        strict.threshold((u[:50], loss[:50]))
    words = re.fullmatch(
        r"With these images, risk=(\S+) is feasible at confidence 0\.9\.", strict.feasible((u, 5 * loss), 1500)
    )
    assert words is not None
    lowest = float(words[1])
    assert replace(strict, level=lowest).threshold((u, 5 * loss)).accepted > 0
    with pytest.raises(GuardError):
        replace(strict, level=lowest - 0.005).threshold((u, 5 * loss))
    two = Guarantee("cost", 0.01, 0.9, largest=5.0, two_costs=True)
    with pytest.raises(
        GuardError, match=r"cost 0 or 5, so a mean cost of at most 0\.01 is an error rate of at most 0\.002"
    ):
        two.threshold((u, 5.0 * (loss > 0.3)))
    assert " risk of 0.01 would take" in two.feasible((u, 5.0 * (u > 0.9)), 1500)


def test_a_mean_cost_is_below_the_largest() -> None:
    assert Guarantee("cost", 4.9, 0.9, largest=5.0).bound == 4.9 / 5
    for level in (5.0, 0.0):
        with pytest.raises(ValueRangeError, match=rf"risk must be .* in \(0, 5\); got {level}\. With costs, it is"):
            Guarantee("cost", level, 0.9, largest=5.0)


def test_a_risk_with_costs_is_in_their_unit() -> None:
    costs = CostMatrix.of([[0, 1], [5, 0]], 2)
    guarantee = Guarantee.of(0.9, risk=1.26, costs=costs, coverage=None)
    assert guarantee == Guarantee("cost", 1.26, 0.9, largest=5.0)
    with pytest.raises(ValueRangeError, match=r"costs go with a risk, .*; got coverage=0\.9\. Leave out one"):
        Guarantee.of(0.9, coverage=0.9, costs=costs)
