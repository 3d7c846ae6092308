"""Every way to ask an index wrongly, and what it answers."""

import numpy as np
import pytest

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.scores import Entropy, MaxProbability, Neighbours
from dubito.search import SafeIndex
from dubito.table import Provenance, Table

from .world import D, N, table


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        ({"k": 0}, ValueRangeError, r"k must be a whole number, at least 1; got 0\. 5 is usual\."),
        ({"k": 181}, ValueRangeError, r"got 181\. 180 of 200 items are searched: choose a smaller k, or add items\."),
        (
            {"k": 180, "exclude": ["x"] * 40},
            ValueRangeError,
            r"in \[1, 179\]; got 180\. 180 of 200 items are searched, less the excluded one",
        ),
        ({"exclude": ["x"]}, TableError, "exclude must have one id per query, 40; got 1"),
        ({"exclude": "x" * 40}, TableError, "exclude must have one id per query, 40; got 1"),
        (
            {"queries": np.ones((40, 9))},
            TableError,
            r"features must have the axes \(n, 8\), as wide as the index; got \(40, 9",
        ),
        ({"queries": np.ones(8)}, TableError, r"one row per image: feature\[None\] of shape \(1, 8\) for one\."),
        ({"queries": np.zeros((40, 8))}, ValueRangeError, "row 0 of the array has the norm 0. Check that image"),
        ({"queries": np.ones((40, 8), int)}, TableError, "features must be floating-point numbers; got torch.int64"),
        (
            {"uncertainty": None},
            TableError,
            "needs the uncertainty of every query; got none. Pass one number for every query",
        ),
        ({"uncertainty": np.ones(39)}, TableError, r"uncertainty must have one number per row, \(40,\); got \(39,\)"),
        ({"uncertainty": np.full(40, np.nan)}, ValueRangeError, "uncertainty: 40 of 40 values are NaN or infinite"),
        (
            {"uncertainty": Entropy()},
            TableError,
            "the score entropy reads columns of a table; got an array of features",
        ),
        (
            {"refuse_above": [1.0, 2.0]},
            ValueRangeError,
            r"refuse_above must be one number, or one per query, \(40,\); got shape \(2,\)",
        ),
        (
            {"queries": np.ones((1, 40, 8))},
            TableError,
            r"got \(1, 40, 8\) in the array. Pass features of the same model, one row per image",
        ),
        (
            {"refuse_above": np.nan},
            ValueRangeError,
            r"got shape \(\), 1 of them NaN. Infinity refuses no query",
        ),
        ({"sets": True, "at_most": 0}, ValueRangeError, "at_most must be a whole number, at least 1; got 0"),
    ],
)
def test_wrong_questions(items, queries, ask, error, text):
    index = SafeIndex.build(items["feature"], items["u"])
    requested = {"queries": queries["feature"], "uncertainty": queries["u"], "k": 3} | ask
    with pytest.raises(error, match=text):
        index.search(**requested)


@pytest.mark.parametrize(
    ("original", "error", "text"),
    [
        ({"ids": ["a", "a"]}, TableError, "ids must be unique; got 'a' twice. Nothing was changed"),
        (
            {"ids": ["a", "7"]},
            TableError,
            "ids must be new; 1 of 2 are in the index, such as '7'. Nothing was added: remo",
        ),
        ({"ids": ["a"]}, TableError, "ids must have one id per row, 2; got 1"),
        ({"ids": "ab"}, TableError, "ids must have one id per row, 2; got 1"),
        (
            {"ids": ["a", ""]},
            TableError,
            "ids must be strings of at least one character, without NUL, as files are named; got ''",
        ),
        ({"ids": ["a", "\ud812.png"]}, TableError, r"got '\\ud812.png' for row 1. Rename it."),
        (
            {"uncertainty": None},
            TableError,
            "needs the uncertainty of every item; got none. Pass one number for every item",
        ),
        (
            {"labels": [1, 2]},
            TableError,
            "those of the index have none, the array has some. Nothing was added: leave the labels out.",
        ),
        (
            {"labels": [1.0, 2.0]},
            TableError,
            r"labels must be one integer per row, \(2,\); got torch.float64 of shape \(2,\)",
        ),
    ],
)
def test_wrong_items(items, original, error, text):
    index = SafeIndex.build(items["feature"], items["u"])
    with pytest.raises(error, match=text):
        index.add(**({"items": np.ones((2, 8)), "uncertainty": [0.1, 0.2]} | original))
    assert len(index) == N


def test_further_errors(items):
    empty = SafeIndex(D)
    with pytest.raises(TableError, match=r"the index is empty, so there is nothing to find. Add items first."):
        empty.search(np.ones((1, D)), [0.0])
    with pytest.raises(TableError, match="the index is empty"):
        empty.approximate()
    empty.add(np.empty((0, D)), [])
    assert len(empty) == 0
    index = SafeIndex.build(items["feature"], items["u"])
    with pytest.raises(TableError, match=r"1 of 2 are not, such as 'x'. Nothing was removed"):
        index.remove(["1", "x"])
    with pytest.raises(TableError, match="ids must be unique; got '1' twice"):
        index.remove(["1", "1"])
    assert "1" in index
    index.remove(["0"])
    with pytest.raises(TableError, match=r"such as '199'. Nothing was added: pass ids=..."):
        index.add(np.ones((1, D)), [0.5])
    with pytest.raises(TableError, match=r"features must have the axes \(n, 8\), .*got \(8,\)"):
        SafeIndex.build(np.ones(8), [0.1])
    with pytest.raises(MissingColumnError, match=r"SafeIndex.build needs column 'feature'"):
        SafeIndex.build(Table(logit=[[1.0, 2.0]]), MaxProbability())
    with pytest.raises(ValueRangeError, match="width must be a whole number, at least 1"):
        SafeIndex(0)
    one = SafeIndex.build(np.ones((1, D)), [0.1])
    with pytest.raises(
        ValueRangeError, match=r"with exclude, the number of .* at least 2; got 1\. Add items, or search"
    ):
        one.search(np.ones((1, D)), [0.1], k=1, exclude=["0"])


def test_classes_are_required_where_thresholds_need_them(items, queries):
    with pytest.raises(TableError, match="per_class=True needs the class of every item"):
        SafeIndex.build(items["feature"], items["u"], per_class=True)
    index = SafeIndex.build(items["feature"], items["u"], labels=items["label"], per_class=True)
    with pytest.raises(TableError, match="needs the class of every query, true or predicted; got no labels"):
        index.search(queries["feature"], queries["u"])
    result = index.search(queries["feature"], queries["u"], refuse_above=index.thresholds.overall)
    assert result.refused.tolist() == (queries["u"] > index.thresholds.overall).tolist()


def test_a_number_must_mean_one_class(tmp_path):
    items = table(0, label_space="own", label_names=["ant", "bee", "cat", "dog"])
    other = table(1, label_space="own", label_names=["bee", "cat", "dog", "eel"])
    built = SafeIndex.build(items, MaxProbability(), per_class=True)
    built.save(tmp_path / "index")
    for index in (built, SafeIndex.load(tmp_path / "index")):
        with pytest.raises(TableError, match=r"cache/1 has another set of classes .* one number means two classes"):
            index.search(other)
        with pytest.raises(TableError, match=r"cache/1 has another set of classes .* Pass labels="):
            index.add(other)
        assert len(index) == N
        assert index.search(other, refuse_above=np.inf).refused.sum() == 0
        # Numbers that somebody gives, and names that nobody knows, are believed.
        assert index.search(other, labels=other.label).refused.tolist() == index.search(table(1)).refused.tolist()
    one = SafeIndex.build(items, MaxProbability())
    assert len(one.search(other)) == N  # one threshold for all needs no class


def test_another_model_and_another_score_are_refused():
    index = SafeIndex.build(table(0, provenance=Provenance(weights="model a")), MaxProbability())
    with pytest.raises(TableError, match=r"cache/1 and the items of the index must come from one model"):
        index.search(table(1, provenance=Provenance(weights="model b")))
    named = SafeIndex.build(table(0, provenance=Provenance("timm:small", weights="a1")), MaxProbability())
    narrow = Table(name="photos/new", feature=np.ones((1, 3)), provenance=Provenance("timm:large", weights="b2"))
    for ask in (named.search, named.add):
        with pytest.raises(
            TableError, match=r"photos/new and .* from another \(timm:large, not timm:small\): its weights"
        ):
            ask(narrow)
    with pytest.raises(TableError, match=r"cache/1 has another score \(entropy\) than .* \(max_probability\)"):
        index.add(table(1, provenance=Provenance(weights="model a")), Entropy())
    with pytest.raises(
        TableError, match=r"needs the uncertainty of every query; got none. Pass one number for every query, or a table"
    ):
        index.search(table(1).feature)
    with pytest.raises(
        TableError, match=r"needs the uncertainty of every item; got none. Pass one number for every item, or a table"
    ):
        index.add(table(1).feature)
    index.score = None  # as one does to save an index with a score of one's own
    with pytest.raises(
        TableError, match=r"has another score \(entropy\) .*, and values of two scores have no common scale"
    ):
        index.search(table(1, provenance=Provenance(weights="model a")), Entropy())
    learned = SafeIndex.build(table(0), Neighbours(k=2).fit(table(3)))
    for other in (Neighbours(k=3).fit(table(3)), Neighbours(k=2).fit(table(4))):
        with pytest.raises(TableError, match=r"of the score that the items have, Neighbours\(k=2.* or another fit"):
            learned.search(table(1), other)
    assert len(learned.search(table(1), Neighbours(k=2).fit(table(3)))) == N
    assert SafeIndex.build(table(0), MaxProbability(), clean="items").search(table(1).feature).uncertainty is None
