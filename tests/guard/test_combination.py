import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dubito.errors import GuardError
from dubito.guard.combination import Combination, _weights, choose, quantiles, rank
from dubito.metrics import aurc


def test_rank_is_the_share_below_in_between_linear() -> None:
    grid = torch.tensor([0.0, 1.0, 1.0, 4.0]).double()
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.5, 4.0, 99.0]).double()
    # Places 0, 1/3, 2/3, 1; of two equal numbers the later counts.
    assert rank(values, grid).tolist() == pytest.approx([0, 0, 1 / 6, 2 / 3, 5 / 6, 1, 1])


def test_rank_rises_and_agrees_with_numpy_where_nothing_ties() -> None:
    draw = torch.Generator().manual_seed(0)
    grid = torch.randn(50, generator=draw).double().sort().values
    values = torch.randn(300, generator=draw).double().sort().values
    result = rank(values, grid)
    assert (result.diff() >= 0).all()
    assert result.numpy() == pytest.approx(np.interp(values.numpy(), grid.numpy(), np.linspace(0, 1, 50)))


def test_one_known_image_reports_only_above_or_not() -> None:
    assert rank(torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0]).double()).tolist() == [0.0, 1.0]


def test_quantiles_are_few_and_reach_from_end_to_end() -> None:
    values = torch.randperm(5000, generator=torch.Generator().manual_seed(0)).double()
    grid = quantiles(values, "u")
    assert (len(grid), float(grid[0]), float(grid[-1])) == (513, 0.0, 4999.0)
    assert quantiles(torch.tensor([3.0, 1.0, torch.inf]).double(), "u").tolist() == [1.0, 3.0]
    with pytest.raises(
        GuardError, match="score 'u' is infinite for every reference image; there is nothing to rank others by"
    ):
        quantiles(torch.tensor([torch.inf]).double(), "u")


def two_kinds(n: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Errors of two kinds, each seen by one score alone; the third sees nothing."""
    rng = np.random.default_rng(seed)
    one, two = rng.random((2, n))
    wrong = rng.random(n) < np.maximum(one, two) ** 6
    return {"one": one, "two": two**3, "noise": rng.random(n)}, wrong


def test_scores_that_find_different_errors_are_combined() -> None:
    values, wrong = two_kinds(1500)
    result = choose(values, wrong)
    assert set(result.weights) == {"one", "two"}
    assert result.weights["one"] == pytest.approx(result.weights["two"], rel=0.3)
    reference_quantiles = {name: quantiles(torch.from_numpy(u), name) for name, u in values.items()}
    new, new_wrong = two_kinds(4000, seed=1)
    u = result.of({name: torch.from_numpy(v) for name, v in new.items()}, reference_quantiles)
    assert aurc(u, new_wrong) < 0.8 * min(aurc(v, new_wrong) for v in new.values())


def test_a_copy_adds_nothing() -> None:
    values, wrong = two_kinds(800)
    assert choose({"one": values["one"], "same": values["one"]}, wrong).weights == {"one": 1.0}


def test_with_few_errors_one_score_is_taken() -> None:
    values, _ = two_kinds(400)
    wrong = values["one"] > np.sort(values["one"])[-10]
    result = choose(values, wrong)
    assert result.weights == {"one": 1.0}
    assert next(iter(result.aurc)) == "one"
    assert result.aurc["one"] == aurc(values["one"], wrong)


@pytest.mark.parametrize("all_wrong", [True, False])
def test_without_both_kinds_of_answers_the_first_is_taken(all_wrong: bool) -> None:
    values, _ = two_kinds(50)
    assert choose(values, np.full(50, all_wrong)).weights == {"one": 1.0}


def test_weights_are_never_negative_and_those_of_a_logistic_regression() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((2, 600))
    wrong = rng.random(600) < 1 / (1 + np.exp(2 - 3 * x[0] - 1 * x[1]))
    # mean loss + ridge |w|^2 is sklearn's C sum loss + |w|^2 / 2 with C = 1 / (2 n ridge).
    reference = LogisticRegression(C=1 / (2 * 600 * 1e-3), tol=1e-9).fit(x.T, wrong).coef_[0]
    assert _weights(x, wrong) == pytest.approx(reference, rel=1e-3)
    assert _weights(np.stack([x[0], -x[1]]), wrong)[1] == 0.0


def test_a_single_score_stays_as_it_is() -> None:
    u = torch.tensor([5.0, -3.0]).double()
    assert torch.equal(Combination({"a": 1.0}, {}).of({"a": u}, {}), u)


def test_with_few_images_the_first_stays_where_another_looks_better_by_chance() -> None:
    """Seven scores that tell the same, each with noise of its own; the first is left rarely, if any is as good."""
    left = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        hard = rng.random(100)
        wrong = rng.random(100) < 0.5 * hard**3
        values = {f"score {k}": hard + 0.3 * rng.standard_normal(100) for k in range(7)}
        left += next(iter(choose(values, wrong, seed).weights)) != "score 0"
    assert left <= 12  # it would be 34 of 40 if the best looking were taken


def test_one_that_is_clearly_better_takes_the_place_of_the_first() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(400)
    values = {"poor": hard + rng.standard_normal(400), "good": hard}
    assert "good" in choose(values, rng.random(400) < 0.7 * hard**3).weights


def test_noise_does_not_join() -> None:
    """Five scores of nothing beside one that tells all that there is: rarely does one of them join."""
    joined = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        good = rng.random(300)
        values = {"good": good} | {f"noise {k}": rng.random(300) for k in range(5)}
        result = choose(values, rng.random(300) < 0.7 * good**4)
        assert next(iter(result.weights)) == "good"
        joined += len(result.weights) > 1
    assert joined <= 1
