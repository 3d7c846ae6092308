"""Weights as operations read them: which are parameters laid out anew, and which are computed."""

import torch
from torch import nn

from dubito.gradients import parts as parts_module
from dubito.gradients.borrowed import Borrowed
from dubito.gradients.graph import graph_of
from dubito.gradients.parts import Dense
from dubito.gradients.weights import alike, brought_home, squares_of, totals_of, weight_at
from tests.gradients.reference import classifier, inputs, swept
from tests.gradients.zoo import made


def read_by(graph, operation: str, slot: int):
    """The weights that operations of one kind read."""
    nodes = [node for node in graph.nodes if node.name() == operation]
    edges = [node.next_functions[slot] for node in nodes]
    return [weight_at(graph, source, output, torch.Size([2, 3])) for source, output in edges]


def test_a_view_is_known_by_its_way_and_a_computed_weight_has_none():
    layer, x = nn.Linear(3, 2), inputs(4, 3)
    leaves = dict(layer.named_parameters())
    plain = read_by(graph_of(layer(x), leaves), "AddmmBackward0", 2)
    assert plain[0].parameters == ("weight",)
    assert [step[0] for step in plain[0].way] == ["TBackward0"]
    computed = read_by(graph_of(nn.functional.linear(x, layer.weight * layer.bias[:, None]), leaves), "MmBackward0", 1)
    assert computed[0].way is None
    assert set(computed[0].parameters) == {"weight", "bias"}


def test_uses_in_one_layout_are_alike_and_others_are_not():
    weight = nn.Parameter(inputs(3, 3))
    x = inputs(4, 3)
    same = read_by(graph_of((x @ weight.t()) @ weight.t(), {"weight": weight}), "MmBackward0", 1)
    assert alike(same)
    turned = read_by(graph_of((x @ weight.t()) @ weight, {"weight": weight}), "MmBackward0", 1)
    assert not alike(turned)


def test_gradients_come_home_through_the_jacobian():
    """Of w = exp(v): G_v = G_w w; beside it v itself is read, and both are added before the norm."""
    v = nn.Parameter(inputs(2, 3).double())
    x = inputs(4, 3).double()
    graph = graph_of(x @ v.exp().t() + x @ v.t(), {"v": v})
    weights = read_by(graph, "MmBackward0", 1)
    g = [inputs(5, 3, 2, seed=seed).double() for seed in (1, 2)]
    parts = [(weight, Dense(values)) for weight, values in zip(weights, g, strict=True)]
    parts = [(type(w)(w.source, torch.Size([3, 2]), w.parameters, w.way), part) for w, part in parts]
    expected = g[0].transpose(1, 2) * v.exp() + g[1].transpose(1, 2)
    torch.testing.assert_close(torch.cat([made for _, made in brought_home(parts, graph, v)]), expected)
    torch.testing.assert_close(squares_of(parts, graph, v), expected.square().sum((1, 2)))
    torch.testing.assert_close(totals_of(parts, graph, v), expected.abs().sum((1, 2)))


def test_a_table_that_is_picked_from_is_one_weight(monkeypatch):
    model, x = classifier(made("relative").double()), inputs(5, 3, 4, 4).double()
    cotangent = inputs(5, 4).double()
    whole = swept(model, x, cotangent)[0]
    monkeypatch.setattr(parts_module, "BYTES", 1)  # one image at a time
    torch.testing.assert_close(swept(model, x, cotangent)[0], whole)
    assert "table" in Borrowed(model).leaves
