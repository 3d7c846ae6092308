"""What a rejection study shows: records, files, text, findings and plots."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from dubito.errors import ValueRangeError
from dubito.evaluate.rejection import rejection_study
from dubito.metrics import Interval
from dubito.table import Table
from tests.evaluate.tiles import ALL, QUICK, data


@pytest.fixture(scope="module")
def table() -> Table:
    return data()


@pytest.fixture(scope="module")
def study(table):
    return rejection_study(table, calibration=data(90, seed=1), uncertainties=ALL, **QUICK)


@pytest.mark.parametrize(("figure", "good"), [("auroc", 1), ("aurc", -1)])
def test_better_and_worse_are_beyond_the_interval(study, figure, good):
    def better(low: float, high: float) -> int:
        return replace(study.results[1], differences={figure: Interval((low + high) / 2, low, high, 0.95)}).better(
            figure
        )

    assert better(0.1, 0.3) == good
    assert better(-0.3, -0.1) == -good
    assert better(-0.1, 0.3) == 0
    assert replace(study.results[1], differences={figure: None}).better(figure) == 0


def test_records_and_files(study, tmp_path):
    records = study.records()
    assert len(records) == 2 * (1 + 2 * len(ALL))
    assert {"model", "ensemble", "members", "uncertainty", "calibration_error", "auroc"} <= set(records[0])
    assert records[0]["aurc_difference"] is None
    table, curves = study.to_csv(tmp_path / "deep" / "table.csv"), study.curves_to_csv(tmp_path / "deep" / "curves.csv")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"auroc_low", "aurc_difference_high"} <= set(rows[1])
    assert [float(row["nll"]) for row in rows] == [record["nll"] for record in records]
    assert float(rows[1]["aurc_difference_high"]) == records[1]["aurc_difference"].high
    with curves.open(newline="") as file:
        points = list(csv.DictReader(file))
    assert len(points) == len(records) * 2 * 3 * 10
    assert {point["kind"] for point in points} == {"bucket", "acceptance"}
    plain = json.loads(study.to_json())
    assert plain["results"][1]["figures"]["aurc"]["value"] == records[1]["aurc"].value
    assert plain["results"][1]["order"]["ensemble"] == "tiles_2"


def test_text_and_findings(study):
    text = str(study)
    for word in (
        "set 0: 120 images",
        "T fitted on set 1",
        "mutual information",
        "3x3",
        "original",
        "-cov acceptance NLL",
    ):
        assert word in text
    header, first, second = study.lines()[:3]
    assert header[:7] == ["uncertainty", "ensemble", "T", *(f"errors at {share} %" for share in (100, 90, 80, 50))]
    assert header[7:11] == ["error AUROC", "error AUROC - entropy's", "AURC", "AURC - entropy's"]
    assert header[11:13] == ["accuracy", "NLL"]
    assert first[:3] == ["entropy", "original", "1"]
    assert first[8] == first[10] == "-"
    assert first[3] == f"{100 * (1 - study.results[0].accuracy):.1f} %"
    difference = study.results[1].differences["auroc"]
    assert second[8] == f"{difference.value:.3f} [{difference.low:.3f}, {difference.high:.3f}]"
    assert second[13] == f"{study.results[1].figures['neg_bucket_covariance_calibration_error'].value:.3f}"
    assert len(study.findings()) == 2
    assert f"T = 1: the model's own entropy against {2 * len(ALL)} other orders" in study.findings()[0]


def test_plot_shows_ensembles_and_the_original(study, axes):
    at = study.temperatures[1]
    options = {"uncertainty": "weighted_sum", "metric": "nll", "kind": "bucket", "temperature": at}
    assert study.plot(axes, **options) is axes
    assert [line.get_label() for line in axes.lines] == ["original", "2x2", "3x3"]
    curve = study.of("tiles_3", "weighted_sum", at).curves["bucket"]["nll"]
    assert tuple(axes.lines[2].get_ydata()) == curve
    assert axes.lines[0].get_linestyle() == "--"
    for wrong in ({"uncertainty": "margin"}, {"metric": "ece"}, {"kind": "curve"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueRangeError, match=f"RejectionStudy.plot: {name} must be one of .*; got '{value}'"):
            study.plot(axes, **wrong)


def test_findings_count_by_intervals():
    # Errors are the rows where members disagree; the original's entropy says nothing about them.
    n = 200
    label = torch.arange(n) % 2
    wrong = torch.arange(n) % 4 == 0
    logit = 4 * torch.eye(2)[torch.where(wrong, 1 - label, label)] + 1e-3 * torch.randn(n, 2)
    members = logit[:, None].repeat(1, 4, 1)
    members[:, 0] *= torch.where(wrong, -1.0, 1.0)[:, None]
    table = Table(logit=logit, label=label, tiles_2_logit=members)
    study = rejection_study(table, uncertainties=["mutual_information"], **QUICK)
    assert study.of("tiles_2", "mutual_information").figures["auroc"].value == 1
    assert study.of("tiles_2", "mutual_information").better("aurc") == 1
    assert "error AUROC: 1 of them better (best: mutual information of 2x2), 0 worse, 0 equal" in study.findings()[0]


def test_explicit_members_are_named_with_their_number(table):
    study = rejection_study(table.extended(members_logit=table.whole("tiles_2_logit")), ["members"], **QUICK)
    assert study.results[1].order.size == "members (4)"
