"""A last layer beside the optimal one: by brute force, its bounds, and what is said."""

import importlib
import json
import math
from itertools import combinations

import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.explain.last_layer import Layer, layer, simplex
from dubito.explain.structure import structure
from dubito.table import Table

subject = importlib.import_module("dubito.explain.structure")  # the package's attribute is the function


def random_weight(classes=7, width=5, seed=0):
    return torch.randn(classes, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


def pair_cosines(weight):
    w = weight.numpy()
    return [w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for i, j in combinations(range(len(w)), 2)]


def gram_distance(weight):
    """The docstring's formula, from whole matrices."""
    c = len(weight)
    v = weight - weight.mean(0)
    best = (torch.eye(c) - 1 / c).double() / math.sqrt(c - 1)
    return float((v @ v.T / (v @ v.T).norm() - best).norm())


@pytest.mark.parametrize("classes", [2, 3, 10, 600])
def test_the_simplex_is_at_distance_zero(classes):
    result = structure(4 * simplex(classes, classes + 3, seed=1))
    assert result.distance == pytest.approx(0, abs=1e-12)
    assert result.norm.mean == pytest.approx(4)
    assert (result.cosine.mean, result.cosine.low) == pytest.approx((result.optimal_cosine, -1 / (classes - 1)))
    assert result.cosine.std == pytest.approx(0, abs=1e-7)
    assert result.common == pytest.approx(0, abs=1e-12)


def test_adding_one_vector_and_one_number_changes_raw_figures_only():
    weight, bias = random_weight(), torch.arange(7.0, dtype=torch.float64)
    before, after = structure((weight, bias)), structure((weight + 5, bias - 2))
    assert after.cosine.mean > before.cosine.mean + 0.3
    assert after.common > before.common
    assert after.bias.mean == pytest.approx(before.bias.mean - 2)
    for name in ("centred_norm", "centred_bias", "centred_cosine"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), abs=1e-9)
    assert after.distance == pytest.approx(before.distance)


def test_figures_by_brute_force():
    weight, bias = random_weight(), torch.linspace(-1, 2, 7, dtype=torch.float64)
    result = structure((weight, bias))
    cosines = np.array(pair_cosines(weight))
    assert result.cosine.mean == pytest.approx(cosines.mean())
    assert result.cosine.std == pytest.approx(cosines.std())
    assert (result.cosine.low, result.cosine.high) == pytest.approx((cosines.min(), cosines.max()))
    assert result.cosine.skew == pytest.approx((((cosines - cosines.mean()) / cosines.std()) ** 3).mean())
    assert result.centred_cosine.std == pytest.approx(np.std(pair_cosines(weight - weight.mean(0))))
    assert result.norm.std == pytest.approx(float(weight.norm(dim=1).std(correction=0)))
    assert result.weight_distance == pytest.approx(gram_distance(weight))
    # Biases -1, -0.5 .. 2 around 0.5: squares 2 (2.25 + 1 + 0.25) = 7.
    assert result.bias_distance == pytest.approx(math.sqrt(7) / float((weight - weight.mean(0)).norm()))
    assert result.distance == pytest.approx(math.hypot(result.weight_distance, result.bias_distance))


@pytest.mark.parametrize(("classes", "width"), [(5, 9), (9, 5), (30, 3), (6, 5)])
def test_distance_is_the_same_from_either_gram_matrix(classes, width):
    weight = random_weight(classes, width)
    assert structure(weight).weight_distance == pytest.approx(gram_distance(weight))


def test_bounds_of_the_distance():
    line = structure(torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None] * torch.ones(5, 8, dtype=torch.float64))
    assert line.weight_distance == pytest.approx(math.sqrt(2 - 2 / math.sqrt(4)))
    flat = structure(layer("optimal", 5, 4, seed=None).weight[:, :2])  # two of the four dimensions, equally used
    assert flat.weight_distance == pytest.approx(math.sqrt(2 - 2 * math.sqrt(2 / 4)))
    assert "2 features are too few for 5 classes: the distance cannot be below 0.765" in str(flat)


def test_random_weights_are_where_the_summary_says():
    result = structure(torch.randn(300, 200, generator=torch.Generator().manual_seed(0)))
    assert result.weight_distance == pytest.approx(result.random_distance, abs=0.01)


def test_counterfactual_structures_are_far():
    assert structure(layer("optimal")).distance < 1e-9
    for name in ("sandwich", "stack", "shifted", "narrow", "clustered", "unequal"):
        assert structure(layer(name)).distance > 0.4
    assert structure(layer("stack")).bias_distance > 1


def test_blocks_see_every_pair_once(monkeypatch):
    weight = random_weight(50, 8)
    whole = structure(weight)
    monkeypatch.setattr(subject, "_ROWS", 7)
    blocks = structure(weight)
    assert blocks.cosine == pytest.approx(whole.cosine)
    assert float(blocks.histograms["cosine"][1].sum()) == 50 * 49 / 2
    assert torch.equal(blocks.histograms["cosine"][1], whole.histograms["cosine"][1])


def labelled(weight, rows=400, noise=0.1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(rows) % len(weight)
    feature = 3 * weight[label] + 10 + noise * torch.randn(rows, weight.shape[1], dtype=torch.float64, generator=draw)
    return Table(feature=feature, label=label)


def test_layers_without_boundaries_are_refused():
    with pytest.raises(ValueRangeError, match="structure of weights: no boundary is between equal weights, 3 here"):
        structure(torch.ones(3, 4))
    with pytest.raises(ValueRangeError, match=r"between equal weights, 1 here\. Pass a trained layer of two"):
        structure(torch.ones(1, 4))


def test_a_zero_weight_has_cosine_zero():
    result = structure(torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]))
    assert (result.cosine.low, result.cosine.high) == (-1, 0)


def test_text_and_json():
    weight = simplex(4, 6, seed=2)
    result = structure(weight, labelled(weight))
    text = str(result)
    assert "weights: 4 classes, 6 features" in text
    assert "Distance to the optimal structure: 0.000 (weights 0.000, biases 0.000)" in text
    assert "Class means point along their weights with a cosine of 1.000 on average." in text
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["optimal_cosine"] == pytest.approx(-1 / 3)
    assert plain["means"]["alignment"]["mean"] == pytest.approx(1, abs=1e-3)
    assert "histograms" not in plain


def test_shared_features_and_common_vectors_are_mentioned():
    weight = torch.eye(40, dtype=torch.float64)
    weight[1] = weight[0] + 0.2 * weight[1]
    text = str(structure(weight + 0.3))
    assert "A few pairs are far more alike (up to 0.98): classes that share features." in text
    assert "of the weights' length is one common vector" in text


def test_plot_has_three_histograms():
    pytest.importorskip("matplotlib")
    result = structure((random_weight(30, 9), torch.linspace(-1, 1, 30, dtype=torch.float64)))
    panels = result.plot()
    assert [panel.get_title() for panel in panels] == ["length of weights", "bias", "cosine of pairs"]
    assert sum(bar.get_height() for bar in panels[2].patches) == 30 * 29 / 2
    assert sum(bar.get_height() for bar in panels[0].patches) == 30
    assert panels[2].lines[0].get_xdata()[0] == pytest.approx(-1 / 29)


def test_collapsed_means_along_the_weights_are_optimal():
    weight = simplex(4, 6, seed=2)
    means = structure(weight, labelled(weight, noise=0)).means
    assert means.alignment.low == pytest.approx(1)  # although all features are shifted by 10
    assert means.centred_norm.mean == pytest.approx(3)
    assert means.centred_norm.std == pytest.approx(0, abs=1e-7)
    assert means.within_over_between == pytest.approx(0, abs=1e-12)
    assert (means.rows, means.classes) == (400, 4)


def test_means_by_brute_force():
    weight = random_weight(4, 6)
    table = labelled(weight, rows=5000, noise=2.0)  # three batches
    result = structure(weight, table).means
    z, label = table.feature, table.label
    mean = torch.stack([z[label == i].mean(0) for i in range(4)])
    within = sum(float((z[label == i] - mean[i]).square().sum()) for i in range(4)) / (5000 - 4)
    between = float((mean - mean.mean(0)).square().sum(1).mean())
    assert result.within_over_between == pytest.approx(within / between)
    cosine = torch.cosine_similarity(mean - mean.mean(0), weight - weight.mean(0))
    assert result.alignment.mean == pytest.approx(float(cosine.mean()))
    assert result.norm.high == pytest.approx(float(mean.norm(dim=1).max()))


def test_classes_without_rows_are_left_out():
    weight = random_weight(9, 6)
    table = labelled(weight[:3], rows=3)
    means = structure(weight, table).means
    assert means.classes == 3
    assert means.within_over_between is None  # one row a class


def test_weights_are_centred_over_the_classes_that_have_rows():
    weight = random_weight(9, 6)
    means = structure(weight, labelled(weight[:3], rows=30, noise=0)).means
    assert means.alignment.low == pytest.approx(1.0)  # around the mean of all nine weights it would be less


def test_a_table_of_another_model_is_refused():
    weight = random_weight(4, 6)
    table = labelled(weight)
    logit = Layer(weight, torch.zeros(4)).logits(table.feature)
    assert structure(weight, table.extended(logit=logit)).means is not None
    with pytest.raises(TableError, match="the logits of table in memory are not those of weights on its features"):
        structure(weight, table.extended(logit=logit + 2))
    with pytest.raises(TableError, match="the logits of table in memory are not those"):
        structure(weight, table.extended(logit=logit[:, :3]))
    with pytest.raises(TableError, match="features of width 6; weights reads 5"):
        structure(random_weight(4, 5), table)
    with pytest.raises(TableError, match=r"structure needs labels of the model's own classes"):
        structure(weight, Table(feature=table.feature, label=table.label, label_space="own"))
    with pytest.raises(TableError, match="labels of table in memory must be classes from 0 to 3; got 0 to 4"):
        structure(weight, Table(feature=torch.zeros(5, 6), label=torch.arange(5)))
    with pytest.raises(TableError, match="need rows of two classes or more; table in memory has rows of 1"):
        structure(weight, Table(feature=torch.zeros(5, 6), label=torch.zeros(5, dtype=torch.long)))
