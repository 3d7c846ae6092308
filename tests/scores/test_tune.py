import math
from dataclasses import replace

import pytest
import torch

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.scores.density import Density
from dubito.table import Table
from tests.scores.clusters import data


def test_tune_prefers_what_explains_held_out_rows():
    # Two correlated clusters of positive features: neither one Gaussian nor independent features will do.
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(800) % 2
    shared = torch.randn(800, 1, generator=generator)
    feature = 20 + 8 * label[:, None] + shared + 0.1 * torch.randn(800, 3, generator=generator)
    table = Table(feature=feature, label=label)
    train, held_out = table.rows(slice(0, 400)), table.rows(slice(400, 800))
    grid = {"neurons": (None, 2), "regularisation": (1.0, 1e-4), "components": (1, None), "space": ("z",)}
    tuned = Density.tune(train, held_out, grid=grid, budget=200)
    best = tuned.tried[0]
    assert (best["covariance"], best["components"], best["neurons"], best["regularisation"]) in [
        ("full", None, None, 1e-4),
        ("tied", None, None, 1e-4),
    ]
    assert best["log_likelihood"] == pytest.approx(-tuned.density.score(held_out).mean().item(), rel=1e-9)
    values = [row["log_likelihood"] for row in tuned.tried]
    assert values == sorted(values, reverse=True)
    assert str(tuned).splitlines()[0].split()[:3] == ["covariance", "space", "components"]
    assert len(str(tuned).splitlines()) == len(values) + 1


def test_likelihoods_of_both_spaces_are_of_the_same_z():
    # Log-normal features: in log(z) they are Gaussian, so that space must win; and the truth is known.
    generator = torch.Generator().manual_seed(0)
    feature = torch.exp(0.8 * torch.randn(4000, 2, generator=generator)).double()
    train, held_out = Table(feature=feature[:2000]), Table(feature=feature[2000:])
    tuned = Density.tune(
        train, held_out, grid={"components": (1,), "neurons": (None,)}, budget=100, offset=0.0, max_iterations=0
    )
    assert tuned.tried[0]["space"] == "log"
    z = held_out.feature
    truth = torch.distributions.LogNormal(0.0, 0.8).log_prob(z).sum(1).mean().item()
    assert tuned.tried[0]["log_likelihood"] == pytest.approx(truth, abs=0.02)
    assert max(row["log_likelihood"] for row in tuned.tried if row["space"] == "z") < truth - 0.5


def test_neurons_that_are_left_out_are_independent_gaussians():
    # Independent features: leaving some out costs nothing, and without the rest of the density it would pay.
    z = 3 * torch.randn(4000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = {"neurons": (1, 2, None), "components": (1,), "covariance": ("diagonal",), "space": ("z",)}
    tuned = Density.tune(Table(feature=z[:2000]), Table(feature=z[2000:]), grid=grid, regularisation=0.0, budget=50)
    values = [row["log_likelihood"] for row in tuned.tried]
    assert {row["neurons"] for row in tuned.tried} == {1, 2, None}
    assert values == pytest.approx([values[0]] * len(values), rel=1e-9)
    assert values[0] == pytest.approx(-4 * (0.5 * math.log(2 * math.pi * 9) + 0.5), rel=0.01)


def with_dead(table: Table) -> Table:
    return table.extended(feature=torch.cat([torch.zeros(len(table), 30), table.feature], dim=1))


def test_constant_features_have_no_part():
    train, held_out = data(), data(100, seed=1)
    grid = {"regularisation": (1e-12, 1e-3), "components": (None,), "neurons": (None,)}
    alive = Density.tune(train, held_out, grid=grid, budget=20)
    tuned = Density.tune(with_dead(train), with_dead(held_out), grid=grid, budget=20)
    assert tuned.tried == alive.tried
    assert tuned.density.width_ == 36
    assert torch.equal(tuned.density.score(with_dead(held_out)), alive.density.score(held_out))


@pytest.mark.parametrize("space", ["z", "log"])
def test_the_density_found_is_the_one_that_was_judged(space):
    # Of 36 features 30 are dead: drawn anew from all of them, three neurons would mostly be dead ones.
    train, held_out = data(), data(100, seed=1)
    grid = {"neurons": (3,), "components": (None, 2), "regularisation": (1e-3,), "covariance": ("full", "diagonal")}
    alive = Density.tune(train, held_out, grid=grid, budget=20, space=space)
    tuned = Density.tune(with_dead(train), with_dead(held_out), grid=grid, budget=20, space=space)
    assert tuned.tried == alive.tried
    assert tuned.density.neurons_.tolist() == [30 + neuron for neuron in alive.density.neurons_.tolist()]
    assert (len(tuned.density.neurons_), tuned.density.width_) == (3, 36)
    assert torch.equal(tuned.density.mixture.means, alive.density.mixture.means)
    assert torch.equal(tuned.density.score(with_dead(held_out)), alive.density.score(held_out))


def test_no_fit_is_spent_on_what_cannot_be():
    train, held_out = data(60), data(30, seed=1)
    tuned = Density.tune(train, held_out, start="class", max_iterations=1, space="z", budget=12)
    assert len(tuned.tried) == 12
    assert {row["components"] for row in tuned.tried} == {None}  # not 1, 10 or 100: there are three labels
    assert all(row["error"] is None for row in tuned.tried)
    fixed = Density.tune(train, held_out, components=2, max_iterations=1, space="z", budget=200)
    assert {row["start"] for row in fixed.tried} == {"free"}
    assert {row["start"] for row in Density.tune(train, held_out, components=3, budget=200, space="z").tried} == {
        "class",
        "free",
    }
    with pytest.raises(
        TableError,
        match=r"with start='class' there is one component for each of the 3 labels of table in memory; got only other "
        r"numbers of components\. Leave them out, or choose start='free'\.",
    ):
        Density.tune(train, held_out, start="class", grid={"components": (1, 5)})
    with pytest.raises(MissingColumnError, match=r"density\.tune needs column 'label'"):
        Density.tune(train.select("feature"), held_out, start="class", grid={"components": (1, 5)})


def test_tune_goes_by_its_budget_and_seed():
    train, held_out = data(60), data(30, seed=1)
    first = Density.tune(train, held_out, budget=6, seed=1, max_iterations=2)
    assert len(first.tried) == 6
    assert first.tried == Density.tune(train, held_out, budget=6, seed=1, max_iterations=2).tried
    assert first.tried != Density.tune(train, held_out, budget=6, seed=2, max_iterations=2).tried
    # The cells of the full grid take turns: six fits, six different cells.
    assert len({(row["covariance"], row["space"], row["components"]) for row in first.tried}) == 6


def test_tune_says_what_failed():
    train, held_out = data(60), data(30, seed=1)
    tuned = Density.tune(train, held_out, grid={"components": (1, 100)}, covariance="tied", space="z", budget=8)
    failed = [row for row in tuned.tried if row["log_likelihood"] is None]
    assert failed
    assert all(row["components"] == 100 for row in failed)
    assert failed[0]["error"].startswith(
        "density.fit: 100 components need at least as many rows; table in memory has 60"
    )
    with pytest.raises(
        TableError, match=r"density\.tune: none of 4 candidates could be fitted\. The first: density\.fit"
    ):
        Density.tune(train, held_out, grid={"components": (100,)}, budget=4)


def test_tune_of_what_cannot_be():
    train, held_out = data(60), data(30, seed=1)
    with pytest.raises(
        TableError, match=r"density\.tune: grid may have covariance, space, .*; got 'colour'\. Give one"
    ):
        Density.tune(train, held_out, grid={"colour": ("red",)})
    with pytest.raises(ValueRangeError, match=r"density\.tune: budget must be at least 1 fit; got 0\."):
        Density.tune(train, held_out, budget=0)
    with pytest.raises(TableError, match=r"density\.tune needs rows to fit on and rows to compare by; none has none\."):
        Density.tune(train, data(0, name="none"))
    with pytest.raises(TableError, match=r"density\.tune: features must have one width; got 6 and 5, the latter in"):
        Density.tune(train, data(9, d=5, name="narrow"))


def test_a_smaller_offset_cannot_be_searched_for():
    with pytest.raises(TableError, match=r"density\.tune: grid may have .*; got 'offset'\."):
        Density.tune(data(60), data(30, seed=1), grid={"offset": (1e-2, 1e-9)})


def test_a_search_before_the_non_linearity_ends_with_a_density_that_reads_there():
    def signed(seed: int) -> Table:
        before = torch.randn(80, 3, generator=torch.Generator().manual_seed(seed))
        before[:, 2] = 1.0  # a constant feature is set aside
        return Table(feature=before.relu(), pre_activation=before)

    grid = {"covariance": ("full", "diagonal"), "components": (1,), "space": ("z",), "neurons": (None,)}
    found = Density.tune(signed(0), signed(1), grid=grid, budget=4, nonlinearity="before").density
    assert found.nonlinearity == "before"
    assert found.width_ == 3
    assert found.neurons_.tolist() == [0, 1]
    narrow = replace(found, nonlinearity="after").fit(Table(feature=signed(0).column("pre_activation")[:][:, :2]))
    assert torch.equal(
        found.score(signed(2)), narrow.score(Table(feature=signed(2).column("pre_activation")[:][:, :2]))
    )
