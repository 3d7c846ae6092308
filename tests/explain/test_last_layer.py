"""The last layer of whatever has one."""

import math

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.explain.last_layer import GAP, STRUCTURES, Layer, last_layer, layer, simplex
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
    name, result = last_layer(model)  # it has not seen a batch: it is shown a picture
    assert name == "small"
    for one in (result, last_layer(module.head)[1], last_layer((module.head.weight, module.head.bias))[1]):
        assert torch.equal(one.weight, weight)
        assert torch.equal(one.bias, bias)
        assert not one.weight.requires_grad
    name, bare = last_layer(module.head.weight)
    assert (name, bare.bias.tolist()) == ("weights", [0.0] * 4)


def test_an_unseen_model_without_a_transform_is_reported_with_a_repair():
    model = dubito.wrap(Small())
    with pytest.raises(ModelError, match=r"has not seen a batch yet.*Call features\(x\) once before"):
        last_layer(model)
    model.features(torch.zeros(1, 3, 8, 8))
    assert last_layer(model)[1].weight.shape == (4, 3)


def test_what_is_no_layer_is_reported():
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
    result = Layer(torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 0.0]))
    assert result.logits(torch.tensor([[3.0, 4.0]])).tolist() == [[11.5, -4.0]]


@pytest.mark.parametrize("classes", [2, 3, 7, 40])
@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("seed", [None, 3])
def test_simplex_has_the_gram_matrix_of_definition_2(classes, extra, seed):
    w = simplex(classes, classes - 1 + extra, seed=seed)
    gram = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1.0)
    torch.testing.assert_close(w @ w.T, gram)
    torch.testing.assert_close(w.sum(0), torch.zeros(classes - 1 + extra, dtype=torch.float64))


def test_two_classes_are_opposite():
    torch.testing.assert_close(simplex(2, 1), torch.tensor([[1.0], [-1.0]], dtype=torch.float64))


def test_a_thousand_classes_are_quick_and_exact():
    w = simplex(1000, 1280, seed=0)
    assert abs(float(w[0] @ w[999]) + 1 / 999) < 1e-12


def test_seeds_turn_it_reproducibly():
    assert torch.equal(simplex(4, 6, seed=1), simplex(4, 6, seed=1))
    assert not torch.allclose(simplex(4, 6, seed=1), simplex(4, 6, seed=2))


def test_turns_are_uniform():
    # Each coordinate of a uniformly turned unit vector in 3 dimensions has mean 0; without the signs of R it would not.
    first = torch.stack([simplex(2, 3, seed=seed)[0] for seed in range(400)])
    assert float(first.mean(0).abs().max()) < 4 / math.sqrt(3 * 400)


def test_too_few_dimensions_or_classes_are_reported():
    with pytest.raises(
        ValueRangeError, match=r"simplex: width must be a whole number, at least 4; got 3. 5 classes need 4 dimensions"
    ):
        simplex(5, 3)
    with pytest.raises(
        ValueRangeError, match=r"classes must be a whole number, at least 2; got 1. One class has no boundary"
    ):
        simplex(1, 3)
    with pytest.raises(
        ValueRangeError, match=r"classes must be a whole number, at least 3; got 2. For two, .* simplex\(2, width\)"
    ):
        layer("stack", 2)
    with pytest.raises(
        ValueRangeError, match="one of optimal, sandwich, stack, shifted, narrow, clustered, unequal; got 'pile'"
    ):
        layer("pile")


def test_sandwich_is_that_of_proposition_5():
    weight, bias = layer("sandwich", 3, 2, seed=None)
    torch.testing.assert_close(weight, torch.tensor([[0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64))
    assert not bias.any()


def test_narrow_is_half_as_wide():
    weight, _ = layer("narrow", 3, 2, seed=None)
    cosines = weight @ weight.T
    assert float(cosines[1, 2]) == pytest.approx(0, abs=1e-12)  # the outer two, 90 degrees
    assert float(cosines[0, 1]) == pytest.approx(math.cos(math.pi / 4))


def test_stack_has_parallel_boundaries_and_room_for_every_class():
    result = layer("stack", 5, 1, seed=None)
    line = torch.linspace(-200, 200, 4001, dtype=torch.float64)[:, None]
    logits = result.logits(line)
    assert logits.argmax(1).unique_consecutive().tolist() == [0, 1, 2, 3, 4]
    for i in range(5):
        others = torch.cat([logits[:, :i], logits[:, i + 1 :]], dim=1).amax(1)
        assert float((logits[:, i] - others).max()) >= GAP - 1e-9


@pytest.mark.parametrize("classes", [3, 7])
def test_shifted_is_the_simplex_around_another_point(classes):
    weight, bias = layer("shifted", classes, 9, seed=None)
    torch.testing.assert_close(weight, simplex(classes, 9))
    meeting = -GAP * (classes - 1) / classes * weight[0]  # the only place where no class leads
    logits = weight @ meeting + bias
    torch.testing.assert_close(logits, logits[:1].expand(classes))
    torch.testing.assert_close(bias[0] - bias[1:], torch.full((classes - 1,), GAP, dtype=torch.float64))  # the origin


def test_clustered_has_one_class_apart():
    weight, _ = layer("clustered", 4, 9)
    cosines = weight @ weight.T
    assert float(cosines[:3, :3].min()) > 0.89  # three corners, each 15 degrees from their middle
    torch.testing.assert_close(cosines[3, :3], torch.full((3,), -math.cos(math.pi / 12), dtype=torch.float64))


def test_unequal_has_the_directions_of_the_simplex():
    weight, _ = layer("unequal", 3, 2, seed=None)
    length = weight.norm(dim=1)
    torch.testing.assert_close(length, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(weight / length[:, None], simplex(3, 2))


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_class_can_win_behind_a_relu(name):
    result = layer(name)
    z = 60 * torch.randn(20_000, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).relu()
    assert result.weight.shape == (3, 16)
    assert set(result.logits(z).argmax(1).tolist()) == {0, 1, 2}


def test_scale_multiplies_logits():
    z = torch.randn(5, 16)
    torch.testing.assert_close(layer("stack", scale=3.0).logits(z), 3 * layer("stack").logits(z))


def test_features_of_another_width_are_reported():
    with pytest.raises(ValueRangeError, match="features must be 16 wide; got 4"):
        layer("optimal").logits(torch.zeros(2, 4))


def test_logits_are_float64():
    assert Layer(torch.ones(2, 3), torch.zeros(2)).logits(torch.ones(1, 3)).dtype == torch.float64
