"""What a recipe of masks refuses, and how its temperature falls."""

import pytest

from dubito.ensembles.training import MaskRecipe
from dubito.errors import ValueRangeError


def test_temperature_falls_by_the_same_factor_each_step():
    recipe = MaskRecipe(steps=4, first_temperature=8.0, last_temperature=1.0)
    assert [recipe.temperature(step) for step in range(4)] == pytest.approx([8, 4, 2, 1])
    assert MaskRecipe(steps=1).temperature(0) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"MaskRecipe: steps must be positive and finite; got 0. The default is 300\."),
        ({"batch": -1}, r"batch must be positive and finite; got -1"),
        ({"rate": float("nan")}, r"rate must be positive and finite; got nan"),
        ({"last_temperature": 0.0}, r"last_temperature must be positive and finite; got 0.0"),
        ({"start": float("inf")}, r"start must be finite; got inf. The default is 0.0\."),
        ({"spread": float("inf")}, r"spread must be finite and not negative; got inf"),
        ({"diversity_weight": -1.0}, r"diversity_weight must be finite and not negative; got -1.0. The default is 2.0"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ValueRangeError, match=message):
        MaskRecipe(**settings)


def test_the_papers_weight_is_the_default():
    assert MaskRecipe().diversity_weight == 2.0
    assert MaskRecipe(**MaskRecipe(steps=7).to_json()) == MaskRecipe(steps=7)
