"""The graph behind a result, and where in a tensor the images lie."""

import pytest
import torch
from torch import nn

from dubito.gradients import parts as parts_module
from dubito.gradients.parts import Dense
from dubito.gradients.plan import Borrowed, Graph, brought_home, norms_of, weight_at
from dubito.gradients.rules import Layout, layout_of
from tests.gradients.reference import classifier, inputs, swept
from tests.gradients.zoo import made


def test_nodes_are_in_the_order_of_the_forward_pass():
    a, b = nn.Linear(3, 4), nn.Linear(4, 2)
    x = torch.randn(5, 3)
    leaves = {f"{name}.{part}": p for name, m in (("a", a), ("b", b)) for part, p in m.named_parameters()}
    graph = Graph(b(torch.tanh(a(x))), leaves)
    assert [name.removesuffix("Backward0") for name, *_ in graph.signature()] == ["T", "Addmm", "Tanh", "T", "Addmm"]
    assert set(graph.leaves.values()) == set(leaves)
    assert [graph.order[node] for node in graph.nodes] == [0, 1, 2, 3, 4]
    assert Graph(b(torch.tanh(a(x))), leaves).signature() == graph.signature()
    assert Graph(b(a(x)), leaves).signature() != graph.signature()


def test_the_same_operations_with_other_weights_are_another_graph():
    a, b, x = nn.Linear(3, 4), nn.Linear(3, 4), torch.randn(5, 3)
    leaves = {"a.weight": a.weight, "a.bias": a.bias, "b.weight": b.weight, "b.bias": b.bias}
    one, other = (Graph(layer(x), leaves).signature() for layer in (a, b))
    assert one == (("TBackward0", "a.weight"), ("AddmmBackward0", "a.bias", "", "0"))
    assert other == (("TBackward0", "b.weight"), ("AddmmBackward0", "b.bias", "", "0"))


def test_a_tensor_that_is_no_parameter_is_left_out():
    layer, stranger = nn.Linear(3, 2), torch.randn(3, requires_grad=True)
    graph = Graph(layer(torch.randn(4, 3) * stranger), {"weight": layer.weight, "bias": layer.bias})
    assert set(graph.leaves.values()) == {"weight", "bias"}
    assert [name for name, *_ in graph.signature()] == ["TBackward0", "AddmmBackward0"]  # no product with the stranger


def test_rows_with_copies_of_images():
    images, copies, tokens = 3, 2, 4
    values = torch.arange(images * copies * tokens).view(images, copies, tokens)
    by_image = values.flatten(1)
    first = values.reshape(-1, 1)  # image, copy, token
    assert torch.equal(Layout(0, each=tokens).rows(first, images).flatten(1), by_image)
    tokens_first = values.flatten(0, 1).t().reshape(-1, 1)  # token, image, copy
    result = Layout(0, each=tokens, last=True).rows(tokens_first, images).flatten(1)
    assert torch.equal(result.sort(1).values, by_image)
    apart = values.flatten(0, 1).t()[..., None]  # (token, image and copy, 1)
    assert Layout(1).rows(apart, images).shape == (3, 2, 4, 1)
    assert torch.equal(Layout(1).rows(apart, images).flatten(1), by_image)


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 7])
def test_a_layout_is_found_whichever_token_has_numbers(tokens, tokens_first):
    def seen(images: int, only: int, token: int):
        values = torch.zeros(images, tokens, 2)
        values[only, token] = 1.0
        return (values.transpose(0, 1) if tokens_first else values).reshape(-1, 2)

    for token in range(tokens):
        result = layout_of(seen(2, 0, token), seen(3, 2, token))
        assert result == Layout(0, tokens, last=tokens_first), token


def test_no_layout_where_there_is_none():
    assert layout_of(torch.zeros(2, 2), torch.zeros(3, 3)) is None  # two axes grow
    assert layout_of(torch.zeros(2, 5), torch.zeros(2, 5)) is None  # none grows
    assert layout_of(torch.zeros(3, 5), torch.zeros(4, 5)) is None  # one grows otherwise: a token that all share
    two, three = torch.zeros(2, 5), torch.zeros(3, 5)
    two[0], three[2] = 1.0, 1.0
    assert layout_of(two, three) == Layout(0)
    two[1] = 1.0
    assert layout_of(two, three) is None  # the second image's row has numbers of the first


@pytest.mark.parametrize("numbers", [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
def test_several_rows_without_numbers_fit_every_order(numbers):
    """An image that says nothing of a layer proves nothing of it."""
    two, three = torch.zeros(2, 4, 5), torch.zeros(3, 4, 5)
    two[0, 0], three[2, 0] = numbers
    assert layout_of(two.flatten(0, 1), three.flatten(0, 1)) is None
    assert layout_of(two, three) == Layout(0)  # one row per image lies in one way only


def read_by(graph, operation: str, slot: int):
    """The weights that operations of one kind read."""
    nodes = [node for node in graph.nodes if node.name() == operation]
    edges = [node.next_functions[slot] for node in nodes]
    return [weight_at(graph, source, output, torch.Size([2, 3])) for source, output in edges]


def test_a_view_is_known_by_its_way_and_a_computed_weight_has_none():
    layer, x = nn.Linear(3, 2), inputs(4, 3)
    leaves = dict(layer.named_parameters())
    plain = read_by(Graph(layer(x), leaves), "AddmmBackward0", 2)
    assert plain[0].parameters == ("weight",)
    assert [step[0] for step in plain[0].way] == ["TBackward0"]
    computed = read_by(Graph(nn.functional.linear(x, layer.weight * layer.bias[:, None]), leaves), "MmBackward0", 1)
    assert computed[0].way is None
    assert set(computed[0].parameters) == {"weight", "bias"}


def test_uses_in_one_layout_are_alike_and_others_are_not():
    weight = nn.Parameter(inputs(3, 3))
    x = inputs(4, 3)
    same = read_by(Graph((x @ weight.t()) @ weight.t(), {"weight": weight}), "MmBackward0", 1)
    assert same[0].way == same[1].way is not None
    turned = read_by(Graph((x @ weight.t()) @ weight, {"weight": weight}), "MmBackward0", 1)
    assert turned[0].way != turned[1].way


def test_gradients_come_home_through_the_jacobian():
    """Of w = exp(v): G_v = G_w w; beside it v itself is read, and both are added before the norm."""
    v = nn.Parameter(inputs(2, 3).double())
    x = inputs(4, 3).double()
    graph = Graph(x @ v.exp().t() + x @ v.t(), {"v": v})
    weights = read_by(graph, "MmBackward0", 1)
    g = [inputs(5, 3, 2, seed=seed).double() for seed in (1, 2)]
    parts = [(weight, Dense(values)) for weight, values in zip(weights, g, strict=True)]
    parts = [(type(w)(w.source, torch.Size([3, 2]), w.parameters, w.way), part) for w, part in parts]
    expected = g[0].transpose(1, 2) * v.exp() + g[1].transpose(1, 2)
    torch.testing.assert_close(torch.cat(list(brought_home(parts, graph, v))), expected)
    torch.testing.assert_close(norms_of(parts, graph, v, "squares"), expected.square().sum((1, 2)))
    torch.testing.assert_close(norms_of(parts, graph, v, "totals"), expected.abs().sum((1, 2)))


def test_a_table_that_is_picked_from_is_one_weight(monkeypatch):
    model, x = classifier(made("relative").double()), inputs(5, 3, 4, 4).double()
    cotangent = inputs(5, 4).double()
    whole = swept(model, x, cotangent)[0]
    monkeypatch.setattr(parts_module, "BYTES", 1)  # one image at a time
    torch.testing.assert_close(swept(model, x, cotangent)[0], whole)
    assert "table" in Borrowed(model).leaves
