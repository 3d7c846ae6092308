"""Rejection studies: values are those of the metrics, whatever columns they come from; and clear errors."""

import inspect
import math

import numpy as np
import pytest
import torch

from dubito import metrics
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.evaluate.rejection import ensembles_of, figures_of, rejection_study
from dubito.evaluate.rejection_result import FIGURES
from dubito.metrics import (
    MemberStream,
    acceptance_curve,
    aurc,
    auroc,
    bucket_curve,
    decompose,
    member_weights,
)
from dubito.metrics.bootstrap import draw_counts
from dubito.scores import WeightedMutualInformation, information
from dubito.scores.temperature import fit_temperature
from dubito.table import Provenance, Table
from tests.evaluate.tiles import ALL, QUICK, C, data


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
    result = study.of("original", temperature=temperature)
    assert result.accuracy == pytest.approx(metrics.accuracy(logit, table.label))
    assert result.nll == pytest.approx(metrics.nll(logit, table.label))
    sure = metrics.confidence(logit)
    assert result.calibration_error == pytest.approx(abs(float(sure.mean() - right.double().mean())))
    assert result.curves["bucket"]["nll"] == pytest.approx(
        metrics.bucket_curve(u, metrics.nll_per_row(logit, table.label)).tolist()
    )
    assert result.curves["acceptance"]["accuracy"] == pytest.approx(metrics.acceptance_curve(u, right).tolist())
    assert result.curves["bucket"]["calibration_error"] == pytest.approx(
        metrics.bucket_curve(u, sure - right.double()).abs().tolist()
    )
    assert result.figures["auroc"].value == pytest.approx(metrics.auroc(u, ~right))
    assert result.figures["aurc"].value == pytest.approx(metrics.aurc(u, ~right))
    assert result.differences is None


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
        result = study.of(name, uncertainty, temperature)
        # Five digits: summaries are float32, and near ties may change places.
        assert result.figures["auroc"].value == pytest.approx(metrics.auroc(u, wrong), abs=2e-3), uncertainty
        assert result.curves["acceptance"]["accuracy"] == pytest.approx(
            metrics.acceptance_curve(u, ~wrong).tolist(), abs=0.02
        ), uncertainty
        assert result.nll == pytest.approx(float(-mean.gather(1, table.label[:, None]).log().mean()), abs=1e-5)
        assert result.accuracy == pytest.approx(float((~wrong).double().mean()))
        assert result.order.members == len(p)


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
    monkeypatch.setattr(information, "_BYTES", C * (4 * 9 + 64) * 7)  # seven rows of nine members
    again = rejection_study(table, calibration=calibration, uncertainties=ALL, **QUICK)
    for a, b in zip(study.results, again.results, strict=True):
        assert a.nll == pytest.approx(b.nll, rel=1e-9)
        assert a.figures["auroc"].value == pytest.approx(b.figures["auroc"].value, abs=2e-3)


def test_pooled_weights_do_not_overflow():
    logits = torch.tensor([[[900.0, 800.0], [901.0, 800.0]], [[900.0, 800.0], [900.0, 800.0]]])
    table = Table(logit=torch.zeros(2, 2), tiles_2_logit=logits)
    # Masses: member 1 e^900 + e^900, member 2 e^901 + e^900.
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    score = WeightedMutualInformation(over="pooled", of="tiles_2")
    assert score.pooled_weights(table).tolist() == pytest.approx([float(2 / (3 + e)), float((1 + e) / (3 + e))])


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
    accuracies = {result.accuracy for result in study.results}
    assert len(accuracies) == 1
    last = {result.curves["acceptance"]["nll"][-1] for result in study.results}
    assert max(last) == pytest.approx(min(last))
    own = rejection_study(table, **QUICK)
    assert len({result.accuracy for result in own.results}) > 1


def test_original_predictions_need_no_losses(table):
    bare = table.select("logit", "label", "tiles_2")
    with pytest.raises(MissingColumnError, match=r"'tiles_2_loss' for the NLL of the ensemble's own predictions, which "
                       r"predictions='original' does without; set 0 has only the summary 'tiles_2'"):  # fmt: skip
        rejection_study(bare, **QUICK)
    result = rejection_study(bare, predictions="original", **QUICK).of("tiles_2", "mutual_information")
    assert result.nll == pytest.approx(metrics.nll(table.logit, table.label))


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
    with pytest.raises(ValueRangeError, match=r"one of original/entropy, tiles_2/mutual_.*; got tiles_3/entropy\.$"):
        study.of("tiles_3")
    with pytest.raises(ValueRangeError, match=r"^RejectionStudy.of: temperature must be one of 1.0, 2.0; got 3.0\.$"):
        study.of("original", temperature=3.0)
    with pytest.raises(ValueRangeError, match=r"^RejectionStudy.plot: temperature must be one of 1.0, 2.0; got 3.0\.$"):
        study.plot(temperature=3.0)


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
    result = study.of("members", "mutual_information")
    assert result.constant
    assert result.figures["auroc"].value == 0.5
    assert result.curves["bucket"]["accuracy"] == pytest.approx([result.accuracy] * 10)
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
    assert all(figure is not None for result in study.results for figure in result.figures.values())


def test_each_name_counts_once(table):
    study = rejection_study(table, ["tiles_2", "tiles_2"], uncertainties=["variation_ratio"] * 2, **QUICK)
    assert len(study.results) == 2


def test_all_right_leaves_nothing_to_rank():
    label = torch.arange(12) % 3
    logit = 5 * torch.eye(3)[label] + 0.1 * torch.rand(12, 3)
    study = rejection_study(Table(logit=logit, label=label, tiles_2_logit=logit[:, None].repeat(1, 4, 1)), **QUICK)
    result = study.of("tiles_2", "mutual_information")
    assert result.figures["auroc"] is None
    assert result.figures["aurc"].value == 0
    assert "all right or all wrong, so there is nothing to reject" in study.findings()[0]
    assert study.records()[0]["auroc"] is None


def test_without_ensembles_the_original_stands_alone(table):
    study = rejection_study(table.select("logit", "label"), **QUICK)
    assert [result.order.ensemble for result in study.results] == ["original"]
    assert study.findings() == ["T = 1: there is no ensemble to compare with the model's own entropy."]


def test_the_model_is_named_by_its_provenance(table):
    made = Table(logit=table.logit, label=table.label, name="cache/x", provenance=Provenance("timm:resnet50"))
    assert rejection_study(made, **QUICK).model == "timm:resnet50"
    assert rejection_study(table, ["tiles_2"], **QUICK).records()[0]["model"] == "set 0"


def test_ensembles_of_a_table_in_order():
    columns = {"tiles_10": torch.zeros(1, 9), "tiles_2_logit": torch.zeros(1, 4, 2), "dropout": torch.zeros(1, 9)}
    assert ensembles_of(Table(feature=torch.zeros(1, 9), **columns)) == ["dropout", "tiles_2", "tiles_10"]


def warm(**columns) -> Table:
    """A table whose summary 'tiles_2' is that of another temperature."""
    stream = MemberStream(temperature=3.0)
    stream.add(data().whole("tiles_2_logit"))
    return data(grids=(2,)).extended(tiles_2=stream.summary().float(), **columns)


def test_a_summary_that_is_recorded_to_be_of_another_temperature(table):
    recorded = warm()
    recorded.provenance = Provenance(probes={"tiles": {"settings": {"temperature": 3.0}}})
    text = r"needs column 'tiles_2_logit' for T = 1; .* summary 'tiles_2' with temperature=3\. It is written by"
    with pytest.raises(TableError, match=text):
        rejection_study(recorded.select("logit", "label", "tiles_2", "tiles_2_loss"), **QUICK)
    result, plain = (rejection_study(t, ["tiles_2"], **QUICK).results[1] for t in (recorded, table))  # from the logits
    assert result.figures["aurc"].value == pytest.approx(plain.figures["aurc"].value, abs=1e-3)


def test_kept_logits_may_be_halved(table):
    halved = table.extended(tiles_2_logit=table.whole("tiles_2_logit").half())
    assert rejection_study(halved, ["tiles_2"], **QUICK).results


def test_other_images_without_ids_or_with_the_same_names_calibrate(table, calibration):
    bare, renamed = table.select("logit", "label"), calibration.extended(id=table.id[: len(calibration)])
    assert len(rejection_study(bare, calibration=data(len(table), seed=1), **QUICK).temperatures) == 2
    assert len(rejection_study(table, calibration=renamed, **QUICK).temperatures) == 2


def test_summaries_suffice_at_a_temperature_of_one(calibration):
    summaries = data(keep=False)
    assert rejection_study(summaries, calibration=calibration, temperatures=(1.0,), **QUICK).temperatures == (1.0,)


def test_one_name_needs_no_list(table):
    study = rejection_study(table, "tiles_2", uncertainties="variation_ratio", **QUICK)
    assert [one.order.ensemble for one in study.results] == ["original", "tiles_2"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"confidence": 95.0}, r"confidence must be a number in \(0, 1\); got 95\.0\. 95 % is 0\.95\. 0\.95 is usual"),
        ({"resamples": 0}, r"resamples must be a whole number, at least 1; got 0\. 1000 are usual"),
        ({"seed": -1}, r"seed must be a whole number, at least 0; got -1\. 0 is usual"),
        ({"buckets": 121}, r"buckets must be a whole number in \[2, 120\]; got 121\. set 0 has 120 rows"),
        ({"uncertainties": ["mutual_info"]}, r"one of .*; got 'mutual_info'\. Did you mean mutual_information"),
        ({"predictions": "mine"}, "predictions must be one of own, original; got 'mine'"),
        ({"against": "rank"}, "against must be one of level, uncertainty; got 'rank'"),
        ({"temperatures": []}, r"the number of temperatures must be a number, at least 1; got 0\. Use \(1\.0,\)"),
        ({"temperatures": [-1]}, r"temperatures must be a number, above 0; got -1\. Use \(1\.0, 'optimal'\)"),
    ],
)
def test_options_that_cannot_be(table, options, text):
    with pytest.raises(ValueRangeError, match=text):
        inspect.unwrap(rejection_study)(table, **options)


@pytest.mark.parametrize(
    ("made", "ensembles", "text"),
    [
        (lambda t: t.select("logit", "tiles_2"), None, "rejection_study needs column 'label'"),
        (lambda t: Table(logit=t.logit, label=t.label, label_space="own", name="birds"), None,
         "needs labels of the model's own classes; those of birds are another set's"),
        (lambda t: t.rows([0]), None, "table needs at least 2 rows; .* has 1"),
        (lambda t: t, ["tiles_5"],
         r"needs an ensemble 'tiles_5'; set 0 has tiles_2, tiles_3\. It is written by the tiles probe"),
        (lambda _: warm(), ["tiles_2"],
         r"'tiles_2' of set 0 must be the summary of 'tiles_2_logit' at T = 1; in row \d+ its total .* temperature=1"),
        (lambda t: t.extended(members_logit=torch.zeros(len(t), 3, 2)), ["members"],
         "'members' must predict the classes of the logits, 6; its members have 2"),
        (lambda t: t.extended(mine=t.logit, mine_loss=t.logit[:, 0]), ["mine"],
         r"'mine' must be the summary of an ensemble, \(n, 9\); got \(120, 6\) in set"),
        (lambda t: t.extended(mine_logit=t.logit), ["mine"],
         r"'mine_logit' must be the logits of members, \(n, m, c\); got torch\.float32 of shape \(120, 6\) in set 0"),
        (lambda t: t.extended(members_logit=t.logit[:, None]), ["members"],
         "'members' of set 0 has one member, which always agrees with itself"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_studied(table, made, ensembles, text):
    with pytest.raises((TableError, MissingColumnError), match=text):
        rejection_study(made(table), ensembles, **QUICK)


def test_nan_of_members_names_its_column(table):
    corrupted = table.whole("tiles_2_logit").clone()
    corrupted[3, 1] = torch.nan
    with pytest.raises(ValueRangeError, match="rejection_study: column 'members_logit' must be finite; row 3 of set 0"):
        rejection_study(table.extended(members_logit=corrupted), ["members"])


def of_model(table: Table, weights: str) -> Table:
    return Table(logit=table.logit, label=table.label, provenance=Provenance(weights=weights))


@pytest.mark.parametrize(
    ("made", "options", "text"),
    [
        (lambda t, _: (t, None), {"temperatures": ["optimal"]},
         r"needs calibration=\.\.\.; got none\. Pass a table of other labelled"),
        (lambda t, _: (t, None), {"uncertainties": ["pooled_sum"]},
         r"pooled_sum is fitted on other images and needs calibration=\.\.\.; got none"),
        (lambda t, _: (t.select("logit", "label"), t), {},
         r"at least 120 of the 120 images of set 0 are also in calibration"),
        (lambda t, _: (t, t.rows(slice(0, 30))), {},
         r"30 of the 120 images of set 0 are also in calib.* '0/0'.*flatters them"),
        (lambda t, c: (t, Table(name="narrow", logit=c.logit[:, :4], label=c.label % 4, id=c.id)), {},
         r"'logit' of calibration \(narrow\) must be 6 wide, as in set 0; got 4"),
        (lambda t, c: (of_model(t, "a"), of_model(c, "b")), {},
         r"calibration \(.*\) and table in memory must come from one model"),
        (lambda t, c: (t, c.extended(tiles_2_logit=c.whole("tiles_2_logit")[:, :3])),
         {"ensembles": ["tiles_2"], "uncertainties": ["pooled_sum"]},
         "has 4 members in 'tiles_2_logit'; weights were fitted for 3"),
        (lambda _, c: (data(keep=False), c), {},
         r"needs column 'tiles_2_logit' for T = [\d.]+; .*dubito\.probes\.Tiles\(.*keep=.logits"),
    ],
)  # fmt: skip
def test_calibration_that_cannot_be(table, calibration, made, options, text):
    studied, other = made(table, calibration)
    with pytest.raises((TableError, MissingColumnError), match=text):
        rejection_study(studied, calibration=other, **options, **QUICK)


LEVELS = np.arange(1, 6) / 5


def order(n: int, seed: int, ties: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    u = rng.integers(4, size=n).astype(float) if ties else rng.normal(size=n)
    right = (rng.random(n) < 0.6).astype(float)
    return np.stack([u, right, rng.exponential(size=n), rng.random(n) - right])


def expected(one: np.ndarray, rows: np.ndarray, by_uncertainty: bool) -> dict[str, float]:
    """By the public metrics and numpy's covariance, on repeated rows."""
    u, right, nll, gap = (column[rows] for column in one)
    x = bucket_curve(u, u, LEVELS.tolist()).numpy() if by_uncertainty else LEVELS
    result = {"auroc": auroc(u, right == 0), "aurc": aurc(u, right == 0)}
    for kind, curve in (("bucket", bucket_curve), ("acceptance", acceptance_curve)):
        for name, values in (("accuracy", right), ("nll", nll), ("calibration_error", gap)):
            y = curve(u, values, LEVELS.tolist()).numpy()
            y = abs(y) if name == "calibration_error" else y
            result[f"neg_{kind}_covariance_{name}"] = -np.cov(x, y, bias=True)[0, 1]
    return result


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("by_uncertainty", [False, True])
def test_counted_is_called(ties: bool, by_uncertainty: bool) -> None:
    one = order(37, 0, ties)
    drawn = np.concatenate([np.ones((1, 37), dtype=np.int64), *draw_counts(37, 4, seed=3)])
    result = figures_of(one, drawn, LEVELS, against_uncertainty=by_uncertainty)
    assert result.shape == (5, len(FIGURES))
    for line, count in zip(result, drawn, strict=True):
        rows = np.repeat(np.arange(37), count)
        assert dict(zip(FIGURES, line.tolist(), strict=True)) == pytest.approx(expected(one, rows, by_uncertainty))


def test_a_covariance_by_hand() -> None:
    # Two levels, 1/2 and 1; accepted accuracies 1 and 1/2, buckets 1 and 0. -cov = -(1/4)((-1)(1) + (1)(y)) / 2.
    one = np.array([[1.0, 2.0], [1.0, 0.0], [0.0, 2.0], [-0.5, 0.5]])
    result = figures_of(one, np.ones((1, 2), dtype=np.int64), np.array([0.5, 1.0]))
    figures = dict(zip(FIGURES, result[0].tolist(), strict=True))
    assert figures["neg_acceptance_covariance_accuracy"] == pytest.approx(0.25 * (1 - 0.5) / 2)
    assert figures["neg_bucket_covariance_accuracy"] == pytest.approx(0.25 * (1 - 0) / 2)
    assert figures["neg_bucket_covariance_nll"] == pytest.approx(0.25 * (0 - 2) / 2)
    # |gap| is 1/2 in both buckets, and 0 over both.
    assert figures["neg_bucket_covariance_calibration_error"] == pytest.approx(0)
    assert figures["neg_acceptance_covariance_calibration_error"] == pytest.approx(0.25 * (0.5 - 0) / 2)


def test_undefined_is_nan() -> None:
    one = order(8, 1)
    one[1] = 1
    result = figures_of(one, np.ones((1, 8), dtype=np.int64), LEVELS)[0]
    assert math.isnan(result[FIGURES.index("auroc")])
    assert result[FIGURES.index("aurc")] == 0
