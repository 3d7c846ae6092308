"""Linear layers: which follow each other, masked passes that leave the module untouched, and smaller dense layers."""

from itertools import pairwise

import pytest
import timm
import torch
from tests.ensembles.conftest import by_weights, clusters, mlp
from torch import nn

from dubito.ensembles.layers import (
    Link,
    LinkRecorder,
    Masked,
    SubLinear,
    linear_layers,
    masked_linear,
    spans_of,
    sub_model,
)
from dubito.ensembles.masks import LayerMasks, binarised, by_layer, of_member
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
    watch = LinkRecorder(linear_layers(module))
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
    q = torch.rand(members, sum(spans.values()), generator=torch.Generator().manual_seed(1))
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


class Residual(nn.Module):
    """Its hidden layer is added to what follows it, so that nothing can be left out of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 20, bias=False)
        self.last = nn.Linear(20, 3)

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.second(h).sigmoid() + h)


class Convolutional(nn.Module):
    """In the manner of AlexNet and VGG: linear layers behind a flattened map."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(36, 32), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 3)),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


MODELS = {
    "relu": (mlp, (12,)),
    "sigmoid": (lambda: mlp(activation=nn.Sigmoid), (12,)),
    "softplus": (lambda: mlp(activation=nn.Softplus), (12,)),
    "normed": (lambda: nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)), (12,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(12, 16), nn.Sigmoid(), nn.Linear(16, 3, bias=False)), (12,)),
    "residual": (Residual, (12,)),
    "convolutional": (Convolutional, (1, 8, 8)),
    "one layer": (lambda: nn.Linear(12, 3), (12,)),
    "vit": (lambda: timm.create_model("test_vit", num_classes=3, img_size=32), (3, 32, 32)),
}


def masked(module, x, *, soft=False, members=2, links=True):
    layers = linear_layers(module)
    spans = spans_of(layers, 3)
    q = torch.rand(members, sum(spans.values()), generator=torch.Generator().manual_seed(2))
    masks = by_layer(q if soft else binarised(q, spans), spans)
    watch = LinkRecorder(layers)
    with torch.no_grad(), watch:
        module(x)
    kept = watch.links if links else {}
    return masks, [sub_model(module, layers, of_member(masks, member), kept) for member in range(members)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["binary", "relaxed", "without links"])
@torch.no_grad()
def test_a_dense_member_is_the_masked_model(name, how):
    make, shape = MODELS[name]
    torch.manual_seed(3)
    module, x = make().eval(), torch.randn(5, *shape)
    masks, members = masked(module, x, soft=how == "relaxed", links=how != "without links")
    for number, member in enumerate(members):
        expected = by_weights(module, masks, number)(x)
        torch.testing.assert_close(member(x), expected, atol=1e-5, rtol=1e-4)
        assert float((expected - module(x)).abs().max()) > 1e-3  # masks matter


def test_layers_of_an_mlp_become_smaller_and_plain():
    module = mlp()
    masks, (member, _) = masked(module, torch.randn(2, 12))
    first, second = (masks[a].rows[0].bool() & masks[b].columns[0].bool() for a, b in (("0", "3"), ("3", "5")))
    sizes = [int(masks["0"].columns[0].sum()), int(first.sum()), int(second.sum()), 3]
    assert isinstance(member[0], SubLinear)
    assert [type(member[place]) for place in (3, 5)] == [nn.Linear, nn.Linear]
    dense = [member[0].linear, member[3], member[5]]
    assert [(layer.in_features, layer.out_features) for layer in dense] == list(pairwise(sizes))
    assert [tuple(layer.weight.shape) for layer in dense] == [(b, a) for a, b in pairwise(sizes)]


@torch.no_grad()
def test_what_is_not_masked_is_shared_and_the_module_is_left_alone():
    module = Convolutional().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(2, 1, 8, 8)
    _, (member, _) = masked(module, x)
    assert member.features[0].weight is module.features[0].weight
    assert member.features is not module.features
    assert isinstance(module.classifier[1], nn.Linear)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@torch.no_grad()
def test_a_layer_that_keeps_no_unit_gives_its_bias():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)).eval()
    one, none = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    masks = {"0": LayerMasks(one, torch.ones(1, 2)), "2": LayerMasks(None, none)}  # what one keeps, the other drops
    watch = LinkRecorder(linear_layers(module))
    with watch:
        module(torch.randn(2, 2))
    member = sub_model(module, linear_layers(module), masks, watch.links)
    torch.testing.assert_close(member(torch.randn(4, 2)), module[2].bias.expand(4, 3))


def test_a_member_can_be_trained_on():
    module = mlp()
    _, (member, _) = masked(module, torch.randn(2, 12))
    member(torch.randn(2, 12)).sum().backward()
    assert all(parameter.grad is not None for parameter in member.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
