"""Norms from factors, against norms of the gradients themselves."""

import pytest
import torch

from dubito.gradients import parts as parts_module
from dubito.gradients import patches as patches_module
from dubito.gradients.parts import Dense, Outer, Picked, made_of, squares, totals
from tests.gradients.reference import inputs


def outer(t: int, i: int, o: int, seed: int = 0, *, turned: bool = False) -> Outer:
    return Outer(inputs(5, t, i, seed=seed).double(), inputs(5, t, o, seed=seed + 100).double(), turned)


def by_hand(part: Outer):
    g = torch.einsum("nto,nti->noi", part.g, part.a)
    return g.transpose(1, 2) if part.turned else g


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("t", "i", "o"), [(1, 4, 3), (2, 9, 8), (50, 3, 4)])  # one position, grams, the gradients
def test_outer_products(t, i, o, turned):
    part = outer(t, i, o, turned=turned)
    truth = by_hand(part)
    torch.testing.assert_close(part.made(), truth)
    torch.testing.assert_close(part.squares(), truth.square().sum((1, 2)))
    torch.testing.assert_close(totals([part]), truth.abs().sum((1, 2)))
    assert len(part.some(slice(1, 3))) == 2


@pytest.mark.parametrize(("t", "count"), [(40, 3), (3, 40)])  # from the rows, from pairs of positions
def test_picked_rows(t, count):
    index = torch.randint(0, count, (5, t), generator=torch.Generator().manual_seed(0))
    g = inputs(5, t, 4).double()
    truth = torch.zeros(5, count, 4).double()
    for n in range(5):
        for position in range(t):
            truth[n, index[n, position]] += g[n, position]
    part = Picked(index, g, count)
    torch.testing.assert_close(part.made(), truth)
    torch.testing.assert_close(part.squares(), truth.square().sum((1, 2)))
    torch.testing.assert_close(totals([part]), truth.abs().sum((1, 2)))


def test_dense_also_of_single_numbers():
    part = Dense(torch.tensor([3.0, -4.0]))
    assert squares([part]).tolist() == [9, 16]
    assert totals([part]).tolist() == [3, 4]
    assert squares([part, part]).tolist() == [36, 64]


@pytest.mark.parametrize("turned", [(False, False), (True, True)])
def test_a_sum_of_parts_is_not_the_sum_of_their_norms(turned):
    parts = [outer(2, 9, 8, 0, turned=turned[0]), outer(3, 9, 8, 1, turned=turned[1])]
    truth = by_hand(parts[0]) + by_hand(parts[1])
    torch.testing.assert_close(squares(parts), truth.square().sum((1, 2)))
    torch.testing.assert_close(totals(parts), truth.abs().sum((1, 2)))
    mixed = [*parts, Dense(inputs(5, *truth.shape[1:]).double())]
    torch.testing.assert_close(squares(mixed), (truth + mixed[2].made()).square().sum((1, 2)))
    torch.testing.assert_close(totals(mixed), (truth + mixed[2].made()).abs().sum((1, 2)))


def test_gradients_are_made_for_a_few_images_at_a_time(monkeypatch):
    part = outer(50, 3, 4)
    whole = part.squares(), totals([part])
    monkeypatch.setattr(parts_module, "BYTES", 4 * 12 * 2)
    monkeypatch.setattr(patches_module, "BYTES", 4 * 12 * 2)
    assert [len(made) for _, made in made_of([part])] == [2, 2, 1]
    torch.testing.assert_close(part.squares(), whole[0])
    torch.testing.assert_close(totals([part]), whole[1])
