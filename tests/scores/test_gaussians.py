import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture

from dubito.errors import ValueRangeError
from dubito.scores import gaussians
from dubito.scores.gaussians import Maximiser, Mixture, improve, kmeans, maximise, precision_factor, squared_distances

COVARIANCES = ("full", "tied", "diagonal", "spherical")
THEIRS = {"full": "full", "tied": "tied", "diagonal": "diag", "spherical": "spherical"}


def clusters(n: int, *, d: int = 6, k: int = 3, apart: float = 1.5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows around k means, each cluster squeezed and turned in its own way, all far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % k
    means = 5 + apart * torch.randn(k, d, generator=generator, dtype=torch.float64)
    shapes = torch.eye(d, dtype=torch.float64) + 0.4 * torch.randn(k, d, d, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 1, d, generator=generator, dtype=torch.float64)
    return means[label] + (noise @ shapes[label])[:, 0], label


def closed(z: torch.Tensor, label: torch.Tensor, covariance: str, regularisation: float = 1e-5) -> Mixture:
    k = int(label.max()) + 1
    means = torch.stack([z[label == c].mean(0) for c in range(k)])
    return maximise(iter([(z, label)]), means, covariance, regularisation)


def sklearn_from(mixture: Mixture, **settings) -> GaussianMixture:
    covariances = mixture.covariances()
    precisions = covariances.inverse() if mixture.covariance in ("full", "tied") else 1 / covariances
    return GaussianMixture(
        len(mixture.weights),
        covariance_type=THEIRS[mixture.covariance],
        weights_init=mixture.weights.numpy(),
        means_init=mixture.means.numpy(),
        precisions_init=precisions.numpy(),
        **settings,
    )


def dense(mixture: Mixture) -> list[np.ndarray]:
    """Every component's covariance as a matrix."""
    k, d = mixture.means.shape
    covariances = mixture.covariances()
    as_matrices = {
        "full": lambda: covariances,
        "tied": lambda: covariances.expand(k, d, d),
        "diagonal": covariances.diag_embed,
        "spherical": lambda: covariances[:, None, None] * torch.eye(d, dtype=torch.float64),
    }
    return list(as_matrices[mixture.covariance]().numpy())


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_the_density_by_brute_force(covariance):
    z, label = clusters(90)
    mixture = closed(z, label, covariance)
    rows = clusters(40, seed=3)[0]
    logs = [
        np.log(weight) + multivariate_normal(mean, cov).logpdf(rows.numpy())
        for weight, mean, cov in zip(mixture.weights.numpy(), mixture.means.numpy(), dense(mixture), strict=True)
    ]
    assert mixture.log_density(rows).numpy() == pytest.approx(logsumexp(logs, axis=0), rel=1e-9)


def test_one_gaussian_by_hand():
    # Mean 1, variance (1 + 1 + 4) / 3 = 2: log N(3) = -log(2 pi 2) / 2 - 4 / 4
    z = torch.tensor([[0.0], [0.0], [3.0]], dtype=torch.float64)
    for covariance in COVARIANCES:
        mixture = closed(z, torch.zeros(3, dtype=torch.long), covariance, regularisation=0.0)
        assert mixture.means.item() == pytest.approx(1.0)
        assert mixture.covariances().item() == pytest.approx(2.0)
        assert mixture.log_density(z)[2].item() == pytest.approx(-0.5 * np.log(4 * np.pi) - 1)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_the_closed_form_is_the_mean_and_covariance_of_each_class(covariance):
    z, label = clusters(90)
    result = dense(closed(z, label, covariance, regularisation=0.25))
    each = [np.cov(z[label == c].numpy().T, bias=True) for c in range(3)]
    for c in range(3):
        expected = {
            "full": each[c],
            "tied": np.mean(each, axis=0),  # thirty rows each
            "diagonal": np.diag(np.diag(each[c])),
            "spherical": np.eye(6) * np.trace(each[c]) / 6,
        }[covariance]
        assert result[c] == pytest.approx(expected + 0.25 * np.eye(6), rel=1e-9, abs=1e-12)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("iterations", [1, 7])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_em_is_sklearns(covariance, iterations):
    z, _ = clusters(300)
    start = closed(z, torch.arange(300) // 100, covariance, regularisation=1e-3)
    theirs = sklearn_from(start, max_iter=iterations, tol=0.0, reg_covar=1e-3).fit(z.numpy())
    ours, likelihoods = improve(
        lambda: iter(z.split(77)), start, regularisation=1e-3, max_iterations=iterations, tolerance=0.0
    )
    assert len(likelihoods) == iterations
    assert likelihoods[-1] == pytest.approx(theirs.lower_bound_, rel=1e-8)
    assert ours.weights.numpy() == pytest.approx(theirs.weights_, rel=1e-7)
    assert ours.means.numpy() == pytest.approx(theirs.means_, rel=1e-7)
    assert ours.covariances().numpy() == pytest.approx(theirs.covariances_, rel=1e-6, abs=1e-9)
    rows = clusters(50, seed=3)[0]
    assert ours.log_density(rows).numpy() == pytest.approx(theirs.score_samples(rows.numpy()), rel=1e-6)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("apart", [0.3, 1.5, 30.0])
def test_chunks_and_left_out_components_change_nothing(monkeypatch, apart):
    # Seven chunks of the twenty coordinates; clusters from overlapping to so far apart that all but one are left out.
    monkeypatch.setattr("dubito.scores.gaussians.CHUNK", 3)
    z, label = clusters(600, d=20, k=5, apart=apart)
    start = closed(z, label, "full", regularisation=1e-3)
    theirs = sklearn_from(start, max_iter=3, tol=0.0, reg_covar=1e-3).fit(z.numpy())
    ours, likelihoods = improve(lambda: iter([z]), start, regularisation=1e-3, max_iterations=3, tolerance=0.0)
    assert likelihoods[-1] == pytest.approx(theirs.lower_bound_, rel=1e-9)
    assert ours.means.numpy() == pytest.approx(theirs.means_, rel=1e-8)
    rows = torch.cat([clusters(50, d=20, k=5, apart=apart, seed=3)[0], 100 * torch.ones(1, 20, dtype=torch.float64)])
    assert ours.log_density(rows).numpy() == pytest.approx(theirs.score_samples(rows.numpy()), rel=1e-9)
    left_out = ours.log_joint(z) == -torch.inf
    assert not bool(left_out.all(1).any())
    if apart == 30:
        assert int(left_out.sum()) == 600 * 4  # that is what saves the time


def test_the_best_component_is_found_when_the_first_coordinates_mislead(monkeypatch):
    # Judged by the first coordinate alone, the row belongs to component 0; the second one says otherwise.
    monkeypatch.setattr(gaussians, "CHUNK", 1)
    means = torch.tensor([[0.0, 100.0], [3.0, 0.0]], dtype=torch.float64)
    mixture = Mixture("full", torch.full((2,), 0.5).double(), means, torch.eye(2).double().expand(2, 2, 2).clone())
    joint = mixture.log_joint(torch.zeros(1, 2, dtype=torch.float64))
    constant = np.log(0.5) - np.log(2 * np.pi)
    assert joint[0].tolist() == pytest.approx([constant - 100**2 / 2, constant - 3**2 / 2])


def test_em_ends_by_its_tolerance_and_never_gets_worse():
    z, label = clusters(300, apart=0.8)
    start = closed(z, label.roll(1) % 3, "full")
    _, likelihoods = improve(lambda: iter([z]), start, regularisation=1e-9, max_iterations=200, tolerance=1e-4)
    steps = np.diff(likelihoods)
    assert 2 < len(likelihoods) < 200
    assert steps.min() > -1e-9
    assert steps[-1] < 1e-4 <= steps[:-1].min()


@pytest.mark.parametrize("regularisation", [1e-5, 0.0])
@pytest.mark.parametrize("covariance", ["full", "diagonal", "spherical"])
def test_a_component_that_loses_its_rows_keeps_its_shape(covariance, regularisation):
    z, label = clusters(100, k=2, apart=3.0)
    start = closed(z, label, covariance)
    means = torch.cat([start.means, torch.full((1, 6), 1e4, dtype=torch.float64)])
    factors = torch.cat([start.factors, start.factors[:1]])
    lonely = Mixture(covariance, torch.full((3,), 1 / 3).double(), means, factors)
    ours, _ = improve(lambda: iter([z]), lonely, regularisation=regularisation, max_iterations=3, tolerance=0.0)
    assert ours.weights[2].item() == 0
    assert torch.equal(ours.means[2], lonely.means[2])
    assert torch.equal(ours.factors[2], lonely.factors[2])
    expected, _ = improve(lambda: iter([z]), start, regularisation=regularisation, max_iterations=3, tolerance=0.0)
    assert torch.allclose(ours.log_density(z), expected.log_density(z), rtol=1e-7)  # sums lie around a far middle


def test_shares_count_rows_in_parts():
    z, _ = clusters(40)
    shares = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)).double()
    shares /= shares.sum(1, keepdim=True)
    for covariance in COVARIANCES:
        sums = Maximiser(z[:2].clone(), covariance, 1e-5)
        for part, share in zip(z.split(9), shares.split(9), strict=True):
            sums.add(part, share)
        mixture = sums.mixture()
        assert mixture.weights.numpy() == pytest.approx(shares.mean(0).numpy())
        for k in range(2):
            mean = np.average(z.numpy(), axis=0, weights=shares[:, k].numpy())
            assert mixture.means[k].numpy() == pytest.approx(mean)
        if covariance == "full":
            expected = np.cov(z.numpy().T, bias=True, aweights=shares[:, 0].numpy()) + 1e-5 * np.eye(6)
            assert mixture.covariances()[0].numpy() == pytest.approx(expected)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_without_regularisation_a_constant_feature_is_singular(covariance):
    z, label = clusters(60)
    z[:, 2] = 1.0
    if covariance == "spherical":
        z[:] = 1.0
    with pytest.raises(
        ValueRangeError, match=r"density\.fit: the covariance of (component 0|all components) is singul"
    ):
        closed(z, label, covariance, regularisation=0.0)
    assert bool(closed(z, label, covariance, regularisation=1e-5).log_density(z).isfinite().all())


def test_the_factor_of_a_singular_covariance():
    factor = precision_factor(torch.eye(2).double(), whose="x", regularisation=3.0)
    assert (factor @ factor.T).tolist() == [[0.25, 0.0], [0.0, 0.25]]
    with pytest.raises(ValueRangeError) as error:
        precision_factor(torch.ones(2, 2).double(), whose="the covariance", regularisation=0.0)
    assert str(error.value) == (
        "the covariance is singular, even with regularisation 0 on its diagonal: some features are constant, or "
        "combinations of others, or there are fewer rows than features. Raise regularisation."
    )


def test_kmeans_finds_clusters_and_obeys_its_seed():
    z, label = clusters(300, apart=20.0)
    centres = kmeans(z.float(), 3, seed=1)
    result = squared_distances(z, centres).argmin(1)
    assert all(len(result[label == c].unique()) == 1 for c in range(3))
    assert len(result.unique()) == 3
    assert torch.equal(kmeans(z.float(), 3, seed=1), centres)
    assert torch.allclose(centres, torch.stack([z[result == c].mean(0) for c in range(3)]), rtol=1e-5)
