"""Class means beside the weights: optimal ones, brute force, and tables that do not belong to the layer."""

import pytest
import torch

from dubito.errors import TableError
from dubito.explain.last_layer import Layer, simplex
from dubito.explain.structure import structure
from dubito.table import Table


def random_weight(classes=7, width=5, seed=0):
    return torch.randn(classes, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


def labelled(weight, rows=400, noise=0.1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(rows) % len(weight)
    feature = 3 * weight[label] + 10 + noise * torch.randn(rows, weight.shape[1], dtype=torch.float64, generator=draw)
    return Table(feature=feature, label=label)


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
    found = structure(weight, table).means
    z, label = table.feature, table.label
    mean = torch.stack([z[label == i].mean(0) for i in range(4)])
    within = sum(float((z[label == i] - mean[i]).square().sum()) for i in range(4)) / (5000 - 4)
    between = float((mean - mean.mean(0)).square().sum(1).mean())
    assert found.within_over_between == pytest.approx(within / between)
    cosine = torch.cosine_similarity(mean - mean.mean(0), weight - weight.mean(0))
    assert found.alignment.mean == pytest.approx(float(cosine.mean()))
    assert found.norm.high == pytest.approx(float(mean.norm(dim=1).max()))


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
    with pytest.raises(TableError, match="features of width 6 and labels of model classes; weights reads 5"):
        structure(random_weight(4, 5), table)
    with pytest.raises(TableError, match=r"labels of own classes; .* needs labels of the model's classes"):
        structure(weight, Table(feature=table.feature, label=table.label, label_space="own"))
    with pytest.raises(TableError, match="labels of table in memory must be classes from 0 to 3; got 0 to 4"):
        structure(weight, Table(feature=torch.zeros(5, 6), label=torch.arange(5)))
    with pytest.raises(TableError, match="need rows of two classes or more; table in memory has rows of 1"):
        structure(weight, Table(feature=torch.zeros(5, 6), label=torch.zeros(5, dtype=torch.long)))
