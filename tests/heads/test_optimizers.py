"""The optimisers: one step by hand, decay on matrices only, and their state there and back."""

import pytest
import torch
from torch import nn

from dubito.heads.module import HeadModule
from dubito.heads.optimizers import make_optimizer, optimizer_tensors, restore_optimizer, set_lr
from dubito.heads.recipe import Recipe

ALL = ["adamw", "adam", "sgd", "lion"]


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def linear() -> nn.Linear:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0]]))
        layer.bias.fill_(0.5)
    return layer


def test_two_steps_of_adamw_by_hand():
    recipe = Recipe(lr=0.1, weight_decay=0.25, betas=(0.8, 0.95))
    layer = linear()
    optimizer = make_optimizer(layer, recipe)
    gradients = [(torch.tensor([[0.3, -0.4]]), torch.tensor([2.0])), (torch.tensor([[-0.1, 0.2]]), torch.tensor([1.0]))]
    expected = {"weight": torch.tensor([[1.0, -2.0]]).double(), "bias": torch.tensor([0.5]).double()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step, pair in enumerate(gradients, start=1):
        layer.weight.grad, layer.bias.grad = pair
        optimizer.step()
        for name, gradient in zip(("weight", "bias"), pair, strict=True):
            g = gradient.double()
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            m, v = first[name] / (1 - 0.8**step), second[name] / (1 - 0.95**step)
            decay = 0.25 if name == "weight" else 0.0
            expected[name] = expected[name] * (1 - 0.1 * decay) - 0.1 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(layer.weight.double(), expected["weight"], rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.bias.double(), expected["bias"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ALL)
def test_decay_touches_matrices_only(name):
    layer = linear()
    optimizer = make_optimizer(layer, Recipe(optimizer=name, lr=0.1, weight_decay=0.5))
    layer.weight.grad, layer.bias.grad = torch.zeros(1, 2), torch.zeros(1)
    optimizer.step()
    assert layer.bias.tolist() == [0.5]
    assert layer.weight.detach().abs().sum().item() < 3
    assert layer.weight.detach().sign().tolist() == [[1, -1]]


@pytest.mark.parametrize("name", ALL)
def test_without_decay_and_gradient_nothing_moves(name):
    layer = linear()
    optimizer = make_optimizer(layer, Recipe(optimizer=name, lr=0.1, weight_decay=0.0))
    layer.weight.grad, layer.bias.grad = torch.zeros(1, 2), torch.zeros(1)
    optimizer.step()
    assert layer.weight.tolist() == [[1.0, -2.0]]


def test_every_parameter_of_a_head_is_in_one_group():
    head = HeadModule(3, width=4)
    matrices, vectors = make_optimizer(head, Recipe()).param_groups
    assert [tuple(one.shape) for one in matrices["params"]] == [(4, 3), (4, 4), (1, 4)]
    assert [tuple(one.shape) for one in vectors["params"]] == [(4,), (4,), (1,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (1e-4, 0.0)


@pytest.mark.parametrize("name", ALL)
def test_the_learning_rate_is_set_in_all_groups(name):
    optimizer = make_optimizer(linear(), Recipe(optimizer=name))
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def steps(head: HeadModule, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        head(rows).square().mean().backward()
        set_lr(optimizer, 0.01 / (1 + step))
        optimizer.step()


@pytest.mark.parametrize("name", ALL)
def test_put_back_it_goes_on_with_the_same_bits(name):
    recipe = Recipe(optimizer=name)
    whole = HeadModule(3, width=4)
    optimizer = make_optimizer(whole, recipe)
    steps(whole, optimizer, 0, 6)

    begun = HeadModule(3, width=4)
    before = make_optimizer(begun, recipe)
    steps(begun, before, 0, 3)
    kept = {key: value.clone() for key, value in optimizer_tensors(before).items()}
    again = HeadModule(3, width=4, seed=9)
    again.load_state_dict(begun.state_dict())
    after = make_optimizer(again, recipe)
    restore_optimizer(after, kept)
    steps(again, after, 3, 6)

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True))
    ours, theirs = optimizer_tensors(after), optimizer_tensors(optimizer)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
