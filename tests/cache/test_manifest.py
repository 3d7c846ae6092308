"""A finished cache as a table: who made it."""

import copy
import json
from dataclasses import replace

import pytest
import torch

import dubito
from dubito.cache.disk import model_identity
from dubito.table import Provenance
from tests.cache.conftest import contents, edit_manifest


def test_the_provenance_is_the_model_part_by_part(model, folder, tmp_path):
    table = dubito.extract(model, folder, tmp_path / "cache", workers=0)
    forward = {"settings": dubito.probes.Forward().settings()}
    expected = replace(model_identity(model), task_loss="cross_entropy", probes={"forward": forward})
    assert table.provenance == expected
    assert dubito.open(tmp_path / "cache").provenance == expected
    assert expected.model == "small"
    assert expected.operations == ["AdaptiveAvgPool2d(output_size=1)", "ReLU"]
    assert expected.weights != expected.tensors
    assert Provenance.from_json(json.loads(json.dumps(expected.to_json())), "here") == expected


@pytest.mark.parametrize("parts", [{}, {"operations": {"ReLU": 1}}], ids=["nothing recorded", "in another form"])
def test_what_an_older_cache_lacks_is_known_from_the_model_in_hand(model, folder, tmp_path, parts):
    expected = dubito.extract(model, folder, tmp_path / "cache", workers=0).provenance

    def edit(entries):
        del entries["identity"]["operations"], entries["identity"]["tensors"]
        entries["identity"] |= parts

    edit_manifest(tmp_path / "cache", edit)
    before = contents(tmp_path / "cache")
    assert dubito.open(tmp_path / "cache").provenance == replace(
        expected, **{"operations": None, "tensors": None} | parts
    )
    assert dubito.open(tmp_path / "cache", model=model).provenance == expected
    assert dubito.extract(model, folder, tmp_path / "cache", workers=0).provenance == expected
    assert contents(tmp_path / "cache") == before


def test_the_provenance_records_how_probes_were_configured(model, folder, tmp_path):
    probes = [
        dubito.probes.Tiles([2, 3], keep="logits"),
        dubito.probes.Views(["identity", "flip"], temperature=2.0),
    ]
    table = dubito.extract(model, folder, tmp_path / "cache", workers=0, probes=probes)
    recorded = table.provenance.probes
    assert {name: recorded[name] for name in ("tiles", "views")} == {
        probe.name: {"settings": probe.settings()} for probe in probes
    }


def test_views_keep_the_provenance(model, folder, tmp_path):
    table = dubito.extract(model, folder, tmp_path / "cache", workers=0)
    views = [table.rows([0, 2]), table.select("feature"), table.extended(u=torch.zeros(len(table)))]
    assert all(view.provenance == table.provenance for view in [*views, next(table.batches(size=3))])


def test_fine_tuning_and_another_version_are_distinguished(model):
    tuned = copy.deepcopy(model.module)
    with torch.no_grad():
        tuned[0].bias[0] += 1e-3
    renamed = copy.deepcopy(model.module)
    renamed[2].__class__ = type("NewReLU", (torch.nn.ReLU,), {})  # as a new version may call it
    before = model_identity(model)
    after = {
        name: model_identity(dubito.wrap(module, transform=model.transform))
        for name, module in (("tuned", tuned), ("renamed", renamed))
    }
    assert after["tuned"].tensors != before.tensors
    assert after["renamed"].tensors == before.tensors
    assert before.weights not in (after["tuned"].weights, after["renamed"].weights)


def test_tensors_alone_do_not_make_a_cache_stale(model, folder, tmp_path):
    dubito.extract(model, folder, tmp_path / "cache", workers=0)
    edit_manifest(tmp_path / "cache", lambda entries: entries["identity"].pop("tensors"))
    table = dubito.extract(model, folder, tmp_path / "cache", workers=0)
    assert len(table) == 23
    assert dubito.open(tmp_path / "cache", model=model).model_id == table.model_id
