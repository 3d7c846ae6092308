"""Orders and probabilities that the papers state, and diverse batches by brute force."""

import numpy as np
import pytest
import torch

from dubito.active import strategies as module
from dubito.active.strategies import Distances, diverse, stochastic, top
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
    with pytest.raises(ValueRangeError, match=r"are not negative; got -1. Choose 'softrank'"):
        stochastic(np.array([-1.0, 1.0]), 1, "power", beta=1.0, rng=np.random.default_rng(0))


@pytest.fixture
def feature():
    return torch.randn(60, 5, generator=torch.Generator().manual_seed(0)) + 100.0  # a common offset loses no digits


def all_pairs(feature):
    return torch.cdist(feature.double(), feature.double()).numpy()


def test_distances_are_those_to_the_nearest_centre(feature, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 7)
    monkeypatch.setattr(module, "_CENTRES", 2)
    distances = Distances(feature)
    assert torch.isinf(distances.squared).all()
    distances.add(np.array([3, 10, 20]))
    expected = all_pairs(feature)[:, [3, 10, 20]].min(axis=1)
    np.testing.assert_allclose(distances.squared.sqrt(), expected, atol=1e-3)
    assert distances.squared[[3, 10, 20]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["core_set", "weighted"])
def test_greedy_choices_are_those_of_brute_force(feature, kind):
    pairs, u = all_pairs(feature), np.random.default_rng(3).normal(size=60)
    free = np.ones(60, dtype=bool)
    free[[0, 1]] = False
    weight = (u - u[free].min()) / (u[free].max() - u[free].min()) if kind == "weighted" else np.ones(60)
    chosen, expected = [0, 1], []
    for _ in range(8):
        value = weight * pairs[:, chosen].min(axis=1)
        value[chosen] = -1
        expected.append(int(value.argmax()))
        chosen.append(expected[-1])
    distances = Distances(feature)
    distances.add(np.array([0, 1]))
    assert diverse(distances, kind, free, 8, u=u, rng=np.random.default_rng(0)).tolist() == expected


def test_images_of_far_clusters_are_distinguished():
    """Two clusters 400 apart, whose images differ by thousandths: products of features would lose them."""
    draw = torch.Generator().manual_seed(1)
    feature = torch.randn(40, 8, generator=draw) * 1e-3 + torch.tensor([100.0, -100.0]).repeat(20)[:, None]
    pairs, chosen = all_pairs(feature), [0, 1]
    for _ in range(5):
        chosen.append(int(np.where(np.isin(range(40), chosen), -1, pairs[:, chosen].min(axis=1)).argmax()))
    distances, free = Distances(feature), np.arange(40) > 1
    distances.add(np.array([0]))
    distances.add(np.array([1]))
    assert diverse(distances, "core_set", free, 5, u=None, rng=np.random.default_rng(0)).tolist() == chosen[2:]


def test_seeding_draws_by_weight_times_squared_distance():
    feature = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    u = np.array([0.0, 1.0, 0.5, 1.0])
    free = np.array([False, True, True, True])
    drawn = []
    for seed in range(1000):
        distances = Distances(feature)
        distances.add(np.array([0]))
        drawn.append(diverse(distances, "seeding", free, 1, u=u, rng=np.random.default_rng(seed))[0])
    # u of the free rows moved to 0..1: 1, 0, 1; times 1, 4, 9.
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 1000, [0, 0.1, 0, 0.9], atol=0.03)


def test_without_labels_core_set_begins_at_the_mean_and_the_others_at_the_most_uncertain(feature):
    free, u = np.ones(60, dtype=bool), np.arange(60.0)
    middle = int((feature - feature.mean(0)).square().sum(1).argmin())
    rng = np.random.default_rng(0)
    assert diverse(Distances(feature), "core_set", free, 1, u=None, rng=rng).tolist() == [middle]
    assert diverse(Distances(feature), "weighted", free, 1, u=u, rng=rng).tolist() == [59]


def test_duplicates_are_all_taken_before_any_comes_twice():
    feature = torch.ones(5, 2)
    for kind in ("core_set", "weighted", "seeding"):
        rows = diverse(Distances(feature), kind, np.ones(5, dtype=bool), 5, u=np.zeros(5), rng=np.random.default_rng(0))
        assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]


def test_nan_is_an_error():
    with pytest.raises(ValueRangeError, match="acquire: features: 1 of 2 values are NaN"):
        Distances(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]))
