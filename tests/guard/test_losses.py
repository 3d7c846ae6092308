import itertools

import numpy as np
import pytest

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.costs import CostMatrix
from dubito.guard.losses import STAKES, fewest_images, log_evidence, mean_bound, mean_interval
from dubito.guard.thresholds import NO_LIMIT, cost_threshold


def test_evidence_by_hand() -> None:
    # One loss of 0 and one of 1, r = 0.2: stake c gives (1 + c 0.2 / 0.8) (1 - c 0.8 / 0.8) = (1 + c / 4) (1 - c).
    expected = np.log(np.mean((1 + STAKES / 4) * (1 - STAKES)))
    assert log_evidence(np.array([0.0, 1.0]), 0.2)[2] == pytest.approx(expected)
    assert log_evidence(np.array([1.0, 0.0]), 0.2)[2] == pytest.approx(expected)  # whatever the order


def test_the_mean_evidence_is_one_where_the_mean_is_as_tested() -> None:
    """Over all outcomes of six losses in {0, 1/2, 1} with mean 0.3, exactly."""
    values, chances = (0.0, 0.5, 1.0), (0.5, 0.4, 0.1)  # 0.4 / 2 + 0.1 = 0.3
    total = 0.0
    for outcome in itertools.product(range(3), repeat=6):
        chance = np.prod([chances[one] for one in outcome])
        total += chance * np.exp(log_evidence(np.array([values[one] for one in outcome]), 0.3)[-1])
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize(("mean", "full"), [(0.05, 0), (0.05, 8), (0.3, 2)])
def test_the_fewest_images_are_the_fewest(mean: float, full: int) -> None:
    n = fewest_images(mean, 0.95, full)
    losses = np.append(np.ones(full), np.zeros(n - full))
    assert log_evidence(losses, mean)[-1] >= np.log(20) > log_evidence(losses[:-1], mean)[-1]


def test_bounds_hold_and_are_sharper_where_losses_vary_little() -> None:
    rng = np.random.default_rng(0)
    draws = rng.beta(1, 9, (200, 200))  # mean 0.1
    bounds = np.array([mean_bound(one, 0.9) for one in draws])
    assert np.mean(bounds < 0.1) <= 0.1 + 2.6 * (0.09 / 200) ** 0.5
    hoeffding = draws.mean(1) + np.sqrt(np.log(10) / 400)
    assert np.median(bounds) < np.median(hoeffding) - 0.03
    low, high = mean_interval(draws[0], 0.95)[1:3]
    assert low < draws[0].mean() < high


def drawn(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """u uniform in [0, 1]; with probability u^2 a loss that is uniform in [0, 0.6]: mean 0.3 u^2, below t 0.1 t^2."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    return u, 0.6 * rng.random(n) * (rng.random(n) < u**2)


def threshold(u: np.ndarray, loss: np.ndarray, cost: float = 0.05) -> float:
    """Nothing is accepted where nothing can be guaranteed."""
    try:
        return cost_threshold(u, loss, cost=cost, confidence=0.9).value
    except GuardError:
        return 0.0


def test_if_all_images_may_be_accepted_they_are() -> None:
    """Below 0.5, the mean cost is 0.025; what is above is novel. At a cost of 0.024, all may rarely be accepted."""

    def known(seed: int) -> tuple[np.ndarray, np.ndarray]:
        u, loss = drawn(1200, seed)
        return np.where(u < 0.5, u, np.inf), loss

    values = [threshold(*known(seed), 0.05) for seed in range(20)]
    assert values.count(NO_LIMIT) == 20
    risky = np.array([threshold(*known(seed), 0.024) for seed in range(300)]) > (0.024 / 0.1) ** 0.5
    assert risky.mean() <= 0.1 + 2.6 * (0.09 / 300) ** 0.5


@pytest.mark.parametrize("n", [600, 2000])
def test_the_mean_cost_is_kept_in_as_many_draws_as_stated(n: int) -> None:
    values = [threshold(*drawn(n, seed)) for seed in range(200)]
    values = np.clip(values, 0.0, 1.0)
    true = 0.1 * values**2
    assert np.mean(true > 0.05) <= 0.1 + 2.6 * (0.09 / 200) ** 0.5
    best = (0.05 / 0.1) ** 0.5
    assert np.mean(values) > (0.6 if n == 600 else 0.85) * best


def test_a_threshold_by_brute_force() -> None:
    u, loss = drawn(1500, 1)
    order = np.argsort(u)
    start = max(fewest_images(0.05, 0.9, full) for full in range(9) if fewest_images(0.05, 0.9, full) <= 750)
    k = start
    while log_evidence(loss[order[:k]], 0.05)[-1] >= np.log(10):
        k += 1
    result = cost_threshold(u, loss, cost=0.05, confidence=0.9)
    assert (result.accepted, result.errors) == (k - 1, (loss[order[: k - 1]] > 0).sum())
    assert u[order[k - 2]] <= result.value < u[order[k - 1]]


def test_what_cannot_be_kept_is_an_error() -> None:
    with pytest.raises(GuardError, match=r"needs at least 109 calibration images"):
        cost_threshold(np.arange(108.0), np.zeros(108), cost=0.05, confidence=0.95)
    with pytest.raises(GuardError, match=r"mean cost at or below 0\.5 .* begin, cost 3 on average"):
        cost_threshold(np.arange(900.0), np.full(900, 3.0), cost=0.5, largest=10.0, confidence=0.95)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ([[0, 1]], r"matrix \(2, 2\).* got \(1, 2\)"),
        ([[0, -1], [1, 0]], "finite numbers from 0 on"),
        ([[0, np.nan], [1, 0]], "finite numbers from 0 on"),
        ([[0, 0], [0, 0]], "some above 0"),
        ([["a", "b"], ["c", "d"]], "matrix of numbers"),
    ],
)
def test_matrices_are_checked(costs: list, words: str) -> None:
    with pytest.raises(ValueRangeError, match=words):
        CostMatrix.of(costs, 2)
