"""The last layer of whatever has one."""

import math

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.explain.last_layer import Layer, last_layer
from dubito.models.transform import Preprocess


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.pool(x).flatten(1))


def test_of_a_classifier_a_layer_and_weights():
    module = Small()
    weight, bias = module.head.weight.detach().double(), module.head.bias.detach().double()
    model = dubito.wrap(module, transform=Preprocess((8, 8), resize=8), name="small")
    name, found = last_layer(model)  # it has not seen a batch: it is shown a picture
    assert name == "small"
    for layer in (found, last_layer(module.head)[1], last_layer((module.head.weight, module.head.bias))[1]):
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, bias)
        assert not layer.weight.requires_grad
    name, bare = last_layer(module.head.weight)
    assert (name, bare.bias.tolist()) == ("weights", [0.0] * 4)


def test_an_unseen_model_without_a_transform_is_told_what_to_do():
    model = dubito.wrap(Small())
    with pytest.raises(ModelError, match=r"has not seen a batch yet.*Call features\(x\) once before"):
        last_layer(model)
    model.features(torch.zeros(1, 3, 8, 8))
    assert last_layer(model)[1].weight.shape == (4, 3)


def test_what_is_no_layer_is_told():
    with pytest.raises(ValueRangeError, match="weight of weights: 1 of 4 values are NaN"):
        last_layer(torch.tensor([[1.0, 2.0], [math.nan, 0.0]]))
    with pytest.raises(ValueRangeError, match="bias of weights: 1 of 2 values are NaN"):
        last_layer((torch.eye(2), torch.tensor([math.inf, 0.0])))
    with pytest.raises(ValueRangeError) as error:
        last_layer((torch.ones(3, 4), torch.ones(2)))
    assert str(error.value) == (
        "last layer of weights: weight must be (classes, features) and bias (classes); got (3, 4) and (2,). "
        "torch.nn.Linear keeps them like that."
    )


def test_logits_are_those_of_the_layer():
    found = Layer(torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 0.0]))
    assert found.logits(torch.tensor([[3.0, 4.0]])).tolist() == [[11.5, -4.0]]
