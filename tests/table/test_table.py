import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.errors import DubitoError, DubitoWarning, MissingColumnError, TableError
from dubito.table import Column, Provenance, Table, check_table, to_tensor

LOGIT = [[2.0, 0.0], [0.0, 1.0], [0.5, 0.25]]


def small(**more) -> Table:
    return Table(
        id=["a.jpg", "b.jpg", "a longer name.jpg"],
        feature=torch.arange(12.0).view(3, 4),
        logit=LOGIT,
        label=[0, 1, 1],
        loss=[0.1, 0.2, 0.3],
        **more,
    )


@pytest.mark.parametrize(
    "given_as",
    [
        lambda rows: rows,
        lambda rows: tuple(map(tuple, rows)),
        np.asarray,
        lambda rows: np.asarray(rows, dtype=np.float32),
        lambda rows: np.asarray(rows)[::-1][::-1],
        lambda rows: np.asarray(rows[::-1])[::-1],  # runs backwards in memory
        lambda rows: np.asarray(rows, dtype=">f4"),  # foreign byte order
        np.asfortranarray,
        torch.tensor,
        lambda rows: torch.tensor(rows, requires_grad=True),
        lambda rows: [torch.tensor(row) for row in rows],
    ],
)
def test_numbers_come_in_any_form(given_as):
    logit = Table(logit=given_as(LOGIT)).logit
    assert isinstance(logit, torch.Tensor)
    assert logit.tolist() == LOGIT
    assert not logit.requires_grad


def test_a_read_only_array_is_copied_without_a_warning():
    array = np.asarray(LOGIT)
    array.flags.writeable = False
    assert Table(logit=array).logit.tolist() == LOGIT


class Series:
    """Like a column of pandas: it has a shape and can be indexed, and becomes an array when asked."""

    def __init__(self, values) -> None:
        self.values = np.asarray(values)
        self.shape = self.values.shape

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __getitem__(self, key):
        raise KeyError(key)


def test_array_likes_become_tensors():
    table = Table(label=Series([1, 0]), id=Series(["a", "b"]))
    assert isinstance(table.label, torch.Tensor)
    assert table.rows(slice(1, 2)).label.tolist() == [0]
    assert table.id.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("original", "kept"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
    ],
)
def test_columns_of_the_model_are_float32_or_float64(original, kept):
    for column in ("feature", "logit"):
        assert Table(**{column: torch.ones(2, 3, dtype=original)}).whole(column).dtype == kept
    assert Table(loss=torch.ones(2, dtype=original)).loss.dtype == kept


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_labels_are_int64(dtype):
    assert Table(label=np.array([3, 1], dtype=dtype)).label.dtype == torch.int64


def test_other_columns_keep_their_type_and_shape():
    table = Table(map=torch.ones(2, 3, 4, dtype=torch.float16), seen=np.array([True, False]))
    assert table.whole("map").dtype == torch.float16
    assert table.whole("seen").dtype == torch.bool
    assert table.shape("map") == (2, 3, 4)


def test_attributes():
    table = small(name="cache/train", classes=["cat", "dog"], label_space="own", skipped=[("c.jpg", "cut short")])
    assert len(table) == 3
    assert table.columns == ("id", "feature", "logit", "label", "loss")
    assert (table.name, table.classes, table.label_space) == ("cache/train", ["cat", "dog"], "own")
    assert table.label_names is None
    assert small(classes=["cat", "dog"]).label_names == ["cat", "dog"]
    assert table.skipped == [("c.jpg", "cut short")]
    assert table.id.tolist() == ["a.jpg", "b.jpg", "a longer name.jpg"]
    assert table.loss.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert "logit" in table
    assert "gradient" not in table


def test_repr():
    table = Table(logit=LOGIT, label=[0, 1, 1], name="cache/train")
    assert repr(table) == "Table('cache/train': 3 rows; logit (3, 2), label (3,))"
    assert repr(Table()) == "Table('table in memory': 0 rows; )"


def test_none_is_no_column():
    table = Table(logit=LOGIT, label=None)
    assert table.columns == ("logit",)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("logit", [1.0, 2.0], r"must have 2 axes; got shape \(2,\)\. Reshape it to \(n, width\)\."),
        ("feature", np.ones((2, 3, 4)), r"must have 2 axes; got shape \(2, 3, 4\)\."),
        ("label", [[0], [1]], r"must have one axis; got shape \(2, 1\)\. Reshape it to \(n,\)\."),
        (
            "label",
            np.eye(5),
            r"must have one axis; got shape \(5, 5\)\. .* For one-hot labels, pass label\.argmax",
        ),
        ("loss", 0.5, r"must have one axis; got shape \(\)\."),
        ("id", [["a"], ["b"]], r"must have one axis; got shape \(2, 1\)\."),
        ("anything", 5, r"must have one axis; got shape \(\)\."),
    ],
)
def test_wrong_axes(column, value, message):
    with pytest.raises(TableError, match=rf"column '{column}' of table in memory {message}"):
        Table(**{column: value})


def test_unequal_lengths_are_listed():
    with pytest.raises(TableError) as error:
        Table(logit=LOGIT, label=[0, 1], id=["a", "b", "c"], name="mine")
    assert str(error.value) == (
        "columns of mine must have one length; logit has 3, label has 2, id has 3. "
        "Pass one row per image in every column."
    )


@pytest.mark.parametrize("label", [[0.0, 1.0], np.array([0.0, 1.0], dtype=np.float32), torch.ones(2)])
def test_labels_with_a_decimal_point(label):
    with pytest.raises(
        TableError, match=r"column 'label' of table in memory must be integers; got torch\.float\d\d\. Cast it"
    ):
        Table(label=label)


@pytest.mark.parametrize(
    "value", [["cat", "dog"], [[1.0], [1.0, 2.0]], [None, 1.0], [torch.ones(2, requires_grad=True)] * 2, {"a": 1}]
)
def test_what_is_no_array_of_numbers(value):
    with pytest.raises(TableError, match=rf"column 'logit' must be numbers in an array; got {type(value).__name__}"):
        Table(logit=value)


def test_a_missing_column_says_who_writes_it():
    table = Table(logit=LOGIT, name="cache/test")
    with pytest.raises(MissingColumnError) as error:
        _ = table.label
    assert str(error.value) == (
        "table.label needs column 'label'; cache/test has logit. Pass label=... to dubito.Table. "
        "It is written by dubito.cache.label_cache(folder, labels), or by an extraction of images with labels."
    )
    with pytest.raises(MissingColumnError, match=r"energy\.score needs column 'mine'.* Run the probe that writes"):
        table.require("logit", "mine", by="energy.score")
    extracted = Table(logit=LOGIT, provenance=Provenance(weights="ab12"))
    with pytest.raises(MissingColumnError, match=r"has logit\. It is written by dubito\.cache\.label_cache"):
        _ = extracted.label
    with pytest.raises(MissingColumnError, match="needs column 'logit'; table in memory has no columns"):
        Table().select("logit")
    with pytest.raises(MissingColumnError, match=r"table\.shape\('feature'\) needs column 'feature'"):
        table.shape("feature")


def test_a_plural_or_misspelt_column_is_warned_of_once_and_named_by_errors():
    message = r"The column 'logits' must be called 'logit'\. Pass it as logit=\.\.\. to dubito\.Table\."
    with pytest.warns(DubitoWarning, match=message) as warned:
        table = Table(logits=LOGIT, camera=["a", "b", "a"], labeler=[0, 1, 2], idx=[0, 1, 2])
    assert len(warned) == 1
    with pytest.raises(MissingColumnError, match=rf"needs column 'logit'; .* has logits, .*, idx\. {message}"):
        table.select("logit")
    with pytest.warns(DubitoWarning, match="The column 'lables' must be called 'label'"):
        Table(logit=LOGIT).extended(lables=[0, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.rows([0])
        table.extended(camera=["c", "d", "c"])
        Table(logit=LOGIT, logits=LOGIT)  # a column of its own


def test_a_missing_column_is_a_missing_attribute():
    table = Table(logit=LOGIT)
    for column in ("logit", "feature", "label", "loss", "id"):
        assert hasattr(table, column) == (column == "logit")
    assert getattr(table, "label", None) is None
    assert issubclass(MissingColumnError, DubitoError)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (slice(0, 2), [0, 1]),
        (slice(2, None), [2]),
        (slice(None, None, 2), [0, 2]),
        (slice(5, 9), []),
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([1]), [1]),  # one index: still rows, not a row
        (torch.tensor([1, 1]), [1, 1]),
        (torch.tensor([-1]), [2]),
        (torch.tensor([True, False, True]), [0, 2]),
        (torch.tensor([False, False, True]), [2]),
        (torch.zeros(3, dtype=torch.bool), []),
        (torch.tensor([], dtype=torch.long), []),
    ],
    ids=str,
)
def test_rows_of_every_column(rows, kept):
    about = {"classes": ["cat", "dog"], "label_space": "own", "label_names": ["owl", "ape"], "name": "mine"}
    table = small(skipped=[("c", "broken")], **about)
    chosen = table.rows(rows)
    assert len(chosen) == len(kept)
    assert chosen.columns == table.columns
    assert chosen.id.tolist() == [table.id[i] for i in kept]
    assert chosen.label.tolist() == [table.label[i].item() for i in kept]
    assert chosen.feature.tolist() == [table.feature[i].tolist() for i in kept]
    assert (chosen.classes, chosen.label_space, chosen.label_names, chosen.name) == tuple(about.values())
    assert chosen.skipped == [("c", "broken")]


def test_a_single_number_is_no_rows():
    with pytest.raises(
        TableError, match=r"rows of table in memory must be .*; got torch\.int64 of shape \(\)\. Choose"
    ):
        small().rows(torch.tensor(1))


def test_a_mask_on_a_table_of_one_row():
    table = small().rows(slice(0, 1))
    assert table.rows(torch.tensor([True])).id.tolist() == ["a.jpg"]
    assert len(table.rows(torch.tensor([False]))) == 0


@given(st.integers(0, 30), st.integers(1, 9))
@settings(deadline=None, max_examples=40)
def test_batches_are_all_rows_once_and_in_order(n, size):
    table = Table(logit=torch.arange(2.0 * n).view(n, 2), label=torch.arange(n))
    batches = list(table.batches("label", size=size))
    assert [len(batch) for batch in batches] == [min(size, n - start) for start in range(0, n, size)]
    assert all(batch.columns == ("label",) for batch in batches)
    assert [int(y) for batch in batches for y in batch.label] == list(range(n))


def test_batches_without_names_have_all_columns():
    assert [batch.columns for batch in small().batches(size=2)] == [small().columns] * 2
    with pytest.raises(MissingColumnError, match=r"table\.select needs column 'gradient'"):
        next(small().batches("gradient"))


def test_select_and_extended():
    table = small(name="mine")
    assert table.select("loss", "id").columns == ("loss", "id")
    wider = table.extended(gradient=[1, 2, 3], logit=[[0.0]] * 3)
    assert wider.columns == (*table.columns, "gradient")
    assert wider.logit.tolist() == [[0.0]] * 3
    assert table.logit.tolist() == LOGIT
    assert (wider.name, "gradient" in table) == ("mine", False)
    with pytest.raises(TableError, match="gradient has 2"):
        table.extended(gradient=[1, 2])


class Lazy:
    """A column on disk: only what is asked for is read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self.shape, self.read = values, tuple(values.shape), []

    def __getitem__(self, rows):
        self.read.append(rows)
        return self._values[rows]


def test_a_column_on_disk_is_read_when_it_is_needed():
    logit = Lazy(torch.arange(10.0).view(5, 2))
    assert isinstance(logit, Column)
    table = Table(logit=logit, label=[0, 1, 0, 1, 0])
    assert (len(table), table.shape("logit")) == (5, (5, 2))
    repr(table)
    table.select("logit").extended(loss=[0.0] * 5)
    assert logit.read == []
    assert [len(batch) for batch in table.batches("logit", size=2)] == [2, 2, 1]
    assert logit.read == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert table.logit.shape == (5, 2)


def test_to_tensor_keeps_the_shape_of_a_number():
    assert to_tensor(3.0, "x").shape == ()
    assert to_tensor(np.float32(3.0), "x").shape == ()


def test_what_is_no_table_is_reported():
    check_table(Table(), by="x.fit")
    for path in ("cache/train", Path("cache/train")):
        with pytest.raises(TableError) as error:
            check_table(path, by="density.fit")
        assert str(error.value) == (
            'density.fit: table must be a table; got the path "cache/train". Open it: dubito.open("cache/train").'
        )
    with pytest.raises(TableError) as error:
        check_table(np.zeros(3), by="evaluate", what="ood")
    assert str(error.value) == (
        "evaluate: ood must be a table, from dubito.extract or dubito.open; got ndarray. "
        "Make one from arrays: dubito.Table(logit=..., feature=..., label=...)."
    )


def test_the_provenance_goes_with_the_rows():
    known = Provenance(weights="ab")
    table = Table(feature=torch.zeros(3, 2), provenance=known)
    assert table.rows([1]).provenance == table.select("feature").provenance == known
    assert table.rows([1]).model_id == known.model_id
    assert Table(feature=torch.zeros(3, 2)).provenance is Table(feature=torch.zeros(3, 2)).model_id is None


def test_rows_without_ids_are_named_by_their_number():
    named, bare = Table(label=[0, 1, 2], id=["a", "b", "c"]), Table(label=[0, 1, 2])
    assert (named.row_ids(), bare.row_ids()) == (["a", "b", "c"], ["0", "1", "2"])
    assert (named.row_ids([2, 0]), bare.row_ids([2, 0]), bare.row_ids([])) == (["c", "a"], ["2", "0"], [])


@pytest.mark.parametrize("kind", [list, np.array, lambda names: np.array(names, dtype=object)])
def test_labels_that_are_names_say_how_to_number_them(kind):
    with pytest.raises(
        TableError, match=r"class indices, 0 for the first logit; got names such as 'cat'\. Number them"
    ):
        Table(logit=LOGIT, label=kind(["cat", "dog", "cat"]))
    with pytest.raises(TableError, match="column 'label' must be numbers in an array"):
        Table(logit=LOGIT, label=[0, None, 1])
