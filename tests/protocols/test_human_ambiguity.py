"""People's ambiguity: from label sets and votes to AUROC and rank correlation."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy as scipy_entropy

from dubito import metrics
from dubito.data.labels import Votes, read_label_sets, read_votes
from dubito.errors import ImagesError, MissingColumnError, TableError, ValueRangeError
from dubito.protocols.human_ambiguity import ambiguous_images, human_ambiguity, vote_degree, vote_entropy
from dubito.scores import Entropy, Margin, MaxProbability
from dubito.table import Table

QUICK = {"resamples": 60}
N = 60


@pytest.fixture(scope="module")
def table() -> Table:
    logit = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return Table(logit=logit, id=[f"{i + 1:08d}.jpg" for i in range(N)], name="cache/val")


def test_sets():
    sets = [(970,), (970, 795), (), (3, 3)]
    assert ambiguous_images(dict(enumerate(sets)), none="drop") == {0: False, 1: True, 3: False}  # by row
    by_image = dict(zip("abcd", sets, strict=True))
    assert ambiguous_images(by_image) == {"a": False, "b": True, "c": True, "d": False}
    assert ambiguous_images(by_image, none="drop") == {"a": False, "b": True, "d": False}
    with pytest.raises(ValueRangeError, match="none must be one of ambiguous, drop; got 'clear'"):
        ambiguous_images(by_image, none="clear")


def test_vote_entropy():
    counts = np.random.default_rng(0).integers(0, 20, (30, 10)) + np.eye(30, 10, dtype=int)
    assert vote_entropy(counts).tolist() == pytest.approx(scipy_entropy(counts, axis=1).tolist(), abs=1e-12)
    assert vote_entropy([[0.5, 0.5, 0.0]]).tolist() == [math.log(2)]  # soft labels are votes too


@pytest.mark.parametrize("counts", [[[1, 0], [0, 0]], [[1, -1]], [1, 2]])
def test_votes_that_are_none(counts):
    with pytest.raises(ValueRangeError, match="counts must have the axes"):
        vote_entropy(counts)


def test_degree_of_votes():
    votes = {
        "one label": {4: Votes(no=2, maybe=0, yes=3)},
        "two": {1: Votes(0, 0, 5), 2: Votes(2, 2, 1), 3: Votes(5, 0, 0)},  # 5 against 1 + 2/2 = 2
        "nobody": {1: Votes(5, 0, 0), 2: Votes(5, 0, 0)},
    }
    expected = -(5 / 7 * math.log(5 / 7) + 2 / 7 * math.log(2 / 7))
    assert vote_degree(votes) == pytest.approx({"one label": 0.0, "two": expected})


def test_values_are_those_of_the_metrics_on_the_annotated_rows(table, tmp_path):
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 3, N)
    sets = "val_id,label,real_labels\n" + "".join(
        f"{i + 1},0,{' '.join(map(str, range(size)))}\n" for i, size in enumerate(sizes)
    )
    (tmp_path / "labels.csv").write_text(sets)
    yes = rng.integers(1, 6, (N // 2, 3))
    votes = "val_id,label,votes_no,votes_maybe,votes_yes,ds_score\n" + "".join(
        f"{2 * i + 1},{label},0,0,{yes[i, label]},0.5\n" for i in range(N // 2) for label in range(3)
    )
    (tmp_path / "votes.csv").write_text(votes)
    result = human_ambiguity(
        {"margin": Margin(), "array": torch.linspace(0, 1, N)},
        table,
        ambiguous=ambiguous_images(read_label_sets(tmp_path / "labels.csv"), none="drop"),
        degree=vote_degree(read_votes(tmp_path / "votes.csv")),
        **QUICK,
    )
    kept = torch.from_numpy(sizes > 0)
    degree = torch.from_numpy(scipy_entropy(yes, axis=1))
    expected = {"margin": Margin(), "entropy": Entropy(), "max_probability": MaxProbability()}
    for name, u in ((key, score.score(table)) for key, score in expected.items()):
        assert result.auroc[name].value == metrics.auroc(u[kept], torch.from_numpy(sizes[kept] > 1))
        assert result.spearman[name].value == pytest.approx(metrics.spearman(u[::2], degree), abs=1e-12)
        assert result.auroc[name].low < result.auroc[name].value < result.auroc[name].high
        assert result.spearman[name].low < result.spearman[name].value < result.spearman[name].high
    assert list(result.auroc) == ["margin", "array", "entropy", "max_probability"]
    assert (result.annotated, result.ambiguous, result.graded) == (int(kept.sum()), int((sizes > 1).sum()), N // 2)


def test_the_order_of_the_keys_does_not_count(table):
    degree = {f"{i + 1}": float(i % 7) for i in range(N)}
    turned = dict(reversed(degree.items()))
    first, second = (
        human_ambiguity({"m": Margin()}, table, degree=annotation, **QUICK) for annotation in (degree, turned)
    )
    assert first == second
    assert first == human_ambiguity({"m": Margin()}, table, degree=[i % 7 for i in range(N)], **QUICK)


def test_one_kind_of_annotation_is_enough(table):
    flags = [i % 3 == 0 for i in range(N)]
    result = human_ambiguity({"m": Margin()}, table, ambiguous=flags, **QUICK)
    assert result.spearman == {}
    assert result.lines()[0] == ["score", "AUROC"]
    assert str(result).startswith("cache/val: 20 of 60 images ambiguous\nscore ")
    graded = human_ambiguity({"m": Margin()}, table, degree=torch.arange(N), **QUICK)
    assert graded.lines()[0] == ["score", "Spearman"]
    assert str(graded).startswith("cache/val: 60 images with a degree\n")
    plain = json.loads(result.to_json())
    assert plain["auroc"]["m"]["value"] == result.auroc["m"].value
    assert (plain["published_auroc"], plain["ambiguous"]) == (0.701, 20)


def test_a_table_without_logits_has_no_baselines(table):
    result = human_ambiguity({"u": torch.arange(N)}, table.select("id"), degree=torch.arange(N), **QUICK)
    assert list(result.spearman) == ["u"]
    assert result.spearman["u"].value == pytest.approx(1.0)


def test_errors(table):
    with pytest.raises(TableError, match="human_ambiguity needs ambiguous= or degree=; got neither"):
        human_ambiguity({"m": Margin()}, table)
    with pytest.raises(ImagesError, match="human_ambiguity: degree must name images of the table"):
        human_ambiguity({"m": Margin()}, table, degree={"cat": 1.0})
    with pytest.raises(MissingColumnError, match="human_ambiguity: degree by image needs column 'id'"):
        human_ambiguity({"m": Margin()}, table.select("logit"), degree={"1": 1.0})
    with pytest.raises(TableError, match=r"ambiguous must have one value per row of cache/val, \(60,\); got \(2,\)"):
        human_ambiguity({"m": Margin()}, table, ambiguous=[True, False])
    with pytest.raises(TableError, match=r"score 'u' must have one value per row of cache/val, \(60,\); got \(3,\)"):
        human_ambiguity({"u": [1.0, 2.0, 3.0]}, table, degree=torch.arange(N))
    with pytest.raises(TableError, match="auroc needs positives and negatives"):
        human_ambiguity({"m": Margin()}, table, ambiguous=[True] * N)


def test_plot_shows_both_measures(table, axes):
    flags = [i % 3 == 0 for i in range(N)]
    result = human_ambiguity({"m": Margin()}, table, ambiguous=flags, degree=torch.arange(N), **QUICK)
    assert result.plot(axes) is axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["m", "entropy", "max_probability"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["AUROC", "Spearman"]
    assert axes.containers[0].lines[0].get_xdata()[0] == result.auroc["m"].value
