"""Orders and probabilities that the papers state, diverse batches by brute force, BatchBALD by all joint labels."""

from itertools import combinations, product

import numpy as np
import pytest
import torch

from dubito.active import strategies as module
from dubito.active.strategies import Distances, JointLabels, batch_bald, diverse, stochastic, top
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


def test_images_of_far_clusters_are_told_apart():
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


def bald(predicted, information: np.ndarray, count: int, samples: int = 1000, seed: int = 0):
    return batch_bald(predicted, information, count, samples, np.random.default_rng(seed))


def members(n: int, m: int = 4, c: int = 3, seed: int = 0, sharp: float = 2.0) -> np.ndarray:
    logits = sharp * np.random.default_rng(seed).normal(size=(n, m, c))
    p = np.exp(logits)
    return p / p.sum(-1, keepdims=True)


def joint_information(p: np.ndarray) -> float:
    """I[y_1 ... y_b; M] by its definition, over all c^b joint labels."""
    b, _, c = p.shape
    marginal, conditional = 0.0, 0.0
    for labels in product(range(c), repeat=b):
        of_members = np.prod([p[j, :, y] for j, y in enumerate(labels)], axis=0)
        marginal -= of_members.mean() * np.log(of_members.mean())
        conditional -= (of_members * np.log(of_members)).mean()
    return marginal - conditional


def single(p: np.ndarray) -> np.ndarray:
    return np.array([joint_information(one[None]) for one in p])


def test_gains_add_up_to_the_joint_information():
    p = members(12)
    picks, gains = bald(lambda rows: p[rows], single(p), 4, samples=1000)
    for size in range(1, 5):
        assert gains[:size].sum() == pytest.approx(joint_information(p[picks[:size]]), abs=1e-10)


def test_every_choice_is_the_greedy_one(monkeypatch):
    monkeypatch.setattr(module, "_EVALUATED_AT_ONCE", 2)  # so that most candidates are left out by their bounds
    for seed in range(4):
        p = members(9, seed=seed)
        picks, _ = bald(lambda rows, p=p: p[rows], single(p), 3, samples=1000)
        chosen: list[int] = []
        for _ in range(3):
            rest = [i for i in range(9) if i not in chosen]
            chosen.append(max(rest, key=lambda i: joint_information(p[[*chosen, i]])))
        assert picks.tolist() == chosen


def test_greedy_is_near_the_best_batch_and_better_than_top():
    p = members(8, seed=5)
    p[1] = p[0]  # a duplicate, which tells nothing new
    p[0, 0], p[1, 0] = (0.98, 0.01, 0.01), (0.98, 0.01, 0.01)
    alone = single(p)
    _, gains = bald(lambda rows: p[rows], alone, 2, samples=1000)
    best = max(joint_information(p[list(pair)]) for pair in combinations(range(8), 2))
    assert gains.sum() >= (1 - 1 / np.e) * best
    assert gains.sum() >= joint_information(p[np.argsort(-alone)[:2]]) - 1e-12


def test_drawn_labels_estimate_what_counted_ones_are():
    p = members(6, m=5, c=3, seed=2)
    counted, drawn = JointLabels(5, 10_000, np.random.default_rng(0)), JointLabels(5, 20, np.random.default_rng(0))
    for one in p[:4]:
        counted.add(one)
    estimates = []
    for seed in range(200):
        drawn = JointLabels(5, 20, np.random.default_rng(seed))
        for one in p[:4]:
            drawn.add(one)
        estimates.append(drawn.gains(p[4:]))
    assert len(drawn.weight) == 20
    assert len(counted.weight) == 3**4
    spread = np.std(estimates, axis=0) / np.sqrt(200)
    assert (abs(np.mean(estimates, axis=0) - counted.gains(p[4:])) < 4 * spread).all()


def test_long_batches_neither_underflow_nor_repeat():
    p = members(60, m=3, c=4, seed=1, sharp=6.0)
    picks, gains = bald(lambda rows: p[rows], single(p), 60, samples=50)
    assert sorted(picks.tolist()) == list(range(60))
    assert np.isfinite(gains).all()
    p[:] = p[:, :1]  # nothing to learn at all
    assert bald(lambda rows: p[rows], np.zeros(60), 3)[0].tolist() == [0, 1, 2]


def test_members_that_are_told_apart_are_asked_anew():
    """Each image tells two of four members from the others: two halves are worth more than one twice."""
    first, second = [0, 0, 1, 1], [0, 1, 0, 1]
    p = np.eye(2)[[first] * 3 + [second] * 3]
    picks, gains = bald(lambda rows: p[rows], single(np.clip(p, 1e-300, 1)), 6)
    assert picks.tolist() == [0, 3, 1, 4, 2, 5]
    np.testing.assert_allclose(gains, np.log(2))


def test_the_lines_in_memory_are_few_for_many_members_and_classes(monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", 3 * 12)
    asked, p = [], members(20)
    bald(lambda rows: asked.append(len(rows)) or p[rows], single(p), 4)
    assert max(asked) == 3


def test_the_same_seed_gives_the_same_batch():
    p = members(40, m=6, c=5)
    first, second = (bald(lambda rows: p[rows], single(p), 8, samples=30, seed=3)[0] for _ in range(2))
    assert first.tolist() == second.tolist()
