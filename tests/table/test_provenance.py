"""Who made a table, and in what two models differ."""

import json
from dataclasses import replace

import pytest

from dubito.errors import ArtefactError
from dubito.table import Provenance

BACKBONE = Provenance(
    model="timm:a",
    weights="a" * 32,
    tensors="b" * 32,
    head={"layer": None, "output": "logits"},
    transform={"kind": "preprocess", "size": [224, 224], "resize": 256},
)


def test_json_and_back():
    ensemble = Provenance("both", members=(BACKBONE, replace(BACKBONE, probes={"tiles": {"settings": {"grids": [2]}}})))
    for provenance in (BACKBONE, ensemble, Provenance()):
        assert Provenance.from_json(json.loads(json.dumps(provenance.to_json())), "here") == provenance
    assert Provenance.from_json(None, "here") is None


@pytest.mark.parametrize(("written", "part"), [({"maker": 1}, "maker"), ("me", "'me'"), ([], r"\[\]")])
def test_what_another_version_wrote(written, part):
    with pytest.raises(
        ArtefactError, match=rf"^here: provenance has no part {part}\. It was written by another version"
    ):
        Provenance.from_json(written, "here")


def test_the_hash_of_a_model():
    assert Provenance("a name").model_id is None
    known = BACKBONE.model_id
    assert known == replace(BACKBONE, model="b", tensors=None, task_loss="bce", probes={"x": {}}).model_id
    assert known not in [replace(BACKBONE, **{part: "other"}).model_id for part in ("weights", "head", "transform")]
    both = Provenance(members=(BACKBONE, replace(BACKBONE, weights="c")))
    assert both.model_id not in (None, known, Provenance(members=both.members[::-1]).model_id)
    assert Provenance(members=(BACKBONE, Provenance())).model_id is None


def test_ensembles_are_compared_member_by_member():
    both = Provenance("both", members=(BACKBONE, BACKBONE))
    assert both.difference(replace(both, model="another name")) is None
    assert both.difference(BACKBONE) == "it has 2 members there, 0 here"
    other = Provenance(members=(BACKBONE, replace(BACKBONE, head=None)))
    assert both.difference(other).startswith("member 1: its classifying layer differs")


def test_the_same_model():
    assert BACKBONE.difference(BACKBONE) is None
    assert BACKBONE.difference(replace(BACKBONE, model="another name")) is None


def test_either_hash_is_enough_but_nothing_is_not():
    assert BACKBONE.difference(replace(BACKBONE, weights="c" * 32)) is None  # another version of timm
    assert BACKBONE.difference(replace(BACKBONE, tensors=None)) is None
    assert replace(BACKBONE, weights=None).difference(BACKBONE) is None
    assert replace(BACKBONE, weights=None, tensors=None).difference(replace(BACKBONE, weights=None, tensors=None)) == (
        "its weights differ (none is recorded): the backbone was fine-tuned or is another one"
    )


def test_what_differs_is_named():
    other = {"weights": "cd34" + "0" * 28, "tensors": "ef56" + "0" * 28}
    assert BACKBONE.difference(replace(BACKBONE, **other)) == (
        "its weights differ (bbbbbbbb there, ef560000 here): the backbone was fine-tuned or is another one"
    )
    assert replace(BACKBONE, tensors=None).difference(replace(BACKBONE, **other)) == (
        "its weights differ (aaaaaaaa there, cd340000 here): the backbone was fine-tuned or is another one"
    )
    assert BACKBONE.difference(replace(BACKBONE, transform={**BACKBONE.transform, "resize": 232})) == (
        "its transform differs (resize=256 there, 232 here): images were prepared in another way"
    )
    assert BACKBONE.difference(replace(BACKBONE, transform={"kind": "none"})) == (
        "its transform differs (kind=preprocess there, none here, size=[224, 224] there, none here, "
        "resize=256 there, none here): images were prepared in another way"
    )
    assert BACKBONE.difference(replace(BACKBONE, head={"layer": "fc", "output": "logits"})) == (
        "its classifying layer differs (layer=none there, fc here): features are read elsewhere in the model"
    )


def test_another_activation_under_the_same_tensors_is_reported():
    ours = replace(BACKBONE, operations=["AdaptiveAvgPool2d(output_size=1)", "ReLU"])
    theirs = replace(ours, weights="c" * 32, operations=["AdaptiveAvgPool2d(output_size=1)", "GELU", "Tanh"])
    assert ours.difference(replace(ours, weights="c" * 32)) is None
    assert ours.difference(theirs) == (
        "its operations differ (ReLU there, GELU, Tanh here): activations or pools were replaced"
    )
    assert ours.difference(replace(ours, operations=["ReLU"])) == (
        "its operations differ (AdaptiveAvgPool2d(output_size=1) there, none here): activations or pools were replaced"
    )


def test_how_often_an_operation_is_there_does_not_count():
    counted = replace(BACKBONE, operations={"ReLU": 3, "SiLU": 1})  # as caches once had it
    assert counted.difference(replace(BACKBONE, operations=["SiLU", "ReLU"])) is None
    assert counted.difference(replace(BACKBONE, operations={"ReLU": 2, "SiLU": 1})) is None


def test_operations_that_one_side_does_not_know_are_not_compared():
    known = replace(BACKBONE, operations=["ReLU"])
    for unknown in (BACKBONE, replace(BACKBONE, operations=None)):
        assert unknown.difference(known) is None
        assert known.difference(unknown) is None


def test_all_reasons_are_reported_at_once():
    reason = BACKBONE.difference(Provenance())
    assert reason is not None
    assert [part.split(" differ")[0] for part in reason.split("; ")] == [
        "its weights",
        "its transform",
        "its classifying layer",
    ]


def test_tuples_and_lists_are_the_same():
    tupled = replace(BACKBONE, transform={**BACKBONE.transform, "size": (224, 224)})
    assert BACKBONE.difference(tupled) is None
