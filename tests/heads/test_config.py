import json

import pytest

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.config import FORMAT, HeadConfig, same_backbone

MAKER = {
    "model": "timm:a",
    "weights": "a" * 32,
    "tensors": "b" * 32,
    "head": {"layer": None, "output": "logits"},
    "transform": {"kind": "preprocess", "size": [224, 224], "resize": 256},
}
FULL = HeadConfig(
    features=8, width=4, depth=1, model="timm:a", provenance=MAKER, dtype="float16", trained={"rows": 5}, licence="MIT"
)


def test_json_and_back():
    text = json.dumps(FULL.to_json())
    assert HeadConfig.from_json(json.loads(text), "x") == FULL
    assert json.loads(text)["format"] == FORMAT


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, r"x is not a head's config.json of format 1; got format 2. Update dubito"),
        ({"features": "8"}, r"x has features='8'\. Copy it again"),
        ({"features": True}, r"x has features=True"),
        ({"depth": 1.0}, r"x has depth=1\.0"),
        ({"provenance": "me"}, r"x has provenance='me'"),
        ({"trained": None}, r"x has trained=None"),
        ({"surprise": 1}, r"x has an entry 'surprise' that no head has"),
        ({"width": 0}, r"x cannot be used \(head: features and width must be at least 1 .*; got 8, 0, 1"),
        ({"dtype": "float8"}, r"x has dtype='float8'"),
    ],
)
def test_odd_entries_are_named(change, told):
    with pytest.raises(ArtefactError, match=told):
        HeadConfig.from_json(FULL.to_json() | change, "x")


@pytest.mark.parametrize("key", [key for key in FULL.to_json() if key != "format"])
def test_every_entry_must_be_there(key):
    found = FULL.to_json()
    del found[key]
    with pytest.raises(ArtefactError, match=f"x has no entry '{key}'"):
        HeadConfig.from_json(found, "x")


@pytest.mark.parametrize("found", [None, [], "config", 3])
def test_json_that_is_no_config(found):
    with pytest.raises(ArtefactError, match=r"is not a head's config.json of format 1; got format \w+"):
        HeadConfig.from_json(found, "x")


def test_what_is_not_json_is_refused():
    for measured in ({"auroc": float("nan")}, {"auroc": {1, 2}}):
        with pytest.raises(ArtefactError, match="provenance, trained and measured must be JSON without NaN"):
            HeadConfig(features=8, measured=measured).to_json()
    with pytest.raises(ValueRangeError, match="0, 512, 2 came"):
        HeadConfig(features=0)


def test_the_same_backbone_fits():
    assert same_backbone(MAKER, MAKER) is None
    assert same_backbone(MAKER, MAKER | {"model": "another name"}) is None


def test_either_hash_is_enough_but_nothing_is_not():
    assert same_backbone(MAKER, MAKER | {"weights": "c" * 32}) is None  # another version of timm
    assert same_backbone(MAKER, MAKER | {"tensors": None}) is None
    assert same_backbone(MAKER | {"weights": None}, MAKER) is None
    assert same_backbone(MAKER | {"weights": None, "tensors": None}, MAKER | {"weights": None, "tensors": None}) == (
        "its weights differ (none there, none here): the backbone was fine-tuned or is another one"
    )


def test_what_differs_is_named():
    other = {"weights": "cd34" + "0" * 28, "tensors": "ef56" + "0" * 28}
    assert same_backbone(MAKER, MAKER | other) == (
        "its weights differ (bbbbbbbb… there, ef560000… here): the backbone was fine-tuned or is another one"
    )
    assert same_backbone(MAKER | {"tensors": None}, MAKER | other) == (
        "its weights differ (aaaaaaaa… there, cd340000… here): the backbone was fine-tuned or is another one"
    )
    assert same_backbone(MAKER, MAKER | {"transform": MAKER["transform"] | {"resize": 232}}) == (
        "its transform differs (resize=256 there, 232 here): images were prepared in another way"
    )
    assert same_backbone(MAKER, MAKER | {"transform": {"kind": "none"}}) == (
        "its transform differs (kind=preprocess there, none here, size=[224, 224] there, none here, "
        "resize=256 there, none here): images were prepared in another way"
    )
    assert same_backbone(MAKER, MAKER | {"head": {"layer": "fc", "output": "logits"}}) == (
        "its classifying layer differs (layer=none there, fc here): features are read elsewhere in the model"
    )


def test_another_activation_under_the_same_tensors_is_told():
    ours = MAKER | {"operations": ["AdaptiveAvgPool2d(output_size=1)", "ReLU"]}
    theirs = ours | {"weights": "c" * 32, "operations": ["AdaptiveAvgPool2d(output_size=1)", "GELU", "Tanh"]}
    assert same_backbone(ours, ours | {"weights": "c" * 32}) is None
    assert same_backbone(ours, theirs) == (
        "its operations differ (ReLU there, GELU, Tanh here): activations or pools were replaced"
    )
    assert same_backbone(ours, ours | {"operations": ["ReLU"]}) == (
        "its operations differ (AdaptiveAvgPool2d(output_size=1) there, none here): activations or pools were replaced"
    )


def test_how_often_an_operation_is_there_does_not_count():
    counted = MAKER | {"operations": {"ReLU": 3, "SiLU": 1}}  # as caches once had it
    assert same_backbone(counted, MAKER | {"operations": ["SiLU", "ReLU"]}) is None
    assert same_backbone(counted, MAKER | {"operations": {"ReLU": 2, "SiLU": 1}}) is None


def test_operations_that_one_side_does_not_know_are_not_compared():
    known = MAKER | {"operations": ["ReLU"]}
    for unknown in (MAKER, MAKER | {"operations": None}):
        assert same_backbone(unknown, known) is None
        assert same_backbone(known, unknown) is None


def test_all_reasons_are_told_at_once():
    reason = same_backbone(MAKER, {})
    assert reason is not None
    assert [part.split(" differ")[0] for part in reason.split("; ")] == [
        "its weights",
        "its transform",
        "its classifying layer",
    ]


def test_tuples_and_lists_are_the_same():
    tupled = MAKER | {"transform": MAKER["transform"] | {"size": (224, 224)}}
    assert same_backbone(MAKER, tupled) is None
