"""Linear layers from outside: which follow each other, and masked passes that leave the module untouched."""

import pytest
import torch
from tests.ensembles.conftest import by_weights, clusters, mlp
from torch import nn

from dubito.ensembles.layers import Link, Masked, Watch, linear_layers, masked_linear, spans_of
from dubito.ensembles.masks import LayerMasks, by_layer, of_member
from dubito.errors import ModelError


class Custom(nn.Module):
    """Three layers, put together by a function."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.how = how

    def forward(self, x):
        return self.how(self, x)


def links(module, x):
    watch = Watch(linear_layers(module))
    with torch.no_grad(), watch:
        module.eval()(x)
    return watch.links


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (lambda m, x: m.c(m.b(m.a(x).relu()).sigmoid()), {"a": Link("b", 0.0), "b": Link("c", 0.5)}),
        (lambda m, x: m.c(torch.tanh(m.b(nn.functional.gelu(m.a(x))))), {"a": Link("b", 0.0), "b": Link("c", 0.0)}),
        (lambda m, x: m.c(m.b(m.a(x)) + 1), {"a": Link("b", 0.0)}),  # a constant is not followed
        (lambda m, x: m.c(m.b(h := m.a(x).relu()) + h), {}),  # a residual: h goes two ways
        (lambda m, x: m.c(m.b(m.b(m.a(x).relu()).relu())), {}),  # b is called twice
        (lambda m, x: m.c(m.b(m.a(x).relu()[:, :6])), {"b": Link("c", 0.0)}),  # a view is not followed
        (lambda m, x: m.c(torch.cat([m.b(m.a(x).relu())], dim=1)), {"a": Link("b", 0.0)}),
    ],
    ids=["functions", "torch", "constant", "residual", "twice", "view", "list"],
)
def test_links(how, expected):
    assert links(Custom(how), torch.randn(2, 4)) == expected


def test_an_activation_in_place_and_dropout_are_followed():
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(5, 2))
    assert links(module, torch.randn(2, 4)) == {"0": Link("3", 0.0)}


def test_what_functions_make_of_zero():
    module = nn.Sequential(nn.Linear(4, 5), nn.Softplus(beta=2.0), nn.Linear(5, 2))
    assert links(module, torch.randn(2, 4))["0"].at_zero == pytest.approx(0.34657, abs=1e-5)  # log(2) / 2


def some_masks(module, classes=3, members=3):
    spans = spans_of(linear_layers(module), classes)
    q = torch.rand(members, sum(span.width for span in spans), generator=torch.Generator().manual_seed(1))
    return by_layer(q, spans)


@torch.no_grad()
def test_members_share_a_batch_in_equal_parts():
    module, (x, _) = mlp(), clusters(6)
    masks = some_masks(module)
    with Masked(linear_layers(module), masks):
        logits = module(x)
    for member in range(3):
        rows = slice(2 * member, 2 * member + 2)
        torch.testing.assert_close(logits[rows], by_weights(module, masks, member)(x[rows]))


@torch.no_grad()
def test_tokens_of_an_image_belong_to_its_member():
    layer, x = nn.Linear(4, 5), torch.randn(6, 7, 4)
    masks = {"": LayerMasks(torch.rand(3, 5), torch.rand(3, 4))}
    with Masked({"": layer}, masks):
        logits = layer(x)
    assert logits.shape == (6, 7, 5)
    for member in range(3):
        rows = slice(2 * member, 2 * member + 2)
        torch.testing.assert_close(logits[rows], by_weights(layer, of_member(masks, member), 0)(x[rows]))


def test_no_gradient_is_computed_for_weights():
    module, (x, y) = mlp(), clusters(6)
    masks = some_masks(module)
    for mask in masks.values():
        mask.columns.requires_grad_()
    with Masked(linear_layers(module), masks):
        loss = nn.functional.cross_entropy(module(x), y)
    inputs = [masks["0"].columns, *module.parameters()]
    first, *others = torch.autograd.grad(loss, inputs, allow_unused=True)
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
    with mode, pytest.raises(ModelError, match=r"layer '0' gets 4 rows, which 3 members cannot share"):
        module(torch.randn(4, 12))
