"""Diversity against counts by hand, masks as vectors, what a recipe refuses, and how its temperature falls."""

import math
from dataclasses import asdict

import pytest
import torch

from dubito.ensembles.masks import MaskRecipe, binarised, by_layer, diversity, mask_diversity, of_member
from dubito.errors import ValueRangeError
from dubito.metrics import decompose

SPANS = {("a", "rows"): 2, ("a", "columns"): 3, ("b", "columns"): 2}


def test_diversity_of_coins_by_hand():
    q = torch.tensor([[1.0, 0.5, 0.9], [1.0, 0.5, 0.1], [0.0, 0.5, 0.9], [0.0, 0.5, 0.1]])
    inner = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))  # H_b(0.9) = H_b(0.1) = 0.3251
    expected = [math.log(2), 0.0, math.log(2) - inner]
    torch.testing.assert_close(mask_diversity(q), torch.tensor(expected), atol=3e-5, rtol=0)


def test_diversity_is_the_mutual_information_of_member_and_mask():
    q = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    coins = torch.stack([q, 1 - q], dim=-1)  # members, units, two sides
    torch.testing.assert_close(mask_diversity(q), decompose(coins).epistemic.float(), atol=1e-5, rtol=1e-4)


def test_what_diversity_is_taken_over():
    q = torch.tensor([[1.0] * 7, [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]])  # in units of log 2: 1, 0 | 1, 1, 1 | 0, 0
    in_units = {"sum": 4.0, "units": 4 / 7, "masks": 0.5 + 1.0 + 0.0}
    for over, expected in in_units.items():
        assert float(diversity(q, SPANS, over)) == pytest.approx(expected * math.log(2), abs=1e-4)


def test_gradients_stay_finite_where_masks_are_decided():
    theta = torch.tensor([[200.0, -200.0], [200.0, 200.0]], requires_grad=True)
    mask_diversity(theta.sigmoid()).sum().backward()
    assert bool(theta.grad.isfinite().all())


def test_lines_are_cut_into_layers():
    q = torch.arange(14.0).view(2, 7)
    masks = by_layer(q, SPANS)
    assert list(masks) == ["a", "b"]
    assert masks["a"].rows.tolist() == [[0, 1], [7, 8]]
    assert masks["a"].columns.tolist() == [[2, 3, 4], [9, 10, 11]]
    assert masks["b"].rows is None
    assert of_member(masks, 1)["b"].columns.tolist() == [[12, 13]]


def test_binary_masks_keep_something():
    q = torch.tensor([[0.4, 0.3, 0.6, 0.5, 0.2, 0.1, 0.05]])  # the first and the last mask would keep nothing
    assert binarised(q, SPANS).tolist() == [[1, 0, 1, 0, 0, 1, 0]]


def test_temperature_falls_by_the_same_factor_each_step():
    recipe = MaskRecipe(steps=4, first_temperature=8.0, last_temperature=1.0)
    assert [recipe.temperature(step) for step in range(4)] == pytest.approx([8, 4, 2, 1])
    assert MaskRecipe(steps=1).temperature(0) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"MaskRecipe: steps must be a whole number, at least 1; got 0. The default is 300\."),
        ({"batch": -1}, r"batch must be a whole number, at least 1; got -1"),
        ({"rate": float("nan")}, r"rate must be a number, above 0; got nan"),
        ({"last_temperature": 0.0}, r"last_temperature must be a number, above 0; got 0.0"),
        ({"start": float("inf")}, r"start must be a number in \[-100, 100\]; got inf. The default is 0.0\."),
        ({"spread": float("inf")}, r"spread must be a number, at least 0; got inf"),
        ({"diversity_weight": -1.0}, r"diversity_weight must be a number, at least 0; got -1.0. The default is 2.0"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ValueRangeError, match=message):
        MaskRecipe(**settings)


def test_the_papers_weight_is_the_default():
    assert MaskRecipe().diversity_weight == 2.0
    assert MaskRecipe(**asdict(MaskRecipe(steps=7))) == MaskRecipe(steps=7)
