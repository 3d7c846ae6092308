"""Some rows of a table, and several tables as one: the same as indexing and concatenation, read when needed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dubito
from dubito.errors import MissingColumnError, TableError
from dubito.metrics.information import decompose
from dubito.scores import Entropy, MutualInformation, Temperature
from dubito.table import Provenance, Table
from dubito.table.views import chosen_rows, concat, ensemble


def table_of(n: int, start: int = 0, **about: object) -> Table:
    number = torch.arange(start, start + n)
    return Table(
        feature=torch.stack([number, -number, number**2], 1).float(),
        label=number % 3,
        loss=number / 7,
        id=[f"photo {i}" for i in number.tolist()],
        **about,
    )


def same(ours: Table, theirs: Table) -> None:
    assert set(ours.columns) == set(theirs.columns)
    assert len(ours) == len(theirs)
    for name in ours.columns:
        assert ours.shape(name) == theirs.shape(name)
        one, other = ours.whole(name), theirs.whole(name)
        assert type(one) is type(other)
        assert one.dtype.kind == other.dtype.kind if isinstance(one, np.ndarray) else one.dtype == other.dtype
        assert np.array_equal(np.asarray(one), np.asarray(other)), name


@pytest.fixture(scope="module")
def cached(tmp_path_factory, one_thread):
    """A cache of 23 rows in shards of 5, and the same in memory."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    folder = tmp_path_factory.mktemp("views") / "cache"
    model = dubito.wrap(network, transform=None)
    labels = torch.arange(23) % 3
    disk = dubito.extract(
        model, torch.randn(23, 3, 2, 2), folder, labels=labels, shard_size=5, batch_size=5, progress=False
    )
    memory = Table(provenance=disk.provenance, **{name: disk.whole(name) for name in disk.columns})
    return disk, memory


ROWS = [slice(0, 0), slice(2, 7), slice(0, 9), [0], [8, 0, 8, 3], [], slice(None, None, 2), [-1, 1]]


@pytest.mark.parametrize("rows", ROWS)
def test_chosen_rows(rows):
    index = torch.tensor([4, 0, 9, 9, 2, 7, 5, 1, 3])
    same(chosen_rows(table_of(10), index).rows(rows), table_of(10).rows(index).rows(rows))


@pytest.mark.parametrize("rows", ROWS)
def test_concat(rows):
    parts = table_of(4), table_of(0, 4), table_of(3, 4), table_of(2, 7)
    same(concat(parts).rows(rows), table_of(9).rows(rows))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data())
def test_any_rows_of_any_tables(sizes, data):
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    whole, both = table_of(sum(sizes)), concat([table_of(n, start) for n, start in zip(sizes, starts, strict=True)])
    index = data.draw(st.lists(st.integers(0, sum(sizes) - 1), max_size=12)) if sum(sizes) else []
    same(both.rows(index), whole.rows(index))
    same(chosen_rows(both, torch.tensor(index, dtype=torch.long)), whole.rows(index))
    first, last = sorted(data.draw(st.tuples(st.integers(0, sum(sizes)), st.integers(0, sum(sizes)))))
    same(both.rows(slice(first, last)), whole.rows(slice(first, last)))


def test_views_of_views():
    both = concat([table_of(5), table_of(5, 5)])
    some = chosen_rows(both, torch.tensor([9, 0, 5]))
    again = concat([some, chosen_rows(both, torch.tensor([4, 5]))])
    assert again.id.tolist() == ["photo 9", "photo 0", "photo 5", "photo 4", "photo 5"]
    assert again.loss.tolist() == pytest.approx([9 / 7, 0, 5 / 7, 4 / 7, 5 / 7])
    assert [len(batch) for batch in again.batches("loss", size=2)] == [2, 2, 1]


@pytest.mark.parametrize("rows", [slice(0, 0), slice(3, 17), [22, 0, 5, 5, 4], []])
def test_caches(cached, rows):
    disk, memory = cached
    index = torch.tensor([*range(20, 2, -1), 22, 0, 1, 2, 21])
    same(chosen_rows(disk, index).rows(rows), memory.rows(index).rows(rows))
    both, plain = concat([disk, memory, disk]), concat([memory, memory, memory])
    assert len(both) == 69
    same(both.rows(rows), plain.rows(rows))
    same(both.rows([68, 0, 23, 46, 22]), memory.rows([22, 0, 0, 0, 22]))


def test_nothing_is_read_before_it_is_requested():
    class Column:
        shape, reads = (5,), 0

        def __getitem__(self, rows):
            self.reads += 1
            return torch.arange(5.0)[rows]

    column = Column()
    table = concat([chosen_rows(Table(loss=column), torch.tensor([3, 1])), table_of(2)])
    assert (table.shape("loss"), column.reads) == ((4,), 0)
    assert table.rows([0]).loss.tolist() == [3.0]
    assert column.reads == 1


def test_what_is_known_of_a_table_stays_known():
    about = {"name": "cache/a", "classes": ["x", "y", "z"], "provenance": Provenance(weights="w")}
    table = table_of(4, skipped=[("broken.png", "why")], **about)
    for view in (chosen_rows(table, torch.tensor([1])), concat([table])):
        assert (view.name, view.classes, view.provenance) == tuple(about.values())
        assert view.skipped == [("broken.png", "why")]
        assert view.label_space == "model"
    assert concat([table, table_of(2, name="cache/b")]).name == "cache/a + cache/b"


def test_only_columns_that_all_have():
    assert concat([table_of(3), table_of(2).select("loss", "label")]).columns == ("label", "loss")
    own = table_of(2, label_space="own")
    assert "label" not in concat([table_of(3), own])  # classes of different sets
    assert concat([own, own]).label_space == "own"


def test_labels_are_joined_where_their_names_agree():
    beasts, fish = (table_of(2, label_space="own", label_names=names) for names in (["ape", "owl"], ["cod", "eel"]))
    assert "label" not in concat([beasts, fish])
    unnamed = concat([table_of(2, label_space="own"), beasts])
    assert ("label" in unnamed, unnamed.label_names) == (True, ["ape", "owl"])


def test_photographs_of_a_table_without_epochs_are_its_rows():
    crops = Table(loss=[1.0, 2.0, 3.0, 4.0], image_index=[0, 1, 0, 1], epoch=[0, 0, 1, 1])
    both = concat([Table(loss=[5.0, 6.0, 7.0]), crops])
    assert both.whole("image_index").tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert both.whole("epoch").tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert "image_index" not in concat([table_of(2), table_of(2)])


def refused(text, *arguments, by=concat):
    with pytest.raises(TableError) as error:
        by(*arguments)
    assert str(error.value) == text


def test_what_cannot_be_joined():
    refused("concat needs a list of at least 1 table; got 0. Pass a list: concat([a, b]).", [])
    refused("concat needs a list of at least 1 table; got a single one. Pass a list: concat([a, b]).", table_of(2))
    first, second = Provenance(weights="aa"), Provenance(weights="bb")
    refused(
        "concat: a and b must come from one model with one transform; the first comes from another: its weights differ "
        "(aa there, bb here): the backbone was fine-tuned or is another one. Extract both with the same model.",
        [table_of(2, name="a", provenance=first), table_of(2, name="b", provenance=second)],
    )
    assert concat([table_of(2, provenance=first), table_of(2)]).provenance == first
    older, newer = (Provenance(weights=weights, tensors="cc") for weights in ("aa", "bb"))  # by two versions of timm
    assert concat([table_of(2, provenance=older), table_of(2, provenance=newer)]).provenance == older
    refused(
        "concat: column 'feature' must have one width in all tables; got [(2,), (3,)]. Join tables of one model.",
        [table_of(2), Table(feature=torch.zeros(1, 2))],
    )
    refused(
        "concat: table in memory, table in memory have no column in common. Extract them with the same probes.",
        [Table(loss=[1.0]), Table(label=[1])],
    )


@pytest.mark.parametrize(("index", "message"), [([0, 5], "0 to 5"), ([-1, 2], "-1 to 2")])
def test_rows_that_are_not_there(index, message):
    refused(
        f"rows of table in memory must be indices from 0 to 4; got {message}. Choose among its rows.",
        table_of(5),
        torch.tensor(index),
        by=chosen_rows,
    )


def test_losses_of_different_task_losses_are_not_joined():
    tables = [
        Table(name=name, loss=[1.0], provenance=Provenance(task_loss=made_by))
        for name, made_by in (("a", "cross_entropy"), ("b", "bce"), ("c", "cross_entropy"), ("d", None))
    ]
    with pytest.raises(TableError) as error:
        concat(tables)
    assert str(error.value) == (
        "concat: losses of a, b, c, d were made by different task losses (bce, cross_entropy), which have no common "
        "scale. Join tables of one task loss."
    )
    assert len(concat([tables[0], tables[2], tables[3]])) == 3


def test_the_known_task_loss_stays_known():
    unlabelled, bce = (
        Table(logit=[[1.0]], provenance=Provenance("m")),
        Table(logit=[[1.0]], provenance=Provenance(task_loss="bce")),
    )
    assert concat([unlabelled, bce]).provenance == Provenance("m", task_loss="bce")
    assert concat([bce, unlabelled]).provenance == Provenance(task_loss="bce")
    assert unlabelled.provenance == concat([unlabelled, unlabelled]).provenance == Provenance("m")
    assert concat([Table(logit=[[1.0]]), bce]).provenance is None  # arrays come from an unknown model


def predictions_of(seed: int, n: int = 8, c: int = 3, **about: object) -> Table:
    """What one model says of eight photographs."""
    logit = 2 * torch.randn(n, c, generator=torch.Generator().manual_seed(seed))
    columns = {"logit": logit, "feature": logit, "label": torch.arange(n) % 3, "id": [f"{i}.png" for i in range(n)]}
    return Table(
        **{"name": f"cache/{seed}", "provenance": Provenance(f"m{seed}", weights=f"s{seed}"), **columns, **about}
    )


def test_an_ensemble_of_tables():
    tables = [predictions_of(seed) for seed in range(3)]
    both = ensemble(tables)
    assert both.columns == ("id", "label", "logit", "members_logit")  # features of different models are not comparable
    assert torch.equal(both.whole("members_logit"), torch.stack([table.logit for table in tables], 1))
    probs = torch.stack([table.logit.double().softmax(-1) for table in tables])
    torch.testing.assert_close(both.logit.double().exp(), probs.mean(0))
    assert both.logit.dtype == torch.float32
    assert both.label.tolist() == tables[0].label.tolist()
    assert both.id.tolist() == tables[0].id.tolist()
    torch.testing.assert_close(MutualInformation().score(both), decompose(probs).epistemic, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(Entropy().score(both), decompose(probs).total, rtol=1e-5, atol=1e-6)
    accuracy = (probs.mean(0).argmax(1) == tables[0].label).double().mean()
    result = dubito.evaluate({"mutual_information": MutualInformation()}, both, resamples=5)
    assert result.model["accuracy"].value == pytest.approx(float(accuracy))


@pytest.mark.parametrize("rows", [slice(0, 0), slice(2, 7), [0], [7, 0, 7, 3], [], [-1, 1]])
def test_rows_of_an_ensemble(rows):
    tables = [predictions_of(seed) for seed in range(3)]
    same(ensemble(tables).rows(rows), ensemble([table.rows(rows) for table in tables]))
    same(chosen_rows(ensemble(tables), torch.tensor([5, 2])), ensemble([table.rows([5, 2]) for table in tables]))
    same(concat([ensemble(tables), ensemble(tables)]).rows(slice(8, 16)), ensemble(tables).rows(slice(0, 8)))


def test_an_ensemble_of_caches(cached):
    disk, memory = cached
    same(ensemble([disk, memory]).rows(slice(3, 17)), ensemble([memory, memory]).rows(slice(3, 17)))


def test_an_ensemble_reads_nothing_before_it_is_used():
    class Column:
        shape, reads = (5, 2), 0

        def __getitem__(self, rows):
            Column.reads += 1
            return torch.zeros(5, 2)[rows]

    table = ensemble([Table(logit=Column()), Table(logit=Column())])
    assert (table.shape("members_logit"), table.shape("logit"), Column.reads) == ((5, 2, 2), (5, 2), 0)
    assert table.rows([1]).shape("members_logit") == (1, 2, 2)


def test_an_ensemble_knows_its_models():
    one, two = predictions_of(1), predictions_of(2)
    both = ensemble([one, two])
    assert (both.name, both.model_id) == ("ensemble of cache/1, cache/2", ensemble([one, two]).model_id)
    assert both.provenance == Provenance("ensemble of m1, m2", members=(one.provenance, two.provenance))
    assert both.model_id not in (one.model_id, two.model_id, ensemble([two, one]).model_id, None)
    assert (
        ensemble([one, predictions_of(2, provenance=Provenance("m2"))]).model_id,
        ensemble([one, predictions_of(2, provenance=None)]).provenance,
    ) == (
        None,
        None,
    )
    many = [predictions_of(seed, n=200, label=torch.arange(200) % 3) for seed in (1, 2)]
    fitted = Temperature().fit(ensemble(many))
    fitted.score(both)
    with pytest.raises(TableError, match="must come from one model"):
        fitted.score(one)
    with pytest.raises(TableError, match="must come from one model"):
        fitted.score(ensemble([one, predictions_of(3)]))


def test_what_is_no_ensemble():
    one = predictions_of(1)
    for tables, got in (([], 0), ([one], 1), (one, "a single one")):
        text = f"ensemble needs a list of at least 2 tables; got {got}. Pass a list: ensemble([a, b])."
        refused(text, tables, by=ensemble)
    refused(
        "ensemble: cache/1 and cache/2 must have the same images; they have 8 and 7 rows, 0 and 1 skipped. "
        "Extract the same images with every model.",
        [one, predictions_of(2, n=7, skipped=[("7.png", "broken")])],
        by=ensemble,
    )
    refused(
        "ensemble: cache/1 and cache/2 must have the same classes; they have 3 and 4 logits. Members of one ensemble "
        "share their classes, in one order.",
        [one, predictions_of(2, c=4)],
        by=ensemble,
    )
    refused(
        "ensemble: cache/1 and cache/2 must have the same classes; class 1 is 'dog' and 'owl'. Members of one ensemble "
        "share their classes, in one order.",
        [predictions_of(1, classes=["cat", "dog", "owl"]), predictions_of(2, classes=["cat", "owl", "dog"])],
        by=ensemble,
    )
    refused(
        "ensemble: cache/1 and cache/2 must have the same images; row 2 is '2.png' and 'two.png'. Extract the same "
        "images, in one order, with the same labels.",
        [one, predictions_of(2, id=["0.png", "1.png", "two.png", *(f"{i}.png" for i in range(3, 8))])],
        by=ensemble,
    )
    refused(
        "ensemble: cache/1 and cache/2 must have the same labels; row 7 is '1' and '0'. Extract the same images, in "
        "one order, with the same labels.",
        [one, predictions_of(2, label=[0, 1, 2, 0, 1, 2, 0, 0])],
        by=ensemble,
    )
    refused(
        "ensemble: cache/1 and cache/2 must have the same labels; those of one are the model's classes, those of the "
        "other another set's. Extract both with the same labels and label_space.",
        [one, predictions_of(2, label_space="own")],
        by=ensemble,
    )
    with pytest.raises(MissingColumnError, match="ensemble needs column 'logit'; table in memory has label"):
        ensemble([one, Table(label=[0])])


def test_labels_and_names_of_an_ensemble_are_those_of_any_table_that_has_them():
    bare = predictions_of(2, label=None, id=None)
    assert ensemble([bare, predictions_of(1, classes=["a", "b", "c"])]).classes == ["a", "b", "c"]
    assert ensemble([bare, predictions_of(1)]).label.tolist() == predictions_of(1).label.tolist()
    assert ensemble([bare, predictions_of(1, label_space="own")]).label_space == "own"
    assert "label" not in ensemble([bare, bare])


def test_a_first_table_that_says_little_hides_no_difference_between_the_others():
    bare = predictions_of(0, label=None, id=None)
    for about, message in (
        ({"id": [f"other/{i}.png" for i in range(8)]}, "same images; row 0 is '0.png' and 'other/0.png'"),
        ({"label": [0, 1, 2, 0, 1, 2, 0, 0]}, "same labels; row 7 is '1' and '0'"),
        ({"label_space": "own"}, "same labels; those of one are the model's classes"),
        ({"classes": ["cat", "owl", "dog"]}, "same classes; class 1 is 'dog' and 'owl'"),
    ):
        with pytest.raises(TableError, match=f"^ensemble: cache/1 and cache/2 must have the {message}"):
            ensemble([bare, predictions_of(1, classes=["cat", "dog", "owl"]), predictions_of(2, **about)])


def test_an_ensemble_of_augmented_epochs_keeps_crops_of_a_photograph_together():
    places = {"image_index": torch.arange(8) % 4, "epoch": torch.arange(8) // 4}
    both = ensemble([predictions_of(1, **places), predictions_of(2, **places)])
    assert (both.whole("image_index").tolist(), both.whole("epoch").tolist()) == ([0, 1, 2, 3] * 2, [0] * 4 + [1] * 4)
    with pytest.raises(TableError, match="must have the same images; row 1 is '1' and '0'"):
        ensemble([predictions_of(1, **places), predictions_of(2, **{**places, "image_index": torch.arange(8) // 2})])


def test_ensembles_of_different_settings_are_not_concatenated():
    def table(passes: int, **columns: object) -> Table:
        provenance = Provenance(probes={"dropout": {"settings": {"passes": passes}}})
        return Table(
            name=f"cache/{passes}", provenance=provenance, **{"loss": [1.0], "dropout": torch.zeros(1, 9), **columns}
        )

    refused(
        "concat: 'dropout' of cache/10 and cache/20 were extracted with different settings (passes=10 and passes=20), "
        "so their numbers cannot be compared. Extract both with the same settings, or select other columns.",
        [table(10), table(20)],
    )
    assert len(concat([table(10), table(10)])) == 2
    assert concat([table(10), table(20, dropout=None)]).columns == ("loss",)
    assert concat([table(10).select("loss"), table(20)]).columns == ("loss",)


def test_gradients_of_different_settings_are_not_concatenated():
    def table(copies: int, **columns: object) -> Table:
        probe = {"settings": {"copies": copies}, "notes": {"layers": ["fc"], "depth": [0], "of": 1}}
        provenance = Provenance(probes={"gradient": probe})
        return Table(
            name=f"cache/{copies}", provenance=provenance, **{"loss": [1.0], "gradient": torch.ones(1, 1), **columns}
        )

    refused(
        "concat: 'gradient' of cache/0 and cache/8 were extracted with different settings (copies=0 and copies=8), so "
        "their numbers cannot be compared. Extract both with the same settings, or select other columns.",
        [table(0), table(8)],
    )
    assert concat([table(8), table(8)]).provenance == table(8).provenance
    assert concat([table(0), table(8, gradient=None)]).columns == ("loss",)
