"""Guidance by neighbours: by hand, by brute force, and what holds whatever the sign of the energies."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from dubito.errors import TableError
from dubito.metrics import spearman
from dubito.scores import NNGuide
from dubito.scores.nnguide import guided_energy
from dubito.table import Table, concat


def table(n: int, seed: int = 0, d: int = 7, c: int = 4, shift: float = 5.0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(n, d, generator=generator) + 0.5
    weight = torch.randn(d, c, generator=torch.Generator().manual_seed(99))
    return Table(feature=feature, logit=feature @ weight + shift)


def brute(train: Table, rows: Table, k: int) -> np.ndarray:
    z, q = (one.feature.double().numpy() for one in (train, rows))
    z, q = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (z, q))
    bank, energy = (logsumexp(one.logit.double().numpy(), axis=1) for one in (train, rows))
    guidance = np.sort(q @ (z * bank[:, None]).T, axis=1)[:, -k:].mean(1)
    return -guidance * energy


def test_by_hand():
    # One class, so that the energy is the logit. Bank: 2 at 0 degrees, 4 at 90 degrees. The row, of energy 3, is at 60:
    # 2 cos 60 = 1 and 4 cos 30 = 2 sqrt(3); k = 1 takes the latter, k = 2 the mean of both.
    bank = Table(feature=[[5.0, 0.0], [0.0, 0.1]], logit=[[2.0], [4.0]])
    row = Table(feature=[[0.5, math.sqrt(0.75)]], logit=[[3.0]])
    assert NNGuide(k=1).fit(bank).score(row).item() == pytest.approx(-3 * 2 * math.sqrt(3), rel=1e-6)
    assert NNGuide(k=2).fit(bank).score(row).item() == pytest.approx(-3 * (1 + 2 * math.sqrt(3)) / 2, rel=1e-6)


@pytest.mark.parametrize("k", [1, 5, 60])
def test_by_brute_force(k):
    train, rows = table(60, shift=20.0), table(25, seed=1, shift=20.0)
    expected = brute(train, rows, k)
    assert (expected < 0).mean() > 0.8  # a negative guidance is not multiplied
    u = NNGuide(k=k).fit(train).score(rows).numpy()
    assert u[expected < 0] == pytest.approx(expected[expected < 0], rel=1e-5)


def test_it_never_grows_with_energy_or_guidance():
    axis = torch.linspace(-3, 3, 61, dtype=torch.float64)
    u = torch.stack([guided_energy(torch.full_like(axis, energy), axis) for energy in axis.tolist()])
    assert bool((u.diff(dim=0) <= 0).all())
    assert bool((u.diff(dim=1) <= 0).all())
    assert float(u.diff(dim=0).abs().max()) < 0.31  # 3 times the step: continuous


def test_a_constant_on_all_logits_does_not_turn_the_order_around():
    train, rows = table(300), table(100, seed=1)
    low = NNGuide().fit(table(300, shift=-50.0))
    assert low.centred_
    assert not NNGuide().fit(table(300, shift=20.0)).centred_
    u = low.score(table(100, seed=1, shift=-50.0))
    # Where energies are centred, the constant makes no difference at all.
    assert torch.allclose(NNGuide().fit(table(300, shift=-70.0)).score(table(100, seed=1, shift=-30.0)), u, rtol=1e-4)
    high = NNGuide().fit(train).score(rows)
    ranks = torch.stack([u.argsort().argsort(), high.argsort().argsort()]).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.5


def test_one_row_does_not_decide_which_energies_are_used():
    train, rows = table(300), table(100, seed=1)
    energy = train.logit.logsumexp(1)
    kept = train.rows(energy > 0)
    odd = Table(feature=-kept.feature[:1], logit=torch.full((1, 4), -3.0))
    alone, joined = NNGuide().fit(kept), NNGuide().fit(concat([kept, odd]))
    assert not joined.centred_
    assert spearman(alone.score(rows), joined.score(rows)) > 0.999
    # As many rows of energies below zero as it takes to have a median below zero do.
    assert NNGuide().fit(concat([kept, *[odd] * len(kept)])).centred_


def test_equal_rows_count_each():
    bank = Table(feature=[[1.0, 0.0]] * 3 + [[0.0, 1.0]], logit=[[2.0]] * 4)
    row = Table(feature=[[1.0, 0.0]], logit=[[1.0]])
    assert NNGuide(k=3).fit(bank).score(row).item() == pytest.approx(-2.0)
    assert NNGuide(k=4).fit(bank).score(row).item() == pytest.approx(-1.5)  # three times 2, once 0


def test_the_bank_is_bounded_and_drawn_by_its_seed():
    train = table(100)
    assert NNGuide().bank_size == 10_000
    some = NNGuide(bank_size=20, seed=4).fit(train).bank_
    assert some.shape == (20, 7)
    assert torch.equal(some, NNGuide(bank_size=20, seed=4).fit(train).bank_)
    assert not torch.equal(some, NNGuide(bank_size=20, seed=5).fit(train).bank_)
    whole = NNGuide(bank_size=None).fit(train).bank_
    assert len(whole) == 100
    assert all(bool((whole == row).all(1).any()) for row in some)


def test_a_k_beyond_the_bank():
    with pytest.raises(
        TableError, match=r"nnguide\.fit: k must be a whole number in \[1, 9\]; got 10\. The bank has 9"
    ):
        NNGuide().fit(table(9))
