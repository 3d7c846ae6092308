import contextlib
import math

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from dubito.errors import DubitoWarning, MissingColumnError, NotFittedError, TableError, ValueRangeError
from dubito.scores.density import Density, default_density, describe_density, in_space
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.registry import load_score, save_score
from dubito.scores.residual import Residual
from dubito.scores.softmax import Entropy
from dubito.table import Table
from tests.scores.clusters import data

COVARIANCES = ("full", "tied", "diagonal", "spherical")


def test_by_hand():
    # One Gaussian of mean 2 and variance 1 in each of two features: -log N = log 2 pi + (9 + 1) / 2
    train = Table(feature=[[1.0, 1.0], [3.0, 3.0], [1.0, 3.0], [3.0, 1.0]], label=[0, 0, 0, 0])
    for covariance in COVARIANCES:
        score = Density(covariance=covariance, regularisation=0.0).fit(train)
        assert score.score(Table(feature=[[5.0, 1.0]])).item() == pytest.approx(math.log(2 * math.pi) + 5)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("space", ["z", "log"])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_from_the_classes_on_it_is_sklearns(covariance, space):
    train, rows = data(), data(50, seed=1)
    score = Density(covariance=covariance, space=space, offset=0.5, max_iterations=5, tolerance=0.0).fit(train)
    z, y = train.feature.double().numpy(), train.label.numpy()
    z = np.log(z + 0.5) if space == "log" else z
    closed = Density(covariance=covariance, space=space, offset=0.5, max_iterations=0).fit(train)
    covariances = closed.mixture.covariances()
    theirs = GaussianMixture(
        3,
        covariance_type={"diagonal": "diag"}.get(covariance, covariance),
        max_iter=5,
        tol=0.0,
        reg_covar=1e-5,
        weights_init=[1 / 3] * 3,
        means_init=[z[y == c].mean(0) for c in range(3)],
        precisions_init=(covariances.inverse() if covariance in ("full", "tied") else 1 / covariances).numpy(),
    ).fit(z)
    q = rows.feature.double().numpy()
    expected = -theirs.score_samples(np.log(q + 0.5) if space == "log" else q)
    assert score.score(rows).numpy() == pytest.approx(expected, rel=1e-6)
    assert score.log_likelihoods_[-1] == pytest.approx(theirs.lower_bound_, rel=1e-8)
    assert closed.log_likelihoods_ == []


def test_without_iterations_it_stays_class_by_class():
    train = data()
    score = Density(max_iterations=0).fit(train)
    for c in range(3):
        z = train.feature[train.label == c].double().numpy()
        assert score.means_[c].numpy() == pytest.approx(z.mean(0))
        expected = np.cov(z.T, bias=True) + 1e-5 * np.eye(6)
        assert score.mixture.covariances()[c].numpy() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert score.weights_.tolist() == pytest.approx([1 / 3] * 3)


def test_free_finds_the_same_clusters_without_labels():
    train, rows = data(), data(50, seed=1)
    free = Density(components=3, start="free", tolerance=1e-10).fit(train.select("feature"))
    assert torch.allclose(free.score(rows), Density(tolerance=1e-10).fit(train).score(rows), rtol=1e-3)
    assert torch.equal(
        free.score(rows), Density(components=3, start="free", tolerance=1e-10).fit(train.select("feature")).score(rows)
    )


def test_the_number_of_components():
    train = data()
    assert len(Density().fit(train).weights_) == 3
    assert len(Density(start="free").fit(train).weights_) == 3
    wide = Table(feature=train.feature, label=train.label, logit=torch.zeros(300, 5))
    assert len(Density(start="free").fit(wide).weights_) == 5
    assert len(Density(start="free").fit(train.select("feature", "label")).weights_) == 3
    with pytest.raises(
        TableError, match=r"^density\.fit: components must be set; table in memory has neither label nor logit to co"
    ):
        Density(start="free").fit(train.select("feature"))
    with pytest.raises(
        TableError,
        match=r"^density\.fit: with start='class' there is one component for each of the 3 labels of table in memory; "
        r"got components=4\. Leave components out, or choose start='free'\.",
    ):
        Density(components=4).fit(train)
    with pytest.raises(
        TableError, match=r"^density\.fit: 301 components need at least as many rows; table in memory has 300\. Fit on"
    ):
        Density(components=301, start="free").fit(train)
    with pytest.raises(TableError, match=r"density\.fit needs labelled rows; table in memory has none"):
        Density().fit(train.rows(slice(0, 0)))


def test_as_many_components_as_rows():
    subset = data(12)
    score = Density(components=12, start="free", covariance="tied", regularisation=0.1, max_iterations=3)
    assert bool(score.fit(subset).score(subset).isfinite().all())


def test_rows_that_are_all_the_same():
    same = Table(feature=torch.ones(20, 4))
    score = Density(components=3, start="free").fit(same)
    # Any number of needles at one place: one Gaussian with the variance of the regularisation.
    expected = 0.5 * 4 * math.log(2 * math.pi * 1e-5)
    assert score.score(same).numpy() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_class_with_one_example(covariance):
    train = data(60)
    label = train.label.clone()
    label[0] = 9
    train = train.extended(label=label)
    message = (
        r"^density\.fit: a class with a single row gets a Gaussian without variance but the regularisation, 1e-05, "
        r"which knows no other image; table in memory has 1 of that kind \(label 9\)\. Fit on more images of them, or "
        r"choose covariance='tied'\.$"
    )
    with contextlib.nullcontext() if covariance == "tied" else pytest.warns(DubitoWarning, match=message):
        score = Density(covariance=covariance, max_iterations=0).fit(train)
    assert score.weights_.tolist() == pytest.approx([19 / 60, 20 / 60, 20 / 60, 1 / 60])
    assert torch.allclose(score.means_[3], train.feature[0].double())
    if covariance == "full":
        # A needle: its variance is the regularisation alone.
        assert torch.allclose(score.mixture.covariances()[3], 1e-5 * torch.eye(6).double(), atol=1e-12)
    assert bool(score.score(data(30, seed=1)).isfinite().all())


def test_a_feature_that_never_varied():
    feature = torch.cat([data().feature, torch.full((300, 1), 7.0)], dim=1)
    train = Table(feature=feature, label=data().label)
    for covariance in ("full", "tied", "diagonal"):
        score = Density(covariance=covariance, max_iterations=0).fit(train)
        moved = Table(feature=feature + torch.tensor([0.0] * 6 + [0.25]))
        # Its variance is the regularisation: 0.25^2 / (2e-5) = 3125 more
        assert (score.score(moved) - score.score(train)).numpy() == pytest.approx(3125, rel=1e-4)
        with pytest.raises(ValueRangeError, match=r"density\.fit: the covariance of .* is singular, even with regular"):
            Density(covariance=covariance, regularisation=0.0).fit(train)


def test_fewer_rows_than_features():
    subset = data(12, d=40)
    assert bool(Density().fit(subset).score(subset).isfinite().all())
    with pytest.raises(ValueRangeError, match="there are fewer rows than features"):
        Density(regularisation=0.0).fit(subset)


def test_the_logarithm():
    z = torch.tensor([[0.0, 1.0]])
    assert in_space(z, "log", 0.5, "x")[0].tolist() == pytest.approx([math.log(0.5), math.log(1.5)])
    with pytest.raises(ValueRangeError) as error:
        Density(space="log", offset=0.01).fit(Table(feature=[[1.0, 0.0], [2.0, -0.01]], label=[0, 0]))
    assert str(error.value) == (
        "density.fit: with space='log', features must be larger than -offset = -0.01; got -0.01 in feature 1. Choose "
        "space='z' (features before a non-linearity may be negative), or a larger offset."
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_without_meaning(bad):
    train = data()
    broken = train.feature.clone()
    broken[7, 2] = bad
    message = f"column 'feature' must be finite; row 7 of table in memory holds {bad}. Look at that image."
    with pytest.raises(ValueRangeError) as error:
        Density(neurons=2).fit(train.extended(feature=broken))
    assert str(error.value) == f"density.fit: {message}"
    with pytest.raises(ValueRangeError) as error:
        Density().fit(train).score(Table(feature=broken))
    assert str(error.value) == f"density.score: {message}"


@pytest.mark.parametrize("score", [Density(components=1, start="free", max_iterations=0), Mahalanobis(), Residual()])
def test_a_bad_row_is_named_by_its_place_in_the_table(score):
    train = data(5000, name="many")
    broken = train.feature.clone()
    broken[4321, 2] = torch.nan  # in the third block
    score.fit(train.extended(logit=2 * train.feature))
    table = train.extended(feature=broken, logit=2 * train.feature)
    message = r"column 'feature' must be finite; row 4321 of many holds nan\. Look at that image\."
    with pytest.raises(ValueRangeError, match=rf"^{score.name}\.score: {message}$"):
        score.score(table)
    with pytest.raises(ValueRangeError, match=rf"^{score.name}\.fit: {message}$"):
        score.fit(table)


def test_some_neurons():
    train, rows = data(), data(20, seed=1)
    score = Density(neurons=2, seed=3).fit(train)
    chosen = score.neurons_
    assert len(chosen.unique()) == 2
    narrow = Density().fit(Table(feature=train.feature[:, chosen], label=train.label))
    assert torch.allclose(score.score(rows), narrow.score(Table(feature=rows.feature[:, chosen])), rtol=1e-9)
    assert {tuple(Density(neurons=2, seed=s).fit(train).neurons_.tolist()) for s in range(8)} != {
        tuple(chosen.tolist())
    }
    with pytest.raises(TableError, match=r"density\.fit: neurons must be a number in \[1, 6\]; got 7\. Leave it out"):
        Density(neurons=7).fit(train)


def test_memory_is_requested_beforehand():
    # 2 x 1000 x 1280 x 1280 x 8 bytes: the features themselves are never read.
    train = Table(feature=torch.zeros(1, 1280).expand(1000, 1280), label=torch.arange(1000))
    with pytest.raises(ValueRangeError) as error:
        Density().fit(train)
    assert str(error.value) == (
        "density.fit: 1000 components with full covariances of 1280 features take 26.2 GB (26,214,400,000 bytes); "
        "memory=4 allows 4 GB. Choose covariance='tied' or 'diagonal', fewer features (neurons=...) or components, or "
        "allow more memory."
    )
    with pytest.raises(
        ValueRangeError, match=r"density\.fit: 3 components with tied covariances of 6 features take 0\.0"
    ):
        Density(covariance="tied", memory=1e-7).fit(data())
    assert Density(memory=math.inf).fit(data()).is_fitted
    with pytest.raises(
        ValueRangeError, match=r"density: memory must be a number, above 0; got nan\. It is in gigabytes"
    ):
        Density(memory=math.nan)


def test_k_means_takes_no_more_than_memory(monkeypatch):
    # The mixture takes 96 kB, but 16,384 rows of 1,000 features would take 0.3 GB on their way through k-means.
    seen = []

    def watched(sample, k, seed):
        seen.append(len(sample))
        return sample[:k].double()

    monkeypatch.setattr("dubito.scores.density.kmeans", watched)
    table = Table(feature=torch.randn(1, 1000).expand(20_000, 1000))
    Density(start="free", components=2, covariance="diagonal", max_iterations=0, memory=0.01).fit(table)
    assert seen == [312]  # 32 x 1,000 bytes each
    Density(start="free", components=2, covariance="diagonal", max_iterations=0).fit(table)
    Density(start="free", components=400, covariance="diagonal", max_iterations=0, memory=0.02).fit(table)
    assert seen[1:] == [16_384, 625]
    monkeypatch.setattr("dubito.scores.density._SAMPLE_BYTES", 1e6)
    Density(start="free", components=40, covariance="diagonal", max_iterations=0).fit(table)
    assert seen[3:] == [40]  # one for each component is the least


@pytest.mark.parametrize("covariance", ["tied", "diagonal", "spherical"])
def test_a_thousand_classes_of_many_features(covariance, one_thread):
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(1000, 320, generator=generator)
    label = torch.arange(2000) % 1000
    train = Table(feature=means[label] + 0.3 * torch.randn(2000, 320, generator=generator), label=label)
    score = Density(covariance=covariance, max_iterations=2, regularisation=1e-3).fit(train)
    known = score.score(train.rows(slice(0, 100)))
    unknown = score.score(Table(feature=2 * torch.randn(100, 320, generator=generator)))
    assert known.max() < unknown.min()


def test_far_is_more_uncertain():
    train = data()
    centre = train.feature.mean(0)
    steps = torch.tensor([5.0, 10.0, 100.0, 1e4])[:, None]
    u = Density().fit(train).score(Table(feature=centre + steps))
    assert bool((u.diff() > 0).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regularisation": -1.0}, "regularisation must be a number, at least 0; got -1.0."),
        ({"regularisation": float("nan")}, "regularisation must be a number, at least 0; got nan."),
        ({"components": 0}, "components must be a number, at least 1; got 0."),
        ({"max_iterations": -1}, "max_iterations must be a number, at least 0; got -1."),
        ({"memory": 0.0}, "memory must be a number, above 0; got 0.0. It is in gigabytes."),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueRangeError) as error:
        Density(**settings)
    assert str(error.value) == f"density: {message}"


def test_features_of_another_width():
    score = Density(neurons=2).fit(data())
    with pytest.raises(
        TableError, match=r"density\.score: features must be 6 wide, as in fit; got 5 in cache/other\. Score a table"
    ):
        score.score(Table(feature=torch.ones(3, 5), name="cache/other"))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_saved_and_loaded(covariance, tmp_path):
    score = Density(covariance=covariance, neurons=4, space="log").fit(data())
    loaded = load_score(save_score(score, tmp_path))
    assert torch.equal(loaded.score(data(20, seed=1)), score.score(data(20, seed=1)))
    assert loaded.log_likelihoods_ == score.log_likelihoods_


def test_a_fit_that_fails_leaves_nothing_behind():
    score = Density(neurons=3).fit(data())
    with pytest.raises(TableError, match=r"neurons must be a number in \[1, 2\]; got 3"):
        score.fit(data(d=2))
    with pytest.raises(NotFittedError, match=r"density\.score was called before fit"):
        score.score(data())


def with_before(n: int = 300, seed: int = 0) -> Table:
    """Features behind a ReLU, and what lies before it."""
    table = data(n, seed=seed)
    before = table.feature - 6
    return Table(feature=before.relu(), pre_activation=before, label=table.label, logit=table.logit)


def test_before_the_non_linearity_it_is_the_density_of_that_column():
    train, rows = with_before(), with_before(50, seed=1)
    plain = Density().fit(Table(feature=train.whole("pre_activation"), label=train.label))
    result = Density(nonlinearity="before").fit(train)
    assert torch.equal(result.score(rows), plain.score(Table(feature=rows.whole("pre_activation"))))
    assert not torch.equal(result.score(rows), Density().fit(train).score(rows))


def test_before_needs_its_column_and_says_who_writes_it():
    writer = r"It is written by .*PreActivation.*$"
    with pytest.raises(
        MissingColumnError, match=rf"^density\.fit needs column 'pre_activation'; table in memory has .*\. {writer}"
    ):
        Density(nonlinearity="before").fit(data())
    fitted = Density(nonlinearity="before").fit(with_before())
    with pytest.raises(MissingColumnError, match=rf"^density\.score needs column 'pre_activation'; .*\. {writer}"):
        fitted.score(data())


def test_before_is_kept_in_the_artefact(tmp_path):
    rows = with_before(50, seed=1)
    score = Density(nonlinearity="before").fit(with_before())
    save_score(score, tmp_path / "density")
    assert torch.equal(load_score(tmp_path / "density").score(rows), score.score(rows))


@pytest.mark.parametrize(
    ("rows", "width", "classes", "expected"),
    [
        (4000, 16, 10, ("class", "full", 100)),  # 4000 >= 5 x 10 x 16
        (700, 16, 10, ("class", "tied", 100)),
        (100, 64, 10, ("class", "diagonal", 100)),
        (1500, 4, 150, ("class", "tied", 0)),  # more than a hundred: in closed form
        (400, 8, 100, ("free", "full", 100)),  # four rows a class: 400 / 50 clusters, 400 >= 5 x 8 x 8
    ],
)
def test_default_density(rows, width, classes, expected):
    table = Table(feature=torch.randn(rows, width), label=torch.arange(rows) % classes)
    density = default_density(table)
    assert (density.start, density.covariance, density.max_iterations) == expected
    assert default_density(table, "spherical").covariance == "spherical"


def test_default_density_without_labels_and_its_words():
    table = Table(feature=torch.randn(120, 4), logit=torch.randn(120, 10))
    density = default_density(table)
    assert (density.components, density.start) == (2, "free")
    assert describe_density(density, table) == (
        "2 Gaussians (by k-means), full covariances of 4 features, by EM, 0.0 MB"
    )
    many = Table(feature=torch.zeros(2000, 100), label=torch.arange(2000) % 200)
    assert describe_density(default_density(many), many) == (
        "200 Gaussians (one per class), tied covariances of 100 features, in closed form, 0.2 MB"
    )
    assert describe_density(Entropy(), table) == "entropy"
    free = Density(start="free", covariance="diagonal", max_iterations=0)
    assert (
        describe_density(free, table)
        == "10 Gaussians (by k-means), diagonal covariances of 4 features, in closed form, 0.0 MB"
    )
    fitted = Density(components=3, start="free", covariance="tied", neurons=2).fit(table)
    assert describe_density(fitted, None) == ("3 Gaussians (by k-means), tied covariances of 2 features, by EM, 0.0 MB")
    assert describe_density(Density(), None) == "density"


@pytest.mark.parametrize(
    ("covariance", "cost"),
    [("full", 600 * 3 * 8 * 8), ("tied", 600 * 8 * (8 + 3)), ("diagonal", 600 * 3 * 8), ("spherical", 600 * 3 * 8)],
)
def test_em_is_left_out_where_an_iteration_costs_too_much(covariance, cost):
    table = Table(feature=torch.randn(600, 8), label=torch.arange(600) % 3)
    for most, iterations in ((cost, 100), (cost - 1, 0)):
        density = default_density(table, covariance, most=float(most))
        assert (density.covariance, density.max_iterations) == (covariance, iterations)


def test_without_features_it_says_who_needs_them():
    with pytest.raises(MissingColumnError, match=r"^diagnose needs column 'feature'; table in memory has label\."):
        default_density(Table(label=[0, 1]), by="diagnose")
