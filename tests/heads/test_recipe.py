"""The recipe: learning rates against timm's schedulers, plans for tables of any size, and what it refuses."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler import CosineLRScheduler, StepLRScheduler

from dubito.errors import ValueRangeError
from dubito.heads.recipe import Recipe, as_recipe, learning_rate

PEAK = 0.0028284271247461903
"""1e-3 sqrt(2048 / 256) = 1e-3 sqrt(8)"""


def timm_rates(scheduler_of) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = scheduler_of(optimizer)
    return [scheduler._get_lr(episode)[0] for episode in range(460)]


def unchecked(**settings: object) -> Recipe:
    """A recipe as it is made where nobody checks types."""
    recipe = Recipe()
    for name, value in settings.items():
        object.__setattr__(recipe, name, value)
    recipe.__post_init__()
    return recipe


def test_cosine_is_that_of_timm():
    expected = timm_rates(
        lambda optimizer: CosineLRScheduler(
            optimizer, t_initial=435, lr_min=1e-8, warmup_t=25, warmup_lr_init=1e-4, warmup_prefix=True
        )
    )
    result = [learning_rate(Recipe(), episode) for episode in range(460)]
    assert result == pytest.approx(expected, rel=1e-9)
    assert (result[0], result[25]) == (1e-4, pytest.approx(PEAK))
    assert result[24] == pytest.approx(1e-4 + (PEAK - 1e-4) * 24 / 25)
    assert learning_rate(Recipe(), 460) == pytest.approx(1e-8)
    assert result[25:] == sorted(result[25:], reverse=True)


def test_steps_are_those_of_timm():
    expected = timm_rates(
        lambda optimizer: StepLRScheduler(
            optimizer, decay_t=145, decay_rate=0.1, warmup_t=25, warmup_lr_init=1e-4, warmup_prefix=True
        )
    )
    result = [learning_rate(Recipe(schedule="step"), episode) for episode in range(460)]
    assert result == pytest.approx(expected, rel=1e-9)
    assert sorted(set(result[25:]), reverse=True) == pytest.approx([PEAK, PEAK / 10, PEAK / 100])


def test_constant_stays_at_the_peak():
    rates = {learning_rate(Recipe(schedule="constant", batch=256), episode) for episode in range(25, 460)}
    assert rates == {1e-3}


def test_no_warm_up():
    assert learning_rate(Recipe(warmup=0, batch=1024), 0) == pytest.approx(2e-3)  # 1e-3 sqrt(1024 / 256)


@given(rows=st.integers(2, 10**9), batch=st.one_of(st.none(), st.integers(2, 10**5)))
def test_plans(rows, batch):
    plan = Recipe(batch=batch).plan(rows)
    assert plan.steps >= 1
    assert plan.batch == plan.recipe.batch
    if batch is None:
        assert plan.batch % 2 == 0
        assert 2 <= plan.batch <= min(2048, max(2, rows))
    else:
        assert plan.batch == batch
    assert plan.steps * min(plan.batch, rows) >= min(rows, 2)
    episodes = [plan.episode(step) for step in (0, plan.steps // 2, plan.steps - 1)]
    assert episodes == sorted(episodes)
    assert episodes[0] == 0
    assert episodes[-1] < 460
    assert plan.lr(0) == 1e-4


@given(rows=st.integers(1, 10**7), batch=st.integers(1, 5000).map(lambda half: 2 * half), table=st.integers(2, 10**7))
def test_requested_rows_are_seen(rows, batch, table):
    steps = Recipe(rows=rows + 1, batch=batch).plan(table).steps
    at_once = min(batch, table)
    assert abs(steps * at_once - (rows + 1)) <= at_once


def test_the_default_rule():
    plan = Recipe().plan(1_000_000)
    assert (plan.batch, plan.steps) == (2048, round(7_000_000 / 2048))
    assert Recipe().plan(400).batch == 50  # an eighth


def test_a_hand_made_plan():
    plan = Recipe(batch=4, rows=20, episodes=10, warmup=2, warmup_lr=0.0, lr=1.0, final_lr=0.0).plan(100)
    assert (plan.batch, plan.steps) == (4, 5)
    assert [plan.episode(step) for step in range(5)] == [0, 2, 4, 6, 8]
    peak = math.sqrt(4 / 256)  # = 1 / 8
    cosine = [(1 + math.cos(math.pi * done / 8)) / 2 for done in (0, 2, 4, 6)]
    assert [plan.lr(step) for step in range(5)] == pytest.approx([0, *(peak * one for one in cosine)])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(loss="l2", leeway=0.5, target="mixed", temperature=1.5, mix=0.25, optimizer="lion", betas=(0.9, 0.99)),
        Recipe(schedule="step", episodes=3, warmup=0, batch=7, rows=100, init="zero", weight_decay=0.0),
    ],
)
def test_through_json_and_back(recipe):
    assert as_recipe(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert as_recipe(recipe) is recipe
    assert replace(recipe, lr=0.5) != recipe


def test_part_of_the_settings_is_enough():
    assert as_recipe({"lr": 0.5}) == Recipe(lr=0.5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"loss": "hinge"},
            "recipe: loss must be one of ranking, l2, l1, log_l2, variance_nll; got 'hinge'.",
        ),
        ({"target": "own"}, "recipe: target must be one of observed, expected, mixed; got 'own'."),
        (
            {"optimizer": "lamb"},
            "recipe: optimizer must be one of adamw, adam, sgd, lion; got 'lamb'.",
        ),
        ({"schedule": "poly"}, "recipe: schedule must be one of cosine, step, constant; got 'poly'."),
        ({"init": "ones"}, "recipe: init must be one of default, zero, classes; got 'ones'."),
        ({"lr": 0.0}, "recipe: lr must be a number, above 0; got 0.0."),
        ({"lr": math.nan}, "recipe: lr must be a number, above 0; got nan."),
        ({"temperature": -1.0}, "recipe: temperature must be a number, above 0; got -1.0."),
        ({"margin": math.inf}, "recipe: margin must be a number, above 0; got inf."),
        ({"leeway": -0.1}, "recipe: leeway must be a number, at least 0; got -0.1."),
        ({"leeway": math.nan}, "recipe: leeway must be a number, at least 0; got nan."),
        ({"weight_decay": -1.0}, "recipe: weight_decay must be a number, at least 0; got -1.0."),
        ({"warmup_lr": -1.0}, "recipe: warmup_lr must be a number, at least 0; got -1.0."),
        ({"final_lr": -1.0}, "recipe: final_lr must be a number, at least 0; got -1.0."),
        ({"episodes": 0}, "recipe: episodes must be a whole number, at least 1; got 0."),
        ({"warmup": -1}, "recipe: warmup must be a whole number in [0, 460); got -1."),
        ({"batch": 1}, "recipe: batch must be a whole number, at least 2; got 1."),
        ({"rows": 1}, "recipe: rows must be a number, at least 2; got 1."),
        ({"warmup": 460}, "recipe: warmup must be a whole number in [0, 460); got 460."),
        ({"dropout": 1.0}, "recipe: dropout must be a number in [0, 1); got 1.0."),
        ({"mix": 1.5}, "recipe: mix must be a number in [0, 1]; got 1.5. 1.5 % is 0.015."),
        ({"mix": math.nan}, "recipe: mix must be a number in [0, 1]; got nan."),
        (
            {"betas": (0.9, 1.0)},
            "recipe: betas must be two numbers from 0 to below 1; got (0.9, 1.0). Pass betas=(0.8, 0.95).",
        ),
        ({"betas": (0.9,)}, "recipe: betas must be two numbers from 0 to below 1; got (0.9,). Pass betas=(0.8, 0.95)."),
    ],
)
def test_what_it_refuses(settings, text):
    with pytest.raises(ValueRangeError) as error:
        unchecked(**settings)
    assert str(error.value) == text


def test_what_is_no_recipe():
    with pytest.raises(ValueRangeError, match=r"^recipe must be a dubito.heads.Recipe; got list. Pass Recipe\(...\).$"):
        as_recipe([1])
    with pytest.raises(
        ValueRangeError, match=r"^recipe: a setting must be one of loss, margin, leeway, .*; got 'speed'\."
    ):
        as_recipe({"speed": 3})
