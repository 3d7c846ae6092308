"""What Pearce et al. 2021 prove about the optimal structure, as properties; and where a statement goes too far."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.explain.last_layer import Layer, layer, simplex
from dubito.scores.softmax import max_probability

seeds = st.integers(0, 100_000)
sizes = st.floats(0.1, 30)


def draws(seed):
    return torch.Generator().manual_seed(seed)


def confidence(weight, z):
    return -max_probability(z @ weight.T)


def max_cosine(weight, z):
    return ((z / z.norm(dim=1, keepdim=True)) @ (weight / weight.norm(dim=1, keepdim=True)).T).amax(1)


@given(seed=seeds, classes=st.integers(2, 12), width=st.integers(1, 8), shrink=st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_proposition_4_shorter_features_are_less_certain_for_any_structure(seed, classes, width, shrink):
    draw = draws(seed)
    weight = torch.randn(classes, width, dtype=torch.float64, generator=draw)
    z = torch.randn(20, width, dtype=torch.float64, generator=draw)
    assert (confidence(weight, shrink * z) < confidence(weight, z)).all()


def test_proposition_4_needs_biases_of_zero():
    # Logits z - 2 and 0: the shorter feature is the more certain one, of the other class.
    biased = Layer(torch.tensor([[1.0], [0.0]]), torch.tensor([-2.0, 0.0]))
    long, short = biased.logits(torch.tensor([[2.5], [0.1]])).softmax(1).amax(1)
    assert short > long


@given(seed=seeds, size=sizes)
@settings(max_examples=60, deadline=None)
def test_theorem_4_in_the_plane_of_the_weights(seed, size):
    for classes in (2, 3):
        weight = simplex(classes, classes - 1)
        z = torch.randn(40, classes - 1, dtype=torch.float64, generator=draws(seed))
        z = size * z / z.norm(dim=1, keepdim=True)
        order = max_cosine(weight, z).argsort()
        result, cosines = confidence(weight, z)[order], max_cosine(weight, z)[order]
        assert (result.diff()[cosines.diff() > 1e-9] > -1e-12).all()


@given(seed=seeds, size=sizes, classes=st.sampled_from([2, 3]))
@settings(max_examples=60, deadline=None)
def test_theorem_4_turning_out_of_the_plane(seed, size, classes):
    weight = simplex(classes, classes + 2)
    z = torch.randn(classes + 2, dtype=torch.float64, generator=draws(seed))
    z[classes - 1 :] = 0
    out = torch.zeros_like(z)
    out[-1] = 1
    turn = torch.linspace(0, math.pi / 2 - 0.01, 30, dtype=torch.float64)[:, None]
    path = size * (turn.cos() * z / z.norm() + turn.sin() * out)
    assert (max_cosine(weight, path).diff() < 0).all()
    assert (confidence(weight, path).diff() <= 1e-12).all()


def test_theorem_4_is_about_paths_not_about_any_two_features():
    # Half out of the plane along w_1, or on the boundary of two classes in it: nearly the same largest cosine, but the
    # first has one class ahead and the second has two. So a smaller largest cosine can go with more confidence.
    weight = simplex(3, 3)
    along, out = weight[0], torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    lifted = 0.49 * along + math.sqrt(1 - 0.49**2) * out
    between = -weight[2]
    z = 10 * torch.stack([lifted, between])
    assert max_cosine(weight, z).tolist() == pytest.approx([0.49, 0.5])
    assert confidence(weight, z)[0] > 0.99
    assert confidence(weight, z)[1] < 0.51


@given(seed=seeds, classes=st.integers(100, 400), towards=st.integers(1, 6), size=sizes)
@settings(max_examples=25, deadline=None)
def test_theorem_5_moving_towards_other_weights(seed, classes, towards, size):
    weight = simplex(classes, classes - 1)
    share = torch.rand(towards, dtype=torch.float64, generator=draws(seed)) + 0.01
    goal = share @ weight[1 : 1 + towards]
    step = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None]
    path = (1 - step) * weight[0] + step * goal / goal.norm()
    path = size * path / path.norm(dim=1, keepdim=True)
    path = path[(path @ weight.T).argmax(1) == 0]  # as long as the first class leads
    assert len(path) > 5
    assert (max_cosine(weight, path).diff() < 0).all()
    assert (confidence(weight, path).diff() <= 1e-12).all()


@given(seed=seeds)
@settings(max_examples=15, deadline=None)
def test_theorem_5_for_any_two_features_of_length_one(seed):
    classes, draw = 600, draws(seed)
    weight = simplex(classes, classes - 1)
    # From one weight alone to a mixture of many, so that the largest cosines cover the whole range.
    mix = torch.rand(40, 8, dtype=torch.float64, generator=draw) ** torch.linspace(0.1, 20, 40)[:, None]
    z = mix @ weight[torch.randperm(classes, generator=draw)[:8]]
    z = z / z.norm(dim=1, keepdim=True)
    cosine, sure = max_cosine(weight, z), confidence(weight, z)
    clear = (
        cosine[:, None] - cosine[None] > 10 / classes
    )  # "cos = -1/(K-1) is about 0" cannot tell less than that apart
    assert clear.any()
    assert (sure[:, None] > sure[None])[clear].all()


def test_proposition_5_a_smaller_cosine_with_more_confidence():
    weight = layer("sandwich", 3, 2, seed=None).weight
    # The paper rounds to [0.9, -0.44] and says that the largest cosine of the second is 0.8: it is 0.9.
    z = torch.tensor([[1.0, 0.0], [0.9, -math.sqrt(1 - 0.81)]], dtype=torch.float64)
    assert max_cosine(weight, z).tolist() == pytest.approx([1.0, 0.9])
    assert confidence(weight, z).tolist() == pytest.approx([0.665, 0.700], abs=5e-4)


def regularised_loss(weight, bias, mean, decay):
    """Eq. 36 for clusters of no extent, balanced, the bias being one more weight."""
    logits = mean @ weight.T + bias
    cross_entropy = -logits.log_softmax(1).diagonal().mean()
    return cross_entropy + decay * (weight.square().sum() + bias.square().sum())


def best_scale(classes, size, decay):
    """Of the simplex as weights: the length with the least loss, by bisection of the derivative."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        scale, corners = torch.tensor(middle, dtype=torch.float64, requires_grad=True), simplex(classes, classes - 1)
        regularised_loss(scale * corners, torch.zeros(classes, dtype=torch.float64), size * corners, decay).backward()
        low, high = (low, middle) if scale.grad > 0 else (middle, high)
    return low


@pytest.mark.parametrize("classes", [2, 3, 5, 10])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_theorem_3_the_optimal_structure_is_a_minimum(classes, size):
    decay, draw = 1e-3, draws(classes)
    corners = simplex(classes, classes + 1)
    weight, bias, mean = best_scale(classes, size, decay) * corners, torch.zeros(classes).double(), size * corners
    least = float(regularised_loss(weight, bias, mean, decay))

    def noise(like):
        return torch.randn(like.shape, dtype=torch.float64, generator=draw)

    for step in (1e-3, 1e-2, 1e-1, 1.0):
        for _ in range(40):
            moved = mean + step * noise(mean)
            moved = size * moved / moved.norm(dim=1, keepdim=True)  # theorem 3 fixes the lengths of the means
            loss = regularised_loss(weight + step * noise(weight), bias + step * noise(bias), moved, decay)
            assert float(loss) > least


@pytest.mark.parametrize("name", ["sandwich", "narrow", "clustered", "unequal"])
def test_theorem_3_no_other_structure_has_a_smaller_loss(name):
    size, decay = 4.0, 1e-3
    corners = simplex(3, 2)
    none = torch.zeros(3, dtype=torch.float64)
    least = float(regularised_loss(best_scale(3, size, decay) * corners, none, size * corners, decay))
    weight = layer(name, 3, 2, seed=None).weight
    turn = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    circle = size * torch.stack([turn.cos(), turn.sin()], dim=1)
    for scale in torch.logspace(-1, 1.5, 60).tolist():
        # The best place on the circle for the mean of every class, one by one.
        loss = -(circle @ (scale * weight).T).log_softmax(1).amax(0).mean() + decay * (scale * weight).square().sum()
        assert float(loss) > least
