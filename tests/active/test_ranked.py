"""By the uncertainty alone: the order, and the probabilities that the papers state."""

import numpy as np
import pytest

from dubito.active.ranked import stochastic, top
from dubito.errors import ValueRangeError


def test_top_takes_the_highest_and_ties_by_place():
    assert top(np.array([0.2, 0.9, 0.9, 0.1]), 2).tolist() == [1, 2]
    assert top(np.array([1.0, 2.0]), 5).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("softmax", np.exp(2 * np.array([0.5, 1.0, 0.0]))),  # exp(beta u)
        ("power", np.array([0.5, 1.0, 0.0]) ** 2),  # u^beta
        ("softrank", np.array([2.0, 1.0, 3.0]) ** -2),  # r^-beta
    ],
)
def test_the_first_of_a_batch_has_the_stated_probabilities(kind, weights):
    rng = np.random.default_rng(0)
    u = np.array([0.5, 1.0, 0.0])
    first = np.bincount([stochastic(u, 1, kind, beta=2.0, rng=rng)[0] for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(first, weights / weights.sum(), atol=0.025)


@pytest.mark.parametrize("kind", ["softmax", "power", "softrank"])
def test_no_image_comes_twice_and_a_large_beta_is_top(kind):
    u = np.random.default_rng(1).random(50) + 0.1
    drawn = stochastic(u, 30, kind, beta=1.0, rng=np.random.default_rng(2))
    assert len(set(drawn.tolist())) == 30
    assert stochastic(u, 5, kind, beta=1e9, rng=np.random.default_rng(2)).tolist() == top(u, 5).tolist()


def test_power_takes_zeros_last_and_refuses_negative_scores():
    u = np.array([0.0, 0.3, 0.0, 0.2])
    assert set(stochastic(u, 2, "power", beta=1.0, rng=np.random.default_rng(0)).tolist()) == {1, 3}
    drawn = stochastic(np.zeros(100), 10, "power", beta=1.0, rng=np.random.default_rng(0))
    assert max(drawn) > 50  # not the first ten of the table
    with pytest.raises(ValueRangeError, match=r"must not be negative; got -1. Choose 'softrank'"):
        stochastic(np.array([-1.0, 1.0]), 1, "power", beta=1.0, rng=np.random.default_rng(0))
