import json

import pytest
import yaml

from dubito.heads.card import make_card
from dubito.heads.config import HeadConfig
from dubito.table import Provenance


def front(card: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_front_matter_is_what_the_hub_reads():
    found = front(make_card(HeadConfig(features=192, model="timm:vit_tiny_patch16_224.x", licence="Apache-2.0")))
    assert found["library_name"] == "dubito"
    assert found["license"] == "apache-2.0"
    assert found["base_model"] == "timm/vit_tiny_patch16_224.x"
    assert "uncertainty" in found["tags"]


@pytest.mark.parametrize(
    ("model", "base"), [("hf:google/vit", "google/vit"), ("pypi:efficientnet_lite0", None), (None, None)]
)
def test_only_backbones_of_the_hub_are_linked(model, base):
    found = front(make_card(HeadConfig(features=8, model=model)))
    assert found.get("base_model") == base
    assert "license" not in found


def test_a_licence_cannot_write_yaml_of_its_own():
    licence = 'x"\ntags: [evil]\n# '
    assert front(make_card(HeadConfig(features=8, licence=licence)))["license"] == licence


def test_it_tells_what_was_recorded_and_how_to_use_it():
    provenance = Provenance(weights="w" * 32, tensors="t" * 32, head={"layer": None}, transform={"size": [224, 224]})
    config = HeadConfig(
        features=1280,
        width=64,
        depth=1,
        model="pypi:efficientnet_lite0",
        provenance=provenance,
        trained={"corpus": "4,000 photographs", "rows": 40000},
        measured={"ambiguous_auroc": 0.70123, "interval": [0.65, 0.75]},
    )
    card = make_card(config, name="org/mine")
    for text in (
        "1280 features",
        "1 hidden layers of width 64",
        "4,000 photographs",
        "rows: 40000",
        "ambiguous auroc: 0.7012",
        "interval: 0.65, 0.75",
        "w" * 32,
        'dubito.load("pypi:efficientnet_lite0")',
        'UncertaintyHead.from_pretrained("org/mine")',
        "licence:\nnot stated",
    ):
        assert text in card, text


def test_it_does_not_pretend():
    card = make_card(HeadConfig(features=8, depth=0))
    assert "Nothing was measured." in card
    assert "Nothing was recorded about its training." in card
    assert "Its exact weights were not recorded" in card
    assert "one linear layer" in card
    assert json.dumps("SOURCE:NAME") in card
