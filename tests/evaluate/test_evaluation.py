"""What an evaluation looks like: text, JSON, CSV and pictures."""

import csv
import inspect
import json

import numpy as np
import pytest
import torch

from dubito import metrics
from dubito.errors import ValueRangeError
from dubito.evaluate.evaluate import evaluate
from dubito.scores import Entropy, MaxProbability
from dubito.table import Table
from tests.evaluate.gaussians import QUICK, C, N, data, evaluated


@pytest.fixture(scope="module")
def table() -> Table:
    return data()


@pytest.fixture(scope="module")
def result(table):
    return evaluated(table)


def test_as_json(result):
    plain = json.loads(result.to_json())
    assert plain == result.to_dict()
    assert (plain["name"], plain["rows"]) == ("cache/test", N)
    assert list(plain["scores"]) == ["max_probability", "neighbours", "array"]
    aurc = result["array"]["aurc"]
    assert plain["scores"]["array"]["aurc"] == {
        "value": aurc.value,
        "low": aurc.low,
        "high": aurc.high,
        "confidence": 0.95,
    }
    assert plain["microseconds"]["array"] is None
    assert plain["model"]["accuracy"]["value"] == result.model["accuracy"].value


def test_as_text(result):
    title, *facts = str(result).splitlines()[:10]
    assert title == "cache/test: 240 images"
    assert facts[0] == "at 100 % coverage  38.8 % errors"  # 93 of 240
    assert facts[2].startswith("at 80 % coverage ")
    assert facts[2].endswith("(the best of 3, chosen on these images)")
    assert facts[4].startswith("accuracy           0.61")
    header, *body = str(result).splitlines()[10:]
    assert header.split("  ")[0] == "score"
    for key in ("error AUROC", "AURC", "excess AURC", "AUGRC", "R-AUROC", "µs / image"):
        assert key in header
    assert [line.split()[0] for line in body] == ["max_probability", "neighbours", "array"]
    value = result["neighbours"]["error_auroc"]
    assert f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]" in body[1]
    assert body[2].endswith("-")
    # columns stand under their titles
    assert all(line[header.index("AURC")] == "0" for line in body)


def test_as_cells(result):
    header, *body = result.lines()
    assert len(header) == 8
    assert all(len(line) == 8 for line in body)
    accuracy = result.model["accuracy"]
    assert result.facts()["accuracy"] == f"{accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"
    assert list(result.facts())[-5:] == ["accuracy", "NLL", "Brier", "ECE", "Recall@1"]


def test_a_metric_that_one_score_lacks_is_a_dash():
    result = evaluate({"u": [0.1, 0.2, 0.3]}, Table(logit=[[1.0, 0.0]] * 3, label=[0, 1, 0]), **QUICK)
    result.scores["other"] = {}
    result.microseconds["other"] = None
    assert result.lines()[-1] == ["other", "-", "-", "-", "-", "-", "-"]


def test_csv_has_columns_for_bounds(result, tmp_path):
    rows = list(csv.DictReader(result.to_csv(tmp_path / "scores.csv").read_text().splitlines()))
    value = result["neighbours"]["aurc"]
    assert [row["score"] for row in rows] == ["max_probability", "neighbours", "array"]
    assert [float(rows[1][key]) for key in ("aurc", "aurc_low", "aurc_high")] == list(value[:3])
    assert rows[2]["microseconds"] == ""


class TestPlot:
    @pytest.fixture
    def both(self, table):
        scores = {"entropy": Entropy(), "max_probability": MaxProbability()}
        return evaluate(scores, table, ood=data(80, seed=3, shift=-2.0), **QUICK)

    def test_risk_coverage_is_that_of_the_metric(self, table, both, axes):
        curve = metrics.risk_coverage(Entropy().score(table), ~metrics.correct(table.logit, table.label))
        points = both.risk_coverage["entropy"]
        assert len(points) == 200
        assert points[0] == (curve.coverage[0].item(), curve.risk[0].item())
        assert points[-1] == (1.0, pytest.approx(1 - both.model["accuracy"].value))
        assert set(points) <= set(zip(curve.coverage.tolist(), curve.risk.tolist(), strict=True))
        assert both.plot(axes) is axes
        assert [line.get_label() for line in axes.lines] == ["entropy", "max_probability"]
        assert axes.lines[0].get_xydata().tolist() == [list(point) for point in points]

    def test_of_many_scores_those_with_the_fewest_errors_have_names(self, table, axes):
        wrong = ~metrics.correct(table.logit, table.label)
        scores = {f"late{k}": (torch.arange(N) + k) % N for k in range(11)} | {"oracle": wrong.double()}
        evaluate(scores, table, metrics=["aurc"], **QUICK).plot(axes)
        named = [text.get_text() for text in axes.get_legend().get_texts()]
        assert len(axes.lines) == 12
        assert len(named) == 10
        assert named[-1] == "oracle"
        assert [line.get_color() for line in axes.lines[:3]][:2] == ["lightgrey"] * 2
        assert axes.lines[2].get_color() != "lightgrey"

    def test_the_bins_of_the_reliability_diagram_are_those_of_the_ece(self, both, axes):
        bins = both.reliability
        gaps = np.abs(np.subtract(bins.confidence, bins.accuracy)) * bins.images
        assert sum(bins.images) == N
        assert gaps.sum() / N == pytest.approx(both.model["ece"].value)
        assert both.plot(axes, kind="reliability").get_xlabel() == "confidence"
        assert axes.lines[1].get_xdata().tolist() == list(bins.confidence)

    def test_histograms_in_and_out(self, both, axes):
        histogram = both.ood["max_probability"]
        assert (sum(histogram.in_distribution), sum(histogram.ood), len(histogram.edges)) == (N, 80, 51)
        assert both.plot(axes, kind="ood", score="max_probability").get_xlabel() == "max_probability"
        assert [one.get_label() for one in axes.patches] == ["in-distribution", "OOD"]
        assert sum(axes.patches[1].get_data().values) == pytest.approx(1)

    def test_one_outlier_does_not_flatten_a_histogram(self, table):
        outlier = data(80, seed=3).logit.clone()
        outlier[0] = torch.tensor([1e6] + [0.0] * (C - 1))
        with_outlier = evaluate("max_logit", data(4000), ood=Table(logit=outlier), metrics=["ood_auroc"], **QUICK)
        assert with_outlier.ood["max_logit"].edges[0] > -100

    def test_scores_that_never_change(self, table):
        same = Table(logit=torch.zeros(9, C), label=torch.zeros(9, dtype=torch.long))
        counts = evaluate("entropy", same, ood=same, **QUICK).ood["entropy"]
        assert (sum(counts.in_distribution), sum(counts.ood)) == (9, 9)

    def test_what_cannot_be_drawn(self, result, table, both):
        with pytest.raises(ValueRangeError, match=r"'ood' needs OOD images: evaluate\(..., ood=table\); cache/test"):
            result.plot(kind="ood")
        unlabelled = evaluate("entropy", table.select("logit"), **QUICK)
        with pytest.raises(ValueRangeError, match="'risk_coverage' needs labels of the model's classes"):
            unlabelled.plot()
        with pytest.raises(ValueRangeError, match=r"kind must be one of risk_coverage, ood, reliability; got 'roc'"):
            inspect.unwrap(type(result).plot)(result, kind="roc")
        with pytest.raises(ValueRangeError, match=r"score must be one of entropy, max_probability; got 'margin'"):
            both.plot(kind="ood", score="margin")
