"""The search against brute force, and what is refused and left out."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import dubito
from dubito.errors import ValueRangeError
from dubito.scores import MaxProbability, Neighbours
from dubito.search import Rule, SafeIndex, Thresholds
from dubito.table import Provenance, Table

from .world import D, N, brute_force, data, table


def test_it_is_the_front_door():
    assert dubito.SafeIndex is SafeIndex


@pytest.mark.parametrize("clean", ["both", "items", "queries", "none"])
@pytest.mark.parametrize("per_class", [False, True])
def test_neighbours_are_those_of_brute_force(items, queries, clean, per_class):
    index = SafeIndex.build(items["feature"], items["u"], labels=items["label"], clean=clean, per_class=per_class)
    result = index.search(queries["feature"], queries["u"], k=5, labels=queries["label"])
    groups = items["label"] if per_class else np.zeros(N, int)
    requested = queries["label"] if per_class else np.zeros(40, int)
    limit = {one: np.quantile(items["u"][groups == one], 0.9, method="inverted_cdf") for one in set(groups)}
    kept = np.array(
        [u <= limit[one] or clean in ("queries", "none") for u, one in zip(items["u"], groups, strict=True)]
    )
    refused = np.array(
        [u > limit[g] and clean in ("both", "queries") for u, g in zip(queries["u"], requested, strict=True)]
    )
    assert result.refused.tolist() == refused.tolist()
    assert refused.any() == (clean in ("both", "queries"))
    rows = np.flatnonzero(kept)
    order, cosine = brute_force(items["feature"][rows], queries["feature"], 5)
    assert result.ids[~refused].tolist() == [[str(rows[i]) for i in one] for one in order[~refused]]
    np.testing.assert_allclose(result.similarities[~refused], cosine[~refused], atol=1e-6)
    assert result.labels is not None
    assert result.labels[~refused].tolist() == items["label"][rows[order]][~refused].tolist()
    assert (result.ids[refused] == "").all()
    assert np.isnan(result.similarities[refused]).all()
    assert (result.labels[refused] == -1).all()
    assert index.kept == kept.sum()
    assert sorted(index.left_out()) == sorted(str(row) for row in np.flatnonzero(~kept))


def test_a_refusal_says_why():
    index = SafeIndex.build(np.eye(4), np.arange(4.0), quantile=0.5, labels=[0, 0, 1, 1])
    result = index.search(np.eye(4)[:2], [0.5, 3.25], k=1)
    assert result.reason(0) is None
    assert result.reason(1) == "its uncertainty 3.25 is above 1, the 0.5 quantile of the items"
    assert str(result).splitlines() == [
        "2 queries, 1 refused",
        "query  nearest items  cosines  labels  uncertainty  refused because",
        "0      0              1.000    0       0.5          -",
        "1      -              -        -       3.25         " + str(result.reason(1)),
    ]
    assert result.to_dict()["queries"] == [
        {"refused": False, "reason": None, "ids": ["0"], "similarities": [1.0], "labels": [0], "uncertainty": 0.5},
        {"refused": True, "reason": result.reason(1), "ids": [], "similarities": [], "labels": [], "uncertainty": 3.25},
    ]
    original = index.search(np.eye(4)[:2], [0.5, 3.25], k=1, refuse_above=0.25)
    assert original.refused.all()
    assert original.reason(0) == "its uncertainty 0.5 is above 0.25, the threshold that you set"
    assert index.search(np.eye(4)[:2], [0.5, 3.25], k=1, refuse_above=[0.25, 4.0]).refused.tolist() == [True, False]


def test_answers_are_called_by_the_names_of_the_queries():
    index = SafeIndex.build(np.eye(2), [0.1, 0.2], ids=["a", "b"], quantile=1.0)
    args = Table(feature=[[1.0, 0.0], [0.0, 1.0]], id=["new/1.jpg", "new/2.jpg"])
    result = index.search(args, [0.1, 0.5], k=1)
    assert result.queries == ["new/1.jpg", "new/2.jpg"]
    assert [line.split()[:2] for line in str(result).splitlines()[2:]] == [["new/1.jpg", "a"], ["new/2.jpg", "-"]]
    assert result.to_pandas()["ids"].tolist() == [["a"], []]
    assert [one["id"] for one in result.to_dict()["queries"]] == result.queries
    unnamed = index.search(args.feature, [0.1, 0.5], k=1)
    assert unnamed.queries is None
    assert str(unnamed).splitlines()[2].startswith("0      a")
    assert "id" not in unnamed.to_dict()["queries"][0]


def test_text_shows_the_first_queries_only(items):
    index = SafeIndex.build(items["feature"], items["u"], clean="none")
    assert str(index.search(items["feature"][:53], k=1)).splitlines()[-1] == "and 3 more"
    assert "more" not in str(index.search(items["feature"][:50], k=1))


def test_all_queries_may_be_refused(items):
    index = SafeIndex.build(items["feature"], items["u"])
    result = index.search(items["feature"][:3], [9.0, 9.0, 9.0], k=2, sets=True)
    assert (result.refused.all(), result.ids.shape, result.sets) == (True, (3, 2), (None, None, None))
    assert result.labels is None
    assert not index.search(items["feature"][:3], [9.0] * 3, k=2, refuse_above=np.inf).refused.any()
    labelled = SafeIndex.build(items["feature"], items["u"], labels=items["label"])
    refused = labelled.search(items["feature"][:3], [9.0, 9.0, 9.0], k=2, exclude=["0", "1", "2"])
    assert refused.labels is not None
    assert refused.labels.tolist() == [[-1, -1]] * 3


def test_no_query_at_all_is_no_answer(items):
    result = SafeIndex.build(items["feature"], items["u"]).search(np.empty((0, D)), [], k=3, sets=True)
    assert (result.ids.shape, result.sets, result.to_dict()["queries"]) == ((0, 3), (), [])


def test_cosines_are_never_above_one():
    x = np.random.default_rng(0).normal(size=(300, 37))
    result = SafeIndex.build(x, np.zeros(300)).search(x, np.zeros(300), k=1)
    assert result.similarities.max() <= 1
    assert result.similarities.min() > 1 - 1e-6


def test_items_need_not_find_themselves(items):
    doubled = np.concatenate([items["feature"], items["feature"][:1]])  # row 0 and the last are the same
    index = SafeIndex.build(doubled, np.zeros(N + 1))
    own = [str(row) for row in range(N + 1)]
    result = index.search(doubled, np.zeros(N + 1), k=1, exclude=own)
    expected = dubito.metrics.nearest(doubled)
    assert result.ids[:, 0].tolist() == [str(int(row)) for row in expected]
    assert result.ids[0, 0] == str(N)


def test_a_table_brings_everything(monkeypatch):
    index = SafeIndex.build(table(0), MaxProbability())
    result = index.search(table(1, 30), k=3)
    by_hand = SafeIndex.build(
        table(0).feature, MaxProbability().score(table(0)), ids=table(0).id, labels=table(0).label
    ).search(table(1, 30).feature, MaxProbability().score(table(1, 30)), k=3)
    assert result.ids.tolist() == by_hand.ids.tolist()
    assert result.ids[~result.refused][0, 0].startswith("0/")
    assert index.score == MaxProbability()
    assert result.uncertainty is not None
    assert result.uncertainty.tolist() == MaxProbability().score(table(1, 30)).tolist()


def test_adding_and_removing_is_as_building_anew(items, queries):
    index = SafeIndex(D, quantile=0.8, per_class=True)
    names = [f"i{row}" for row in range(N)]
    for rows in (slice(0, 50), slice(50, 51), slice(51, N)):  # the thresholds move each time
        index.add(items["feature"][rows], items["u"][rows], ids=names[rows], labels=items["label"][rows])
        assert index.search(queries["feature"], queries["u"], k=1, labels=queries["label"]).refused.any()
    gone = [3, 50, 51, 120, 198, 199, 0]
    index.remove([names[row] for row in gone])
    left = np.setdiff1d(np.arange(N), gone)
    anew = SafeIndex.build(
        items["feature"][left],
        items["u"][left],
        ids=[names[row] for row in left],
        labels=items["label"][left],
        quantile=0.8,
        per_class=True,
    )
    assert (len(index), index.kept, index.thresholds) == (len(anew), anew.kept, anew.thresholds)
    assert sorted(index.left_out()) == sorted(anew.left_out())
    ask = (queries["feature"], queries["u"])
    result, expected = (one.search(*ask, k=4, labels=queries["label"], sets=True) for one in (index, anew))
    assert result.ids.tolist() == expected.ids.tolist()
    assert (result.labels == expected.labels).all()
    assert result.sets == expected.sets
    assert ("i3" in index, "i4" in index) == (False, True)


def test_removing_everything_leaves_an_empty_index(items):
    index = SafeIndex.build(table(0, 5, provenance=Provenance(weights="a")), MaxProbability())
    index.remove(table(0, 5).id)
    assert (len(index), index.kept) == (0, 0)
    index.add(table(1, 7, provenance=Provenance(weights="b")))  # another model, and a score that is still there
    assert (len(index), index.provenance) == (7, Provenance(weights="b"))


def test_a_failed_addition_leaves_everything_as_it_was(items, queries):
    index = SafeIndex.build(items["feature"], items["u"])
    before = index.search(queries["feature"], queries["u"], k=3)
    broken = data(5, 20)
    broken["feature"][13] = np.nan
    with pytest.raises(ValueRangeError, match="row 13 of the array has the norm nan"):
        index.add(broken["feature"], broken["u"])
    assert len(index) == N
    assert index.search(queries["feature"], queries["u"], k=3).ids.tolist() == before.ids.tolist()
    index.add(data(5, 20)["feature"], data(5, 20)["u"])
    assert len(index) == N + 20


def test_threads_may_search_an_index_that_nobody_has_searched_before(items, queries, monkeypatch):
    expected = SafeIndex.build(items["feature"], items["u"]).search(queries["feature"], queries["u"], k=3)
    keeps = Rule.keeps

    def slowly(*original):
        result = keeps(*original)
        time.sleep(0.05)  # so that all threads would be here at once, if a search did this
        return result

    monkeypatch.setattr(Rule, "keeps", slowly)
    index = SafeIndex.build(items["feature"], items["u"])
    with ThreadPoolExecutor(4) as pool:
        result = list(pool.map(lambda _: index.search(queries["feature"], queries["u"], k=3).ids.tolist(), range(4)))
    assert result == [expected.ids.tolist()] * 4
    left_out = np.flatnonzero(items["u"] > index.thresholds.overall)
    assert index.left_out() == sorted(str(row) for row in left_out)


def test_one_text_is_one_name(items):
    index = SafeIndex.build(items["feature"][:1], [0.1], ids="ab")
    index.add(items["feature"][1:2], [0.1], ids="cd")
    assert index.search(items["feature"][:1], [0.1], k=1, exclude="ab").ids.tolist() == [["cd"]]
    index.remove("ab")
    assert ("ab" in index, "cd" in index) == (False, True)


def test_growing_moves_nothing_that_somebody_looks_at(items):
    index = SafeIndex.build(items["feature"], items["u"])
    assert index.kept == 180  # rows are in their places
    seen = index.backend.vectors[:3]  # as a search in another thread does
    before = seen.copy()
    index.add(np.random.default_rng(0).normal(size=(20_000, D)), np.zeros(20_000))
    assert (seen == before).all()
    assert not np.shares_memory(seen, index.backend.vectors)


def test_an_approximation_reports_its_recall(items, queries):
    index = SafeIndex.build(items["feature"], items["u"])
    exact = index.search(queries["feature"], queries["u"], k=3)
    everything = index.approximate("IVF4,Flat", effort=4)  # all lists: exact after all
    assert (everything.kind, everything.recall, everything.queries) == ("IVF4,Flat", 1.0, 180)
    result = index.search(queries["feature"], queries["u"], k=3)
    assert (result.exact, exact.exact) == (False, True)
    assert result.ids.tolist() == exact.ids.tolist()
    np.testing.assert_allclose(result.similarities, exact.similarities, atol=1e-6)
    some = index.approximate("IVF8,Flat", effort=1)
    assert 0.3 < some.recall < 1
    assert index.approximate("HNSW16").recall > 0.95
    assert index.approximate().kind == "IVF2,SQ8"  # 180 items: 64 for each centre
    index.add(items["feature"][:1], [0.5])
    assert index.search(queries["feature"], queries["u"], k=3).exact
    with pytest.raises(ValueRangeError, match="faiss cannot build 'nonsense' of 181 vectors of 8 numbers"):
        index.approximate("nonsense")


def test_an_approximation_that_finds_too_few_compares_all(items, queries):
    index = SafeIndex.build(items["feature"], items["u"])
    exact = index.search(queries["feature"], queries["u"], k=60)
    index.approximate("IVF8,Flat", effort=1)  # a list has about 22 items
    result = index.search(queries["feature"], queries["u"], k=60)
    assert result.ids.tolist() == exact.ids.tolist()


def test_half_precision_and_mapped_arrays_are_read_in_blocks(tmp_path, monkeypatch, queries):
    monkeypatch.setattr("dubito.search.inputs._ROWS_AT_ONCE", 7)
    made = data(0)
    np.save(tmp_path / "items.npy", made["feature"].astype(np.float16))
    mapped = np.load(tmp_path / "items.npy", mmap_mode="r")
    index = SafeIndex.build(mapped, made["u"])
    result = index.search(torch.from_numpy(queries["feature"]), queries["u"], k=2, exclude=["1"] * 40)
    whole = SafeIndex.build(made["feature"].astype(np.float16).astype(np.float32), made["u"])
    monkeypatch.setattr("dubito.search.inputs._ROWS_AT_ONCE", 8192)
    expected = whole.search(queries["feature"], queries["u"], k=2, exclude=["1"] * 40)
    assert result.ids.tolist() == expected.ids.tolist()
    assert "1" not in result.ids


def test_a_score_that_learns_serves_as_well():
    score = Neighbours(k=2).fit(table(3))
    index = SafeIndex.build(table(0), score, quantile=0.5)
    assert index.search(table(1), k=1).refused.mean() == pytest.approx(0.5, abs=0.15)
    assert index.thresholds == Thresholds(float(np.quantile(score.score(table(0)), 0.5, method="inverted_cdf")))
