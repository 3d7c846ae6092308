"""Norms from factors, against norms of the gradients themselves."""

import pytest
import torch
import torch.nn.functional as F

from dubito.gradients import parts as parts_module
from dubito.gradients.parts import Dense, Outer, Patches, Picked, Window, by_grams, made_of, norms
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
    torch.testing.assert_close(norms([part], "totals"), truth.abs().sum((1, 2)))
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
    torch.testing.assert_close(norms([part], "totals"), truth.abs().sum((1, 2)))


def test_dense_also_of_single_numbers():
    part = Dense(torch.tensor([3.0, -4.0]))
    assert norms([part], "squares").tolist() == [9, 16]
    assert norms([part], "totals").tolist() == [3, 4]
    assert norms([part, part], "squares").tolist() == [36, 64]


@pytest.mark.parametrize("turned", [(False, False), (True, True)])
def test_a_sum_of_parts_is_not_the_sum_of_their_norms(turned):
    parts = [outer(2, 9, 8, 0, turned=turned[0]), outer(3, 9, 8, 1, turned=turned[1])]
    truth = by_hand(parts[0]) + by_hand(parts[1])
    torch.testing.assert_close(norms(parts, "squares"), truth.square().sum((1, 2)))
    torch.testing.assert_close(norms(parts, "totals"), truth.abs().sum((1, 2)))
    mixed = [*parts, Dense(inputs(5, *truth.shape[1:]).double())]
    torch.testing.assert_close(norms(mixed, "squares"), (truth + mixed[2].made()).square().sum((1, 2)))
    torch.testing.assert_close(norms(mixed, "totals"), (truth + mixed[2].made()).abs().sum((1, 2)))


def test_gradients_are_made_for_a_few_images_at_a_time(monkeypatch):
    part = outer(50, 3, 4)
    whole = part.squares(), norms([part], "totals")
    monkeypatch.setattr(parts_module, "BYTES", 4 * 12 * 2)
    assert [len(made) for made in made_of([part])] == [2, 2, 1]
    torch.testing.assert_close(part.squares(), whole[0])
    torch.testing.assert_close(norms([part], "totals"), whole[1])


SPECS = {
    "plain": Window((3, 3), (1, 1), (0, 0), (1, 1), 1),
    "stride": Window((3, 2), (2, 3), (1, 0), (1, 1), 1),
    "dilation": Window((2, 3), (1, 2), (2, 2), (3, 2), 2),
    "depthwise": Window((3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise_large": Window((5, 7), (1, 1), (2, 3), (1, 1), 4),
    "depthwise_stride": Window((5, 5), (2, 3), (2, 1), (1, 1), 4),
    "depthwise_dilation": Window((4, 4), (2, 1), (3, 0), (1, 2), 4),
}


def made(window: Window, out: int = 4) -> tuple[Patches, torch.Tensor]:
    """Of three images that come in two copies each, and the true gradients."""
    x = inputs(3, 2, 4, 11, 12).double()
    weight = torch.zeros(out, 4 // window.groups, *window.kernel).double().requires_grad_()
    spec = (None, window.stride, window.padding, window.dilation, window.groups)
    g = inputs(*F.conv2d(x.flatten(0, 1), weight, *spec).shape, seed=5).double().unflatten(0, (3, 2))
    truth = [torch.autograd.grad((F.conv2d(a, weight, *spec) * c).sum(), weight)[0] for a, c in zip(x, g, strict=True)]
    return Patches(x, g, window), torch.stack(truth)


@pytest.mark.parametrize("kind", SPECS)
def test_every_way_is_the_gradient(kind):
    patches, truth = made(SPECS[kind])
    expected = truth.flatten(1).square().sum(1)
    torch.testing.assert_close(patches.made(), truth)
    torch.testing.assert_close(patches.squares(), expected)
    torch.testing.assert_close(patches._squares_by_grams(), expected)
    if SPECS[kind].groups == 4:
        torch.testing.assert_close(patches._squares_by_shifts(), expected)


def test_several_outputs_a_channel():
    patches, truth = made(Window((5, 5), (1, 1), (2, 2), (1, 1), 4), out=8)
    torch.testing.assert_close(patches.squares(), truth.flatten(1).square().sum(1))


@pytest.mark.parametrize(
    ("channels", "side", "window", "way"),
    [
        (64, 3, Window((3, 3), (1, 1), (1, 1), (1, 1), 1), "_squares_by_grams"),
        (8, 16, Window((5, 5), (1, 1), (2, 2), (1, 1), 8), "_squares_by_shifts"),
    ],
)
def test_the_cheapest_way_is_taken(monkeypatch, channels, side, window, way):
    taken = []
    monkeypatch.setattr(Patches, way, lambda part: taken.append(len(part)) or torch.zeros(len(part)))
    x = inputs(3, 1, channels, side, side)
    Patches(x, x, window).squares()
    assert taken == [3]


def test_a_few_images_at_a_time(monkeypatch):
    patches, truth = made(SPECS["stride"])
    monkeypatch.setattr(parts_module, "BYTES", 4)
    torch.testing.assert_close(patches.squares(), truth.flatten(1).square().sum(1))


def test_plain_windows_are_linear_layers():
    assert Window((1, 1), (1, 1), (0, 0), (1, 1), 1).plain
    for window in (
        Window((1, 1), (2, 1), (0, 0), (1, 1), 1),
        Window((1, 1), (1, 1), (0, 1), (1, 1), 1),
        Window((1, 1), (1, 1), (0, 0), (1, 1), 2),
        Window((1, 3), (1, 1), (0, 0), (1, 1), 1),
    ):
        assert not window.plain


@pytest.mark.parametrize("mean", [0.0, 10.0, 1000.0])
def test_grams_where_positions_cancel(mean):
    """Gradients that add up to zero over positions, on activations far from zero: products alone would lose it all."""
    a, g = mean + inputs(3, 20, 64), inputs(3, 20, 48, seed=2)
    g = g - g.mean(1, keepdim=True)
    truth = torch.einsum("nti,nto->nio", a.double(), g.double()).square().sum((1, 2))
    torch.testing.assert_close(by_grams(a, g).double(), truth, rtol=2e-5, atol=0)
    assert by_grams(a, 0 * g).tolist() == [0, 0, 0]
