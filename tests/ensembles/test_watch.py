"""Which layers follow each other: only where nothing but element-wise functions lies between, and nobody else looks."""

import pytest
import torch
from torch import nn

from dubito.ensembles._layers import linear_layers
from dubito.ensembles._watch import Link, Watch


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
