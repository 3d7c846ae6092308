"""Numbers, rows and classes that are refused; settings from text: every declared type."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import dubito
from dubito.errors import TableError, ValueRangeError
from dubito.explain import filtering
from dubito.heads import Recipe
from dubito.protocols import corruption_curve, human_ambiguity, ood_auroc_by_dataset, transfer
from dubito.scores import tune_regrad
from dubito.table import Table
from dubito.validate import check_classes, check_number, check_per_row, check_seed, settings_from_text


@dataclass
class Settings:
    number: int = 1
    share: float = 0.5
    exact: bool = True
    name: str = ""
    kind: Literal["full", "tied"] = "full"
    several: int | None = None
    pair: tuple[float, int] = (0.5, 1)
    names: tuple[str, ...] = ()
    layers: Sequence[str] | None = None
    either: "int | float | str" = 0
    where: Path | None = None
    learned: float = field(default=0.0, init=False)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("number", "12", 12),
        ("share", "1e-3", 0.001),
        ("exact", "no", False),
        ("exact", "True", True),
        ("name", "none", "none"),
        ("kind", "tied", "tied"),
        ("several", "none", None),
        ("several", "4", 4),
        ("pair", "0.25, 3", (0.25, 3)),
        ("names", "a,b", ("a", "b")),
        ("names", "", ()),
        ("layers", "fc1,fc2", ("fc1", "fc2")),
        ("layers", "none", None),
        ("either", "3", 3),
        ("either", "3.5", 3.5),
        ("either", "all", "all"),
        ("where", "a/b", Path("a/b")),
    ],
)
def test_text_becomes_the_declared_type(name, text, value):
    converted = settings_from_text(Settings, {name: text}, by="demo")[name]
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("number", "1.5", r"demo: number must be a whole number; got '1.5'\."),
        ("share", "half", r"demo: share must be a number; got 'half'\."),
        ("exact", "maybe", r"demo: exact must be one of true, false, yes, no; got 'maybe'\."),
        ("kind", "diagonal", r"demo: kind must be one of full, tied; got 'diagonal'\."),
        ("several", "few", r"demo: several must be a whole number or none; got 'few'\."),
        ("pair", "0.5", r"demo: pair must be 2 items separated by commas, each a number; got '0.5'\."),
        ("kinds", "full", r"demo: a setting must be one of number, share, .*; got 'kinds'\. Did you mean kind\?"),
        ("learned", "1", r"demo: a setting must be one of .*; got 'learned'"),
    ],
)
def test_text_that_is_not_of_the_type_is_refused(name, text, message):
    with pytest.raises(ValueRangeError, match=message):
        settings_from_text(Settings, {name: text}, by="demo")


def test_further_types_have_parsers():
    @dataclass
    class Weighted:
        score: Settings | None = None

    values = settings_from_text(
        Weighted, {"score": "7"}, by="demo", parsers={Settings: lambda text: Settings(int(text))}
    )
    assert values == {"score": Settings(7)}


def test_every_setting_of_a_recipe_can_be_text():
    recipe = Recipe(betas=(0.9, 0.999), target="mixed", rows=100, init="classes")
    texts = {
        key: ",".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, value in recipe.to_json().items()
    }
    assert Recipe(**settings_from_text(Recipe, texts, by="recipe")) == recipe


@pytest.mark.parametrize(
    ("value", "interval", "whole", "message"),
    [
        (0, "[1, inf)", True, "demo: count must be a whole number, at least 1; got 0. Ten are usual."),
        (1.0, "[1, inf)", True, "demo: count must be a whole number, at least 1; got 1.0."),
        (True, "[1, inf)", True, "got True"),
        (0.0, "(0, inf)", False, "demo: count must be a number, above 0; got 0.0."),
        (1, "(0, 1)", False, r"demo: count must be a number in \(0, 1\); got 1."),
        (1.5, "[0, 1]", False, r"demo: count must be a number in \[0, 1\]; got 1.5."),
        (float("nan"), "[0, inf)", False, "got nan"),
        (float("inf"), "[0, inf)", False, "got inf"),
        ("3", "[0, inf)", False, "got '3'"),
    ],
)
def test_numbers_outside_of_their_interval(value, interval, whole, message):
    with pytest.raises(ValueRangeError, match=message):
        check_number(value, interval, by="demo", what="count", whole=whole, hint="Ten are usual.")


@pytest.mark.parametrize(
    ("value", "interval"), [(1, "[1, inf)"), (np.int64(3), "[1, 3]"), (np.float32(0.5), "(0, 1)"), (0, "[0, 1)")]
)
def test_numbers_in_their_interval(value, interval):
    check_number(value, interval, by="demo", what="count")


def test_one_value_per_row():
    table = Table(logit=torch.zeros(3, 2), name="val")
    check_per_row(torch.zeros(3), table, by="demo", what="u")
    with pytest.raises(TableError, match=r"demo: u must have one value per row of val, \(3,\); got \(2,\)"):
        check_per_row(torch.zeros(2), table, by="demo", what="u")


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [0.0, 1.0], [True, False]])
def test_labels_that_are_no_classes(labels):
    check_classes(torch.tensor([0, 2]), 3, by="demo")
    with pytest.raises(TableError, match=r"demo: the labels must be (classes|integers) from 0 to 2"):
        check_classes(torch.tensor(labels), 3, by="demo")


@pytest.mark.parametrize(
    ("labels", "repair"),
    [([1, 2, 3], r"If they count from 1, subtract 1\.$"), ([-1, 2], r"no label: table\.rows\(table\.label >= 0\)\.$")],
)
def test_labels_from_one_and_images_without_a_label(labels, repair):
    with pytest.raises(TableError, match=repair):
        check_classes(torch.tensor(labels), 3, by="demo")


NOTHING = Table(logit=torch.zeros(1, 2))
MODEL = dubito.wrap(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("name", "value"), [("confidence", 95.0), ("resamples", 0), ("seed", -1)])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (dubito.evaluate, ({}, NOTHING)),
        (filtering, (torch.eye(2), NOTHING, NOTHING)),
        (corruption_curve, (MODEL, [], {}, "nowhere")),
        (ood_auroc_by_dataset, ({}, NOTHING, {})),
        (transfer, ({}, {})),
        (human_ambiguity, ({}, NOTHING)),
        (tune_regrad, (NOTHING,)),
    ],
)
def test_settings_of_the_bootstrap_are_checked_before_any_work(function, arguments, name, value):
    if function is tune_regrad and name == "confidence":
        return
    with pytest.raises(ValueRangeError, match=f"^{function.__name__}: {name} must be a .*number.*; got {value}"):
        function(*arguments, **{name: value})


@pytest.mark.parametrize("seed", [-1, 0.5, "x", True, 2**63])
def test_what_is_not_a_seed(seed):
    with pytest.raises(ValueRangeError, match="map: seed must be"):
        check_seed(seed, by="map")


def test_the_largest_seed():
    check_seed(2**63 - 1, by="map")
    torch.Generator().manual_seed(2**63 - 1)
