"""Patterns of activation: the order of neurons, means, examples, and what OOD rows resemble."""

import json

import pytest
import torch

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.explain.patterns import patterns
from dubito.table import Table

MEANS = torch.tensor([[0.0, 5.0, 0.0, 1.0], [3.0, 0.0, 0.0, 2.0], [0.0, 0.0, 4.0, 0.0]])
"""Of three classes over four neurons: neuron 1 belongs to the first, 0 and 3 to the second, 2 to the third."""


def rows_of(n: int, labels: list[int], noise: float = 0.0) -> Table:
    label = torch.tensor(labels)[torch.arange(n) % len(labels)]
    where = torch.tensor([labels.index(y) for y in label.tolist()])
    draw = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return Table(feature=MEANS[where] + noise * draw, label=label, name="known")


def test_neurons_are_grouped_by_class_and_fall_within_it():
    result = patterns(rows_of(6, [0, 1, 2]), Table(feature=[[2.0, 2.0, 2.0, 2.0]], name="ood"))
    assert result.order.tolist() == [1, 0, 3, 2]
    assert result.owner.tolist() == [0, 1, 1, 2]
    assert torch.equal(result.mean.float(), MEANS[:, [1, 0, 3, 2]])
    assert result.ood_mean.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert result.names == ["0", "1", "2"]


def test_numbers_by_hand():
    # The OOD rows (0, 0, 2, 0) and (0, 3, 0, 4): cosine 1 with class 2; with class 0 (15 + 4) / (5 sqrt 26).
    result = patterns(rows_of(6, [0, 1, 2]), Table(feature=[[0.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 4.0]], name="ood"))
    assert result.own_cosine.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert result.own_norm.tolist() == pytest.approx([26**0.5, 13**0.5, 4.0])
    assert result.ood_share.tolist() == [0.5, 0.0, 0.5]
    assert result.ood_cosine == pytest.approx((1 + 19 / (5 * 26**0.5)) / 2)
    assert result.ood_norm == pytest.approx(3.5)


def test_labels_need_not_be_dense_and_have_names():
    table = Table(feature=MEANS, label=[2, 5, 4], classes=list("abcdef"), name="known")
    result = patterns(table, table)
    assert result.classes.tolist() == [2, 4, 5]
    assert result.names == ["c", "e", "f"]
    assert result.owner.tolist() == [0, 1, 2, 2]
    assert torch.equal(result.mean.float(), MEANS[[0, 2, 1]][:, result.order])
    other = Table(feature=MEANS, label=[2, 5, 4], classes=list("ab"), label_space="own")
    assert patterns(other, other).names == ["2", "4", "5"]  # the names are those of the logits, not of these labels


def test_examples_are_rows_of_their_class_drawn_by_the_seed():
    table = rows_of(300, [7, 1, 4], noise=0.1)
    result = patterns(table, table, examples=5, seed=3)
    assert [len(rows) for rows in result.examples] == [5, 5, 5]
    for y, rows in zip(result.classes.tolist(), result.examples, strict=True):
        own = table.feature[table.label == y][:, result.order]
        assert all(bool((own == row).all(1).any()) for row in rows)
        assert len(rows.unique(dim=0)) == 5
    assert torch.equal(result.ood_examples, patterns(table, table, examples=5, seed=3).ood_examples)
    assert not torch.equal(result.ood_examples, patterns(table, table, examples=5, seed=4).ood_examples)
    subset = patterns(rows_of(4, [0, 1, 2]), Table(feature=MEANS[:1]), examples=5)
    assert [len(rows) for rows in subset.examples] == [2, 1, 1]
    assert len(subset.ood_examples) == 1


def test_statistics_are_those_of_all_rows_over_many_blocks():
    known = rows_of(5000, [0, 1, 2], noise=0.5)
    ood = Table(feature=torch.rand(4500, 4, generator=torch.Generator().manual_seed(1)), name="ood")
    result = patterns(known, ood)
    means = torch.stack([known.feature[known.label == y].double().mean(0) for y in range(3)])
    assert torch.allclose(result.mean, means[:, result.order])
    cosine = torch.cosine_similarity(ood.feature.double()[:, None], means[None], dim=2)
    assert result.ood_cosine == pytest.approx(float(cosine.amax(1).mean()))
    assert result.ood_share.tolist() == pytest.approx((torch.bincount(cosine.argmax(1), minlength=3) / 4500).tolist())
    rows = known.feature[known.label == 1].double()
    others = torch.stack([torch.cat([rows[:i], rows[i + 1 :]]).mean(0) for i in range(len(rows))])
    assert float(result.own_cosine[1]) == pytest.approx(float(torch.cosine_similarity(rows, others, dim=1).mean()))


def test_a_row_is_not_compared_with_itself():
    # Two rows at a right angle: each has the cosine 0 with the other; with their common mean it would be 0.71.
    table = Table(feature=[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], label=[0, 0, 1])
    result = patterns(table, table)
    assert result.own_cosine[0].item() == pytest.approx(0.0)


def test_a_class_of_one_row_has_no_others():
    table = Table(feature=[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], label=[0, 0, 1], name="known")
    result = patterns(table, Table(feature=[[3.0, 3.0]]))
    assert result.own_cosine.isnan().tolist() == [False, True]
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["own_cosine"] == [pytest.approx(0.0), None]
    assert result.findings()[0].startswith("Rows have a cosine of 0.00 with the mean of others")  # not 0.50
    alone = patterns(table.rows([0, 2]), Table(feature=[[3.0, 3.0]]))
    assert alone.findings()[::2] == [
        "Every class has one row, so none has a cosine with others of its class; OOD rows have one of 1.00 with the "
        "pattern they resemble most.",
        "100% of the OOD rows resemble '1' most; that class has one row.",
    ]


def test_json_text_and_plot():
    boots = Table(feature=2 * MEANS[[2, 2, 2, 0]], name="digits")
    result = patterns(rows_of(6, [0, 1, 2]), boots)
    assert result.findings() == [
        "Rows have a cosine of 1.00 with the mean of others of their class, OOD rows one of 1.00 with the pattern they "
        "resemble most.",
        f"OOD rows are {result.ood_norm / float(result.own_norm.mean()):.2f} times as long as in-distribution rows.",
        "75% of the OOD rows resemble '2' most; for rows of that class the cosine is 1.00.",
    ]
    assert json.loads(json.dumps(result.to_dict()))["ood_share"] == [0.25, 0.0, 0.75]
    assert str(result).startswith("known (3 classes) against digits\n")
    pytest.importorskip("matplotlib")
    assert len(result.plot()) == 4
    assert len(result.plot(classes=[2])) == 2
    long = Table(feature=MEANS, label=[0, 1, 2], classes=["hen, Gallus", "x" * 30, "b"], name="caches/birds")
    labels = [axes.get_ylabel() for axes in patterns(long, long).plot()]
    assert labels == ["hen", "x" * 17 + "…", "b", "birds"]
    with pytest.raises(ValueRangeError, match=r"labels that occur, such as \[0, 1, 2\]; got \[9\]."):
        result.plot(classes=[9])


def test_what_cannot_be_shown_is_refused():
    known = rows_of(6, [0, 1, 2])
    with pytest.raises(TableError, match="patterns: ood needs at least 1 row; nothing has 0"):
        patterns(known, Table(feature=torch.zeros(0, 4), name="nothing"))
    with pytest.raises(TableError, match=r"column 'feature' of ood .* must be 4 wide, as in known; got 3"):
        patterns(known, Table(feature=[[1.0, 2.0, 3.0]], name="ood"))
    with pytest.raises(MissingColumnError, match="patterns needs column 'label'"):
        patterns(known.select("feature"), known)
    with pytest.raises(ValueRangeError, match="examples must be a whole number, at least 1; got 0"):
        patterns(known, known, examples=0)
    with pytest.raises(TableError, match="label of known must be a number, at least 0; got -1"):
        patterns(rows_of(6, [0, -1]), known)
    with pytest.raises(ValueRangeError, match="features of broken: 1 of 4 values are NaN"):
        patterns(known, Table(feature=[[torch.nan, 0.0, 0.0, 0.0]], name="broken"))


def test_records_start_with_the_class_that_ood_rows_resemble_most():
    result = patterns(rows_of(6, [0, 1, 2]), Table(feature=2 * MEANS[[2, 2, 0]], name="digits"))
    assert [row["class"] for row in result.records()] == ["2", "0", "1"]
    assert result.to_pandas()["ood_share"].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    many = Table(feature=torch.eye(30), label=list(range(30)), name="many")
    assert (len(patterns(many, many).records()), len(patterns(many, many).lines())) == (30, 1 + 10)
