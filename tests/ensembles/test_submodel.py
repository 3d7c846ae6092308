"""Dense members say what the masked model says, whatever lies between its layers."""

from itertools import pairwise

import pytest
import timm
import torch
from tests.ensembles.conftest import by_weights, mlp
from torch import nn

from dubito.ensembles._layers import linear_layers, spans_of
from dubito.ensembles._watch import Watch
from dubito.ensembles.masks import LayerMasks, binarised, by_layer, of_member
from dubito.ensembles.submodel import SubLinear, sub_model


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
    q = torch.rand(members, sum(span.width for span in spans), generator=torch.Generator().manual_seed(2))
    masks = by_layer(q if soft else binarised(q, spans), spans)
    watch = Watch(layers)
    with torch.no_grad(), watch:
        module(x)
    found = watch.links if links else {}
    return masks, [sub_model(module, layers, of_member(masks, member), found) for member in range(members)]


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
    found = [member[0].linear, member[3], member[5]]
    assert [(layer.in_features, layer.out_features) for layer in found] == list(pairwise(sizes))
    assert [tuple(layer.weight.shape) for layer in found] == [(b, a) for a, b in pairwise(sizes)]


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
    watch = Watch(linear_layers(module))
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
