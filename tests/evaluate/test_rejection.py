"""Rejection studies: values are those of the metrics, whatever columns they come from; and clear words at the edges."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from tests.evaluate.rejected import QUICK, C, data

from dubito import metrics
from dubito.errors import MissingColumnError
from dubito.evaluate._member_predictions import ensembles_of, pooled_weights
from dubito.evaluate._rejection_words import UNCERTAINTIES
from dubito.evaluate.rejection import rejection_study
from dubito.metrics import Interval, decompose, member_weights
from dubito.scores.temperature import fit_temperature
from dubito.table import Provenance, Table

ALL = tuple(name for name in UNCERTAINTIES if name != "entropy")


@pytest.fixture(scope="module")
def table() -> Table:
    return data()


@pytest.fixture(scope="module")
def calibration() -> Table:
    return data(90, seed=1)


@pytest.fixture(scope="module")
def study(table, calibration):
    return rejection_study(table, calibration=calibration, uncertainties=ALL, **QUICK)


def probs(table: Table, name: str, temperature: float) -> torch.Tensor:
    return (table.whole(f"{name}_logit").double() / temperature).softmax(-1).transpose(0, 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_original(table, calibration, study, scaled):
    temperature = fit_temperature(calibration) if scaled else 1.0
    logit = table.logit.double() / temperature
    u = metrics.decompose(logit.softmax(-1)[None]).total
    right = metrics.correct(logit, table.label)
    found = study.of("original", temperature=temperature)
    assert found.accuracy == pytest.approx(metrics.accuracy(logit, table.label))
    assert found.nll == pytest.approx(metrics.nll(logit, table.label))
    sure = metrics.confidence(logit)
    assert found.calibration_error == pytest.approx(abs(float(sure.mean() - right.double().mean())))
    assert found.curves["bucket"]["nll"] == pytest.approx(
        metrics.bucket_curve(u, metrics.nll_per_row(logit, table.label)).tolist()
    )
    assert found.curves["acceptance"]["accuracy"] == pytest.approx(metrics.acceptance_curve(u, right).tolist())
    assert found.curves["bucket"]["calibration_error"] == pytest.approx(
        metrics.bucket_curve(u, sure - right.double()).abs().tolist()
    )
    assert found.figures["auroc"].value == pytest.approx(metrics.auroc(u, ~right))
    assert found.figures["aurc"].value == pytest.approx(metrics.aurc(u, ~right))
    assert found.differences is None


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["tiles_2", "tiles_3"])
def test_ensembles_against_the_pure_functions(table, calibration, study, name, scaled):
    temperature = fit_temperature(calibration) if scaled else 1.0
    p = probs(table, name, temperature)
    z = table.whole(f"{name}_logit").double().transpose(0, 1) / temperature
    other = calibration.whole(f"{name}_logit").double().transpose(0, 1) / temperature
    parts = decompose(p)
    doubts = {
        "mutual_information": parts.epistemic,
        "predictive_entropy": parts.total,
        "expected_entropy": parts.aleatoric,
        "variation_ratio": metrics.variation_ratio(p),
    }
    for by in ("logsumexp", "sum"):
        doubts[f"weighted_{by}"] = decompose(p, member_weights(z, by=by)).epistemic
        doubts[f"pooled_{by}"] = decompose(p, member_weights(other, by=by, over="pooled")[:, 0]).epistemic
    mean = p.mean(0)
    wrong = mean.argmax(-1) != table.label
    for uncertainty, u in doubts.items():
        found = study.of(name, uncertainty, temperature)
        # Five digits: summaries are float32, and near ties may change places.
        assert found.figures["auroc"].value == pytest.approx(metrics.auroc(u, wrong), abs=2e-3), uncertainty
        assert found.curves["acceptance"]["accuracy"] == pytest.approx(
            metrics.acceptance_curve(u, ~wrong).tolist(), abs=0.02
        ), uncertainty
        assert found.nll == pytest.approx(float(-mean.gather(1, table.label[:, None]).log().mean()), abs=1e-5)
        assert found.accuracy == pytest.approx(float((~wrong).double().mean()))
        assert found.order.members == len(p)


def test_differences_are_paired(study, table):
    # Narrower than those of two independent figures, and centred on the difference of the values.
    original, tiles = study.of("original"), study.of("tiles_3", "predictive_entropy")
    difference = tiles.differences["aurc"]
    assert difference.value == pytest.approx(tiles.figures["aurc"].value - original.figures["aurc"].value)
    assert difference.high - difference.low < tiles.figures["aurc"].high - tiles.figures["aurc"].low


def test_differences_are_those_at_the_same_temperature(study):
    at = study.temperatures[1]
    original, tiles = study.of("original", temperature=at), study.of("tiles_3", "mutual_information", at)
    assert original.figures["aurc"].value != study.of("original").figures["aurc"].value
    for figure, difference in tiles.differences.items():
        assert difference.value == pytest.approx(tiles.figures[figure].value - original.figures[figure].value), figure


@pytest.mark.parametrize(("figure", "good"), [("auroc", 1), ("aurc", -1)])
def test_better_and_worse_are_beyond_the_interval(study, figure, good):
    def judged(low: float, high: float) -> int:
        return replace(study.results[1], differences={figure: Interval((low + high) / 2, low, high, 0.95)}).better(
            figure
        )

    assert judged(0.1, 0.3) == good
    assert judged(-0.3, -0.1) == -good
    assert judged(-0.1, 0.3) == 0
    assert replace(study.results[1], differences={figure: None}).better(figure) == 0


def test_logits_and_summaries_agree(table):
    columns = [name for name in table.columns if not name.startswith("tiles_")]
    only_logits = table.select(*columns, "tiles_2_logit", "tiles_3_logit")
    assert ensembles_of(only_logits) == ["tiles_2", "tiles_3"]
    one, other = rejection_study(table, **QUICK), rejection_study(only_logits, **QUICK)
    for a, b in zip(one.results, other.results, strict=True):
        assert a.order == b.order
        assert a.nll == pytest.approx(b.nll, abs=1e-5)
        assert a.figures["aurc"].value == pytest.approx(b.figures["aurc"].value, abs=1e-3)


def test_batches_of_rows_do_not_matter(table, calibration, study, monkeypatch):
    monkeypatch.setattr("dubito.evaluate._member_predictions._BYTES", 4 * C * 9 * 7)  # seven rows of nine members
    again = rejection_study(table, calibration=calibration, uncertainties=ALL, **QUICK)
    for a, b in zip(study.results, again.results, strict=True):
        assert a.nll == pytest.approx(b.nll, rel=1e-9)
        assert a.figures["auroc"].value == pytest.approx(b.figures["auroc"].value, abs=2e-3)


def test_pooled_weights_do_not_overflow():
    logits = torch.tensor([[[900.0, 800.0], [901.0, 800.0]], [[900.0, 800.0], [900.0, 800.0]]])
    table = Table(logit=torch.zeros(2, 2), tiles_2_logit=logits)
    # Masses: member 1 e^900 + e^900, member 2 e^901 + e^900.
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    assert pooled_weights(table, "tiles_2", 1.0)["pooled_logsumexp"].tolist() == pytest.approx(
        [float(2 / (3 + e)), float((1 + e) / (3 + e))]
    )


def test_a_member_without_any_weight_is_no_harm():
    """By sums of many logits all weight may go to one member, and others put all probability elsewhere."""
    label = torch.arange(20) % 2
    logit = 3 * torch.eye(2)[label] + torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    members = torch.stack([logit + 2000, -2000 * torch.eye(2)[label], logit], 1)
    columns = {"logit": logit, "members_logit": members}
    table = Table(label=label, **columns)
    other = Table(label=torch.cat([1 - label[:4], label[4:]]), **columns).extended(logit=logit + 1)
    study = rejection_study(table, calibration=other, uncertainties=["pooled_sum"], temperatures=(1.0,), **QUICK)
    assert study.of("members", "pooled_sum").figures["aurc"] is not None


def test_original_predictions_compare_orders_alone(table):
    study = rejection_study(table, predictions="original", **QUICK)
    accuracies = {found.accuracy for found in study.results}
    assert len(accuracies) == 1
    last = {found.curves["acceptance"]["nll"][-1] for found in study.results}
    assert max(last) == pytest.approx(min(last))
    own = rejection_study(table, **QUICK)
    assert len({found.accuracy for found in own.results}) > 1


def test_original_predictions_need_no_losses(table):
    bare = table.select("logit", "label", "tiles_2")
    with pytest.raises(MissingColumnError, match=r"'tiles_2_loss' for the NLL of the ensemble's own predictions; .* or "
                       r"compare orders alone with predictions='original'"):  # fmt: skip
        rejection_study(bare, **QUICK)
    found = rejection_study(bare, predictions="original", **QUICK).of("tiles_2", "mutual_information")
    assert found.nll == pytest.approx(metrics.nll(table.logit, table.label))


def test_covariances_against_uncertainty(table):
    level = rejection_study(table, **QUICK).of("tiles_3", "mutual_information")
    doubt = rejection_study(table, against="uncertainty", **QUICK).of("tiles_3", "mutual_information")
    key = "neg_acceptance_covariance_accuracy"
    assert level.curves == doubt.curves
    assert level.figures[key].value > 0
    assert doubt.figures[key].value > 0
    assert level.figures[key].value != pytest.approx(doubt.figures[key].value, rel=0.01)


def test_given_temperatures_and_sources(table):
    study = rejection_study(table, ["tiles_2"], temperatures=(1.0, 2.0, 2), **QUICK)
    assert study.temperatures == (1.0, 2.0)
    assert study.calibrated_on is None
    with pytest.raises(
        KeyError, match="no result tiles_3/entropy at T = 1; there are original/entropy, tiles_2/mutual"
    ):
        study.of("tiles_3")


def test_rows_files_and_words(study, tmp_path):
    rows = study.rows()
    assert len(rows) == 2 * (1 + 2 * len(ALL))
    assert {"model", "ensemble", "uncertainty", "auroc", "auroc_low", "aurc_difference_high"} <= set(rows[0])
    assert rows[0]["aurc_difference"] is None
    table, curves = study.to_csv(tmp_path / "deep" / "folder")
    with table.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [float(row["nll"]) for row in read] == [row["nll"] for row in rows]
    with curves.open(newline="") as file:
        points = list(csv.DictReader(file))
    assert len(points) == len(rows) * 2 * 3 * 10
    assert {point["kind"] for point in points} == {"bucket", "acceptance"}
    told = json.loads(json.dumps(study.to_json()))
    assert told["results"][1]["figures"]["aurc"]["value"] == rows[1]["aurc"]
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
    assert len(study.findings()) == 2
    assert f"T = 1: the model's own entropy against {2 * len(ALL)} other orders" in study.findings()[0]


def test_words_count_by_intervals():
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
    assert "error AUROC: 1 of them better (best: mutual information of 2x2), 0 worse, 0 alike" in study.findings()[0]


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_identical_members_order_nothing(table, noise):
    logits = table.logit[:, None].double().repeat(1, 4, 1)
    logits += noise * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    study = rejection_study(
        table.extended(members_logit=logits),
        ["members"],
        uncertainties=["mutual_information", "expected_entropy"],
        **QUICK,
    )
    found = study.of("members", "mutual_information")
    assert found.constant
    assert found.figures["auroc"].value == 0.5
    assert found.curves["bucket"]["accuracy"] == pytest.approx([found.accuracy] * 10)
    assert study.findings()[0].endswith(
        "The same for every image, and no order at all: mutual information of members (4). Members agree everywhere, "
        "as where they are one and the same model, or one of them has all the weight."
    )
    assert [one["constant"] for one in study.to_json()["results"]] == [False, True, False]


def test_a_class_that_nobody_predicts(table):
    """It has a probability of almost nothing, and a label of it a large loss: numbers all the same."""
    never = torch.tensor([0.0] * (C - 1) + [-500.0])
    columns = {"logit": table.logit + never, "members_logit": table.whole("tiles_2_logit") + never}
    study = rejection_study(Table(label=table.label, **columns), **QUICK)
    share = float((table.label == C - 1).double().mean())
    assert study.of("members", "mutual_information").nll > 400 * share > 0
    assert all(figure is not None for found in study.results for figure in found.figures.values())


def test_each_name_counts_once(table):
    study = rejection_study(table, ["tiles_2", "tiles_2"], uncertainties=["variation_ratio"] * 2, **QUICK)
    assert len(study.results) == 2


def test_all_right_leaves_nothing_to_rank():
    label = torch.arange(12) % 3
    logit = 5 * torch.eye(3)[label] + 0.1 * torch.rand(12, 3)
    study = rejection_study(Table(logit=logit, label=label, tiles_2_logit=logit[:, None].repeat(1, 4, 1)), **QUICK)
    found = study.of("tiles_2", "mutual_information")
    assert found.figures["auroc"] is None
    assert found.figures["aurc"].value == 0
    assert "all right or all wrong: there is nothing to reject" in study.findings()[0]
    assert study.rows()[0]["auroc"] is None


def test_without_ensembles_the_original_stands_alone(table):
    study = rejection_study(table.select("logit", "label"), **QUICK)
    assert [found.order.ensemble for found in study.results] == ["original"]
    assert study.findings() == ["T = 1: no ensemble to compare with the model's own entropy."]


def test_the_model_is_named_by_its_provenance(table):
    made = Table(logit=table.logit, label=table.label, name="cache/x", provenance=Provenance("timm:resnet50"))
    assert rejection_study(made, **QUICK).model == "timm:resnet50"
    assert rejection_study(table, ["tiles_2"], **QUICK).rows()[0]["model"] == "set 0"


def test_explicit_members_are_named_with_their_number(table):
    study = rejection_study(table.extended(members_logit=table.whole("tiles_2_logit")), ["members"], **QUICK)
    assert study.results[1].order.size == "members (4)"


def test_ensembles_of_a_table_in_order():
    columns = {"tiles_10": torch.zeros(1, 9), "tiles_2_logit": torch.zeros(1, 4, 2), "dropout": torch.zeros(1, 9)}
    assert ensembles_of(Table(feature=torch.zeros(1, 9), **columns)) == ["dropout", "tiles_2", "tiles_10"]
