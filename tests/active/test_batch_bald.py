"""BatchBALD against the joint mutual information, by enumeration of all joint labels."""

from itertools import combinations, product

import numpy as np
import pytest

from dubito.active import batch_bald as module
from dubito.active.batch_bald import JointLabels, batch_bald


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


def test_images_that_separate_other_members_come_first():
    """Each image tells two of four members from the others: two halves are worth more than one twice."""
    first, second = [0, 0, 1, 1], [0, 1, 0, 1]
    p = np.eye(2)[[first] * 3 + [second] * 3]
    picks, gains = bald(lambda rows: p[rows], single(np.clip(p, 1e-300, 1)), 6)
    assert picks.tolist() == [0, 3, 1, 4, 2, 5]
    np.testing.assert_allclose(gains, np.log(2))


def test_the_lines_in_memory_are_few_for_many_members_and_classes(monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", 3 * 12)
    args, p = [], members(20)
    bald(lambda rows: args.append(len(rows)) or p[rows], single(p), 4)
    assert max(args) == 3


def test_the_same_seed_gives_the_same_batch():
    p = members(40, m=6, c=5)
    first, second = (bald(lambda rows: p[rows], single(p), 8, samples=30, seed=3)[0] for _ in range(2))
    assert first.tolist() == second.tolist()
