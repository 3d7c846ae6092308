"""Masked passes from outside: the same numbers as masked weights, gradients for the masks alone, a module untouched."""

import pytest
import torch
from tests.ensembles.conftest import by_weights, clusters, mlp
from torch import nn

from dubito.ensembles._layers import linear_layers, spans_of
from dubito.ensembles._masked import Masked, masked_linear
from dubito.ensembles.masks import LayerMasks, by_layer, of_member
from dubito.errors import ModelError


def some_masks(module, classes=3, members=3):
    spans = spans_of(linear_layers(module), classes)
    q = torch.rand(members, sum(span.width for span in spans), generator=torch.Generator().manual_seed(1))
    return by_layer(q, spans)


@torch.no_grad()
def test_members_share_a_batch_in_equal_parts():
    module, (x, _) = mlp(), clusters(6)
    masks = some_masks(module)
    with Masked(linear_layers(module), masks):
        said = module(x)
    for member in range(3):
        rows = slice(2 * member, 2 * member + 2)
        torch.testing.assert_close(said[rows], by_weights(module, masks, member)(x[rows]))


@torch.no_grad()
def test_tokens_of_an_image_belong_to_its_member():
    layer, x = nn.Linear(4, 5), torch.randn(6, 7, 4)
    masks = {"": LayerMasks(torch.rand(3, 5), torch.rand(3, 4))}
    with Masked({"": layer}, masks):
        said = layer(x)
    assert said.shape == (6, 7, 5)
    for member in range(3):
        rows = slice(2 * member, 2 * member + 2)
        torch.testing.assert_close(said[rows], by_weights(layer, of_member(masks, member), 0)(x[rows]))


def test_no_gradient_is_computed_for_weights():
    module, (x, y) = mlp(), clusters(6)
    masks = some_masks(module)
    for mask in masks.values():
        mask.columns.requires_grad_()
    with Masked(linear_layers(module), masks):
        loss = nn.functional.cross_entropy(module(x), y)
    wanted = [masks["0"].columns, *module.parameters()]
    first, *others = torch.autograd.grad(loss, wanted, allow_unused=True)
    assert float(first.abs().sum()) > 0
    assert others == [None] * len(others)


def test_gradients_of_masks_are_those_of_masked_weights():
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    rows, columns = (torch.rand(1, n, requires_grad=True) for n in (3, 4))
    ours = torch.autograd.grad(
        masked_linear(x, layer.weight, layer.bias, LayerMasks(rows, columns), "").pow(2).sum(), [rows, columns]
    )
    weight = layer.weight.detach() * rows.T * columns
    theirs = torch.autograd.grad((x @ weight.T + layer.bias.detach() * rows).pow(2).sum(), [rows, columns])
    torch.testing.assert_close(ours, theirs)


def test_rows_that_cannot_be_shared_are_refused():
    module = mlp()
    mode = Masked(linear_layers(module), some_masks(module))
    with mode, pytest.raises(ModelError, match=r"layer '0' is given 4 rows, which 3 members cannot share"):
        module(torch.randn(4, 12))
