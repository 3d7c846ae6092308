"""How REGrad's open settings are chosen: by hand, against a bootstrap step by step, and never on what cannot tell."""

import math

import numpy as np
import pytest
import torch

import dubito
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.metrics import aurc, paired_errors
from dubito.scores import REGrad, tune_regrad
from dubito.table import Provenance, Table

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
    found = tune_regrad(table(gradient=[FALLING, RISING]), betas=(0.0, 4.0))
    assert found.score == REGrad(beta=4.0)
    assert [(row["beta"], row["chosen"], row["error"]) for row in found.tried] == [
        (4.0, True, None),
        (0.0, False, None),
    ]
    assert [row["aurc"] for row in found.tried] == pytest.approx([5 / 24, 1 / 2])
    assert [row["gap_to_best"] for row in found.tried] == pytest.approx([0, 7 / 24])
    assert found.tried[0]["standard_error"] == 0
    assert {(row["column"], row["copies"], row["sigma"]) for row in found.tried} == {("gradient", None, None)}


def test_the_rule_step_by_step():
    many = random(80)
    betas, resamples, seed = (0.0, 1.0, 4.0, 16.0), 300, 5
    found = tune_regrad(many, betas=betas, resamples=resamples, seed=seed)
    wrong = (many.logit.argmax(1) != many.label).numpy()
    scores = [REGrad(beta=beta).score(many).numpy() for beta in betas]
    areas = [aurc(u, wrong) for u in scores]
    best = int(np.argmin(areas))
    rng, good = np.random.default_rng(seed), []
    draws = [rng.integers(80, size=80) for _ in range(resamples)]
    for u, area, beta in zip(scores, areas, betas, strict=True):
        gaps = [aurc(u[rows], wrong[rows]) - aurc(scores[best][rows], wrong[rows]) for rows in draws]
        (row,) = (row for row in found.tried if row["beta"] == beta)
        assert row["aurc"] == pytest.approx(area)
        assert row["standard_error"] == pytest.approx(np.std(gaps, ddof=1))
        if area - areas[best] <= np.std(gaps, ddof=1):
            good.append(beta)
    assert found.score.beta == min(good)
    assert [row["aurc"] for row in found.tried] == sorted(areas)
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
    found = tune_regrad(table(wrong, probes, plain=[good[0][::-1]], noisy=good), ["plain", "noisy"])
    assert (found.score.of, found.score.beta) == ("noisy", 0.0)  # with one layer, all betas are alike
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
    found = tune_regrad(cut, betas=(1.0, 8.0, 16.0))
    assert found.score.beta == 8.0
    assert [row["beta"] for row in found.tried] == [8.0, 16.0, 1.0]
    assert found.tried[2]["aurc"] is None
    assert "with beta=1 a layer that was left out has weight 0.61" in found.tried[2]["error"]
    with pytest.raises(TableError, match=r"^tune_regrad: none of 6 candidates can be computed\. The first: regrad"):
        tune_regrad(table(probes={"gradient": probe(2, 4, last=2)}, gradient=[FALLING, RISING]))


def test_its_text_is_a_table():
    lines = str(tune_regrad(table(gradient=[FALLING, RISING]), betas=(0.0, 4.0))).splitlines()
    names = ["column", "copies", "sigma", "beta", "aurc", "gap_to_best", "standard_error", "chosen", "error"]
    assert lines[0].split() == names
    assert lines[1].split() == ["gradient", "-", "-", "4", "0.208333", "0", "0", "True", "-"]
    assert len(lines) == 3


def test_the_same_seed_chooses_the_same():
    many = random(60, seed=3)
    one, again, other = (tune_regrad(many, resamples=100, seed=seed).tried for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_rows_that_cannot_tell():
    for wrong, said in (
        ([0, 0, 0], "right on all 3 images of table in memory, so AURC is 0"),
        ([1, 1], "wrong on all 2"),
    ):
        with pytest.raises(TableError, match=f"tune_regrad: the model is {said}"):
            tune_regrad(table(wrong, gradient=[RISING[: len(wrong)]]))
    with pytest.raises(TableError, match="tune_regrad needs labelled rows; table in memory has none"):
        tune_regrad(table(gradient=[RISING]).rows(slice(0, 0)))
    with pytest.raises(MissingColumnError, match="tune_regrad needs column 'label'"):
        tune_regrad(table(gradient=[RISING]).select("logit", "gradient"))
    with pytest.raises(MissingColumnError, match="tune_regrad needs column 'mine'"):
        tune_regrad(table(gradient=[RISING]), ["gradient", "mine"])
    foreign = Table(logit=torch.eye(2), label=[0, 1], gradient=torch.ones(2, 1), label_space="own")
    with pytest.raises(
        TableError, match="needs labels of the model's own classes; those of table in memory are another"
    ):
        tune_regrad(foreign)
    with pytest.raises(ValueRangeError, match="labels must be classes of the logits, 0 to 1; got 0 to 5"):
        tune_regrad(Table(logit=torch.eye(2), label=[0, 5], gradient=torch.ones(2, 1)))
    with pytest.raises(ValueRangeError, match=r"regrad\.score of table in memory: 1 of 4 values are NaN"):
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
    assert dubito.tune_regrad is tune_regrad
    assert paired_errors in vars(dubito.metrics).values()
