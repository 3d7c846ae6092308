import inspect
import json

import numpy as np
import pytest
import torch

from dubito import metrics
from dubito.errors import MissingColumnError, NotFittedError, TableError, ValueRangeError
from dubito.evaluate.evaluate import TITLES, evaluate
from dubito.scores import (
    Entropy,
    GradNorm,
    MaxProbability,
    MutualInformation,
    Neighbours,
    PredictedGradient,
    REGrad,
    Temperature,
)
from dubito.table import Table

N, C, D = 240, 5, 6
QUICK = {"resamples": 60}


def data(n: int = N, seed: int = 0, shift: float = 0.0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=generator)
    feature = 1.5 * torch.eye(C, D)[label] + torch.randn(n, D, generator=generator) + shift
    return Table(feature=feature, logit=2 * feature[:, :C], label=label, name="cache/test")


@pytest.fixture(scope="module")
def table() -> Table:
    return data()


@pytest.fixture(scope="module")
def found(table):
    scores = {
        "max_probability": MaxProbability(),
        "neighbours": Neighbours(k=3).fit(data(100, seed=5)),
        "array": torch.linspace(0, 1, N),
    }
    return evaluate(scores, table, **QUICK)


def test_values_are_those_of_the_metrics(table, found):
    wrong = ~metrics.correct(table.logit, table.label)
    assert 0.1 < wrong.double().mean() < 0.7
    for name, u in (
        ("max_probability", MaxProbability().score(table)),
        ("neighbours", Neighbours(k=3).fit(data(100, seed=5)).score(table)),
        ("array", torch.linspace(0, 1, N)),
    ):
        assert {key: value.value for key, value in found[name].items()} == pytest.approx(
            {
                "error_auroc": metrics.auroc(u, wrong),
                "aurc": metrics.aurc(u, wrong),
                "excess_aurc": metrics.excess_aurc(u, wrong),
                "augrc": metrics.augrc(u, wrong),
                "r_auroc": metrics.r_auroc(table.feature, table.label, u),
            },
            abs=1e-12,
        )


def test_the_model_s_own_values(table, found):
    correct = metrics.correct(table.logit, table.label)
    assert {key: value.value for key, value in found.model.items()} == pytest.approx(
        {
            "accuracy": metrics.accuracy(table.logit, table.label),
            "nll": metrics.nll(table.logit, table.label),
            "brier": metrics.brier(table.logit, table.label),
            "ece": metrics.ece(metrics.confidence(table.logit), correct),
            "recall_at_1": metrics.recall_at_1(table.feature, table.label),
        },
        abs=1e-12,
    )


def test_batches_of_the_table_do_not_matter(table, found, monkeypatch):
    batches = Table.batches
    monkeypatch.setattr(Table, "batches", lambda self, *columns: batches(self, *columns, size=7))
    again = evaluate({"max_probability": MaxProbability()}, table, **QUICK)
    for key, interval in found.model.items():
        assert again.model[key] == pytest.approx(interval, rel=1e-9), key
    for key, interval in found["max_probability"].items():
        assert again["max_probability"][key] == pytest.approx(interval, rel=1e-9), key


def test_intervals_hold_the_value_and_have_a_width(found):
    intervals = {**found.model, **found["max_probability"], **{f"array {k}": v for k, v in found["array"].items()}}
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
    found = evaluate({"u": torch.linspace(0, 1, N)}, table.select(*columns), **QUICK)
    assert set(found["u"]) == of_score
    assert set(found.model) == of_model
    assert found.metrics == [key for key in TITLES if key in of_score]


def test_labels_of_another_set_are_only_compared_with_each_other(table):
    own = Table(logit=table.logit, feature=table.feature, label=table.label + 100, label_space="own")
    found = evaluate({"u": Entropy()}, own, **QUICK)
    assert set(found["u"]) == {"r_auroc"}
    assert set(found.model) == {"recall_at_1"}


def test_without_errors_there_is_no_auroc_but_a_risk():
    table = Table(logit=[[2.0, 0.0], [0.0, 3.0]], label=[0, 1])
    found = evaluate({"u": [0.1, 0.2]}, table, **QUICK)
    assert set(found["u"]) == {"aurc", "excess_aurc", "augrc"}
    assert found["u"]["aurc"].value == 0
    assert found.model["accuracy"].value == 1


def test_one_row():
    found = evaluate({"u": [0.1]}, Table(logit=[[2.0, 0.0]], feature=[[1.0]], label=[1]), **QUICK)
    assert found["u"]["aurc"].value == 1
    assert set(found.model) == {"accuracy", "nll", "brier", "ece"}


def test_only_the_chosen_metrics(table, found):
    few = evaluate({"array": torch.linspace(0, 1, N)}, table, metrics=["aurc", "r_auroc", "nll", "ood_auroc"], **QUICK)
    assert few["array"] == {key: found["array"][key] for key in ("aurc", "r_auroc")}
    assert few.model == {"nll": found.model["nll"]}
    foreign = evaluate({"u": Entropy()}, table, ood=data(50, seed=3), metrics=("ood_fpr95",), **QUICK)
    assert set(foreign["u"]) == {"ood_fpr95"}
    assert foreign.model == {}
    assert evaluate({"u": Entropy()}, table, metrics=[], **QUICK)["u"] == {}


def test_every_metric_can_be_chosen_alone(table):
    whole = evaluate({"u": Entropy()}, table, ood=data(50, seed=3), **QUICK)
    for key in TITLES:
        alone = evaluate({"u": Entropy()}, table, ood=data(50, seed=3), metrics=[key], **QUICK)
        assert alone["u"] | alone.model == {key: (whole["u"] | whole.model)[key]}


def test_what_is_not_chosen_costs_nothing(table, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(metrics, "neighbour_matches", never)
    monkeypatch.setattr(metrics, "correct", never)
    others = [key for key in TITLES if key.startswith("ood")]
    assert set(evaluate({"u": Entropy()}, table, ood=table, metrics=others, **QUICK)["u"]) == set(others)
    # an array cannot score the foreign images, and need not
    assert evaluate({"u": np.arange(N)}, table, ood=table, metrics=[], **QUICK)["u"] == {}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["aurc", "r_aurok"], r"'r_aurok' came\. Nearest: r_auroc, "),
        ("aurc", r"'aurc' came\. Nearest: aurc, "),
        (["???"], r"'\?\?\?' came\. Known: error_auroc, aurc, .*, recall_at_1\."),
    ],
)
def test_unknown_metrics_are_errors(table, names, text):
    with pytest.raises(ValueRangeError, match=r"evaluate: metrics must be a list of names; " + text):
        evaluate({"u": Entropy()}, table, metrics=names, **QUICK)


def test_features_are_never_read_as_a_whole(table, found, monkeypatch):
    whole = Table.whole

    def labels_only(self, column):
        assert column == "label"
        return whole(self, column)

    monkeypatch.setattr(Table, "whole", labels_only)
    again = evaluate({"array": torch.linspace(0, 1, N)}, table, metrics=["r_auroc", "recall_at_1"], **QUICK)
    assert again["array"]["r_auroc"] == found["array"]["r_auroc"]
    assert again.model["recall_at_1"] == found.model["recall_at_1"]


def test_foreign_images():
    table, foreign = data(), data(80, seed=3, shift=-2.0)
    score = Neighbours(k=3).fit(data(100, seed=5))
    found = evaluate({"neighbours": score}, table, ood=foreign, **QUICK)["neighbours"]
    u = torch.cat([score.score(table), score.score(foreign)])
    is_foreign = [0] * N + [1] * 80
    assert found["ood_auroc"].value == metrics.auroc(u, is_foreign)
    assert found["ood_average_precision"].value == metrics.average_precision(u, is_foreign)
    assert found["ood_fpr95"].value == metrics.fpr_at_tpr(u, is_foreign)
    assert found["ood_auroc"].value > 0.7  # a foreign image is the positive one, and scores high
    assert {"error_auroc", "r_auroc"} <= set(found)


def test_foreign_images_need_no_labels_and_allow_no_arrays(table):
    foreign = Table(logit=torch.zeros(9, C))
    assert evaluate({"u": Entropy()}, table, ood=foreign, **QUICK)["u"]["ood_auroc"].value > 0.99
    with pytest.raises(TableError) as error:
        evaluate({"mine": np.zeros(N)}, table, ood=foreign, **QUICK)
    assert str(error.value) == (
        "evaluate: with ood=..., 'mine' must be a fitted score, so that the foreign table can be scored too; an array "
        "came. Pass the score itself."
    )
    with pytest.raises(MissingColumnError, match=r"neighbours\.score needs column 'feature'"):
        evaluate({"u": Neighbours(k=1).fit(table)}, table, ood=foreign, **QUICK)


@pytest.mark.parametrize("u", [[0.1, 0.2], torch.zeros(N + 1), np.zeros((N, 1)), torch.tensor(0.5)])
def test_scores_of_another_length(table, u):
    came = tuple(np.shape(u))
    with pytest.raises(TableError) as error:
        evaluate({"mine": u}, table, **QUICK)
    assert str(error.value) == (
        f"evaluate: score 'mine' must have one value a row of cache/test, (240,); {came} came. Score the same table."
    )


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
    with pytest.raises(NotFittedError, match=r"neighbours\.score was called before fit"):
        evaluate({"u": Neighbours()}, table, **QUICK)


def test_scores_need_no_mapping(table):
    expected = {"entropy": Entropy().score(table), "max_probability": MaxProbability().score(table)}
    wrong = ~metrics.correct(table.logit, table.label)
    for given in ([Entropy(), MaxProbability()], ("entropy", MaxProbability()), ["entropy", "max_probability"]):
        found = evaluate(given, table, metrics=["aurc"], **QUICK)
        assert {name: row["aurc"].value for name, row in found.scores.items()} == {
            name: metrics.aurc(u, wrong) for name, u in expected.items()
        }
    for given in (Entropy(), "entropy"):
        found = evaluate(given, table, ood=data(50, seed=3), metrics=["ood_auroc"], **QUICK)
        assert list(found.scores) == ["entropy"]
        assert set(found["entropy"]) == {"ood_auroc"}
        assert found.microseconds["entropy"] > 0


def test_two_scores_of_one_name_are_refused(table):
    with pytest.raises(TableError, match=r"evaluate: scores in a list must have different names; two .* 'neighbours'"):
        evaluate([Neighbours(k=1), Neighbours(k=2)], table, **QUICK)


def test_a_path_in_place_of_a_table_is_told(table):
    # The types are checked first under test, and not where people work: the function inside is asked.
    asked = inspect.unwrap(evaluate)
    with pytest.raises(TableError, match=r'evaluate: table must be a table; the path "cache/test" came\. Open it: '):
        asked({"u": Entropy()}, "cache/test")
    with pytest.raises(TableError, match=r'evaluate: ood must be a table; .* dubito\.open\("cache/odd"\)\.'):
        asked({"u": Entropy()}, table, ood="cache/odd")
    with pytest.raises(TableError, match=r"evaluate: scores must be .*; got Tensor\. Give arrays by name: "):
        asked(torch.zeros(N), table)


def test_a_table_without_rows(table):
    with pytest.raises(TableError, match=r"evaluate needs at least one row; cache/test has none\."):
        evaluate({"u": Entropy()}, table.rows(slice(0, 0)), **QUICK)
    with pytest.raises(
        TableError, match=r"^evaluate: ood must have at least one row; cache/test has none\. Give images"
    ):
        evaluate({"u": Entropy()}, table, ood=table.rows(slice(0, 0)), **QUICK)


def test_scores_have_a_cost_and_arrays_none(found):
    assert found.microseconds["max_probability"] > 0
    assert found.microseconds["array"] is None


def test_as_json(found):
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (plain["table"], plain["rows"]) == ("cache/test", N)
    assert list(plain["scores"]) == ["max_probability", "neighbours", "array"]
    aurc = found["array"]["aurc"]
    assert plain["scores"]["array"]["aurc"] == {
        "value": aurc.value,
        "low": aurc.low,
        "high": aurc.high,
        "confidence": 0.95,
    }
    assert plain["scores"]["array"]["microseconds"] is None
    assert plain["model"]["accuracy"]["value"] == found.model["accuracy"].value


def test_as_text(found):
    title, header, *body = str(found).splitlines()
    assert title.startswith("cache/test: 240 images  accuracy 0.")
    assert header.split("  ")[0] == "score"
    for key in ("error AUROC", "AURC", "excess AURC", "AUGRC", "R-AUROC", "µs / image"):
        assert key in header
    assert [line.split()[0] for line in body] == ["max_probability", "neighbours", "array"]
    value = found["neighbours"]["error_auroc"]
    assert f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]" in body[1]
    assert body[2].endswith("-")
    # columns stand under their titles
    assert all(line[header.index("AURC")] == "0" for line in body)


def test_as_cells(found):
    header, *body = found.lines()
    assert len(header) == 7
    assert all(len(line) == 7 for line in body)
    accuracy = found.model["accuracy"]
    assert found.model_cells()["accuracy"] == f"{accuracy.value:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"
    assert list(found.model_cells()) == ["accuracy", "NLL", "Brier", "ECE", "Recall@1"]


def test_a_metric_that_one_score_lacks_is_a_dash():
    found = evaluate({"u": [0.1, 0.2, 0.3]}, Table(logit=[[1.0, 0.0]] * 3, label=[0, 1, 0]), **QUICK)
    found.scores["other"] = {}
    found.microseconds["other"] = None
    assert found.lines()[-1] == ["other", "-", "-", "-", "-", "-"]


def test_no_scores_leave_the_model_s_metrics(table):
    found = evaluate({}, table, **QUICK)
    assert found.metrics == []
    assert str(found).splitlines()[1].split() == ["score", "µs", "/", "image"]
    assert found.model["accuracy"].value > 0


def test_an_unknown_score_is_not_there(found):
    with pytest.raises(KeyError, match="oracle"):
        found["oracle"]


def test_ensembles_that_were_asked_otherwise_are_not_compared(table):
    def dropped(of, rate):
        logits, stream = torch.randn(len(of), 4, C, generator=torch.Generator().manual_seed(0)), metrics.MemberStream()
        stream.add(logits)
        asked = of.extended(dropout=stream.summary(), dropout_logit=logits)
        asked.provenance = {"ensembles": {"dropout": {"rate": rate}}}
        return asked

    known, foreign = dropped(table, 0.1), data(50, seed=3)
    plain = MutualInformation(of="dropout")
    for score in (plain, Temperature(plain).fit(known)):
        with pytest.raises(
            TableError, match=r"'u' compares 'dropout' of .* settings \(rate=0\.1 and rate=0\.2\)\. Extract"
        ):
            evaluate({"u": score}, known, ood=dropped(foreign, 0.2), **QUICK)
    assert "ood_auroc" in evaluate({"u": plain}, known, ood=dropped(foreign, 0.1), **QUICK)["u"]
    assert "ood_auroc" in evaluate({"u": Entropy()}, known, ood=dropped(foreign, 0.2), **QUICK)["u"]


def test_gradients_that_were_asked_otherwise_are_not_compared():
    def table(sigma: float) -> Table:
        told = {"settings": {"copies": 4, "sigma": sigma}, "layers": ["fc"], "depth": [0], "of": 1}
        columns = {name: torch.rand(20, 1) for name in ("gradient", "gradient_predicted", "gradient_uniform")}
        return Table(
            logit=torch.randn(20, 3),
            feature=torch.randn(20, 2),
            provenance={"gradients": {"gradient": told}},
            **columns,
        )

    weak, strong = table(0.1), table(0.2)
    for score in (REGrad(), PredictedGradient(), GradNorm("gradient")):
        with pytest.raises(TableError, match=r"evaluate: 'u' compares 'gradient' of .*\(sigma=0\.1 and sigma=0\.2\)"):
            evaluate({"u": score}, weak, ood=strong, resamples=5)
        assert evaluate({"u": score}, weak, ood=table(0.1), resamples=5)["u"]["ood_auroc"]
    assert evaluate({"u": GradNorm()}, weak, ood=strong, resamples=5)["u"][
        "ood_auroc"
    ]  # the last layer has no settings
