import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from dubito.errors import NotFittedError, ValueRangeError
from dubito.explain import pictures
from dubito.explain.last_layer import Layer
from dubito.explain.regions import Gaussians, density_field, entropy_field, max_probability_field
from dubito.scores.density import Density
from dubito.scores.softmax import entropy, max_probability
from dubito.table import Table


def random_layer(classes=5, width=4, seed=0):
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
    layer, z = random_layer(), points()
    expected = by_autograd(lambda z: max_probability(layer.logits(z)), z)
    torch.testing.assert_close(max_probability_field(layer, z), expected)


def test_entropy_field_is_the_gradient():
    layer, z = random_layer(), points()
    torch.testing.assert_close(entropy_field(layer, z), by_autograd(lambda z: entropy(layer.logits(z)), z))


def test_equations_8_and_9_are_right_as_printed():
    layer, z = random_layer(), points(1)[0]
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
    with pytest.raises(ValueRangeError, match="one covariance, or one for each of the 3 means; got 2"):
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


def test_wrong_mixtures_are_told():
    eye = torch.eye(2).expand(2, 2, 2)
    with pytest.raises(ValueRangeError, match=r"share must be positive and sum to one; .*Divide it by its sum"):
        Gaussians(torch.tensor([0.5, 0.6]), torch.zeros(2, 2), eye)
    with pytest.raises(ValueRangeError, match=r"must be positive definite; one is not. Add a small number"):
        Gaussians(torch.tensor([0.5, 0.5]), torch.zeros(2, 2), eye * torch.tensor([1.0, 0.0]))
