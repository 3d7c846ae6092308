"""Which calibration: the folds, the gaps, what is recommended and what it says."""

import json

import numpy as np
import pytest
import torch

from dubito.calibration import Histogram, TemperatureScaling, VectorScaling, calibrate
from dubito.errors import TableError, UnknownNameError, ValueRangeError
from dubito.metrics import nll_per_row
from dubito.table import Table
from tests.calibration.samples import sample

QUICK = {"resamples": 100}


def test_held_out_nll_is_that_of_methods_fitted_on_the_other_folds():
    table = sample(200, 3)
    found = calibrate(table, "temperature", folds=4, seed=7, **QUICK)
    fold = torch.randperm(200, generator=torch.Generator().manual_seed(7)) % 4
    losses = torch.empty(200, dtype=torch.float64)
    for one in range(4):
        held_out = table.rows(fold == one)
        fitted = TemperatureScaling().fit(table.rows(fold != one))
        losses[fold == one] = nll_per_row(fitted.apply(held_out).logit, held_out.label)
    assert found["temperature"].nll.value == pytest.approx(losses.mean().item(), abs=1e-12)
    assert found["none"].nll.value == pytest.approx(nll_per_row(table.logit, table.label).mean().item(), abs=1e-12)
    gap = found["none"].nll.value - found["temperature"].nll.value
    assert found["none"].gap_to_best.value == pytest.approx(gap, abs=1e-12)
    assert found.method.temperature_ == TemperatureScaling().fit(table).temperature_


def test_overconfidence_alone_is_repaired_by_temperature():
    found = calibrate(sample(1500, 3), ["vector", "venn_abers", "temperature"], **QUICK)
    assert found.chosen == "temperature"
    assert found["none"].gap_to_best.surely
    assert list(found.methods) == ["none", "temperature", "venn_abers", "vector"]  # simplest first
    assert found["temperature"].smooth_ece.value < found["none"].smooth_ece.value
    assert "Recommended: temperature" in str(found)


def test_a_bias_of_classes_is_repaired_by_vector_scaling():
    found = calibrate(sample(1500, 3, bias=1.5), ["temperature", "vector"], **QUICK)
    assert found.chosen == found.best == "vector"
    assert found.leading == ["vector"]
    text = str(found)
    assert "vector has the lowest NLL, by more than noise." in text
    assert "It changes predictions: accuracy +" in text
    test = sample(300, 3, seed=1, bias=1.5)
    assert torch.equal(found.apply(test).logit, found.method.apply(test).logit)


def test_a_calibrated_model_is_left_alone():
    table = sample(600, 3, sharpness=1.0)
    found = calibrate(table, [TemperatureScaling(), Histogram(bins=5)], **QUICK)
    assert found.chosen == "none"
    assert found.method is None
    assert found.apply(table) is table
    assert "Recommended: no calibration." in str(found)
    assert "cannot be distinguished" in str(found)


def test_all_methods_by_default_and_those_of_many_classes_left_out(monkeypatch):
    monkeypatch.setattr("dubito.calibration.choice.EXACT", 4)
    found = calibrate(sample(100, 5), folds=2, **QUICK)
    assert set(found.left_out) == {"dirichlet", "matrix"}
    assert "dirichlet was left out: it has 30 parameters for 100 images" in str(found)
    assert len(found.methods) == 7


def test_a_curve_per_class_takes_images_of_each():
    found = calibrate(sample(99, 5), folds=2, **QUICK)
    expected = "it fits each of the 5 classes to itself, and there are 19.8 images of each. Name it to compare it all"
    assert found.left_out["class_wise_isotonic"].startswith(expected)
    named = calibrate(sample(99, 5), "class_wise_isotonic", folds=2, **QUICK)
    assert set(named.methods) == {"none", "class_wise_isotonic"}


def test_a_method_that_cannot_be_fitted_is_left_out_unless_it_was_named():
    right = Table(logit=[[3.0, 0.0], [0.0, 3.0]] * 20, label=[0, 1] * 20)  # no temperature: all are right
    found = calibrate(right, **QUICK)
    assert {"temperature", "vector"} <= set(found.left_out)
    assert found.chosen == "none"  # and without wrong predictions, no gap is sure
    with pytest.raises(ValueRangeError, match="grows without end"):
        calibrate(right, "temperature", **QUICK)


def test_crops_of_one_image_share_their_fold():
    table = sample(120, 3)
    twice = Table(
        logit=table.logit.repeat(2, 1),
        label=table.label.repeat(2),
        image_index=torch.arange(120).repeat(2),
        epoch=torch.arange(2).repeat_interleave(120),
    )
    once = calibrate(table, "histogram", **QUICK)
    # Each image is predicted by bins of other images only; twice the rows change little else than Laplace's rule.
    assert calibrate(twice, "histogram", **QUICK)["histogram"].nll.value == pytest.approx(
        once["histogram"].nll.value, abs=0.05
    )


def test_what_it_says_as_data(tmp_path):
    found = calibrate(sample(150, 3), ["temperature", "isotonic"], **QUICK)
    values = json.loads(found.to_json())
    assert values["chosen"] in values["leading"]
    assert values["methods"]["isotonic"]["gap_to_best"]["low"] == found["isotonic"].gap_to_best.low
    assert found.records()[0]["method"] == found.best
    assert found.to_csv(tmp_path / "c.csv").read_text().count("\n") == 4
    picture = found.plot(methods=["none", "isotonic"])
    assert [text.get_text() for text in picture.get_legend().get_texts()] == ["calibrated", "none", "isotonic"]
    assert np.isfinite(picture.lines[1].get_ydata()).all()
    with pytest.raises(UnknownNameError):
        found.plot(methods=["matrix"])
    with pytest.raises(UnknownNameError):
        _ = found["matrix"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"folds": 1}, "folds must be"),
        ({"resamples": 1}, "resamples"),
        ({"methods": "vektor"}, "Did you mean vector"),
        ({"methods": [Histogram(), Histogram(bins=3)]}, "different names"),
        ({"folds": 40}, "at least 80 rows"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises((TableError, ValueRangeError), match=words):
        calibrate(sample(60, 3), **arguments)


def test_labels_of_another_set_are_refused():
    table = sample(60, 3)
    table.label_space = "own"
    with pytest.raises(TableError, match="calibrate needs labels of the model's own classes"):
        calibrate(table)


def test_a_method_of_ones_own_settings_is_refitted_on_all_rows():
    method = VectorScaling(deviation=0.5)
    found = calibrate(sample(400, 3, bias=1.5), method, **QUICK)
    assert found.method is method
    assert torch.equal(method.weight_, VectorScaling(deviation=0.5).fit(sample(400, 3, bias=1.5)).weight_)
