"""What each cause costs: by hand and against references; inputs, findings, JSON and the plot."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from dubito.errors import DubitoWarning, MissingColumnError, TableError, ValueRangeError
from dubito.explain.causes import ALL, REST, TOGETHER, points
from dubito.explain.diagnosis import Diagnosis, _ood_sets, diagnose
from dubito.metrics import auroc, interval
from dubito.scores import Entropy, ScaledEntropy
from dubito.scores.density import Density
from dubito.table import Provenance, Table
from tests.explain.blobs import QUICK, SURE, UNSURE, First, Watched, blobs, example


@pytest.fixture(scope="module")
def result() -> Diagnosis:
    return example()


def test_by_hand():
    table = Table(feature=[[0.0, 0.0], [2.0, 0.0], [0.5, 0.0]], logit=[SURE] * 3)
    ood = Table(feature=[[1.0, 1.0], [3.0, 1.0], [0.5, 1.0]], logit=[UNSURE] * 3)
    result = diagnose(table, ood, density=First(), **QUICK)["ood"]
    # D: 1 beats 0 and 0.5, 3 beats all, 0.5 beats 0 and ties with 0.5: (2 + 3 + 1.5) / 9
    expected = {"max_probability": 1, "entropy": 1, "scaled_entropy": 0, "density": 6.5 / 9}
    assert {name: value.value for name, value in result.auroc.items()} == pytest.approx(expected)
    parts = {"saturation": 0 - 1, "extrapolation": 6.5 / 9 - 0, "overlap": 1 - 6.5 / 9}
    assert {name: value.value for name, value in result.causes.items()} == pytest.approx(parts)
    assert result.together.value == pytest.approx(6.5 / 9 - 1)
    assert result.rows == 3
    assert all(value.spread == 0 for value in result.auroc.values())  # equally many: all draws are the same


@pytest.mark.parametrize(
    ("logits", "ood_logits", "features", "expected"),
    [
        # B, C and D in order: three parts.
        (SURE, SURE, (0, 5), {"saturation": 0.0, "extrapolation": 0.5, "overlap": 0.0}),
        # B = 1, C = 0, D = 1: cooling hurts, the density does not.
        (SURE, UNSURE, (0, 5), {TOGETHER: 0.0, "overlap": 0.0}),
        # B = 1, C = 0, D = 0: both hurt.
        (SURE, UNSURE, (5, 0), {ALL: 0.0}),
        # B = 0, C = 1, D = 0: the density hurts.
        (UNSURE, SURE, (5, 0), {"saturation": 1.0, REST: 0.0}),
    ],
)
def test_what_is_compared(logits, ood_logits, features, expected):
    inside, outside = (
        Table(feature=level + torch.rand(9, 1), logit=[logit] * 9)
        for level, logit in zip(features, (logits, ood_logits), strict=True)
    )
    result = diagnose(inside, outside, density=First(), **QUICK)["ood"]
    assert {name: part.value for name, part in result.parts.items()} == pytest.approx(expected)
    if len(expected) == 1:
        assert (result.lead, result.dominant) == (None, None)
    else:
        first, second, *_ = sorted(expected.values(), reverse=True)
        assert result.lead.value == pytest.approx(first - second)
        assert result.dominant == (result.ranked[0] if first > second else None)


def test_parts_add_up_to_what_entropy_misses(result):
    for causes in result.all:
        assert sum(value.value for value in causes.causes.values()) == pytest.approx(1 - causes.auroc["entropy"].value)
        assert sum(part.value for part in causes.parts.values()) == pytest.approx(1 - causes.auroc["entropy"].value)
        assert causes.together.value == pytest.approx(
            causes.causes["saturation"].value + causes.causes["extrapolation"].value
        )


def test_draws_are_balanced_and_close_to_all_pairs():
    table, ood = blobs(300, seed=1), blobs(60, scale=3.0, seed=2)
    result = diagnose(table, ood, density=First(), draws=200, **QUICK)["ood"]
    both = [torch.cat([score.score(table), score.score(ood)]) for score in (Entropy(), ScaledEntropy(), First())]
    truth = np.arange(360) >= 300
    assert result.rows == 60
    for name, scores in zip(("entropy", "scaled_entropy", "density"), both, strict=True):
        value = result.auroc[name]
        # A mean over 200 draws, each with that spread, around the AUROC of all pairs.
        assert value.value == pytest.approx(roc_auc_score(truth, scores), abs=4 * value.spread / 200**0.5)
        assert 0 < value.spread < 0.05


def test_intervals_are_those_of_the_bootstrap():
    table, ood = blobs(200, seed=1), blobs(200, scale=3.0, seed=2)
    result = diagnose(table, ood, density=First(), resamples=1500)["ood"].auroc["entropy"]
    scores = torch.cat([Entropy().score(table), Entropy().score(ood)])
    reference = interval(auroc, scores, torch.arange(400) >= 200, resamples=1500, seed=1)
    assert result.value == pytest.approx(reference.value)
    assert (result.low, result.high) == pytest.approx((reference.low, reference.high), abs=0.012)


def test_mean_over_sets(result):
    for name in ("entropy", "density"):
        values = [causes.auroc[name].value for causes in result.by_set.values()]
        assert result.mean.auroc[name].value == pytest.approx(sum(values) / 2)
        widths = [causes.auroc[name].high - causes.auroc[name].low for causes in result.by_set.values()]
        assert result.mean.auroc[name].high - result.mean.auroc[name].low < max(widths)
    assert diagnose(blobs(40), blobs(40, seed=1), density=First(), **QUICK).mean is None


def test_same_seed_same_answer():
    table, ood = blobs(80, seed=1), blobs(50, scale=2.0, seed=2)
    first, again, other = (diagnose(table, ood, seed=seed, **QUICK) for seed in (0, 0, 1))
    assert first.to_dict() == again.to_dict()
    assert first.to_dict()["sets"] != other.to_dict()["sets"]


def test_saturated_shares_and_accuracy():
    # In float32, softmax of (20, 0) rounds to 1: exp(-20) = 2e-9 is below half a unit of the last place, 6e-8.
    logit = [[20.0, 0.0], [10.0, 0.0], [0.0, 30.0], [0.0, 1.0]]
    table = Table(feature=torch.randn(4, 2), logit=logit, label=[0, 1, 1, 1])
    ood = Table(feature=torch.randn(2, 2), logit=logit[1::2])
    result = diagnose(table, ood, density=First(), **QUICK)
    assert (result.saturated, result["ood"].saturated, result.accuracy) == (0.5, 0.0, 0.75)


def test_lengths_and_angles_with_a_classifier():
    linear = torch.nn.Linear(2, 3, bias=False)
    linear.weight.data = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    table = Table(feature=[[3.0, 4.0], [0.0, 0.0]], logit=[[1.0, 0.0, 0.0]] * 2)
    result = diagnose(table, Table(feature=[[-1.0, 0.0], [0.0, -2.0]], logit=[[1.0, 0, 0]] * 2), density=First(),
                     classifier=linear, **QUICK)  # fmt: skip
    assert result.scores["norm"].tolist() == [5.0, 0.0]
    assert result.scores["cosine"].tolist() == pytest.approx([0.8, 0.0])
    assert result.ood_scores["ood"]["cosine"].tolist() == pytest.approx([1.0, 0.0])


def test_a_classifier_of_another_width_is_an_error():
    with pytest.raises(TableError, match=r"has features of width 8; linear layer reads 5"):
        diagnose(blobs(12), blobs(12, seed=1), density=First(), classifier=torch.nn.Linear(5, 4), **QUICK)


def test_findings(result):
    words = result.findings_by_set()
    assert list(words) == ["far", "near", "mean"]
    assert len(words["far"]) == 4
    assert words["far"][0].startswith("The entropy misses ")
    assert "No score on these features can repair that" in words["near"][3]
    assert "of mine and" in words["near"][1]  # of caches/mine, the folder alone
    assert result.findings() == [
        f"far: {words['far'][0]}", *words["far"][1:], f"near: {words['near'][0]}", *words["near"][1:],
        f"mean: {words['mean'][0]}",
    ]  # fmt: skip


def test_text(result):
    text = str(result)
    assert text.startswith("AUROC of OOD images against mine, and what each cause costs, in per cent")
    for part in (
        *("mine, 200 images scored, accuracy ", "A max p", "D density", "2 extrapolation", "intervals        95%"),
        *("5 balanced sets; AUROCs vary by up to ±", "fitted on train (400 rows)"),
    ):
        assert part in text
    near = result["near"].auroc["density"]
    assert f"{points(near.value)} [{points(near.low)}, {points(near.high)}]" in text
    assert result.to_pandas()["saturation_low"].tolist() == [one.causes["saturation"].low for one in result.all]


def test_findings_where_scaling_hurts():
    table = Table(feature=torch.rand(30, 1), logit=[SURE] * 30)
    result = diagnose(table, Table(feature=torch.rand(30, 1), logit=[UNSURE] * 30), density=First(), **QUICK)
    verdict, saturation, extrapolation, overlap = result.findings_by_set()["ood"]
    assert verdict == "There is little to explain: the entropy misses 0.0 points of AUROC."
    assert (
        "-100.0 [-100.0, -100.0] points, negative. Scaling the logits down makes it worse: it lets all small logits"
        in saturation
    )
    assert "make up for what scaling lost. Compared with the entropy itself, the density gains -" in extrapolation
    assert "The density is a worse guide than the entropy" in extrapolation
    assert "Fit it on more training images or with another covariance" in extrapolation
    assert "`max_probability` misses only 0.0 points, so overlap is at most that." in overlap
    thousand = torch.zeros(30, 1000)
    thousand[:, 0] = 12
    raised = torch.full((30, 1000), -40.0)
    raised[:, :2] = 0
    result = diagnose(
        Table(feature=table.feature, logit=thousand),
        Table(feature=table.feature + 2, logit=raised),
        density=First(),
        **QUICK,
    )
    assert (
        "all small logits count, and those of 1000 classes outweigh the large ones"
        in result.findings_by_set()["ood"][1]
    )


def test_findings_where_causes_cannot_be_separated():
    draw = torch.Generator().manual_seed(0)
    table = Table(feature=5 + torch.rand(60, 1), logit=[SURE] * 60)
    mixed = [UNSURE] * 45 + [[4.0, 0.0, 0.0]] * 15  # three quarters more uncertain than the table, one quarter less
    ood = Table(feature=torch.rand(60, 1, generator=draw), logit=mixed)
    verdict, _, extrapolation, _ = diagnose(table, ood, density=First(), **QUICK).findings_by_set()["ood"]
    # C = 0 as well as D: nothing is there to be made up for.
    assert verdict == (
        "The entropy misses 25.0 points of AUROC. Neither the scaled entropy nor the density does better, so the "
        "causes cannot be separated."
    )
    assert "make up for" not in extrapolation


def test_findings_where_saturation_or_the_density_dominates():
    # Entropy and scaled entropy reversed: in-distribution UNSURE, OOD SURE. So C - B = 1.
    table = Table(feature=torch.rand(30, 1), logit=[UNSURE] * 30)
    ood = Table(feature=torch.rand(30, 1), logit=[SURE] * 30)
    result = diagnose(table, ood, density=First(), **QUICK)["ood"]
    assert (result.ranked[0], result.dominant) == ("saturation", "saturation")
    words = diagnose(table, ood, density=First(), **QUICK).findings_by_set()["ood"]
    assert "The largest part is saturation, 100.0 [100.0, 100.0]; it exceeds extrapolation and overlap t" in words[0]
    assert "The score `scaled_entropy`, the entropy of 0.1 x logits, recovers these points" in words[1]
    # In-distribution and OOD alike in logits, apart in features: all is extrapolation.
    apart = Table(feature=torch.rand(30, 1) + 5, logit=[UNSURE] * 30)
    words = diagnose(table, apart, density=First(), **QUICK).findings_by_set()["ood"]
    assert "The largest part is extrapolation with aleatoric overlap, 50.0 [50.0, 50.0]" in words[0]
    assert "The score `density` recovers these points" in words[2]
    assert words[3] == (
        "Feature overlap costs next to nothing, 0.0 [0.0, 0.0] points: the features separate ood from table."
    )
    # And with features that lie closer than the in-distribution ones.
    closer = Table(feature=torch.rand(30, 1) - 5, logit=[UNSURE] * 30)
    words = diagnose(table, closer, density=First(), **QUICK).findings_by_set()["ood"]
    assert "The largest part is extrapolation and overlap together, 50.0 [50.0, 50.0]" in words[0]
    assert "so overlap is at most that" in words[3]
    assert "D is even below 50 %" in words[3]


def test_a_lead_by_chance_is_called_so():
    # B = C = D = 1/2 but for chance: saturation and extrapolation are both about zero, overlap one half.
    draw = torch.Generator().manual_seed(0)
    table, ood = (
        Table(feature=torch.rand(40, 1, generator=draw), logit=torch.randn(40, 3, generator=draw)) for _ in range(2)
    )
    result = diagnose(table, ood, density=First(), **QUICK)
    assert result["ood"].dominant == "overlap"
    assert "Saturation costs nothing distinguishable from zero" in result.findings_by_set()["ood"][1]
    # D - C and 1 - D are both 1/4 where D = 3/4 and C = 1/2.
    table = Table(feature=torch.arange(40.0)[:, None], logit=[UNSURE] * 40)
    half = torch.cat([torch.full((20, 1), 99.0), torch.arange(0.5, 40, 2)[:, None]])
    result = diagnose(table, Table(feature=half, logit=[UNSURE] * 40), density=First(), **QUICK)
    assert result["ood"].dominant is None
    assert result.findings_by_set()["ood"][0].endswith(
        ": within the interval, so neither can be called the main cause."
    )


def test_json(result):
    plain = json.loads(json.dumps(result.to_dict()))
    assert list(plain["sets"]) == ["far", "near", "mean"]
    assert plain["sets"]["far"]["causes"]["overlap"]["value"] == result["far"].causes["overlap"].value
    assert (plain["in_distribution"], plain["rows"], plain["classes"], plain["draws"]) == ("mine", 200, 4, 5)
    assert plain["findings"] == result.findings()
    assert plain["sets"]["near"]["findings"] == result.findings_by_set()["near"]
    assert plain["sets"]["far"]["dominant"] == result["far"].dominant
    assert "scores" not in plain
    assert points(-0.0004) == "0.0"


def test_without_train_the_table_is_split():
    Watched.fits.clear()
    table = Table(feature=torch.arange(21.0)[:, None], logit=torch.randn(21, 3))
    ood = Table(feature=100 + torch.arange(5.0)[:, None], logit=torch.randn(5, 3))
    result = diagnose(table, ood, density=Watched(), **QUICK)
    (fitted,), scored = Watched.fits, result.scores["density"].tolist()
    assert sorted(fitted + scored) == list(range(21))
    assert (len(fitted), result.rows) == (10, 11)
    assert result.fitted_on == "half of table (10 rows drawn with seed 0), which is not scored"


def test_train_is_fitted_on_and_all_of_the_table_is_scored():
    Watched.fits.clear()
    score = Watched()
    table, ood = blobs(20, seed=1), blobs(20, seed=2)
    result = diagnose(table, ood, train=blobs(30, seed=3, name="a/train"), density=score, **QUICK)
    assert (len(Watched.fits[0]), result.rows) == (30, 20)
    assert result.fitted_on == "train (30 rows)"
    assert not hasattr(score, "seen_")  # the user's own is left as it was
    diagnose(table, ood, density=Watched().fit(blobs(30, seed=3)), **QUICK)
    assert len(Watched.fits) == 2  # by the line above; one that is fitted is not fitted again


def test_too_large_a_density_is_refused_beforehand():
    with pytest.raises(ValueRangeError, match=r"memory=1e-06 allows 1e-06 GB"):
        diagnose(blobs(40), blobs(40, seed=1), density=Density(memory=1e-6), **QUICK)


def test_the_same_table_twice_is_warned_of():
    table = blobs(60)
    with pytest.warns(
        DubitoWarning,
        match=r"60 of 60 images of ood \(100.0 %\) are also in table, by their features",
    ):
        result = diagnose(table, table, density=First(), **QUICK)
    assert result["ood"].auroc["density"].value == pytest.approx(0.5)
    assert result["ood"].causes["overlap"].value == pytest.approx(0.5)
    assert result.notes[0] in str(result)
    assert "They draw AUROCs towards 50 % by at most about 50.0 points. Leave them out." in result.notes[0]
    message = r"20 of 60 images of table \(33.3 %\) are also .* D is too high by at most about 33.3 points. Fit it on"
    with pytest.warns(DubitoWarning, match=message):
        diagnose(table, blobs(60, seed=1), train=table.rows(slice(0, 20)), **QUICK)
    with pytest.warns(
        DubitoWarning,
        match=r"40 of 60 images .* too well, so D is too high by at most about 66.7 points. Fit it on other images.",
    ):
        diagnose(table, blobs(60, seed=1), train=table.rows(slice(0, 40)), **QUICK)


def test_a_few_shared_images_matter_little_and_the_note_says_so():
    table, other = blobs(100), blobs(200, seed=1)
    shared = {
        column: torch.cat([table.whole(column)[:1], other.whole(column)[1:]])
        for column in ("feature", "logit", "label")
    }
    note = (
        "1 of 200 images of ood (0.5 %) are also in table, by their features. They draw AUROCs towards 50 % by at most "
        "about 0.2 points. Leave them out."
    )
    with pytest.warns(DubitoWarning) as warned:
        result = diagnose(table, Table(**shared), density=First(), **QUICK)
    assert [str(warning.message) for warning in warned] == [note]
    assert result.notes == (note,)


def test_the_same_images_in_other_batches_and_in_half_precision_are_warned_of():
    table, other = blobs(100), blobs(100, seed=1)
    noise = 1 + 1e-6 * torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    anew = torch.cat([table.feature[:5] * noise, other.feature[5:]])
    for feature in (anew, anew.half()):
        with pytest.warns(DubitoWarning, match=r"5 of 100 images of ood \(5.0 %\) are also in table, by"):
            diagnose(table, other.extended(feature=feature), density=First(), **QUICK)
        with pytest.warns(DubitoWarning, match=r"5 of 100 images of table \(5.0 %\) are .* by at most about 5.0"):
            diagnose(table, blobs(100, seed=2), train=other.extended(feature=feature), **QUICK)


def test_what_a_fitted_density_was_fitted_on_cannot_be_checked():
    table, ood, train = blobs(40), blobs(40, seed=1), blobs(40, seed=2)
    note = "The density was fitted before; whether on images of table cannot be checked. If it was, D is too high."
    result = diagnose(table, ood, density=Density(covariance="diagonal").fit(train), **QUICK)
    assert result.notes == (note,)
    assert note in str(result)
    assert "4 Gaussians (one per class), diagonal covariances" in result.density
    assert diagnose(table, ood, density=Density(covariance="diagonal"), train=train, **QUICK).notes == ()
    assert diagnose(table, ood, density=First(), **QUICK).notes == ()  # there is nothing that it could learn


def made(model: str, n: int = 8) -> Table:
    table = blobs(n)
    return Table(feature=table.feature, logit=table.logit, provenance=Provenance(model, weights=model), name="x")


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TableError, "needs at least one OOD table", lambda t: diagnose(t, {})),
        (TableError, "ood needs at least 2 rows; .* has 0. Pass a table", lambda t: diagnose(t, t.rows(slice(0, 0)))),
        (TableError, "ood 'cats' needs at least 2 rows; .* has 1", lambda t: diagnose(t, {"cats": t.rows([0])})),
        (TableError, "table needs at least 2 rows", lambda t: diagnose(t.rows([1]), t)),
        (TableError, "needs at least 4 rows; it has 3. Pass train", lambda t: diagnose(t.rows([0, 1, 2]), t)),
        (TableError, "train needs at least 1 row; ", lambda t: diagnose(t, blobs(9), train=t.rows(slice(0, 0)))),
        (TableError, "train must be other rows than table", lambda t: diagnose(t, blobs(9), train=t)),
        (TableError, r"from another \(b, not a\): its weights differ", lambda t: diagnose(made("a"), made("b"))),
        (TableError, r"train .* another \(c, not a\)", lambda t: diagnose(made("a"), blobs(8), train=made("c"))),
        (TableError, "column 'logit' of ood 'ood' .* must be 4 wide", lambda t: diagnose(t, blobs(9, classes=5))),
        (
            MissingColumnError,
            r"diagnose \(table\) needs column 'feature'",
            lambda t: diagnose(Table(logit=t.logit), t),
        ),
        (MissingColumnError, r"\(ood 'x'\) needs column 'logit'", lambda t: diagnose(t, {"x": t.select("feature")})),
        (ValueRangeError, r"confidence must be .* in \(0, 1\); got 1\.0", lambda t: diagnose(t, t, confidence=1.0)),
        (ValueRangeError, "draws must be a whole number, at least 1; got 0", lambda t: diagnose(t, t, draws=0)),
        (ValueRangeError, "seed must be .* at least 0; got -1", lambda t: diagnose(t, blobs(9), seed=-1)),
        (TableError, "none called 'mean', as the mean .* got mean", lambda t: diagnose(t, {"mean": blobs(9)})),
        (TableError, "Pass a table, or several by name", lambda t: diagnose(t, blobs(9, name="caches/mean"))),
        (ValueRangeError, "got 'tied' together with", lambda t: diagnose(t, t, density=First(), covariance="tied")),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    with pytest.raises(error, match=text):
        call(blobs(12))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("cache", blobs(4), None), "table"),
        ((blobs(4), "cache", None), "ood"),
        ((blobs(4), {"cats": "cache"}, None), "ood 'cats'"),
        ((blobs(4), blobs(5), "cache"), "train"),
    ],
)
def test_paths_are_refused(arguments, what):
    with pytest.raises(TableError, match=rf'diagnose: {what} must be a table; .*path "cache".* Open it: dubito'):
        _ood_sets.__wrapped__(*arguments)  # past the type checks of the tests


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("feature", "density.score: column 'feature' must be finite; row 3 of table in memory holds nan"),
        ("logit", "max_probability.score: column 'logit' must be finite; row 3 of table in memory holds nan"),
    ],
)
def test_nan_is_an_error(column, text):
    clean, bad = blobs(12), blobs(12, seed=1)
    values = bad.whole(column).clone()
    values[3, 1] = torch.nan
    with pytest.raises(ValueRangeError, match=text):
        diagnose(clean, bad.extended(**{column: values}), **QUICK)


def test_plot_draws_one_histogram_per_set(result):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 (optional)

    for score in ("entropy", "density"):
        ax = result.plot(score=score)
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["mine", "far", "near"]
        assert len(ax.patches) == 3 * 40
        assert result.plot(ax, score=score) is ax
        plt.close(ax.figure)
    with pytest.raises(ValueRangeError, match=r"score must be one of max_probability, .* got 'entropi'"):
        result.plot(score="entropi")
