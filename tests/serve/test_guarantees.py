"""Guards for every class, with missed classes and with costs, as a service: the same verdicts, and what is refused."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import dubito
from dubito.errors import GuardError
from dubito.guard import PredictionSets
from dubito.serve import ServiceLimits, serve

from .conftest import files, network, pictures, pixels

COUNT = 40
COSTS = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [4.0, 1.0, 0.0]])


@pytest.fixture(scope="module")
def model() -> Any:
    """The small network with a last layer that predicts every class for some images, and is sure of some."""
    model = network()
    logit = dubito.extract(model, pixels(100), to=None, progress=False).logit
    last, scale = model.module[-1], 2 / logit.std(0)
    with torch.no_grad():
        last.bias.copy_((last.bias - logit.mean(0)) * scale)
        last.weight.mul_(scale[:, None])
    return dubito.wrap(model.module, transform=model.transform, classes=model.classes, name="spread")


@pytest.fixture(scope="module")
def table(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dubito.Table:
    made = dubito.extract(model, pixels(600), to=tmp_path_factory.mktemp("rules") / "cache", progress=False)
    u = dubito.Entropy().score(made)
    wrong = torch.rand(len(u), generator=torch.Generator().manual_seed(1)) < (u.argsort().argsort() / len(u)) ** 3 / 2
    return made.extended(label=(made.logit.argmax(1) + wrong.long()) % 3)


def fitted(model: Any, table: dubito.Table, **settings: Any) -> dubito.Guard:
    usual: dict[str, Any] = {"confidence": 0.6, "scores": ["entropy"], "novel": 0.0, "sets": False}
    return dubito.Guard.fit(model, table, **usual | settings)


def rare_class(table: dubito.Table) -> str:
    """The class that images have most often although another is predicted."""
    predicted = table.logit.argmax(1)
    return ["ant", "bee", "cat"][int(table.label[table.label != predicted].mode().values)]


@pytest.mark.parametrize("kind", ["class", "missed", "costs"])
def test_a_service_answers_what_the_guard_decides(model: Any, table: dubito.Table, kind: str) -> None:
    settings: dict[str, Any] = {
        "class": {"risk": 0.06, "per": "class"},
        "missed": {"risk": 0.3, "missed": {rare_class(table): 0.03}},
        "costs": {"risk": 0.1, "costs": COSTS},
    }[kind]
    guard = fitted(model, table, **settings)
    own = guard(pixels(COUNT, seed=7))
    assert 0 < int(own.accept.sum()) < COUNT
    with (
        serve(guard, port=0, limits=ServiceLimits(workers=1)) as service,
        httpx.Client(base_url=service.address, timeout=30) as client,
    ):
        answer = client.post("/guard", files=files(pictures(COUNT))).json()
        counted = client.get("/metrics").text
        document = client.get("/openapi.json").json()
    assert [one["accept"] for one in answer["verdicts"]] == own.accept.tolist()
    assert [one["reason"] for one in answer["verdicts"]] == [one.reason for one in own]
    assert answer["fingerprint"] == guard.fingerprint
    assert answer["guarantee"] == {
        **guard.guarantee.to_json(),
        "n": 540,
        "sentence": guard.guarantee.sentence(540),
    }
    described = document["paths"]["/guard"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(answer["guarantee"]) <= set(described["properties"]["guarantee"]["properties"])
    causes = {own.cause(row) for row in range(COUNT) if not own.accept[row]}
    assert all(f'reason="{cause}"' in counted for cause in causes)
    if kind == "missed":
        assert any(cause.startswith("may be") for cause in causes)


def test_a_watch_goes_on_with_a_guard_of_classes(model: Any, table: dubito.Table, tmp_path: Path) -> None:
    guard = fitted(model, table, risk=0.2, per="class", missed={rare_class(table): 0.1})
    with (
        serve(guard, port=0, limits=ServiceLimits(workers=1), watch=tmp_path / "watch") as service,
        httpx.Client(base_url=service.address, timeout=30) as client,
    ):
        answer = client.post("/guard", files=files(pictures(COUNT))).json()
        requested = client.post("/labels/requests?count=3").json()["ids"]
        accepted = {one["id"] for one in answer["verdicts"] if one["accept"]}
        assert set(requested) <= accepted
        report = client.post("/labels", json=dict.fromkeys(requested, "ant")).json()
    assert (report["images"], len(requested)) == (COUNT, min(3, len(accepted)))
    with pytest.raises(GuardError, match="a guarantee about costs cannot be watched"):
        serve(fitted(model, table, risk=0.3, costs=COSTS), port=0, watch=tmp_path / "other")


def test_groups_of_images_are_not_in_a_request(model: Any, table: dubito.Table) -> None:
    sites = table.extended(site=["a", "b"] * 300)
    for settings in ({"per": "site"}, {"sets": PredictionSets(per="site")}):
        with pytest.raises(GuardError, match="for every group of 'site', and a request does not state the group"):
            serve(fitted(model, sites, risk=0.3, **settings), port=0)
