import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dubito
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.metrics import aurc, paired_errors
from dubito.scores import REGrad, tune_regrad
from dubito.scores.density import Density
from dubito.table import Provenance, Table
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
    assert best["log_likelihood"] == pytest.approx(-tuned.score.score(held_out).mean().item(), rel=1e-9)
    values = [row["log_likelihood"] for row in tuned.tried]
    assert values == sorted(values, reverse=True)
    assert str(tuned).splitlines()[1].split()[:3] == ["covariance", "space", "components"]
    assert len(str(tuned).splitlines()) == len(values) + 2


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
    assert tuned.score.width_ == 36
    assert torch.equal(tuned.score.score(with_dead(held_out)), alive.score.score(held_out))


@pytest.mark.parametrize("space", ["z", "log"])
def test_the_density_found_is_the_one_that_was_judged(space):
    # Of 36 features 30 are dead: drawn anew from all of them, three neurons would mostly be dead ones.
    train, held_out = data(), data(100, seed=1)
    grid = {"neurons": (3,), "components": (None, 2), "regularisation": (1e-3,), "covariance": ("full", "diagonal")}
    alive = Density.tune(train, held_out, grid=grid, budget=20, space=space)
    tuned = Density.tune(with_dead(train), with_dead(held_out), grid=grid, budget=20, space=space)
    assert tuned.tried == alive.tried
    assert tuned.score.neurons_.tolist() == [30 + neuron for neuron in alive.score.neurons_.tolist()]
    assert (len(tuned.score.neurons_), tuned.score.width_) == (3, 36)
    assert torch.equal(tuned.score.mixture.means, alive.score.mixture.means)
    assert torch.equal(tuned.score.score(with_dead(held_out)), alive.score.score(held_out))


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
        TableError, match=r"density\.tune: none of 4 candidates can be fitted\. The first: density\.fit"
    ):
        Density.tune(train, held_out, grid={"components": (100,)}, budget=4)


def test_tune_of_what_cannot_be():
    train, held_out = data(60), data(30, seed=1)
    with pytest.raises(
        TableError, match=r"density\.tune: grid may have covariance, space, .*; got 'colour'\. Pass one"
    ):
        Density.tune(train, held_out, grid={"colour": ("red",)})
    with pytest.raises(ValueRangeError, match=r"density\.tune: budget must be a whole number, at least 1; got 0\."):
        Density.tune(train, held_out, budget=0)
    with pytest.raises(TableError, match=r"density\.tune: table needs at least 1 row; none has 0\."):
        Density.tune(train, data(0, name="none"))
    with pytest.raises(TableError, match=r"density\.tune: column 'feature' of validation \(narrow\) must be 6 wide"):
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
    result = Density.tune(signed(0), signed(1), grid=grid, budget=4, nonlinearity="before").score
    assert result.nonlinearity == "before"
    assert result.width_ == 3
    assert result.neurons_.tolist() == [0, 1]
    narrow = replace(result, nonlinearity="after").fit(Table(feature=signed(0).column("pre_activation")[:][:, :2]))
    assert torch.equal(
        result.score(signed(2)), narrow.score(Table(feature=signed(2).column("pre_activation")[:][:, :2]))
    )


WRONG = [0, 0, 1, 1]
RISING, FALLING, FLAT = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]


def probe(layers: int, of: int | None = None, **settings) -> dict:
    of = of or layers
    notes = {"layers": ["a"] * layers, "depth": list(range(of - layers, of)), "of": of}
    return {"settings": settings, "notes": notes}


def table(wrong=WRONG, probes=None, **columns) -> Table:
    """Columns by layer; the label is 0, and rows that are wrong say 1."""
    stacked = {name: torch.tensor(layers).T for name, layers in columns.items()}
    provenance = None if probes is None else Provenance(probes=probes)
    return Table(logit=torch.eye(2)[torch.tensor(wrong)], label=[0] * len(wrong), provenance=provenance, **stacked)


def random(n: int, seed: int = 0) -> Table:
    """A first layer that knows a little of the errors, and a second that knows a little more."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(n, generator=generator) < 0.3
    u = torch.rand(n, 2, generator=generator) + wrong[:, None] * torch.tensor([0.25, 0.3])
    return Table(logit=torch.eye(2)[wrong.long()], label=[0] * n, gradient=u)


def test_by_hand():
    # The layers contradict each other: alike they cancel, and the deeper is right. With all rows equal, each coverage
    # has the mean error 1/2; in the right order errors are 0, 0, 1/3, 2/4, the mean of which is 5/24.
    result = tune_regrad(table(gradient=[FALLING, RISING]), betas=(0.0, 4.0))
    assert result.score == REGrad(beta=4.0)
    assert [(row["beta"], row["chosen"], row["error"]) for row in result.tried] == [
        (4.0, True, None),
        (0.0, False, None),
    ]
    assert [row["aurc"] for row in result.tried] == pytest.approx([5 / 24, 1 / 2])
    assert [row["gap_to_best"] for row in result.tried] == pytest.approx([0, 7 / 24])
    assert result.tried[0]["standard_error"] == 0
    assert {(row["column"], row["copies"], row["sigma"]) for row in result.tried} == {("gradient", None, None)}


def test_the_rule_step_by_step():
    many = random(80)
    betas, resamples, seed = (0.0, 1.0, 4.0, 16.0), 300, 5
    result = tune_regrad(many, betas=betas, resamples=resamples, seed=seed)
    wrong = (many.logit.argmax(1) != many.label).numpy()
    scores = [REGrad(beta=beta).score(many).numpy() for beta in betas]
    areas = [aurc(u, wrong) for u in scores]
    best = int(np.argmin(areas))
    rng, good = np.random.default_rng(seed), []
    draws = [rng.integers(80, size=80) for _ in range(resamples)]
    for u, area, beta in zip(scores, areas, betas, strict=True):
        gaps = [aurc(u[rows], wrong[rows]) - aurc(scores[best][rows], wrong[rows]) for rows in draws]
        (row,) = (row for row in result.tried if row["beta"] == beta)
        assert row["aurc"] == pytest.approx(area)
        assert row["standard_error"] == pytest.approx(np.std(gaps, ddof=1))
        if area - areas[best] <= np.std(gaps, ddof=1):
            good.append(beta)
    assert result.score.beta == min(good)
    assert [row["aurc"] for row in result.tried] == sorted(areas)
    assert betas[best] != min(good)  # else this would not tell the rule from the best alone


def test_as_good_and_plainer():
    # All columns are the same, so all are as good: fewest copies, then smallest sigma, then smallest beta.
    probes = {
        "plain": probe(2, sigma=0.5),
        "weak": probe(2, copies=4, sigma=0.1),
        "strong": probe(2, copies=4, sigma=0.2),
        "many": probe(2, copies=8, sigma=0.05),
    }
    same = table(probes=probes, **{name: [RISING, FLAT] for name in probes})

    def chosen(*columns):
        score = tune_regrad(same, columns, betas=(4.0, 1.0, 2.0)).score
        return score.of, score.beta

    assert chosen("many", "strong", "weak", "plain") == ("plain", 1.0)
    assert chosen("many", "strong", "weak") == ("weak", 1.0)
    assert chosen("many", "strong") == ("strong", 1.0)
    assert chosen("many") == ("many", 1.0)
    tried = tune_regrad(same, ["plain", "weak"], betas=[1.0]).tried
    assert [(row["copies"], row["sigma"]) for row in tried] == [(0, 0.0), (4, 0.1)]  # without copies, sigma is idle


def test_what_is_better_is_worth_its_copies():
    probes = {"plain": probe(1), "noisy": probe(1, copies=8, sigma=0.1)}
    wrong = [0] * 20 + [1] * 20
    good = [[float(row) for row in range(40)]]
    result = tune_regrad(table(wrong, probes, plain=[good[0][::-1]], noisy=good), ["plain", "noisy"])
    assert (result.score.of, result.score.beta) == ("noisy", 0.0)  # with one layer, all betas are alike
    assert tune_regrad(table(wrong, probes, plain=good, noisy=[good[0][::-1]]), ["plain", "noisy"]).score.of == "plain"


def test_weightings_are_other_columns():
    both = table(gradient=[FALLING], gradient_root=[RISING])
    assert tune_regrad(both, weighting="root", betas=[0.0]).tried[0]["aurc"] == pytest.approx(5 / 24)
    assert tune_regrad(both, betas=[0.0]).tried[0]["aurc"] == pytest.approx((1 + 1 + 2 / 3 + 2 / 4) / 4)
    assert tune_regrad(both, weighting="root").score == REGrad("root", beta=0.0)
    with pytest.raises(MissingColumnError, match="tune_regrad needs column 'gradient_l1'"):
        tune_regrad(both, weighting="expected_l1")


def test_a_truncated_column_allows_its_own_betas():
    cut = table(probes={"gradient": probe(2, 4, beta=8.0, tolerance=0.02)}, gradient=[FALLING, RISING])
    result = tune_regrad(cut, betas=(1.0, 8.0, 16.0))
    assert result.score.beta == 8.0
    assert [row["beta"] for row in result.tried] == [8.0, 16.0, 1.0]
    assert result.tried[2]["aurc"] is None
    assert "with beta=1 a layer that was left out has weight 0.61" in result.tried[2]["error"]
    with pytest.raises(TableError, match=r"^tune_regrad: none of 6 candidates can be computed\. The first: regrad"):
        tune_regrad(table(probes={"gradient": probe(2, 4, last=2)}, gradient=[FALLING, RISING]))


def test_its_text_is_a_table():
    tuned = tune_regrad(table(gradient=[FALLING, RISING]), betas=(0.0, 4.0))
    names = ["column", "copies", "sigma", "beta", "aurc", "gap_to_best", "standard_error", "chosen", "error"]
    assert list(tuned.records()[0]) == names
    title, header, first, _ = str(tuned).splitlines()
    assert title == "2 settings of regrad by AURC"
    assert header == "column    copies  sigma  beta  aurc      gap to best  standard error  chosen  error"
    assert first.split() == ["gradient", "-", "-", "4", "0.208333", "0", "0", "yes", "-"]


def test_the_same_seed_chooses_the_same():
    many = random(60, seed=3)
    one, again, other = (tune_regrad(many, resamples=100, seed=seed).tried for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_rows_that_cannot_tell():
    for wrong, output in (
        ([0, 0, 0], "right on all 3 images of table in memory, so all candidates have the same AURC"),
        ([1, 1], "wrong on all 2"),
    ):
        with pytest.raises(TableError, match=f"tune_regrad: the model is {output}"):
            tune_regrad(table(wrong, gradient=[RISING[: len(wrong)]]))
    with pytest.raises(TableError, match="tune_regrad needs labelled rows; table in memory has none"):
        tune_regrad(table(gradient=[RISING]).rows(slice(0, 0)))
    with pytest.raises(MissingColumnError, match="tune_regrad needs column 'label'"):
        tune_regrad(table(gradient=[RISING]).select("logit", "gradient"))
    with pytest.raises(MissingColumnError, match="tune_regrad needs column 'mine'"):
        tune_regrad(table(gradient=[RISING]), ["gradient", "mine"])
    other = Table(logit=torch.eye(2), label=[0, 1], gradient=torch.ones(2, 1), label_space="own")
    with pytest.raises(
        TableError, match="needs labels of the model's own classes; those of table in memory are another"
    ):
        tune_regrad(other)
    with pytest.raises(TableError, match="labels of table in memory must be classes from 0 to 1; got 0 to 5"):
        tune_regrad(Table(logit=torch.eye(2), label=[0, 5], gradient=torch.ones(2, 1)))
    with pytest.raises(ValueRangeError, match=r"regrad\.score: column 'gradient' must be finite; row 0 "):
        tune_regrad(table(gradient=[[math.nan, 1.0, 2.0, 3.0]]))


def test_columns_nobody_knows_of():
    both = table(gradient=[RISING], mine=[RISING])
    with pytest.raises(TableError, match="does not know with how many noisy copies 'gradient' was made"):
        tune_regrad(both, ["gradient", "mine"])
    assert tune_regrad(both, ["mine", "mine"]).score.of == "mine"


@pytest.mark.parametrize("wrong", [{"columns": []}, {"betas": []}, {"columns": "gradient"}])
def test_nothing_to_choose_from(wrong):
    with pytest.raises(ValueRangeError, match="tune_regrad: columns and betas must be lists with at least one entry"):
        tune_regrad(table(gradient=[RISING]), **wrong)


def test_it_is_public():
    assert dubito.scores.tune_regrad is tune_regrad
    assert paired_errors in vars(dubito.metrics).values()
