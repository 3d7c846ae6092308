"""The head's network: its formula by hand and by an independent build, its seeds, and what zero weights do to it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dubito.errors import TableError, ValueRangeError
from dubito.heads import HeadModule, l2_loss, ranking_loss


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def test_one_hidden_layer_by_hand():
    head = HeadModule(2, width=2, depth=1)
    with torch.no_grad():
        head.layers[0].weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 0.5]]))
        head.layers[0].bias.copy_(torch.tensor([0.5, -1.0]))
        head.layers[2].weight.copy_(torch.tensor([[0.2, 3.0]]))
        head.layers[2].bias.copy_(torch.tensor([0.1]))
    # z = (1, 2): hidden 1 + 4 + 0.5 = 5.5 and -1 + 1 - 1 = -1, which LeakyReLU(0.01) makes 5.5 and -0.01
    # out: 0.2 * 5.5 + 3 * -0.01 + 0.1 = 1.17; softplus log(1 + e^1.17) + 1e-6
    expected = math.log(1 + math.exp(1.17)) + 1e-6
    assert head(torch.tensor([[1.0, 2.0]])).item() == pytest.approx(expected, rel=1e-6)


def test_the_default_is_that_of_appendix_a():
    head = HeadModule(7)
    kinds = [type(layer) for layer in head.layers]
    assert kinds == [nn.Linear, nn.LeakyReLU, nn.Linear, nn.LeakyReLU, nn.Linear, nn.Softplus]
    assert [tuple(p.shape) for p in head.parameters()] == [(512, 7), (512,), (512, 512), (512,), (1, 512), (1,)]
    assert {layer.negative_slope for layer in head.layers if isinstance(layer, nn.LeakyReLU)} == {0.01}


@settings(max_examples=25, deadline=None)
@given(features=st.integers(1, 9), width=st.integers(1, 12), depth=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_against_numpy(features, width, depth, seed):
    head = HeadModule(features, width=width, depth=depth, seed=seed).double()
    z = np.random.default_rng(seed).normal(size=(5, features))
    weights = [p.detach().numpy() for p in head.parameters()]
    assert len(weights) == 2 * (depth + 1)
    a = z
    for k in range(depth + 1):
        a = a @ weights[2 * k].T + weights[2 * k + 1]
        a = np.where(a > 0, a, 0.01 * a) if k < depth else np.logaddexp(0, a) + 1e-6
    assert np.allclose(head(torch.from_numpy(z)).detach().numpy(), a[:, 0], rtol=1e-12)


def test_depth_zero_is_linear_before_the_softplus():
    head = HeadModule(3, depth=0, seed=5).double()
    z = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def logit(x):  # softplus backwards
        return torch.expm1(head(x) - 1e-6).log()

    assert torch.allclose(logit(z.mean(0)), logit(z).mean())
    deep = HeadModule(3, depth=1, seed=5).double()
    assert not torch.allclose(torch.expm1(deep(z.mean(0)) - 1e-6).log(), torch.expm1(deep(z) - 1e-6).log().mean())


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 3, 6), (0, 6)])
def test_one_number_a_row_for_any_leading_axes(shape):
    head = HeadModule(6, width=4)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u = head(z)
    assert u.shape == shape[:-1]
    assert torch.allclose(u.flatten(), torch.stack([head(row) for row in z.reshape(-1, 6)]) if z.numel() else u)


def test_u_stays_positive_where_softplus_underflows():
    head = HeadModule(1, depth=0)
    nn.init.constant_(head.layers[0].weight, -1000.0)
    # softplus(-1000) is 0 in float32; what remains is the constant
    assert head(torch.ones(1, 1)).item() == pytest.approx(1e-6, rel=1e-6)


def test_a_seed_is_a_head_and_the_global_stream_goes_on_undisturbed():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = HeadModule(4, width=8, seed=1)
    assert torch.equal(torch.rand(3), expected)
    again, other = HeadModule(4, width=8, seed=1), HeadModule(4, width=8, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_default_weights_are_torch_s_own():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        reference = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.01), nn.Linear(8, 1), nn.Softplus())
    head = HeadModule(5, width=8, depth=1, seed=3)
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(z), reference(z)[:, 0] + 1e-6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_zero_init_has_no_gradient_but_at_the_last_bias(depth):
    head = HeadModule(3, width=4, depth=depth, init="zero")
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(z), torch.full((4,), F.softplus(torch.zeros(1)).item() + 1e-6))  # log 2
    l2_loss(head(z), torch.tensor([0.1, 1.0, 2.0, 5.0])).backward()
    *rest, bias = head.parameters()
    assert all(bool((p.grad == 0).all()) for p in rest)
    # u = log 2 everywhere, the mean loss is 2.025; du/db = sigmoid(0) = 1/2: 2 (0.693148 - 2.025) / 2
    assert bias.grad.item() == pytest.approx(math.log(2) + 1e-6 - 2.025, rel=1e-5)


@pytest.mark.parametrize("init", ["zero", "default"])
def test_zero_init_never_leaves_a_constant_function(init):
    head = HeadModule(2, width=8, depth=2, init=init)
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(64, 2, generator=draw)
    losses = z[:, 0].exp()
    step = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(40):
        step.zero_grad()
        (ranking_loss(head(z), losses) + l2_loss(head(z), losses)).backward()
        step.step()
    u = head(z).detach()
    assert (len(u.unique()) == 1) == (init == "zero")
    if init == "default":
        assert torch.corrcoef(torch.stack([u, losses]))[0, 1] > 0.5


@pytest.mark.parametrize("wrong", [{"features": 0}, {"width": 0}, {"depth": -1}])
def test_sizes_that_are_none(wrong):
    sizes = {"features": 3, "width": 4, "depth": 1} | wrong
    text = f"at least 0; got {sizes['features']}, {sizes['width']}, {sizes['depth']}"
    with pytest.raises(ValueRangeError, match=text):
        HeadModule(**sizes)


def test_features_of_another_width_are_refused():
    with pytest.raises(TableError, match=r"features must be 3 wide, .* 4 came. Use the head of this model, or train"):
        HeadModule(3)(torch.zeros(2, 4))
