"""Which score for my model? Rankings, verdicts and words, on images whose truth is known."""

import json
import warnings

import pytest
import torch

import dubito
from dubito import Table, compare
from dubito.errors import DubitoWarning, NotFittedError, TableError, ValueRangeError
from dubito.metrics import aurc, auroc, correct, interval
from dubito.scores import DEUP, make_score
from dubito.table import Provenance
from dubito.validate import check_bootstrap


def images(n: int, seed: int = 0, *, shift: float = 0.0, **more) -> Table:
    """Four classes in eight features; logits are noisy, and OOD features lie elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=draw)
    z = 2 * torch.eye(4, 8)[label] + torch.randn(n, 8, generator=draw) + shift
    logit = 2 * z[:, :4]
    return Table(feature=z, logit=logit, label=label, name=f"set {seed}", **more)


def copies(n: int, seed: int = 0, *, kind: str = "blur", shift: float = 0.0) -> Table:
    """Images with the ids of corrupted copies."""
    return images(n, seed, shift=shift, id=[f"{kind}-5/{number:06d}" for number in range(n)])


class Planted(dubito.Entropy):
    """Knows the truth up to noise; a score as any other."""

    name = "planted"
    needs = ("truth",)

    def score_batch(self, batch):
        return batch.whole("truth")


def with_truth(table: Table, noise: float) -> Table:
    wrong = (~correct(table.logit, table.label)).double()
    draw = torch.Generator().manual_seed(9)
    return table.extended(truth=wrong + noise * torch.randn(len(table), generator=draw, dtype=torch.float64))


def test_values_are_those_of_the_metrics():
    table = images(200)
    result = compare(table, scores={"entropy": dubito.Entropy(), "margin": dubito.Margin()}, resamples=200, seed=4)
    wrong = ~correct(table.logit, table.label)
    u = dubito.Entropy().score(table)
    assert result["error_auroc"].scores["entropy"].value.value == auroc(u, wrong)
    assert result["aurc"].scores["entropy"].value.value == aurc(u, wrong)
    assert result["aurc"].positives == int(wrong.sum())
    alone = interval(auroc, u, wrong, resamples=200, seed=4)
    assert result["error_auroc"].scores["entropy"].value == pytest.approx(alone, abs=0.01)


def test_the_one_that_knows_is_better_and_the_rest_is_noise():
    table = with_truth(images(300), 0.3)
    scores = {"entropy": dubito.Entropy(), "planted": Planted(), "margin": dubito.Margin()}
    result = compare(table, scores=scores, resamples=300)
    question = result["error AUROC"]
    assert question.leading == ["planted"]
    assert [one.rank for one in question.scores.values()] == [1, 2, 3]
    assert question.scores["planted"].gap_to_best == (0, 0, 0)
    assert result.ranking[0] == "planted"
    assert result.choice == "planted"
    assert result.findings()[0].startswith(
        "error AUROC: planted is better than every other score on these 300 images ("
    )


def test_noise_is_called_noise_and_of_equals_the_one_that_needs_the_fewest_columns_is_chosen():
    result = compare(images(300), scores={"entropy": dubito.Entropy(), "margin": dubito.Margin()}, resamples=300)
    first = result.findings()[0]
    assert "cannot be distinguished on these 300 images (" in first
    assert "Differences below about 0." in first
    assert result.choice == result.ranking[0]
    result.costs[result.choice] = result.costs[result.choice]._replace(microseconds=1e6)
    assert result.choice == result.ranking[0]  # times differ from run to run
    result.costs["entropy"] = result.costs["entropy"]._replace(reads=("feature", "logit"))
    assert result.choice == "margin"
    leading = "Of the scores that could be best on every question"
    assert result.findings()[-1] == f"{leading}, margin needs the fewest columns."


def test_aurc_is_better_when_lower():
    table = with_truth(images(300), 0.3)
    result = compare(table, scores={"entropy": dubito.Entropy(), "planted": Planted()}, resamples=100)["aurc"]
    assert result.scores["planted"].value.value < result.scores["entropy"].value.value
    assert result.scores["entropy"].gap_to_best.value == pytest.approx(
        result.scores["entropy"].value.value - result.scores["planted"].value.value
    )


def test_ood_sets_are_questions_of_their_own():
    table, train = images(150), images(150, 1)
    ood = {"near": images(100, 2), "far": images(100, 3, shift=4.0)}
    result = compare(table, ood, train=train, resamples=100)
    assert [one.title for one in result.questions] == ["error AUROC", "AURC", "OOD AUROC near", "OOD AUROC far"]
    far = result["far"]
    assert far.scores["mahalanobis"].value.value > 0.99
    assert "mahalanobis" in far.leading
    assert "entropy" not in far.leading
    assert (far.images, far.positives) == (250, 100)
    u = torch.cat([dubito.Entropy().score(table), dubito.Entropy().score(ood["far"])])
    assert far.scores["entropy"].value.value == auroc(u, torch.arange(250) >= 150)
    assert "(100 of them OOD)" in " ".join(result.findings())


def test_only_ood_images_are_needed():
    table = images(60).select("feature", "logit")
    result = compare(table, images(40, 3, shift=4.0), resamples=50)
    assert [one.title for one in result.questions] == ["OOD AUROC set 3"]
    assert any("its errors are unknown" in sentence for sentence in result.findings())


def test_an_ensemble_that_the_ood_table_lacks_is_left_out():
    table = images(40)
    members = table.logit[:, None] + torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(0))
    both = table.extended(members_logit=members, dropout_logit=members + 0.1)
    result = compare(both, images(30, 2), resamples=20)
    assert "mutual_information:members" not in result.costs
    assert result.left_out["mutual_information:members"] == "set 2 lacks column 'members'"


def test_sentences_name_what_was_left_out_once():
    text = str(compare(images(60), resamples=20))
    assert "Left out: temperature (it learns from logit, label: give other in-distribution images to fit on)." in text
    assert text.count("there is no column 'members'") == 1


def test_json_is_plain():
    result = compare(images(60), scores={"entropy": dubito.Entropy()}, resamples=20)
    plain = json.loads(result.to_json())
    assert plain["choice"] == "entropy"
    assert plain["questions"][0]["scores"]["entropy"]["rank"] == 1
    assert "there is no other score to compare" in plain["findings"][0]


def test_few_errors_are_mentioned():
    logit = torch.tensor([[3.0, 0.0]]).repeat(40, 1) + torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    table = Table(logit=logit, label=[1] * 12 + [0] * 28)
    output = compare(table, scores={"entropy": dubito.Entropy(), "energy": dubito.Energy()}, resamples=200).findings()[
        0
    ]
    assert "Only 12 images are of the rarer class. Differences below about 0." in output


@pytest.mark.parametrize(("label", "word"), [(0, "right"), (1, "wrong")])
def test_without_both_kinds_errors_cannot_be_ranked(label, word):
    table = Table(logit=[[2.0, 0.0]] * 5, label=[label] * 5)
    with pytest.raises(TableError, match=f"All 5 predictions are {word}, so errors cannot be ranked. Give more images"):
        compare(table)


def test_what_cannot_be_compared_is_refused():
    table = images(20)
    with pytest.raises(TableError, match="compare: table needs at least 1 row"):
        compare(table.rows([]))
    with pytest.raises(TableError, match="compare: ood needs at least 1 row; set 2 has 0"):
        compare(table, images(5, 2).rows([]))
    with pytest.raises(
        TableError, match=r"compare: ood tables need names of their own; got 2 with 1. Pass them by name: ood="
    ):
        compare(table, [images(5, 2), images(5, 2)])
    with pytest.raises(TableError, match=r"compare: scores must be scores, .*; got list. Leave them out for all that"):
        compare.__wrapped__(table, scores={"u": [0.0] * 20})  # past the type checks of the tests
    with pytest.raises(ValueRangeError, match=r"resamples must be a whole number, at least 2; got 1. 1000 are usual"):
        compare(table, resamples=1)
    with pytest.raises(
        TableError, match=r"no score can be computed from table in memory .*\. Extract logits or features\.$"
    ):
        compare(Table(feature=[[0.0], [1.0]], label=[0, 1]))
    with pytest.warns(DubitoWarning, match="must be called"):
        misspelt = Table(logits=table.logit, features=table.feature, labels=table.label)
    with pytest.raises(TableError, match=r"^compare needs column 'logit'; .* The column 'logits' must be called 'log"):
        compare(misspelt)
    with pytest.raises(ValueRangeError, match=r"question must be one of error AUROC, AURC.*; got 'x'"):
        compare(table, scores={"entropy": dubito.Entropy()}, resamples=20)["x"]


def test_one_that_fails_on_these_images_is_left_out_with_its_reason_unless_it_was_named():
    table, train = images(60), images(60, 1)
    feature = table.feature.clone()
    feature[3] = float("nan")
    result = compare(table.extended(feature=feature), train=train, resamples=20)
    assert "entropy" in result.costs
    assert "neighbours" not in result.costs
    assert "column 'feature' must be finite; row 3 of set 0 holds nan" in result.left_out["neighbours"]
    odd = images(60, 2)
    odd.feature[3] = float("nan")
    ood = compare(table, {"odd": odd}, train=train, resamples=20)
    assert "neighbours" in ood.left_out
    requested = {"entropy": dubito.Entropy(), "neighbours": dubito.Neighbours().fit(train)}
    with pytest.raises(ValueRangeError, match="column 'feature' must be finite"):
        compare(table.extended(feature=feature), scores=requested, resamples=20)


def test_tables_of_another_width_and_paths_are_refused():
    table = images(20)
    with pytest.raises(TableError, match=r"column 'logit' of ood 'x' \(.*\) must be 4 wide, as in set 0; got 7"):
        compare(table, {"x": Table(logit=torch.zeros(5, 7))})
    with pytest.raises(TableError, match=r'compare: ood must be a table; got the path "cache/x". Open it: dubito.open'):
        compare.__wrapped__(table, "cache/x")


def test_named_scores_that_learn_are_fitted_on_train():
    table, train, own = images(100), images(300, seed=1), dubito.Neighbours(k=5)
    result = compare(table, train=train, scores={"vim": "vim", "own": own, "energy": "energy"}, resamples=20)
    assert torch.equal(result.uncertainties["vim"][None], make_score("vim").fit(train).score(table))
    assert torch.equal(result.uncertainties["own"][None], dubito.Neighbours(k=5).fit(train).score(table))
    assert not own.is_fitted  # the user's own is left as it was
    assert result.costs["energy"].fit_seconds is None
    assert result.costs["vim"].fit_seconds > 0


def test_it_warns_of_losses_on_training_images():
    table, train = images(60), images(200, seed=1)
    deup = DEUP(width=8, depth=1)
    with pytest.warns(DubitoWarning, match=r"deup is fitted on set 1\. If the model was trained on these images"):
        compare(table, train=train, scores=[deup, "vim"], resamples=20)
    ready = deup.fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DubitoWarning)
        compare(table, train=train, scores=[ready, "vim"], resamples=20)


def test_what_is_no_table_score_or_setting_is_refused():
    with pytest.raises(TableError, match=r'compare: table must be a table; got the path "cache/x"'):
        compare.__wrapped__("cache/x")  # past the type checks of the tests
    with pytest.raises(TableError, match=r'compare: train must be a table; got the path "cache/x". Open it: dubi'):
        compare.__wrapped__(images(20), train="cache/x")
    with pytest.raises(
        NotFittedError, match=r"compare: density learns from feature, label: pass train=..., other in-d"
    ):
        compare(images(20), scores=["entropy", "density"])
    assert set(compare(images(60), scores=["entropy", dubito.Margin()], resamples=20).costs) == {"entropy", "margin"}
    wrong = [
        ("confidence", 95),
        ("confidence", "0.9"),
        ("resamples", 1),
        ("resamples", 10.5),
        ("seed", -1),
        ("seed", "x"),
    ]
    for name, value in wrong:
        with pytest.raises(ValueRangeError, match=rf"compare: {name} must be a .*number.*; got {value!r}\. .* usual\."):
            check_bootstrap(by="compare", **{name: value}, least=2)


def test_with_a_handful_of_ood_images_no_gap_counts():
    scores = {"density": dubito.Density().fit(images(200, 7)), "entropy": dubito.Entropy()}
    subset, more = (
        compare(images(100), {"far": images(n, 3, shift=5.0)}, scores=scores, resamples=50)["far"] for n in (9, 10)
    )
    assert subset.scores["entropy"].gap_to_best.low == 0  # a bootstrap of nine would see more
    assert subset.leading == ["density", "entropy"]
    assert "Only 9 images are of the rarer class: too few to distinguish any scores." in subset.finding()
    assert more.leading == ["density"]


def test_ood_images_may_be_called_errors():
    result = compare(
        images(60), {"errors": images(40, 3, shift=4.0)}, scores={"entropy": dubito.Entropy()}, resamples=20
    )
    assert [one.title for one in result.questions] == ["error AUROC", "AURC", "OOD AUROC errors"]
    assert "(40 of them OOD)" in result.findings()[2]


def test_a_score_of_one_pass_is_cheaper_than_one_of_many():
    result = compare(images(300), scores={"entropy": dubito.Entropy(), "margin": dubito.Margin()}, resamples=100)
    result.costs["margin"] = result.costs["margin"]._replace(microseconds=1e-6, reads=("members",))
    assert set(result["error AUROC"].leading) == {"entropy", "margin"}
    assert result.choice == "entropy"


def test_another_model_is_refused_and_shared_images_are_reported():
    table, other = (images(20, seed, provenance=Provenance(weights=str(seed))) for seed in (0, 1))
    with pytest.raises(TableError, match=r"train \(set 1\) and set 0 must come from one model with one transform"):
        compare(table, train=other)
    ids = [str(i) for i in range(20)]
    entropy = {"entropy": dubito.Entropy()}
    message = (
        r"at least 20 of the 20 images of set 0 are also in train \(set 0\) \(such as '0'\)\. Scores that learn have"
    )
    with pytest.warns(DubitoWarning, match=message):
        compare(images(20, id=ids), train=images(20, id=ids), scores=entropy, resamples=20)
    # Other images of the same names, as two arrays have them, are no reason to warn.
    compare(images(20, id=ids), train=images(20, 1, id=ids), scores=entropy, resamples=20)


def test_shared_images_are_reported_whatever_they_are_called_and_in_whatever_batches_they_were_extracted():
    entropy = {"entropy": dubito.Entropy()}
    table = images(20, id=[f"tench/{i}.jpg" for i in range(20)])
    noise = 1 + 1e-6 * torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    feature = torch.cat([images(15, 1).feature, table.feature[:5] * noise])
    train = images(20, 1, id=[f"{i}.jpg" for i in range(20)]).extended(feature=feature)
    with pytest.warns(
        DubitoWarning, match=r"5 of the 20 images of set 0 .* train .* \(such as 'tench/0.jpg', there '15.jpg'\)\. Sco"
    ):
        compare(table, train=train, scores=entropy, resamples=20)
    nameless = Table(logit=train.logit, feature=feature)
    with pytest.warns(
        DubitoWarning, match=r"5 of the 20 images of set 0 are also in train .* \(such as 'tench/0.jpg'\)\. Scores"
    ):
        compare(table, train=nameless, scores=entropy, resamples=20)


def test_in_distribution_images_that_are_given_as_ood_are_reported():
    table = images(20)
    message = r"20 of the 20 images of set 0 are also in ood 'set 0' \(set 0\)\. In-distribution and OOD at once, they"
    with pytest.warns(DubitoWarning, match=message):
        result = compare(table, ood=table, scores={"entropy": dubito.Entropy()}, resamples=20)
    assert result["set 0"].scores["entropy"].value.value == 0.5


def test_a_head_may_have_learned_from_these_images() -> None:
    head = dubito.UncertaintyHead(width=4, depth=1, recipe=dubito.heads.Recipe(rows=500))
    draw = torch.Generator().manual_seed(0)
    table = Table(
        feature=torch.randn(60, 4, generator=draw),
        logit=torch.randn(60, 3, generator=draw),
        label=torch.randint(3, (60,), generator=draw),
        loss=torch.rand(60, generator=draw),
    )
    head.fit(table)
    head.trained_["corpus"] = "60 pictures of clouds"
    result = compare(table, scores={"mine": head, "entropy": dubito.Entropy()}, resamples=20)
    message = [
        one for one in result.findings() if one.startswith("mine was trained on losses of 60 pictures of clouds:")
    ]
    assert len(message) == 1


def test_the_table_marks_what_may_be_noise(tmp_path):
    table = with_truth(images(300), 0.3)
    scores = {"entropy": dubito.Entropy(), "planted": Planted(), "margin": dubito.Margin()}
    result = compare(
        table, {"far": images(50, 3, shift=4.0).extended(truth=torch.ones(50))}, scores=scores, resamples=99
    )
    header, first, second, _ = result.lines()
    assert header[:6] == ["score", "errors at 80 %", "error AUROC", "gap to best", "AURC", "gap to best"]
    assert header[6:] == ["OOD AUROC far", "gap to best", "µs / image", "fit", "reads"]
    assert first[0] == "planted"
    assert first[3] == "= -"
    gap = result["error_auroc"].scores[second[0]].gap_to_best
    assert second[3] == f"{gap.value:.3f} [{gap.low:.3f}, {gap.high:.3f}]"
    assert first[-2:] == ["-", "truth"]
    csv = result.to_csv(tmp_path / "scores.csv").read_text().splitlines()
    assert csv[0].startswith("score,errors_at_80,error_auroc,error_auroc_low,error_auroc_high,error_auroc_gap_to_best,")
    assert len(csv) == 4


def test_plot_shows_gaps_to_the_best(axes):
    result = compare(images(300), scores={"entropy": dubito.Entropy(), "margin": dubito.Margin()}, resamples=50)
    assert result.plot(axes, question="AURC") is axes
    ranked = result["AURC"].scores
    assert axes.get_xlabel() == "AURC: gap to the best"
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        f"{name}  {one.value.value:.3f}" for name, one in ranked.items()
    ]
    assert axes.containers[0].lines[0].get_xdata().tolist() == [one.gap_to_best.value for one in ranked.values()]


def test_a_plot_grows_with_the_number_of_scores():
    pytest.importorskip("matplotlib").use("Agg")
    many = {f"energy {place}": dubito.Energy(temperature=1.0 + place) for place in range(30)}
    picture = compare(images(60), scores=many, resamples=10).plot()
    assert picture.figure.get_size_inches().tolist() == [5, pytest.approx(7)]  # 1 + 0.2 * 30
    picture.figure.clear()


def test_the_best_at_corrupted_copies_is_the_choice_for_unseen_ood_images():
    # Copies of features that moved away: their logits are as certain as before, their neighbours are far.
    table, train = images(150), images(400, seed=1)
    corrupted = copies(600, seed=0, shift=3.0)
    result = compare(table, train=train, corrupted=corrupted, resamples=60)
    question = result["corrupted copies"]
    assert (question.images, question.positives) == (750, 600)
    u = {name: torch.cat([score.score(table), score.score(corrupted)]) for name, score in result.fitted.items()}
    values = {name: auroc(one, torch.arange(750) >= 150) for name, one in u.items()}
    assert result.ood_choice == max(values, key=values.__getitem__)
    assert question.scores[result.ood_choice].value.value == values[result.ood_choice]
    assert values[result.ood_choice] > values["entropy"] + 0.1
    assert json.loads(result.to_json())["ood_choice"] == result.ood_choice
    assert any(
        sentence.startswith(f"For OOD images that you have not seen: {result.ood_choice}, which separates corrupted")
        for sentence in result.findings()
    )
    # The choice among scores of errors is the same as without copies.
    assert result.choice == compare(table, train=train, resamples=60).choice
    lead = "Of the scores that could be best on every question except the corrupted copies, "
    assert f"{lead}{result.choice} needs the fewest columns." in result.findings()


def test_the_auroc_of_all_copies_is_the_mean_over_corruptions():
    table, blurred, noisy = images(80), copies(80, 1, shift=0.5), copies(80, 2, kind="noise", shift=1.5)
    entropy = {"entropy": dubito.Entropy()}
    by_kind = [compare(table, {"copies": part}, scores=entropy, resamples=20)["copies"] for part in (blurred, noisy)]
    mean = sum(one.scores["entropy"].value.value for one in by_kind) / 2
    both = dubito.concat([blurred, noisy])
    question = compare(table, corrupted=both, scores=entropy, resamples=20)["corrupted copies"]
    assert question.scores["entropy"].value.value == pytest.approx(mean)


def test_corrupted_copies_are_enough_and_without_them_there_is_no_ood_choice():
    table = Table(logit=images(60).logit)
    scores = ["entropy", "margin"]
    alone = compare(table, corrupted=copies(60, 1, shift=2.0).select("logit", "id"), scores=scores, resamples=20)
    assert [one.about for one in alone.questions] == ["corrupted copies"]
    assert alone.choice in alone["corrupted copies"].leading
    assert alone.findings()[-1].startswith("Of the scores that could be best on this question, ")
    assert compare(images(60), scores=scores, resamples=20).ood_choice is None


def test_copies_that_are_not_corrupted_or_have_the_name_of_an_ood_table():
    table = images(60)
    with pytest.warns(UserWarning, match="They are not corrupted"):
        compare(table, corrupted=copies(60), scores="entropy", resamples=20)
    with pytest.raises(TableError, match="no ood table may be called 'corrupted copies'"):
        compare(table, {"corrupted copies": images(9, seed=1)}, corrupted=copies(9, 2), scores="entropy")
    for other, first in ((images(9, seed=1), "0"), (images(9, seed=1, id=[f"fog/{i}" for i in range(9)]), "fog/0")):
        expected = rf"like NAME-SEVERITY/IMAGE, such as 'fog-1/000000'; set 1 has '{first}'. Extract dubito.data"
        with pytest.raises(TableError, match=expected):
            compare(table, corrupted=other, scores="entropy")
    with pytest.raises(TableError, match="compare: corrupted needs at least 1 row"):
        compare(table, corrupted=table.rows([]), scores="entropy")
