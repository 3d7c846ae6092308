"""Rejection studies: values are those of the metrics, whatever columns they come from; and clear errors."""

import csv
import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dubito import metrics
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.evaluate import member_predictions
from dubito.evaluate.member_predictions import ensembles_of, pooled_weights
from dubito.evaluate.rejection import RankedRows, figures_of, rejection_study
from dubito.evaluate.rejection_result import FIGURES, UNCERTAINTIES
from dubito.metrics import (
    Interval,
    MemberStream,
    acceptance_curve,
    aurc,
    auroc,
    bucket_curve,
    decompose,
    member_weights,
)
from dubito.metrics.bootstrap import draw_counts
from dubito.scores.temperature import fit_temperature
from dubito.table import Provenance, Table

C = 6
QUICK = {"resamples": 40}
ALL = tuple(name for name in UNCERTAINTIES if name != "entropy")


def data(n: int = 120, seed: int = 0, grids: tuple[int, ...] = (2, 3), keep: bool = True, **more) -> Table:
    """Labelled images with tiles whose members disagree on hard ones."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=draw)
    hard = torch.rand(n, 1, generator=draw)
    logit = 3 * torch.eye(C)[label] * (1 - hard) + torch.randn(n, C, generator=draw)
    columns = {}
    for k in grids:
        members = logit[:, None] + 2 * hard[:, None] * torch.randn(n, k * k, C, generator=draw)
        stream = MemberStream()
        stream.add(members)
        columns |= {f"tiles_{k}": stream.summary().float(), f"tiles_{k}_loss": stream.loss(label).float()}
        columns |= {f"tiles_{k}_logit": members} if keep else {}
    ids = [f"{seed}/{row}" for row in range(n)]
    columns |= {"logit": 1.5 * logit, "label": label, "id": ids, **more}
    return Table(name=f"set {seed}", **columns)


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
    uncertainties = {
        "mutual_information": parts.epistemic,
        "predictive_entropy": parts.total,
        "expected_entropy": parts.aleatoric,
        "variation_ratio": metrics.variation_ratio(p),
    }
    for by in ("logsumexp", "sum"):
        uncertainties[f"weighted_{by}"] = decompose(p, member_weights(z, by=by)).epistemic
        uncertainties[f"pooled_{by}"] = decompose(p, member_weights(other, by=by, over="pooled")[:, 0]).epistemic
    mean = p.mean(0)
    wrong = mean.argmax(-1) != table.label
    for uncertainty, u in uncertainties.items():
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
    def better(low: float, high: float) -> int:
        return replace(study.results[1], differences={figure: Interval((low + high) / 2, low, high, 0.95)}).better(
            figure
        )

    assert better(0.1, 0.3) == good
    assert better(-0.3, -0.1) == -good
    assert better(-0.1, 0.3) == 0
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
    monkeypatch.setattr(member_predictions, "_BYTES", 4 * C * 9 * 7)  # seven rows of nine members
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
    by_uncertainty = rejection_study(table, against="uncertainty", **QUICK).of("tiles_3", "mutual_information")
    key = "neg_acceptance_covariance_accuracy"
    assert level.curves == by_uncertainty.curves
    assert level.figures[key].value > 0
    assert by_uncertainty.figures[key].value > 0
    assert level.figures[key].value != pytest.approx(by_uncertainty.figures[key].value, rel=0.01)


def test_temperatures_by_choice(table):
    study = rejection_study(table, ["tiles_2"], temperatures=(1.0, 2.0, 2), **QUICK)
    assert study.temperatures == (1.0, 2.0)
    assert study.calibrated_on is None
    with pytest.raises(
        KeyError, match="no result tiles_3/entropy at T = 1; there are original/entropy, tiles_2/mutual"
    ):
        study.of("tiles_3")


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
    assert header[:5] == ["uncertainty", "ensemble", "T", "accuracy", "NLL"]
    assert header[8:] == ["error AUROC", "error AUROC - entropy's", "AURC", "AURC - entropy's"]
    assert first[:3] == ["entropy", "original", "1"]
    assert first[9] == first[11] == "-"
    difference = study.results[1].differences["auroc"]
    assert second[9] == f"{difference.value:.3f} [{difference.low:.3f}, {difference.high:.3f}]"
    assert second[5] == f"{study.results[1].figures['neg_bucket_covariance_calibration_error'].value:.3f}"
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
    assert [one["constant"] for one in study.to_dict()["results"]] == [False, True, False]


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
    assert "all right or all wrong, so there is nothing to reject" in study.findings()[0]
    assert study.records()[0]["auroc"] is None


def test_without_ensembles_the_original_stands_alone(table):
    study = rejection_study(table.select("logit", "label"), **QUICK)
    assert [found.order.ensemble for found in study.results] == ["original"]
    assert study.findings() == ["T = 1: there is no ensemble to compare with the model's own entropy."]


def test_the_model_is_named_by_its_provenance(table):
    made = Table(logit=table.logit, label=table.label, name="cache/x", provenance=Provenance("timm:resnet50"))
    assert rejection_study(made, **QUICK).model == "timm:resnet50"
    assert rejection_study(table, ["tiles_2"], **QUICK).records()[0]["model"] == "set 0"


def test_explicit_members_are_named_with_their_number(table):
    study = rejection_study(table.extended(members_logit=table.whole("tiles_2_logit")), ["members"], **QUICK)
    assert study.results[1].order.size == "members (4)"


def test_ensembles_of_a_table_in_order():
    columns = {"tiles_10": torch.zeros(1, 9), "tiles_2_logit": torch.zeros(1, 4, 2), "dropout": torch.zeros(1, 9)}
    assert ensembles_of(Table(feature=torch.zeros(1, 9), **columns)) == ["dropout", "tiles_2", "tiles_10"]


class TestErrors:
    def test_a_summary_of_another_temperature(self, table):
        stream = MemberStream(temperature=3.0)
        stream.add(table.whole("tiles_2_logit"))
        warm = table.extended(tiles_2=stream.summary().float())
        text = (
            r"'tiles_2' of set 0 must be the summary of 'tiles_2_logit' at T = 1; in row \d+ its total .* temperature=1"
        )
        with pytest.raises(TableError, match=text):
            rejection_study(warm, ["tiles_2"], **QUICK)

    def test_a_summary_that_is_known_to_be_of_another_temperature(self, table):
        stream = MemberStream(temperature=3.0)
        stream.add(table.whole("tiles_2_logit"))
        warm = data(grids=(2,)).extended(tiles_2=stream.summary().float())
        warm.provenance = Provenance(probes={"tiles": {"settings": {"temperature": 3.0}}})
        text = r"the summary 'tiles_2' at T = 1, or column 'tiles_2_logit'; .* with temperature=3\. Extract it with"
        with pytest.raises(TableError, match=text):
            rejection_study(warm.select("logit", "label", "tiles_2", "tiles_2_loss"), **QUICK)
        found, plain = (rejection_study(t, ["tiles_2"], **QUICK).results[1] for t in (warm, table))  # from the logits
        assert found.figures["aurc"].value == pytest.approx(plain.figures["aurc"].value, abs=1e-3)

    def test_kept_logits_may_be_halved(self, table):
        halved = table.extended(tiles_2_logit=table.whole("tiles_2_logit").half())
        assert rejection_study(halved, ["tiles_2"], **QUICK).results

    @pytest.mark.parametrize("wrong", [{"confidence": 95.0}, {"resamples": 0}, {"seed": -1}])
    def test_intervals_that_cannot_be_drawn(self, table, wrong):
        name, value = next(iter(wrong.items()))
        with pytest.raises(ValueRangeError, match=rf"at least 1 resample and a seed .*{name}={value}.* are usual"):
            rejection_study(table, **wrong)

    def test_calibration_without_ids_on_the_same_rows(self, table):
        bare = table.select("logit", "label")
        with pytest.raises(TableError, match=r"at least 120 of the 120 images of set 0 are also in calibration"):
            rejection_study(bare, calibration=table)
        assert len(rejection_study(bare, calibration=data(len(table), seed=1), **QUICK).temperatures) == 2

    def test_calibration_with_other_classes(self, table, calibration):
        fewer = Table(name="few", logit=calibration.logit[:, :4], label=calibration.label % 4, id=calibration.id)
        with pytest.raises(TableError, match=r"'logit' of calibration \(few\) must be 6 wide, as in set 0; got 4"):
            rejection_study(table, calibration=fewer)

    def test_pooled_weights_of_another_ensemble(self, table, calibration):
        fewer = calibration.extended(tiles_2_logit=calibration.whole("tiles_2_logit")[:, :3])
        with pytest.raises(TableError, match="has 4 members in 'tiles_2_logit'; weights were fitted for 3"):
            rejection_study(table, ["tiles_2"], calibration=fewer, uncertainties=["pooled_sum"], **QUICK)

    def test_no_labels(self, table):
        with pytest.raises(MissingColumnError, match="rejection_study needs column 'label'"):
            rejection_study(table.select("logit", "tiles_2"))

    def test_labels_of_another_set(self, table):
        own = Table(logit=table.logit, label=table.label, label_space="own", name="birds")
        with pytest.raises(
            TableError, match="needs labels of the model's own classes; those of birds are another set's"
        ):
            rejection_study(own)

    def test_no_such_ensemble(self, table):
        text = r"needs an ensemble 'tiles_5'; set 0 has tiles_2, tiles_3\. It is written by the tiles probe"
        with pytest.raises(MissingColumnError, match=text):
            rejection_study(table, ["tiles_5"])

    def test_fewer_rows_than_buckets(self, table):
        with pytest.raises(ValueRangeError, match=r"buckets must be 2 to the number of rows, 4 in set 0; got 10"):
            rejection_study(table.rows(slice(0, 4)))

    def test_temperature_without_calibration(self, table):
        with pytest.raises(TableError, match=r"needs calibration=\.\.\.; got none\. Give a table of other labelled"):
            rejection_study(table, temperatures=["optimal"])

    def test_temperature_without_logits(self, table, calibration):
        summaries = data(keep=False)
        text = r"T = [\d.]+ needs column 'tiles_2_logit'.*dubito\.probes\.Tiles\(.*keep=.logits"
        with pytest.raises(MissingColumnError, match=text):
            rejection_study(summaries, calibration=calibration)
        assert rejection_study(summaries, calibration=calibration, temperatures=(1.0,), **QUICK).temperatures == (1.0,)

    def test_calibration_on_the_evaluated_rows(self, table):
        with pytest.raises(TableError, match=r"30 of the 120 images of set 0 are also in calib.* '0/0'.*flatters them"):
            rejection_study(table, calibration=table.rows(slice(0, 30)))

    def test_other_images_may_have_the_same_names(self, table, calibration):
        renamed = calibration.extended(id=table.id[: len(calibration)])
        assert len(rejection_study(table, calibration=renamed, **QUICK).temperatures) == 2

    def test_calibration_of_another_model(self, table, calibration):
        mine, other = (
            Table(logit=t.logit, label=t.label, provenance=Provenance(weights=weights))
            for t, weights in ((table, "a"), (calibration, "b"))
        )
        with pytest.raises(TableError, match=r"calibration \(.*\) and table in memory must come from one model"):
            rejection_study(mine, calibration=other)

    def test_pooled_without_calibration(self, table):
        with pytest.raises(TableError, match=r"pooled_sum learns its weights on other images.*or choose weighted_log"):
            rejection_study(table, uncertainties=["pooled_sum"])

    def test_names_and_choices(self, table):
        with pytest.raises(
            ValueRangeError,
            match=r"must be one of .*; got 'mutual_info'\. Did you mean mutual_information",
        ):
            rejection_study(table, uncertainties=["mutual_info"])
        with pytest.raises(ValueRangeError, match="predictions must be one of own, original; got 'mine'"):
            inspect.unwrap(rejection_study)(table, predictions="mine")
        with pytest.raises(ValueRangeError, match="against must be one of level, uncertainty; got 'rank'"):
            inspect.unwrap(rejection_study)(table, against="rank")
        with pytest.raises(ValueRangeError, match=r"temperatures must be positive numbers or 'optimal'; got -1"):
            rejection_study(table, temperatures=[-1])

    def test_one_name_needs_no_list(self, table):
        study = rejection_study(table, "tiles_2", uncertainties="variation_ratio", **QUICK)
        assert [one.order.ensemble for one in study.results] == ["original", "tiles_2"]

    def test_nan_of_members_names_its_column(self, table):
        corrupted = table.whole("tiles_2_logit").clone()
        corrupted[3, 1] = torch.nan
        with pytest.raises(ValueRangeError, match="rejection_study: column 'members_logit' of set 0"):
            rejection_study(table.extended(members_logit=corrupted), ["members"])

    def test_other_classes(self, table):
        with pytest.raises(TableError, match="'members' must predict the classes of the logits, 6; its members have 2"):
            rejection_study(table.extended(members_logit=torch.zeros(len(table), 3, 2)), ["members"])

    def test_columns_of_another_kind(self, table):
        with pytest.raises(TableError, match=r"'mine' of set 0 must have the axes \(n, 9\); got \(120, 6\)"):
            rejection_study(table.extended(mine=table.logit), ["mine"])
        with pytest.raises(TableError, match=r"'mine_logit' of set 0 must have the axes \(n, members, classes\); "):
            rejection_study(table.extended(mine_logit=table.logit), ["mine"])

    def test_one_member(self, table):
        with pytest.raises(TableError, match="'members' of set 0 has one member, which agrees with itself"):
            rejection_study(table.extended(members_logit=table.logit[:, None]), ["members"])


LEVELS = np.arange(1, 6) / 5


def order(n: int, seed: int, ties: bool = False) -> RankedRows:
    rng = np.random.default_rng(seed)
    u = rng.integers(4, size=n).astype(float) if ties else rng.normal(size=n)
    right = (rng.random(n) < 0.6).astype(float)
    return RankedRows(u, right, rng.exponential(size=n), rng.random(n) - right)


def expected(one: RankedRows, rows: np.ndarray, by_uncertainty: bool) -> dict[str, float]:
    """By the public metrics and numpy's covariance, on repeated rows."""
    u, right, nll, gap = (column[rows] for column in one)
    x = bucket_curve(u, u, LEVELS.tolist()).numpy() if by_uncertainty else LEVELS
    found = {"auroc": auroc(u, right == 0), "aurc": aurc(u, right == 0)}
    for kind, curve in (("bucket", bucket_curve), ("acceptance", acceptance_curve)):
        for name, values in (("accuracy", right), ("nll", nll), ("calibration_error", gap)):
            y = curve(u, values, LEVELS.tolist()).numpy()
            y = abs(y) if name == "calibration_error" else y
            found[f"neg_{kind}_covariance_{name}"] = -np.cov(x, y, bias=True)[0, 1]
    return found


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("by_uncertainty", [False, True])
def test_counted_is_called(ties: bool, by_uncertainty: bool) -> None:
    one = order(37, 0, ties)
    drawn = np.concatenate([np.ones((1, 37), dtype=np.int64), *draw_counts(37, 4, seed=3)])
    found = figures_of(one, drawn, LEVELS, against_uncertainty=by_uncertainty)
    assert found.shape == (5, len(FIGURES))
    for line, count in zip(found, drawn, strict=True):
        rows = np.repeat(np.arange(37), count)
        assert dict(zip(FIGURES, line.tolist(), strict=True)) == pytest.approx(expected(one, rows, by_uncertainty))


def test_a_covariance_by_hand() -> None:
    # Two levels, 1/2 and 1; accepted accuracies 1 and 1/2, buckets 1 and 0. -cov = -(1/4)((-1)(1) + (1)(y)) / 2.
    one = RankedRows(np.array([1.0, 2.0]), np.array([1.0, 0.0]), np.array([0.0, 2.0]), np.array([-0.5, 0.5]))
    found = figures_of(one, np.ones((1, 2), dtype=np.int64), np.array([0.5, 1.0]))
    figures = dict(zip(FIGURES, found[0].tolist(), strict=True))
    assert figures["neg_acceptance_covariance_accuracy"] == pytest.approx(0.25 * (1 - 0.5) / 2)
    assert figures["neg_bucket_covariance_accuracy"] == pytest.approx(0.25 * (1 - 0) / 2)
    assert figures["neg_bucket_covariance_nll"] == pytest.approx(0.25 * (0 - 2) / 2)
    # |gap| is 1/2 in both buckets, and 0 over both.
    assert figures["neg_bucket_covariance_calibration_error"] == pytest.approx(0)
    assert figures["neg_acceptance_covariance_calibration_error"] == pytest.approx(0.25 * (0.5 - 0) / 2)


def test_undefined_is_nan() -> None:
    one = order(8, 1)._replace(correct=np.ones(8))
    found = figures_of(one, np.ones((1, 8), dtype=np.int64), LEVELS)[0]
    assert math.isnan(found[FIGURES.index("auroc")])
    assert found[FIGURES.index("aurc")] == 0
