import json

import pytest

from dubito.errors import ArtefactError, ValueRangeError
from dubito.heads.config import FORMAT, HeadConfig
from dubito.table import Provenance

BACKBONE = Provenance(
    model="timm:a",
    weights="a" * 32,
    tensors="b" * 32,
    head={"layer": None, "output": "logits"},
    transform={"kind": "preprocess", "size": [224, 224], "resize": 256},
)
FULL = HeadConfig(
    features=8,
    width=4,
    depth=1,
    model="timm:a",
    provenance=BACKBONE,
    dtype="float16",
    trained={"rows": 5},
    licence="MIT",
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
        ({"provenance": {"maker": 1}}, r"x: provenance has no part maker"),
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
