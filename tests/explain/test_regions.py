import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, multivariate_normal

from dubito.errors import NotFittedError, ValueRangeError
from dubito.explain import pictures
from dubito.explain.last_layer import Layer, simplex
from dubito.explain.regions import (
    Gaussians,
    Region,
    density_field,
    ellipsoid_bounds,
    ellipsoids,
    entropy_field,
    exact_region,
    linear_region,
    max_probability_field,
    training_threshold,
    two_class_region,
)
from dubito.scores.density import Density
from dubito.scores.softmax import entropy, max_probability
from dubito.table import Table


def u_max(layer, z):
    return max_probability(layer.logits(z))


def random_layer(classes, width=2, seed=0, scale=2.0):
    draw = torch.Generator().manual_seed(seed)
    weight = scale * torch.randn(classes, width, dtype=torch.float64, generator=draw)
    return Layer(weight, torch.randn(classes, dtype=torch.float64, generator=draw))


def grid(span=6.0, points=121):
    line = torch.linspace(-span, span, points, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def two_clusters(overlap=False):
    """Two clusters of different size and share; they meet if told to."""
    mean = torch.tensor([[2.0, 0.5], [-2.5, 0.0]], dtype=torch.float64) * (0.25 if overlap else 1.0)
    covariance = torch.tensor([[[0.3, 0.1], [0.1, 0.5]], [[0.6, -0.2], [-0.2, 0.3]]], dtype=torch.float64)
    return Gaussians(torch.tensor([0.3, 0.7], dtype=torch.float64), mean, covariance)


@given(
    u=st.lists(st.integers(0, 6).map(float), min_size=1, max_size=25),
    epsilon=st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5, 0.9, 0.99]),
)
@settings(max_examples=150, deadline=None)
def test_threshold_is_the_definition_counted(u, epsilon):
    threshold = training_threshold(torch.tensor(u), epsilon)
    for candidate in (-0.5, *range(7), 6.5):  # ties, too
        more_uncertain_than = sum(candidate > value for value in u)
        assert (candidate > threshold) == (more_uncertain_than > (1 - epsilon) * len(u) + 1e-9)


@pytest.mark.parametrize("score", [max_probability, entropy])
@pytest.mark.parametrize("classes", [2, 3, 6])
def test_exact_region_by_brute_force(score, classes):
    layer = random_layer(classes)
    train = 2 * torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = grid(points=41)

    def u(z):
        return score(layer.logits(z))

    share = (u(z)[:, None] > u(train)[None]).double().mean(1)
    assert torch.equal(exact_region(u, train, 0.1).contains(z), share > 0.9)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("epsilon", [0.01, 0.05, 0.3])
def test_two_classes_hold_epsilon_of_the_training_data(overlap, epsilon):
    layer, gaussians = random_layer(2), two_clusters(overlap)
    region = two_class_region(layer, gaussians, epsilon)
    z, _ = gaussians.sample(200_000, seed=2)
    error = math.sqrt(epsilon * (1 - epsilon) / len(z))
    assert float(region.contains(z).double().mean()) == pytest.approx(epsilon, abs=5 * error)


def test_two_classes_by_both_uncertainties_and_by_counting():
    layer, gaussians = random_layer(2), two_clusters()
    region, z = two_class_region(layer, gaussians, 0.05), grid()
    train, _ = gaussians.sample(200_000, seed=3)
    for score in (max_probability, entropy):
        counted = exact_region(lambda z, score=score: score(layer.logits(z)), train, 0.05)
        assert float((counted.contains(z) != region.contains(z)).double().mean()) < 0.01


def test_two_classes_solve_equation_20_with_its_indices_mended():
    w = torch.tensor([1.2, 0.3], dtype=torch.float64)
    layer, gaussians = Layer(torch.stack([w, -w]), torch.zeros(2, dtype=torch.float64)), two_clusters()
    region = two_class_region(layer, gaussians, 0.02)
    alpha = 2 * -region.threshold / float((2 * w).square().sum())  # of eq. 11, in units of w_1 = -w_2
    mean, deviation = gaussians.mean @ w, (gaussians.covariance @ w @ w).sqrt()
    shift = alpha * float(w @ w)  # the boundary goes through the origin, so z_0 = 0
    first = torch.special.erf((mean[0] - shift) / (math.sqrt(2) * deviation[0]))
    second = torch.special.erf((-shift - mean[1]) / (math.sqrt(2) * deviation[1]))
    assert float(0.3 * first + 0.7 * second) == pytest.approx(
        1 - 2 * 0.02, abs=1e-4
    )  # the far tails are left out there
    z0 = torch.tensor([[-0.3, 1.2]], dtype=torch.float64)  # on the boundary
    inside = [region.contains(z0 + f * alpha * w).item() for f in (-1.01, -0.99, 0.99, 1.01)]
    assert inside == [False, True, True, False]


def test_linear_region_is_definition_4_pair_by_pair():
    layer, z = random_layer(5), grid()
    region = linear_region(layer, 0.8)
    logits, t = layer.logits(z), math.log(0.8 / 0.2)
    top, inside = logits.argmax(1), torch.zeros(len(z), dtype=torch.bool)
    for i in range(5):
        for j in set(range(5)) - {i}:
            between = (logits[:, i] - logits[:, j]).abs() < t
            inside |= ((top == i) | (top == j)) & between
    assert torch.equal(region.contains(z), inside)


def test_alpha_is_where_the_confidence_is_reached_far_out():
    layer = Layer(2 * simplex(3, 2), torch.zeros(3, dtype=torch.float64))
    normal = layer.weight[0] - layer.weight[1]
    far = -1e4 * layer.weight[2]  # the boundary of classes 0 and 1, opposite to the third
    alpha = -linear_region(layer, 0.9).threshold / normal.square().sum()  # eq. 27
    edge = far + alpha * normal
    assert float(layer.logits(edge[None]).softmax(1).max()) == pytest.approx(0.9, abs=1e-9)


@given(seed=st.integers(0, 10_000), classes=st.integers(2, 8), confidence=st.floats(0.3, 0.999))
@settings(max_examples=60, deadline=None)
def test_linear_region_lies_in_the_exact_one(seed, classes, confidence):
    layer, z = random_layer(classes, seed=seed), grid(points=41)
    linear = linear_region(layer, confidence).contains(z)
    exact = Region(partial(u_max, layer), -confidence).contains(z)
    assert not (linear & ~exact).any()  # corollary 2.1
    if classes == 2:
        assert torch.equal(linear, exact)  # proposition 3
    if confidence <= 0.5:
        assert not linear.any()


def test_linear_region_becomes_exact_far_out():
    layer = Layer(2 * simplex(3, 2), torch.zeros(3, dtype=torch.float64))

    def disagreement(radius):
        turn = torch.linspace(0, 2 * math.pi, 200_001, dtype=torch.float64)
        z = radius * torch.stack([turn.cos(), turn.sin()], dim=1)
        exact = Region(partial(u_max, layer), -0.9).contains(z)
        return float((exact != linear_region(layer, 0.9).contains(z)).double().sum() / exact.double().sum())

    # Along w_1 the linear region ends at log(9) / 3 = 0.73, the exact one at log(18) / 3 = 0.96.
    assert disagreement(0.8) > 0.01
    assert disagreement(40) < 1e-3  # theorem 2


def test_one_gaussian_has_an_exact_ellipsoid():
    one = Gaussians(torch.ones(1), two_clusters().mean[:1], two_clusters().covariance[:1])
    z, _ = one.sample(200_000, seed=5)
    region = ellipsoids(one, 0.05)
    assert float(region.contains(z).double().mean()) == pytest.approx(0.05, abs=0.0025)
    threshold = float(one.uncertainty(one.mean)) + region.threshold / 2
    assert torch.equal(region.contains(z), Region(one.uncertainty, threshold).contains(z))


def test_ellipsoids_use_the_inverse_covariance():
    long = Gaussians(torch.ones(1), torch.zeros(1, 2), torch.diag(torch.tensor([9.0, 1.0]))[None])
    # The 95 % radius in two dimensions is sqrt(5.99) = 2.45, so 7.3 along the first axis.
    result = ellipsoids(long).contains(torch.tensor([[7.0, 0.0], [7.7, 0.0], [0.0, 2.3], [0.0, 2.6]]))
    assert result.tolist() == [False, True, False, True]


@pytest.mark.parametrize("overlap", [False, True])
def test_ellipsoids_of_several_hold_at_most_epsilon(overlap):
    gaussians = two_clusters(overlap)
    z, _ = gaussians.sample(200_000, seed=6)
    held = float(ellipsoids(gaussians, 0.05).contains(z).double().mean())
    assert held < 0.05 + 0.0025
    assert (held > 0.045) == (not overlap)


@pytest.mark.parametrize("threshold", [1.5, 3.0, 6.0])
def test_ellipsoid_bounds_enclose_the_exact_region(threshold):
    gaussians, z = two_clusters(overlap=True), grid(4.0)
    inner, outer = (region.contains(z) for region in ellipsoid_bounds(gaussians, threshold))
    exact = Region(gaussians.uncertainty, threshold).contains(z)
    assert not (inner & ~exact).any()
    assert not (exact & ~outer).any()
    assert (outer & ~inner).any()  # two bounds, not one


@pytest.mark.parametrize("width", [1, 2, 10, 300])
@pytest.mark.parametrize("epsilon", [0.99, 0.5, 0.05, 1e-9])
def test_the_radius_of_an_ellipsoid_is_the_quantile_of_chi_square(width, epsilon):
    one = Gaussians(torch.ones(1), torch.zeros(1, width), torch.eye(width)[None])
    assert ellipsoids(one, epsilon).threshold == pytest.approx(chi2.isf(epsilon, width), rel=1e-9)


def test_pictures_show_boundaries_regions_and_clusters_where_they_are():
    pytest.importorskip("matplotlib")
    _, axes = pictures.new_figure(1, 3)
    layer, gaussians = random_layer(3), two_clusters()
    pictures.draw_boundaries(axes[0][0], layer, 4.0)
    lines = [path for drawn in axes[0][0].collections for path in drawn.get_paths() if len(path.vertices)]
    for path in lines:
        top = layer.logits(torch.tensor(path.vertices)).topk(2, dim=1).values
        assert float((top[:, 0] - top[:, 1]).max()) < 0.1
    assert len(lines) == 3
    pictures.draw_region(axes[0][1], linear_region(layer, 0.9), 4.0, outline=True)
    (edge,) = axes[0][1].collections
    top = layer.logits(torch.tensor(edge.get_paths()[0].vertices)).topk(2, dim=1).values
    assert float((top[:, 0] - top[:, 1] - math.log(9)).abs().max()) < 0.1
    pictures.draw_clusters(axes[0][2], gaussians, share=0.95)
    ellipse = torch.tensor(axes[0][2].lines[3].get_xydata())  # dots and ellipse of each component
    torch.testing.assert_close(
        gaussians.squared_distance(ellipse)[:, 1], torch.full((200,), chi2.ppf(0.95, 2)).double()
    )


def test_all_are_regions():
    layer, gaussians = random_layer(2), two_clusters()
    for region in (
        exact_region(partial(u_max, layer), grid(points=5)),
        two_class_region(layer, gaussians),
        linear_region(layer, 0.9),
        ellipsoids(gaussians),
        *ellipsoid_bounds(gaussians, 2.0),
    ):
        assert isinstance(region, Region)
        assert region.contains(torch.zeros(0, 2)).shape == (0,)


def test_wrong_settings_are_reported():
    layer, gaussians = random_layer(3), two_clusters()
    with pytest.raises(ValueRangeError, match=r"layer must have 2 classes; got 3. Use exact_region"):
        two_class_region(layer, gaussians)
    with pytest.raises(
        ValueRangeError, match=r"ellipsoids: epsilon must be a number in \(0, 1\); got 5.0.*the paper takes 0.05"
    ):
        ellipsoids(gaussians, 5.0)
    with pytest.raises(ValueRangeError, match=r"confidence must be a number in \(0, 1\); got 1\.0.*saturated"):
        linear_region(layer, 1.0)
    with pytest.raises(ValueRangeError, match="the layer must have 2 classes or more; got 1"):
        linear_region(random_layer(1), 0.9)
    with pytest.raises(ValueRangeError, match=r"both weights are equal: no boundary .* Train the layer"):
        two_class_region(Layer(torch.ones(2, 2), torch.zeros(2)), gaussians)
    with pytest.raises(ValueRangeError, match="the number of training rows must be a number, at least 1; got 0"):
        training_threshold(torch.empty(0))
    with pytest.raises(ValueRangeError, match="1 of 2 values are NaN"):
        training_threshold(torch.tensor([0.0, math.nan]))


def drawn_layer(classes=5, width=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Layer(
        torch.randn(classes, width, dtype=torch.float64, generator=draw),
        torch.randn(classes, dtype=torch.float64, generator=draw),
    )


def random_gaussians(parts=3, width=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    share = torch.rand(parts, dtype=torch.float64, generator=draw) + 0.1
    mean = 2 * torch.randn(parts, width, dtype=torch.float64, generator=draw)
    root = torch.randn(parts, width, width, dtype=torch.float64, generator=draw)
    size = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)[:parts, None, None]  # determinants far apart
    covariance = size * (root @ root.transpose(1, 2) + 0.3 * torch.eye(width, dtype=torch.float64))
    return Gaussians(share / share.sum(), mean, covariance)


def points(n=60, width=4, seed=1):
    return 3 * torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_autograd(u, z):
    z = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(u(z).sum(), z)
    return gradient


def test_max_probability_field_is_the_gradient():
    layer, z = drawn_layer(), points()
    expected = by_autograd(lambda z: max_probability(layer.logits(z)), z)
    torch.testing.assert_close(max_probability_field(layer, z), expected)


def test_entropy_field_is_the_gradient():
    layer, z = drawn_layer(), points()
    torch.testing.assert_close(entropy_field(layer, z), by_autograd(lambda z: entropy(layer.logits(z)), z))


def test_equations_8_and_9_are_right_as_printed():
    layer, z = drawn_layer(), points(1)[0]
    p = layer.logits(z[None]).softmax(1)[0]
    towards = torch.stack([sum(p[j] * (layer.weight[j] - layer.weight[i]) for j in range(5)) for i in range(5)])
    i = int(p.argmax())
    torch.testing.assert_close(max_probability_field(layer, z[None])[0], p[i] * towards[i])
    torch.testing.assert_close(entropy_field(layer, z[None])[0], (((p.log() + 1) * p)[:, None] * towards).sum(0))


def test_density_field_is_the_gradient():
    gaussians, z = random_gaussians(), points()
    torch.testing.assert_close(density_field(gaussians, z), by_autograd(gaussians.uncertainty, z))


def test_equation_10_without_determinants_points_elsewhere():
    gaussians, z = random_gaussians(), points()
    part = (gaussians.share.log() - gaussians.squared_distance(z) / 2).softmax(1)
    pull = torch.linalg.solve(gaussians.covariance[None], (z[:, None] - gaussians.mean)[..., None])[..., 0]
    printed = (part[..., None] * pull).sum(1)
    assert float(torch.cosine_similarity(printed, density_field(gaussians, z)).min()) < 0.9


def test_fields_vanish_where_they_must():
    layer = Layer(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2))
    assert not entropy_field(layer, torch.zeros(1, 2)).any()  # the most uncertain point
    one = Gaussians(torch.ones(1), torch.ones(1, 2), torch.eye(2)[None])
    assert not density_field(one, torch.ones(1, 2)).any()  # the most certain one


def test_saturated_entropy_field_is_finite():
    layer = Layer(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2))
    assert torch.isfinite(entropy_field(layer, torch.tensor([[5000.0, 0.0]]))).all()


def test_uncertainty_is_minus_the_log_density_of_scipy():
    gaussians, z = random_gaussians(), points()
    parts = zip(gaussians.share.numpy(), gaussians.mean.numpy(), gaussians.covariance.numpy(), strict=True)
    density = sum(share * multivariate_normal(mean, cov).pdf(z.numpy()) for share, mean, cov in parts)
    np.testing.assert_allclose(gaussians.uncertainty(z).numpy(), -np.log(density), rtol=1e-10)


@pytest.mark.parametrize("covariance", ["full", "tied", "diagonal", "spherical"])
def test_a_fitted_density_score_gives_its_gaussians(covariance):
    z, label = random_gaussians().sample(900, seed=3)
    density = Density(covariance=covariance).fit(Table(feature=z, label=label))
    torch.testing.assert_close(Gaussians.of(density).uncertainty(points()), density.score(Table(feature=points())))


def test_a_density_in_another_space_has_none():
    table = Table(feature=points(200).abs(), label=torch.arange(200) % 2)
    with pytest.raises(ValueRangeError, match=r"space='log', nonlinearity='after' and 4 of 4 features. Fit it"):
        Gaussians.of(Density(space="log").fit(table))
    before = Table(feature=points(200).relu(), pre_activation=points(200), label=torch.arange(200) % 2)
    with pytest.raises(ValueRangeError, match=r"nonlinearity='before' and 4 of 4 features. Fit it with space='z',"):
        Gaussians.of(Density(nonlinearity="before").fit(before))
    with pytest.raises(NotFittedError, match="before fit"):
        Gaussians.of(Density())


@pytest.mark.parametrize("covariance", ["full", "tied", "diagonal", "spherical"])
def test_components_without_rows_are_left_out(covariance):
    z, label = random_gaussians().sample(900, seed=3)
    density = Density(covariance=covariance, max_iterations=0).fit(Table(feature=z, label=label))
    density.weights_ = torch.tensor([0.4, 0.0, 0.6], dtype=torch.float64)  # as EM leaves one that lost its rows
    gaussians = Gaussians.of(density)
    assert gaussians.share.tolist() == [0.4, 0.6]
    torch.testing.assert_close(gaussians.uncertainty(points()), density.score(Table(feature=points())))


def test_a_shared_covariance_is_kept_once():
    z, label = random_gaussians().sample(900, seed=3)
    gaussians = Gaussians.of(Density(covariance="tied").fit(Table(feature=z, label=label)))
    assert gaussians.covariance.shape == (1, 4, 4)
    assert gaussians.factor.shape == (1, 4, 4)
    assert gaussians.factor.untyped_storage().nbytes() == 8 * 4 * 4
    each = Gaussians(gaussians.share, gaussians.mean, gaussians.covariance.repeat(3, 1, 1))
    torch.testing.assert_close(density_field(gaussians, points()), density_field(each, points()))
    torch.testing.assert_close(gaussians.log_peak, each.log_peak)
    assert torch.equal(gaussians.sample(50)[0], each.sample(50)[0])
    torch.testing.assert_close(density_field(gaussians, points()), by_autograd(gaussians.uncertainty, points()))
    with pytest.raises(ValueRangeError, match=r"one covariance, or one for each of the 3 means, .* got 2, 0 of"):
        Gaussians(gaussians.share, gaussians.mean, gaussians.covariance.repeat(2, 1, 1))


def test_arrows_of_a_picture_have_one_length():
    pytest.importorskip("matplotlib")
    _, axes = pictures.new_figure(1, 1)
    layer = Layer(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2))
    pictures.draw_field(axes[0][0], lambda z: max_probability_field(layer, z), 4.0, arrows=5)
    (quiver,) = axes[0][0].collections
    assert np.hypot(quiver.U, quiver.V) == pytest.approx(np.ones(25))
    np.testing.assert_array_equal(np.sign(quiver.U.reshape(5, 5)[0, [0, 1, 3, 4]]), [1, 1, -1, -1])  # to the boundary


def test_samples_have_the_moments():
    gaussians = random_gaussians()
    z, component = gaussians.sample(60_000, seed=4)
    for i in range(3):
        mine = z[component == i]
        assert len(mine) / len(z) == pytest.approx(float(gaussians.share[i]), abs=0.01)
        torch.testing.assert_close(mine.T.cov(), gaussians.covariance[i], rtol=0.1, atol=0.1)
        torch.testing.assert_close(mine.mean(0), gaussians.mean[i], rtol=0, atol=0.1)
    assert torch.equal(z, gaussians.sample(60_000, seed=4)[0])


def test_wrong_mixtures_are_reported():
    eye = torch.eye(2).expand(2, 2, 2)
    with pytest.raises(ValueRangeError, match=r"share must be positive and sum to one; .*Divide it by its sum"):
        Gaussians(torch.tensor([0.5, 0.6]), torch.zeros(2, 2), eye)
    with pytest.raises(ValueRangeError, match=r"all positive definite; got 2, 2 of them not. Add a small number"):
        Gaussians(torch.tensor([0.5, 0.5]), torch.zeros(2, 2), eye * torch.tensor([1.0, 0.0]))
