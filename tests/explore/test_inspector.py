"""One image in detail, against the model, the guard and a search by brute force."""

import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import dubito
from dubito.cache.runner import predict_table
from dubito.data import corrupt, open_images
from dubito.errors import BrokenImageError, ModelError
from dubito.explore.collection import Collection
from dubito.explore.inspector import Inspector, _covered
from dubito.explore.layout import Layouts
from dubito.explore.notes import Notes

from .conftest import EVIL, network


def details(table, **options) -> Inspector:
    collection = Collection(table, **{key: value for key, value in options.items() if key != "model"})
    return Inspector(collection, Layouts(collection, None), Notes(None), options.get("model"))


def test_a_prediction_with_its_top_classes_and_ranks(inspector, table):
    shown = inspector.image(3)
    p = table.logit[3].double().softmax(0)
    assert [one["index"] for one in shown["top"]] == p.argsort(descending=True).tolist()
    assert [one["probability"] for one in shown["top"]] == pytest.approx(sorted(p.tolist(), reverse=True))
    u = dubito.Entropy().score(table)
    entropy = next(one for one in shown["scores"] if one["name"] == "entropy")
    assert entropy["value"] == pytest.approx(float(u[3]), rel=1e-6)
    assert entropy["rank"] == pytest.approx(float((u < u[3]).sum()) / 39)
    assert shown["verdict"]["verdict"] in ("look at it", "confident", "fairly confident")
    json.dumps(shown, allow_nan=False)


def test_neighbours_are_those_of_brute_force_without_the_image_itself(inspector, table):
    z = torch.nn.functional.normalize(table.feature.double(), dim=1)
    cosine = z @ z[5]
    cosine[5] = -math.inf
    neighbours = inspector.image(5)["neighbours"]
    assert [one["row"] for one in neighbours] == cosine.argsort(descending=True)[:8].tolist()
    assert neighbours[0]["similarity"] == pytest.approx(float(cosine.max()), abs=1e-5)


def test_a_guards_verdict_and_prediction_set(table, model, folder):
    guard = dubito.Guard.fit(model, table, risk=0.5)
    shown, verdict = details(table, guard=guard, images=folder).image(7), guard.decide(table)[7]
    assert shown["verdict"]["verdict"] == ("accept" if verdict.accept else "abstain")
    assert shown["verdict"]["reason"] == verdict.reason
    names = ["cat", EVIL, "dog"]
    assert shown["prediction_set"] == [names[one].partition(",")[0] for one in verdict.prediction_set or ()]


def test_a_new_image_is_what_the_table_would_say(inspector, table, folder):
    name = table.row_ids()[9]
    inspector.layouts.points("pca")
    shown = inspector.new((folder / name).read_bytes(), "again.png")
    row = inspector.image(9)
    assert shown["predicted"] == row["predicted"]
    assert shown["probability"] == pytest.approx(row["probability"], abs=1e-3)
    assert shown["neighbours"][0]["row"] == 9
    assert shown["positions"]["pca"] == pytest.approx(inspector.layouts.points("pca")[9].tolist(), abs=0.02)
    json.dumps(shown, allow_nan=False)
    with pytest.raises(BrokenImageError, match=r"image 'x\.png'"):
        inspector.new(b"no image", "x.png")


def test_tiles_are_entropies_of_the_models_own_map(inspector, table, model, folder):
    shown = inspector.tiles(4)
    x = model.transform.finish(model.transform.prepare(Image.open(folder / table.row_ids()[4]).convert("RGB"))[None])
    logits = model.logits(model.feature_map(x))[0].double()  # 8 x 8 tiles
    grid = torch.nn.functional.adaptive_avg_pool2d(logits.T.view(3, 8, 8), 7)
    p = grid.softmax(0)
    np.testing.assert_allclose(shown["values"], -(p * p.log()).sum(0), atol=1e-4)
    assert shown["box"] == [0, 0, 1, 1]


def test_corruptions_are_those_of_the_protocol(inspector, table, model, folder):
    shown = inspector.corruption(4)
    image = Image.open(folder / table.row_ids()[4]).convert("RGB")
    noisy = predict_table(model, open_images([corrupt(image, "noise", 3)]))
    curve = next(one for one in shown["curves"] if one["kind"] == "noise")
    assert curve["u"][3] == pytest.approx(float(dubito.Entropy().score(noisy)[0]), rel=1e-3)
    assert {len(one["u"]) for one in shown["curves"]} == {6}
    assert len({one["u"][0] for one in shown["curves"]}) == 1  # all begin at the clean image


def test_what_is_missing_is_said(table, folder):
    bare = details(table)
    unavailable = bare.image(0)["unavailable"]
    assert "needs the model" in unavailable["tiles"]
    with pytest.raises(BrokenImageError, match="without images"):
        bare.picture(0)
    with pytest.raises(ModelError, match="needs the model"):
        bare.new(b"", "x")
    other = details(table, images=folder, model=lambda: network(seed=3))
    with pytest.raises(ModelError, match="is not the model that made"):
        other.tiles(0)
    features = details(dubito.Table(feature=torch.rand(4, 3))).image(0)
    assert (features["top"], features["verdict"], len(features["neighbours"])) == ([], None, 3)
    single = details(dubito.Table(logit=[[1.0, 0.0]], feature=[[1.0, 2.0]])).image(0)
    assert single["neighbours"] == []
    one_class = details(dubito.Table(logit=[[1.0], [2.0]])).image(0)
    assert one_class["verdict"] is None  # there is no second class to confuse it with


def test_the_part_that_a_crop_keeps():
    # 200 x 100 to a short side of 50, then 40 x 40 of 100 x 50: 0.4 of the width, 0.8 of the height.
    assert _covered(dubito.Preprocess(size=40, resize=50), (200, 100)) == pytest.approx([0.3, 0.1, 0.7, 0.9])


def test_pictures_of_names_that_are_not_text(inspector, table):
    row = table.row_ids().index(EVIL)
    data = io.BytesIO()
    inspector.picture(row).save(data, "PNG")
    assert inspector.rows([row])[0]["id"] == EVIL
