"""Columns of a table, of out-of-distribution tables and of a second model, against computing them directly."""

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import dubito
from dubito.errors import TableError, UnknownNameError
from dubito.explore.collection import Collection
from dubito.explore.inspector import Inspector
from dubito.explore.layout import Layouts
from dubito.explore.notes import Notes
from dubito.explore.server import make_app
from dubito.explore.thresholds import threshold_curve
from dubito.guard.thresholds import NO_LIMIT
from dubito.report.gallery import shares_below

from .conftest import EVIL, network


def test_columns_are_the_models_and_the_scores(table):
    collection = Collection(table)
    predicted = table.logit.argmax(1)
    np.testing.assert_array_equal(collection.values("predicted"), predicted)
    np.testing.assert_array_equal(collection.values("label"), table.label)
    np.testing.assert_array_equal(collection.values("correct"), (predicted == table.label).int())
    np.testing.assert_allclose(collection.values("entropy"), dubito.Entropy().score(table), rtol=1e-6)
    assert collection.values("entropy").dtype == np.float32
    assert collection.first_score == "entropy"


def test_rows_of_other_sets_come_after_and_have_no_label(table, model):
    other = dubito.extract(model, torch.rand(5, 3, 32, 32))
    collection = Collection(table, ood={"noise": other})
    assert len(collection) == 45
    assert collection.values("set").tolist() == [0] * 40 + [1] * 5
    assert collection.values("label")[40:].tolist() == collection.values("correct")[40:].tolist() == [-1] * 5
    np.testing.assert_allclose(collection.values("entropy")[40:], dubito.Entropy().score(other), rtol=1e-6)
    assert collection.locate(42) == ("noise", other, 2)
    with pytest.raises(UnknownNameError, match="rows 0 to 44; got 45"):
        collection.locate(45)


def test_a_rank_is_the_share_of_the_others_that_are_less_uncertain(table):
    collection = Collection(table)
    u = collection.values("entropy")
    ranks = [collection.rank("entropy", float(value), among_them=True) for value in u]
    np.testing.assert_allclose(ranks, shares_below(u.astype(np.float64)))
    assert collection.rank("entropy", 99.0, among_them=False) == 1.0


def test_a_guard_accepts_what_it_accepts(table, model):
    guard = dubito.Guard.fit(model, table, risk=0.5, novel=0.1)
    collection = Collection(table, guard=guard)
    decided = guard.decide(table)
    np.testing.assert_array_equal(collection.values("accepted"), decided.accept.int())
    assert np.isinf(collection.values("guard")[decided.novel.numpy()]).all()
    assert collection.guard_findings == decided.findings()
    assert collection.first_score == "guard"


@pytest.mark.parametrize("per", [None, "class", "site"])
def test_a_line_divides_what_a_guard_accepts(table, model, per):
    """Also where there is no limit, and where thresholds are those of classes or groups, some of which are refused."""
    predicted = table.logit.argmax(1)
    known = table.extended(label=predicted, site=["a"] * 30 + ["b"] * 8 + ["c"] * 2)
    settings = {"scores": ["entropy"], "novel": 0.1, "sets": False, "per": per}
    guard = dubito.Guard.fit(model, known, risk=0.6, confidence=0.5, **settings)
    collection = Collection(known, guard=guard)
    u, accepted = collection.values("guard"), collection.values("accepted").astype(bool)
    assert accepted.sum() > 0
    assert (guard.threshold.value == NO_LIMIT) == accepted[:30].all()
    inspector = Inspector(collection, Layouts(collection, None), Notes(None), model)
    client = TestClient(make_app(inspector, "t", hosts=("testserver",)))
    shown = client.get("/t/api/about").json()["guard"]
    assert ((u <= np.float32(shown["threshold"])) == accepted).all()
    assert shown["guarantee"] == guard.guarantee.sentence(guard.threshold.of)
    curve = threshold_curve(u, ~accepted, np.ones(40, bool), at=shown["threshold"])
    place = np.searchsorted(curve["thresholds"], shown["threshold"], side="right") - 1
    assert (curve["accepted"][place], curve["errors"][place]) == (accepted.sum(), 0)
    assert np.abs(u[np.isfinite(u)]).max() < 10  # of a size that the page can draw
    for row in (0, 35, 39):
        image = inspector.image(row)
        assert image["verdict"]["verdict"] == ("accept" if accepted[row] else "abstain")


def test_a_second_model_of_the_same_images(table, folder):
    second = dubito.extract(network(seed=1), folder)
    collection = Collection(table, other=second)
    both = table.logit.argmax(1) == second.logit.argmax(1)
    np.testing.assert_array_equal(collection.values("agree"), both.int())
    np.testing.assert_allclose(collection.values("other:entropy"), dubito.Entropy().score(second), rtol=1e-6)
    shuffled = second.rows(torch.arange(39, 4, -1))  # another order, and five images fewer
    values = Collection(table, other=shuffled).values("other:entropy")
    assert np.isnan(values[:5]).all()
    np.testing.assert_allclose(values[5:], collection.values("other:entropy")[5:])
    with pytest.raises(TableError, match="shares none of its ids"):
        Collection(table, other=dubito.extract(network(seed=1), torch.rand(4, 3, 32, 32)))


def test_uncertainties_of_ones_own_come_first(table):
    collection = Collection(table, scores={"mine": np.arange(40.0), "warm": dubito.Energy(temperature=2.0)})
    assert collection.first_score == "mine"
    assert collection.values("mine").tolist() == list(range(40))
    np.testing.assert_allclose(collection.values("warm"), dubito.Energy(temperature=2.0).score(table), rtol=1e-6)


def test_names_are_searched_whatever_their_case(table):
    collection = Collection(table)
    assert np.flatnonzero(collection.containing("ONERROR")).tolist() == [table.row_ids().index(EVIL)]
    assert collection.containing("01").sum() == 10  # 010 to 019; what would be 001 has the other name
    assert collection.containing("").all()


def test_tables_with_little_in_them():
    only_features = Collection(dubito.Table(feature=torch.rand(6, 4)))
    assert list(only_features.columns) == []
    assert only_features.first_score is None
    one = Collection(dubito.Table(logit=[[1.0, 0.0]], label=[0]))
    assert one.values("correct").tolist() == [1]
    assert one.rank("entropy", 0.0, among_them=True) == 0.0
    own = dubito.Table(logit=[[1.0, 0.0]], label=[7], label_space="own")
    assert "correct" not in Collection(own).columns
    unlabelled = Collection(dubito.Table(logit=[[1.0, 0.0], [0.0, 1.0]], label=[-1, 1]))
    assert unlabelled.values("correct").tolist() == [-1, 1]
    with pytest.raises(UnknownNameError, match="no column 'entropi'"):
        one.values("entropi")


def test_scores_that_cannot_be_computed_are_left_out_in_words():
    one_class = dubito.Table(logit=[[1.0], [2.0]], id=["a", "b"])
    collection = Collection(one_class)
    assert "entropy" not in collection.columns
    assert collection.first_score == "max_logit"
    assert collection.values("max_logit").tolist() == [-1.0, -2.0]
    words = collection.notices[0]
    assert words.startswith("Left out: max_probability, entropy, ")
    assert "needs at least two classes" in words
    compared = Collection(dubito.Table(logit=[[1.0, 0.0], [0.0, 1.0]], id=["a", "b"]), other=one_class)
    assert "entropy" in compared.columns
    assert "other:entropy" not in compared.columns
    assert "other:max_logit" in compared.columns


def test_a_set_is_named_by_its_folder(table, model):
    other = dubito.extract(model, torch.rand(5, 3, 32, 32))
    assert list(Collection(table, ood={"noise": other}).sets) == ["cache", "noise"]
    assert list(Collection(table, ood={"cache": other}).sets) == [table.name, "cache"]


def test_pictures_that_are_not_there_are_counted(table, folder, tmp_path):
    assert Collection(table).pictures.words().startswith("No pictures")
    assert Collection(table, images=folder).pictures.words() == ""
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in sorted(folder.iterdir())[:10]:
        (moved / path.name).write_bytes(path.read_bytes())
    words = Collection(table, images=moved).pictures.words()
    assert words.startswith("30 of 40 images are not in")
    assert "moved or renamed" in words
