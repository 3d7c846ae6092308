"""`dubito list`: everything that is registered is listed."""

from collections.abc import Collection
from dataclasses import fields
from typing import get_args

import pytest

from dubito import metrics
from dubito.calibration import METHODS
from dubito.choices import SetMethod
from dubito.data import CORRUPTIONS, STAND_INS, Augment
from dubito.heads import Recipe
from dubito.probes import PROBES, probe_settings
from dubito.protocols import OPENOOD
from dubito.protocols.imagenet_variants import VARIANTS
from dubito.scores.registry import SCORES
from dubito.validate import settings_from_text

from .conftest import Run


def test_scores(run: Run) -> None:
    result = run("list", "scores", "--json").json["scores"]
    assert [entry["name"] for entry in result] == list(SCORES)
    entropy = result[list(SCORES).index("entropy")]
    assert entropy == {
        "name": "entropy",
        "kind": "total",
        "needs": ["logit"],
        "learns_from": [],
        "about": "The entropy of the predicted distribution.",
    }
    assert all(entry["about"] for entry in result)


def test_calibrations(run: Run) -> None:
    result = run("list", "calibrations", "--json").json["calibrations"]
    assert [entry["name"] for entry in result] == list(METHODS)
    kept = {entry["name"]: entry["keeps_predictions"] for entry in result}
    assert (kept["temperature"], kept["matrix"]) == (True, False)
    assert all(entry["about"] for entry in result)
    shown = run("list", "calibrations", "venn").out
    assert "1 calibration\n" in shown
    assert "dubito calibrate CACHE --method NAME" in shown


def test_names_of_data_sets_corruptions_and_prediction_sets(run: Run) -> None:
    """Every kind has the names that the commands take."""
    kinds: dict[str, Collection[str]] = {
        "openood-benchmarks": OPENOOD,
        "imagenet-variants": VARIANTS,
        "corruptions": {**CORRUPTIONS, **STAND_INS},
        "set-methods": get_args(SetMethod),
    }
    for kind, names in kinds.items():
        result = run("list", kind, "--json").json[kind]
        assert [entry["name"] for entry in result] == list(names)
    shown = run("list", "openood-benchmarks", "cifar10").out
    assert "2 openood benchmarks" in shown
    assert "cifar100, tin" in shown
    assert "dubito openood MODEL --root DIR --benchmark NAME" in shown


def test_probes_and_metrics(run: Run) -> None:
    probes = {
        probe["name"]: (probe["price"], probe["about"]) for probe in run("list", "probes", "--json").json["probes"]
    }
    assert (
        probes.items()
        >= {
            "forward": ("1 forward pass", "Features and logits."),
            "pre_activation": (
                "1 forward pass",
                "Features before the last non-linearity, in the column `pre_activation`.",
            ),
            "gradient": (
                "1 forward pass, 4 backward passes",
                "Gradient norms of every layer.",
            ),
        }.items()
    )
    result = run("list", "metrics", "--json").json["metrics"]
    assert {entry["name"] for entry in result} < set(metrics.__all__)
    assert "auroc" in {entry["name"] for entry in result}
    assert "Interval" not in {entry["name"] for entry in result}


@pytest.mark.parametrize("filter_", ["test_resnet", "timm:test_resn*", "TEST_RESNET"])
def test_models_by_filter(run: Run, filter_: str) -> None:
    result = run("list", "models", filter_, "--json").json["models"]
    if filter_.isupper():
        assert result == []
    else:
        assert {"name": "timm:test_resnet", "source": "timm"} in result
        assert all("test_resnet" in entry["name"] for entry in result)


def test_models_as_text(run: Run) -> None:
    answer = run("list", "models", "efficientnet_lite0")
    assert "pypi:efficientnet_lite0\n" in answer.out
    assert " models\n" in answer.out
    counts = run("list", "models").out
    assert "3 pypi:" in counts
    assert "torchvision:" in counts
    assert "dubito list models" in counts


def test_overview(run: Run) -> None:
    answer = run("list")
    assert answer.code == 0
    for text in ("scores", "entropy", "probes", "forward", "models", "timm:", "metrics", "auroc"):
        assert text in answer.out
    assert set(run("list", "--json").json) == {
        "filter",
        "scores",
        "calibrations",
        "heads",
        "probes",
        "models",
        "metrics",
        "set-methods",
        "openood-benchmarks",
        "imagenet-variants",
        "corruptions",
        "recipe",
        "augment",
        "notes",
    }


def test_an_unknown_kind_is_a_usage_error(run: Run) -> None:
    answer = run("list", "cats")
    assert answer.code == 2
    assert "'cats' is not one of" in answer.err


def test_settings_of_probes(run: Run) -> None:
    (tiles,) = run("list", "probes", "tiles", "--json").json["probes"]
    settings = {one["name"]: (one["value"], one["default"]) for one in tiles["settings"]}
    assert settings["keep"] == ("one of summary, logits", "summary")
    assert settings["grids"][1] == "none"
    everything = run("list", "probes", "--json").json["probes"]
    assert [probe["name"] for probe in everything] == list(PROBES)
    for probe in everything:
        assert [one["name"] for one in probe["settings"]] == list(probe_settings(probe["name"]))
    shown = run("list", "probes").out
    for text in ("passes", "weightings", "cross_entropy", "--probe NAME:KEY=VALUE", "Monte-Carlo dropout"):
        assert text in shown


@pytest.mark.parametrize(("kind", "settings"), [("recipe", Recipe), ("augment", Augment)])
def test_settings_are_listed_as_they_are_typed(run: Run, kind: str, settings: type) -> None:
    """What is listed as a default is understood, and gives that default."""
    result = run("list", kind, "--json").json[kind]
    assert [one["name"] for one in result] == [one.name for one in fields(settings)]
    texts = {one["name"]: one["default"] for one in result if one["name"] != "ratio"}  # 4/3 is rounded
    assert settings(**settings_from_text(settings, texts, by=kind)) == settings()
    assert sum(bool(one["about"]) for one in result) > len(result) / 2
    assert "KEY=VALUE" in run("list", kind).out
