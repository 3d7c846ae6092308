"""Probes by name: their settings, made from plain values, and rebuilt from what a table has recorded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import dubito
from dubito.choices import GradientMethod
from dubito.errors import MissingColumnError, ValueRangeError
from dubito.probes import (
    PROBES,
    Dropout,
    Forward,
    Gradient,
    Noise,
    PreActivation,
    Tiles,
    Views,
    make_probe,
    probe_settings,
)
from dubito.probes.registry import probes_for
from dubito.table import Provenance
from dubito.types import Probe


@pytest.mark.parametrize("name", PROBES)
def test_defaults_make_the_probe(name):
    probe = make_probe(name)
    assert isinstance(probe, Probe)
    assert probe.name == name
    defaults = {key: setting.default for key, setting in probe_settings(name).items()}
    assert make_probe(name, **defaults).settings() == probe.settings()
    assert json.loads(json.dumps(probe.settings())) == probe.settings()


def test_settings_have_types_and_defaults():
    settings = probe_settings("gradient")
    assert settings["method"].default == "combined"
    assert get_args(settings["method"].annotation) == get_args(GradientMethod)
    assert settings["last"].annotation == int | None
    assert list(probe_settings("dropout")) == ["passes", "rate", "seed", "keep", "temperature", "variance"]


def test_made_from_plain_values():
    assert make_probe("tiles", grids=[7, 2], keep="logits") == Tiles([2, 7], keep="logits")
    assert make_probe("forward", feature_dtype="float32") == Forward(feature_dtype="float32")
    views = make_probe("views", views=["identity", "flip"], amount=0.25)
    assert views.settings() == Views(["identity", "flip"], 0.25).settings()


def test_unknown_names():
    with pytest.raises(
        ValueRangeError, match=r"make_probe: probe must be one of forward, .*; got 'tile'\. Did you mean"
    ):
        make_probe("tile")
    with pytest.raises(ValueRangeError, match=r"'tiles': a setting must be one of .*'grid'\. Did you mean grids\?"):
        make_probe("tiles", grid=[2])


def test_probes_are_taken_or_rebuilt():
    assert probes_for(("feature", "logit", "id"), None) == []
    assert probes_for(("tiles_2", "tiles_4_logit"), None) == [Tiles([2, 4], keep="logits")]
    assert probes_for(("pre_activation",), None) == [PreActivation()]
    dropout = Dropout(4, 0.1)
    assert probes_for(("dropout",), None, [dropout]) == [dropout]
    with pytest.raises(
        MissingColumnError, match=r"guard reads column 'dropout', written by the Monte-Carlo dropout probe .* probes="
    ):
        probes_for(("dropout",), None, by="guard")


@pytest.mark.parametrize(
    ("probe", "columns", "expected"),
    [
        (Tiles([2, 3, 4], temperature=0.5), ("tiles_3",), Tiles([3], temperature=0.5)),
        (Tiles([2], keep="logits"), ("tiles_2", "tiles_2_logit"), Tiles([2], keep="logits")),
        (PreActivation(dtype="float32"), ("pre_activation",), PreActivation(dtype="float32")),
        (Gradient("exact", uniform=True), ("gradient_uniform",), Gradient("exact", uniform=True)),
        (Gradient("top", 1, 0, name="steep"), ("steep",), Gradient("top", 1, 0, name="steep")),
        (Dropout(4, 0.1, 7, keep="logits"), ("dropout",), Dropout(4, 0.1, 7)),
        (Views(temperature=2.0), ("views",), Views(temperature=2.0)),
        (Noise(4, 0.3), ("noise_variance", "noise_logit"), Noise(4, 0.3, keep="logits")),
    ],
)
def test_rebuilt_from_recorded_settings(probe, columns, expected):
    settings = json.loads(json.dumps(probe.settings()))
    (rebuilt,) = probes_for(
        columns, Provenance(probes={"forward": {"settings": {}}, probe.name: {"settings": settings}})
    )
    assert (rebuilt.name, rebuilt.settings()) == (expected.name, expected.settings())


def test_the_longest_name_decides():
    recorded = {
        probe.name: {"settings": probe.settings()} for probe in (Gradient(), Gradient("exact", name="gradient_late"))
    }
    (rebuilt,) = probes_for(("gradient_late_predicted",), Provenance(probes=recorded))
    assert rebuilt == Gradient("exact", name="gradient_late")


def test_what_needs_models_cannot_be_rebuilt():
    recorded = Provenance(probes={"members": {"settings": {"members": ["ab", "cd"]}}, "mine": {"settings": {}}})
    for column in ("members", "mine"):
        with pytest.raises(MissingColumnError, match=f"probes_for reads column '{column}'"):
            probes_for((column,), recorded)


def test_a_cache_records_enough(tmp_path: Path):
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    model = dubito.wrap(torch.nn.Sequential(body, torch.nn.Flatten(), torch.nn.Linear(4, 3)), transform=None)
    x = torch.randn(5, 3, 8, 8)
    probes = [Tiles([2, 3]), PreActivation(), Noise(2), Views(["identity", "flip"])]
    probes += [Gradient("exact", name="late", last=1)]
    table = dubito.extract(model, x, tmp_path / "cache", probes=probes, workers=0, progress=False, batch_size=5)
    columns = [name for name in table.columns if name not in ("id", "feature", "logit")]
    rebuilt = probes_for(columns, replace(table.provenance, model="another name"))
    assert len(rebuilt) == len(probes)
    for probe in rebuilt:
        for name, values in probe.run(model, x, None).items():
            assert torch.equal(values, table.whole(name)), name
