import inspect

import numpy as np
import pytest
import torch

from dubito import metrics
from dubito.errors import DubitoWarning, MissingColumnError, NotFittedError, TableError, ValueRangeError
from dubito.evaluate.evaluate import TITLES, check_fitted_scores, evaluate, has_both, uncertainties
from dubito.scores import (
    Entropy,
    GradNorm,
    Margin,
    MaxProbability,
    MutualInformation,
    Neighbours,
    PredictedGradient,
    REGrad,
    Temperature,
)
from dubito.table import Provenance, Table
from tests.evaluate.gaussians import QUICK, C, N, data, evaluated


@pytest.fixture(scope="module")
def table() -> Table:
    return data()


@pytest.fixture(scope="module")
def result(table):
    return evaluated(table)


def test_values_are_those_of_the_metrics(table, result):
    wrong = ~metrics.correct(table.logit, table.label)
    assert 0.1 < wrong.double().mean() < 0.7
    for name, u in (
        ("max_probability", MaxProbability().score(table)),
        ("neighbours", Neighbours(k=3).fit(data(100, seed=5)).score(table)),
        ("array", torch.linspace(0, 1, N)),
    ):
        assert {key: value.value for key, value in result[name].items()} == pytest.approx(
            {
                "error_auroc": metrics.auroc(u, wrong),
                "aurc": metrics.aurc(u, wrong),
                "excess_aurc": metrics.excess_aurc(u, wrong),
                "augrc": metrics.augrc(u, wrong),
                "r_auroc": metrics.r_auroc(u, table.feature, table.label),
            },
            abs=1e-12,
        )


def test_the_model_s_own_values(table, result):
    correct = metrics.correct(table.logit, table.label)
    assert {key: value.value for key, value in result.model.items()} == pytest.approx(
        {
            "accuracy": metrics.accuracy(table.logit, table.label),
            "nll": metrics.nll(table.logit, table.label),
            "brier": metrics.brier(table.logit, table.label),
            "ece": metrics.ece(metrics.confidence(table.logit), correct),
            "recall_at_1": metrics.recall_at_1(table.feature, table.label),
        },
        abs=1e-12,
    )


def test_batches_of_the_table_do_not_matter(table, result, monkeypatch):
    batches = Table.batches
    monkeypatch.setattr(Table, "batches", lambda self, *columns: batches(self, *columns, size=7))
    again = evaluate({"max_probability": MaxProbability()}, table, **QUICK)
    for key, interval in result.model.items():
        assert again.model[key] == pytest.approx(interval, rel=1e-9), key
    for key, interval in result["max_probability"].items():
        assert again["max_probability"][key] == pytest.approx(interval, rel=1e-9), key


def test_intervals_hold_the_value_and_have_a_width(result):
    intervals = {**result.model, **result["max_probability"], **{f"array {k}": v for k, v in result["array"].items()}}
    for key, interval in intervals.items():
        assert interval.low <= interval.value <= interval.high, key
        assert interval.high - interval.low > 1e-3, key
        assert interval.confidence == 0.95


def test_confidence_resamples_and_seed_reach_the_bootstrap(table):
    scores = {"u": Entropy()}
    first = evaluate(scores, table, confidence=0.5, resamples=80, seed=1)["u"]["error_auroc"]
    wide = evaluate(scores, table, confidence=0.99, resamples=80, seed=1)["u"]["error_auroc"]
    assert first.confidence == 0.5
    assert wide.low < first.low < first.high < wide.high
    assert evaluate(scores, table, confidence=0.5, resamples=80, seed=1)["u"]["error_auroc"] == first
    assert evaluate(scores, table, confidence=0.5, resamples=80, seed=2)["u"]["error_auroc"] != first
    wrong = ~metrics.correct(table.logit, table.label)
    expected = metrics.interval(metrics.auroc, Entropy().score(table), wrong, confidence=0.5, resamples=80, seed=1)
    assert first == expected


@pytest.mark.parametrize(
    ("columns", "of_score", "of_model"),
    [
        (("logit",), set(), set()),
        (("feature", "logit"), set(), set()),
        (
            ("logit", "label"),
            {"error_auroc", "aurc", "excess_aurc", "augrc"},
            {"accuracy", "nll", "brier", "ece"},
        ),
        (("feature", "label"), {"r_auroc"}, {"recall_at_1"}),
    ],
)
def test_what_the_columns_do_not_allow_is_left_out(table, columns, of_score, of_model):
    result = evaluate({"u": torch.linspace(0, 1, N)}, table.select(*columns), **QUICK)
    assert set(result["u"]) == of_score
    assert set(result.model) == of_model
    assert result.metrics == [key for key in TITLES if key in of_score]


def test_labels_of_another_set_are_only_compared_with_each_other(table):
    own = Table(logit=table.logit, feature=table.feature, label=table.label + 100, label_space="own")
    result = evaluate({"u": Entropy()}, own, **QUICK)
    assert set(result["u"]) == {"r_auroc"}
    assert set(result.model) == {"recall_at_1"}


def test_without_errors_there_is_no_auroc_but_a_risk():
    table = Table(logit=[[2.0, 0.0], [0.0, 3.0]], label=[0, 1])
    result = evaluate({"u": [0.1, 0.2]}, table, **QUICK)
    assert set(result["u"]) == {"aurc", "excess_aurc", "augrc"}
    assert result["u"]["aurc"].value == 0
    assert result.model["accuracy"].value == 1


def test_one_row():
    result = evaluate({"u": [0.1]}, Table(logit=[[2.0, 0.0]], feature=[[1.0]], label=[1]), **QUICK)
    assert result["u"]["aurc"].value == 1
    assert set(result.model) == {"accuracy", "nll", "brier", "ece"}


def test_only_the_chosen_metrics(table, result):
    subset = evaluate(
        {"array": torch.linspace(0, 1, N)}, table, metrics=["aurc", "r_auroc", "nll", "ood_auroc"], **QUICK
    )
    assert subset["array"] == {key: result["array"][key] for key in ("aurc", "r_auroc")}
    assert subset.model == {"nll": result.model["nll"]}
    ood = evaluate({"u": Entropy()}, table, ood=data(50, seed=3), metrics=("ood_fpr95",), **QUICK)
    assert set(ood["u"]) == {"ood_fpr95"}
    assert ood.model == {}
    assert evaluate({"u": Entropy()}, table, metrics=[], **QUICK)["u"] == {}


def test_every_metric_can_be_chosen_alone(table):
    whole = evaluate({"u": Entropy()}, table, ood=data(50, seed=3), metrics=list(TITLES), **QUICK)
    for key in TITLES:
        alone = evaluate({"u": Entropy()}, table, ood=data(50, seed=3), metrics=[key], **QUICK)
        assert alone["u"] | alone.model == {key: (whole["u"] | whole.model)[key]}


def test_what_is_not_chosen_costs_nothing(table, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(metrics, "neighbour_matches", never)
    monkeypatch.setattr(metrics, "correct", never)
    others = [key for key in TITLES if key.startswith("ood")]
    ood = data(50, seed=3)
    assert set(evaluate({"u": Entropy()}, table, ood=ood, metrics=others, **QUICK)["u"]) == set(others)
    # an array cannot score the OOD images, and need not
    assert evaluate({"u": np.arange(N)}, table, ood=table, metrics=[], **QUICK)["u"] == {}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["aurc", "r_aurok"], r"'r_aurok'\. Did you mean r_auroc\?"),
        ("r_aurok", r"'r_aurok'\. Did you mean r_auroc\?"),
        (["???"], r"'\?\?\?'\.$"),
    ],
)
def test_unknown_metrics_are_errors(table, names, text):
    with pytest.raises(ValueRangeError, match=r"evaluate: metrics must be one of error_auroc, aurc, .*; got " + text):
        evaluate({"u": Entropy()}, table, metrics=names, **QUICK)


def test_one_metric_needs_no_list(table):
    assert set(evaluate({"u": Entropy()}, table, metrics="aurc", **QUICK)["u"]) == {"aurc"}


def test_features_are_never_read_as_a_whole(table, result, monkeypatch):
    whole = Table.whole

    def labels_only(self, column):
        assert column == "label"
        return whole(self, column)

    monkeypatch.setattr(Table, "whole", labels_only)
    again = evaluate({"array": torch.linspace(0, 1, N)}, table, metrics=["r_auroc", "recall_at_1"], **QUICK)
    assert again["array"]["r_auroc"] == result["array"]["r_auroc"]
    assert again.model["recall_at_1"] == result.model["recall_at_1"]


def test_ood_images():
    table, ood = data(), data(80, seed=3, shift=-2.0)
    score = Neighbours(k=3).fit(data(100, seed=5))
    result = evaluate({"neighbours": score}, table, ood=ood, **QUICK)["neighbours"]
    u = torch.cat([score.score(table), score.score(ood)])
    is_ood = [0] * N + [1] * 80
    assert result["ood_auroc"].value == metrics.auroc(u, is_ood)
    assert result["ood_average_precision"].value == metrics.average_precision(u, is_ood)
    assert result["ood_fpr95"].value == metrics.fpr_at_tpr(u, is_ood)
    assert result["ood_auroc"].value > 0.7  # an OOD image is the positive one, and scores high
    assert {"error_auroc", "r_auroc"} <= set(result)


def test_images_that_are_in_and_out_of_distribution_are_reported(table):
    ood = table.rows(slice(0, 9))
    with pytest.warns(DubitoWarning, match=r"^evaluate: at least 9 of the .* are also in ood \(.*cannot be separated"):
        evaluate({"u": Entropy()}, table, ood=ood, metrics=["ood_auroc"], **QUICK)
    evaluate({"u": Entropy()}, table, ood=ood, metrics=["aurc"], **QUICK)  # nothing is separated


def test_ood_images_need_no_labels_and_allow_no_arrays(table):
    ood = Table(logit=torch.zeros(9, C))
    assert evaluate({"u": Entropy()}, table, ood=ood, **QUICK)["u"]["ood_auroc"].value > 0.99
    with pytest.raises(TableError, match=r"evaluate: 'mine' must be a fitted score, .* got ndarray\. Pass the score"):
        evaluate({"mine": np.zeros(N)}, table, ood=ood, **QUICK)
    with pytest.raises(MissingColumnError, match=r"neighbours\.score needs column 'feature'"):
        evaluate({"u": Neighbours(k=1).fit(table)}, table, ood=ood, **QUICK)


@pytest.mark.parametrize("u", [[0.1, 0.2], torch.zeros(N + 1), np.zeros((N, 1)), torch.tensor(0.5)])
def test_scores_of_another_length(table, u):
    with pytest.raises(TableError) as error:
        evaluate({"mine": u}, table, **QUICK)
    expected = "evaluate: score 'mine' must have one value per row of cache/test, (240,); "
    assert str(error.value).startswith(f"{expected}got {tuple(np.shape(u))}.")


def test_scores_without_a_rank(table):
    u = torch.zeros(N)
    u[7] = float("nan")
    with pytest.raises(
        ValueRangeError, match=r"evaluate: score 'mine': 1 of 240 values are NaN or infinite, the first at position 7"
    ):
        evaluate({"mine": u}, table, **QUICK)


def test_scores_that_are_no_numbers(table):
    with pytest.raises(TableError, match=r"evaluate: score 'mine' must be numbers in an array; got list"):
        evaluate({"mine": ["high"] * N}, table, **QUICK)


def test_a_score_that_is_not_fitted(table):
    with pytest.raises(NotFittedError, match=r"evaluate: u learns from feature: pass train=\.\.\., other in-dist"):
        evaluate({"u": Neighbours()}, table, **QUICK)


def test_scores_that_learn_are_fitted_on_train(table):
    train, ood, own = data(100, seed=5), data(80, seed=3, shift=-2.0), Neighbours(k=3)
    array = torch.linspace(0, 1, N)
    expected = evaluate({"own": Neighbours(k=3).fit(train)}, table, ood=ood, **QUICK)
    result = evaluate({"own": own}, table, ood=ood, train=train, **QUICK)
    assert result.scores == expected.scores
    assert not own.is_fitted
    named = evaluate(["neighbours", "mahalanobis"], table, train=train, **QUICK)
    assert list(named.scores) == ["neighbours", "mahalanobis"]
    assert list(evaluate({"array": array, "own": "neighbours"}, table, train=train, **QUICK).scores) == ["array", "own"]
    with pytest.warns(DubitoWarning, match="Scores that learn have already seen them"):
        evaluate("neighbours", table, train=table, **QUICK)
    with pytest.raises(TableError, match="evaluate: train needs at least 1 row"):
        evaluate("neighbours", table, train=train.rows([]), **QUICK)


def test_scores_need_no_mapping(table):
    expected = {"entropy": Entropy().score(table), "max_probability": MaxProbability().score(table)}
    wrong = ~metrics.correct(table.logit, table.label)
    for value in ([Entropy(), MaxProbability()], ("entropy", MaxProbability()), ["entropy", "max_probability"]):
        result = evaluate(value, table, metrics=["aurc"], **QUICK)
        assert {name: row["aurc"].value for name, row in result.scores.items()} == {
            name: metrics.aurc(u, wrong) for name, u in expected.items()
        }
    for value in (Entropy(), "entropy"):
        result = evaluate(value, table, ood=data(50, seed=3), metrics=["ood_auroc"], **QUICK)
        assert list(result.scores) == ["entropy"]
        assert set(result["entropy"]) == {"ood_auroc"}
        assert result.microseconds["entropy"] > 0


def test_two_scores_of_one_name_are_refused(table):
    with pytest.raises(TableError, match=r"evaluate: scores in a list must have different names; two .* 'neighbours'"):
        evaluate([Neighbours(k=1), Neighbours(k=2)], table, **QUICK)


def test_a_path_in_place_of_a_table_is_an_error(table):
    # Under test, types are checked first; users call the function inside.
    unchecked = inspect.unwrap(evaluate)
    with pytest.raises(TableError, match=r'evaluate: table must be a table; got the path "cache/test"\. Open it: '):
        unchecked({"u": Entropy()}, "cache/test")
    with pytest.raises(TableError, match=r'evaluate: ood must be a table; .* dubito\.open\("cache/odd"\)\.'):
        unchecked({"u": Entropy()}, table, ood="cache/odd")
    with pytest.raises(TableError, match=r"evaluate: scores must be .*; got Tensor\. Pass arrays by name: "):
        unchecked(torch.zeros(N), table)


def test_a_table_without_rows(table):
    with pytest.raises(TableError, match=r"evaluate: table needs at least 1 row; cache/test has 0\."):
        evaluate({"u": Entropy()}, table.rows(slice(0, 0)), **QUICK)
    with pytest.raises(TableError, match=r"^evaluate: ood needs at least 1 row; cache/test has 0\."):
        evaluate({"u": Entropy()}, table, ood=table.rows(slice(0, 0)), **QUICK)


def test_scores_have_a_cost_and_arrays_none(result):
    assert result.microseconds["max_probability"] > 0
    assert result.microseconds["array"] is None


def test_no_scores_leave_the_model_s_metrics(table):
    result = evaluate({}, table, **QUICK)
    assert result.metrics == []
    assert str(result).startswith("cache/test: 240 images\naccuracy  0.613 [")
    assert result.records() == []
    assert result.model["accuracy"].value > 0


def test_an_unknown_score_is_not_there(result):
    with pytest.raises(KeyError, match="oracle"):
        result["oracle"]


def test_ensembles_of_different_settings_are_not_compared(table):
    def dropped(of, rate):
        logits, stream = torch.randn(len(of), 4, C, generator=torch.Generator().manual_seed(0)), metrics.MemberStream()
        stream.add(logits)
        args = of.extended(dropout=stream.summary(), dropout_logit=logits)
        args.provenance = Provenance(probes={"dropout": {"settings": {"rate": rate}}})
        return args

    known, ood = dropped(table, 0.1), data(50, seed=3)
    plain = MutualInformation(of="dropout")
    for score in (plain, Temperature(plain).fit(known)):
        with pytest.raises(
            TableError,
            match=r"'u' cannot be .* 'dropout' of .* settings \(rate=0\.1 and rate=0\.2\)\. Extract",
        ):
            evaluate({"u": score}, known, ood=dropped(ood, 0.2), **QUICK)
    assert "ood_auroc" in evaluate({"u": plain}, known, ood=dropped(ood, 0.1), **QUICK)["u"]
    assert "ood_auroc" in evaluate({"u": Entropy()}, known, ood=dropped(ood, 0.2), **QUICK)["u"]


def test_gradients_of_different_settings_are_not_compared():
    def table(sigma: float) -> Table:
        probe = {"settings": {"copies": 4, "sigma": sigma}, "notes": {"layers": ["fc"], "depth": [0], "of": 1}}
        columns = {name: torch.rand(20, 1) for name in ("gradient", "gradient_predicted", "gradient_uniform")}
        return Table(
            logit=torch.randn(20, 3),
            feature=torch.randn(20, 2),
            provenance=Provenance(probes={"gradient": probe}),
            **columns,
        )

    weak, strong = table(0.1), table(0.2)
    for score in (REGrad(), PredictedGradient(), GradNorm("gradient")):
        with pytest.raises(TableError, match=r"evaluate: 'u' cannot .* 'gradient' of .*\(sigma=0\.1 and sigma=0\.2\)"):
            evaluate({"u": score}, weak, ood=strong, resamples=5)
        assert evaluate({"u": score}, weak, ood=table(0.1), resamples=5)["u"]["ood_auroc"]
    assert evaluate({"u": GradNorm()}, weak, ood=strong, resamples=5)["u"][
        "ood_auroc"
    ]  # the last layer has no settings


TWO_ROWS = Table(logit=[[1.0, 0.0], [0.0, 3.0]], name="cache/t")


def test_scores_arrays_and_baselines():
    values = uncertainties({"m": Margin(), "a": [1, 2]}, TWO_ROWS, by="by", baselines=("entropy", "max_probability"))
    assert list(values) == ["m", "a", "entropy", "max_probability"]
    assert values["a"].tolist() == [1.0, 2.0]
    assert values["m"].equal(Margin().score(TWO_ROWS))
    assert values["entropy"].equal(Entropy().score(TWO_ROWS))
    assert values["max_probability"].equal(MaxProbability().score(TWO_ROWS))


def test_a_score_of_the_same_name_goes_before_a_baseline():
    values = uncertainties({"entropy": [1, 2]}, TWO_ROWS, by="by", baselines=("entropy",))
    assert values["entropy"].tolist() == [1.0, 2.0]


def test_no_logits_no_baselines():
    assert list(uncertainties({"a": [1.0]}, Table(feature=[[1.0]]), by="by", baselines=("entropy",))) == ["a"]


def test_uncertainties_that_cannot_be():
    with pytest.raises(TableError, match=r"by: score 'a' must have one value per row of cache/t, \(2,\); got \(1,\)"):
        uncertainties({"a": [1.0]}, TWO_ROWS, by="by")
    with pytest.raises(ValueRangeError, match="by: score 'a': 1 of 2 values are NaN"):
        uncertainties({"a": [1.0, float("nan")]}, TWO_ROWS, by="by")
    with pytest.raises(TableError, match="by: table needs at least 1 row; cache/t has 0"):
        uncertainties({"m": Margin()}, TWO_ROWS.rows([]), by="by")
    with pytest.raises(TableError, match="by needs at least one score; got none"):
        uncertainties({}, TWO_ROWS, by="by")
    with pytest.raises(TableError, match="'a' must be a fitted score, so that every table can be scored; got list"):
        check_fitted_scores({"m": Margin(), "a": [1.0]}, by="by")
    with pytest.raises(NotFittedError, match=r"neighbours\.score was called before fit"):
        check_fitted_scores({"n": Neighbours()}, by="by")


def test_both_kinds():
    flags = ([True, False], [True, True], [False])
    assert [has_both(torch.tensor(one)) for one in flags] == [True, False, False]


def test_further_calibration_errors_are_computed_on_request(table):
    further = ["adaptive_ece", "smooth_ece", "top_label_ece", "class_wise_ece", "bucket_calibration_error"]
    usual = evaluate({"u": Entropy()}, table, **QUICK)
    assert not {*further} & (usual.model.keys() | usual["u"].keys())
    evaluation = evaluate({"u": Entropy()}, table, metrics=further, **QUICK)
    found = evaluation.model
    q, right, predicted = (
        metrics.confidence(table.logit),
        metrics.correct(table.logit, table.label),
        table.logit.argmax(1),
    )
    assert found["smooth_ece"].value == metrics.smooth_ece(q, right)
    assert found["top_label_ece"].value == metrics.top_label_ece(q, right, predicted)
    assert found["adaptive_ece"].low <= found["adaptive_ece"].value <= found["adaptive_ece"].high
    assert found["class_wise_ece"] == metrics.interval(metrics.class_wise_ece, table.logit, table.label, **QUICK)
    of_u = evaluation["u"]["bucket_calibration_error"]
    assert of_u.value == metrics.bucket_calibration_error(Entropy().score(table), q, right)
    assert of_u.low <= of_u.value <= of_u.high
    assert evaluation.metrics == ["bucket_calibration_error"]
