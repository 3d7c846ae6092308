"""The three ways to a convolution's norms, each against autograd's own gradient of one image."""

import pytest
import torch
import torch.nn.functional as F

from dubito.gradients import patches as patches_module
from dubito.gradients.patches import Patches, Window, by_grams
from tests.gradients.reference import inputs

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
    norms = truth.flatten(1).square().sum(1)
    torch.testing.assert_close(patches.made(), truth)
    torch.testing.assert_close(patches.squares(), norms)
    torch.testing.assert_close(patches._squares_by_grams(), norms)
    if SPECS[kind].groups == 4:
        torch.testing.assert_close(patches._squares_by_shifts(), norms)


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
    monkeypatch.setattr(patches_module, "BYTES", 4)
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
