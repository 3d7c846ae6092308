"""The losses that a head learns: sums by hand and by brute force, and what cannot be learned from."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from scipy.stats import entropy

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.heads.recipe import Recipe, expected_loss, target_column, with_expected_loss
from dubito.table import Provenance, Table
from dubito.table.views import concat


def logits(n: int = 20, c: int = 5) -> torch.Tensor:
    return 3 * torch.randn(n, c, generator=torch.Generator().manual_seed(0))


def test_by_hand():
    # logits (log 3, 0): p = (3/4, 1/4). At T = 1/2 they double, (log 9, 0): p_T = (9/10, 1/10).
    # 9/10 log(4/3) + 1/10 log 4
    result = expected_loss(torch.tensor([[math.log(3), 0.0]]), 0.5)
    assert result.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_mean_of_the_loss_over_labels_drawn_from_the_prediction(temperature):
    z = logits()
    probability = softmax(z.double().numpy() / temperature, axis=1)
    expected = np.zeros(len(z))
    for label in range(z.shape[1]):
        of_label = F.cross_entropy(z.double(), torch.full((len(z),), label), reduction="none").numpy()
        expected += probability[:, label] * of_label
    np.testing.assert_allclose(expected_loss(z, temperature).numpy(), expected, rtol=1e-10)


def test_at_temperature_one_it_is_the_entropy():
    z = logits()
    np.testing.assert_allclose(
        expected_loss(z).numpy(), entropy(softmax(z.double().numpy(), axis=1), axis=1), rtol=1e-6
    )


def test_extreme_logits_stay_finite():
    result = expected_loss(torch.tensor([[1e4, 0.0], [0.0, 0.0]]), 0.01)
    assert result.tolist() == pytest.approx([0.0, math.log(2)])


@settings(max_examples=25)
@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_model_that_is_believed_less_expects_more(first, second):
    low, high = sorted((first, second))
    assert bool((expected_loss(logits(), low) <= expected_loss(logits(), high) + 1e-9).all())


class Watched:
    """A column that counts how many rows were read."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.read = values, tuple(values.shape), 0

    def __getitem__(self, rows):
        result = self.values[rows]
        self.read += len(result)
        return result


def test_the_expected_loss_as_a_column_is_computed_on_request():
    column = Watched(logits())
    table = with_expected_loss(Table(logit=column, feature=torch.zeros(20, 2)), 2.0)
    assert table.shape("loss") == (20,)
    assert column.read == 0
    part = table.select("loss").rows(slice(3, 5)).loss
    assert column.read == 2
    assert part.dtype == torch.float32
    assert torch.equal(part, expected_loss(logits(), 2.0)[3:5].float())
    assert torch.equal(table.rows([7, 0]).loss, expected_loss(logits(), 2.0)[[7, 0]].float())
    assert torch.equal(table.loss, expected_loss(logits(), 2.0).float())


def test_unlabelled_rows_beside_labelled_ones():
    labelled = Table(logit=logits(3), loss=[1.0, 2.0, 3.0])
    both = concat([labelled, with_expected_loss(Table(logit=logits(20)[5:9]))])
    expected = torch.cat([torch.tensor([1.0, 2.0, 3.0]), expected_loss(logits(20)[5:9]).float()])
    assert torch.equal(target_column(both, Recipe()), expected)


def of_one_model(*, task_loss: str | None = None) -> Table:
    """As a cache without labels, or with losses of a task loss."""
    provenance = Provenance(model="one", weights="ab", task_loss=task_loss)
    return Table(logit=logits(3), loss=[1.0, 2.0, 3.0] if task_loss else None, provenance=provenance)


def test_expected_losses_are_known_as_cross_entropy():
    result = with_expected_loss(unlabelled := of_one_model())
    assert result.provenance == Provenance(model="one", weights="ab", task_loss="cross_entropy")
    assert unlabelled.provenance == Provenance(model="one", weights="ab")
    assert with_expected_loss(Table(logit=logits())).provenance is None
    bce = of_one_model(task_loss="bce")
    for tables in ((result, bce), (bce, result)):
        with pytest.raises(TableError, match=r"made by different task losses \(bce, cross_entropy\)"):
            concat(tables)
    assert len(concat([result, of_one_model(task_loss="cross_entropy")])) == 6


@pytest.mark.parametrize("bce_first", [True, False])
def test_rows_without_losses_do_not_hide_the_task_loss_of_the_others(bce_first):
    tables = (of_one_model(task_loss="bce"), of_one_model())
    both = concat(tables if bce_first else tables[::-1])
    assert both.columns == ("logit",)
    with pytest.raises(
        TableError, match=r"^head\.fit with target 'expected' takes the expectation .* come from 'bce'\."
    ):
        target_column(both, Recipe(target="expected"))
    with pytest.raises(TableError, match=r"^with_expected_loss takes the expectation .* come from 'bce'\."):
        with_expected_loss(both)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperatures_without_meaning(temperature):
    with pytest.raises(
        ValueRangeError, match=rf"^with_expected_loss: temperature must be a number, above 0; got {temperature}\."
    ):
        with_expected_loss(Table(logit=logits()), temperature)


def test_with_expected_loss_needs_logits():
    with pytest.raises(
        MissingColumnError, match=r"^with_expected_loss needs column 'logit'; table in memory has feature"
    ):
        with_expected_loss(Table(feature=torch.zeros(2, 2)))


def test_the_three_targets():
    z, loss = logits(3000), torch.rand(3000, generator=torch.Generator().manual_seed(1))
    table = Table(logit=z, loss=loss)
    passed = target_column(table, Recipe())
    assert (passed.dtype, passed.shape) == (torch.float32, (3000,))
    assert torch.equal(passed, loss)
    expected = target_column(table.select("logit"), Recipe(target="expected", temperature=1.7))
    own = softmax(z.double().numpy() / 1.7, axis=1)
    np.testing.assert_allclose(
        expected.numpy(), -(own * log_softmax(z.double().numpy(), axis=1)).sum(1), rtol=1e-5, atol=1e-7
    )
    mixed = target_column(table, Recipe(target="mixed", temperature=1.7, mix=0.25))
    torch.testing.assert_close(mixed, 0.75 * passed + 0.25 * expected)
    assert torch.equal(target_column(table, Recipe(target="mixed", mix=0.0)), passed)


def test_the_column_outlives_its_file():
    column = target_column(Table(loss=[1.0, 2.0]), Recipe())
    column[0] = 5.0
    assert column.tolist() == [5.0, 2.0]


@pytest.mark.parametrize("target", ["expected", "mixed"])
@pytest.mark.parametrize("made_by", ["bce", "first 0123456789abcdef"])
def test_another_task_loss_has_no_expectation(target, made_by):
    provenance = Provenance(model="timm:a", weights="ab", task_loss=made_by)
    table = Table(name="cache/train", logit=logits(3), loss=[1.0, 2.0, 3.0], provenance=provenance)
    refused(
        table,
        Recipe(target=target),
        TableError,
        f"head.fit with target '{target}' takes the expectation of the task loss 'cross_entropy'; "
        f"the losses of cache/train come from '{made_by}'. Train with target='observed', or extract with "
        f"Forward(task_loss='cross_entropy').",
    )
    assert target_column(table, Recipe()).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(
        TableError, match=rf"^with_expected_loss takes the expectation .* come from '{made_by}'\. Take its own"
    ):
        with_expected_loss(table)


@pytest.mark.parametrize("provenance", [None, Provenance("timm:a"), Provenance(task_loss="cross_entropy")])
def test_the_usual_task_loss_and_an_unknown_one_are_taken(provenance):
    table = Table(logit=logits(3), loss=[1.0, 2.0, 3.0], provenance=provenance)
    assert torch.equal(target_column(table, Recipe(target="expected")), expected_loss(logits(3)).float())
    assert torch.equal(with_expected_loss(table).loss, expected_loss(logits(3)).float())


def test_several_labels_an_image_are_no_column_of_a_table():
    with pytest.raises(TableError, match=r"^column 'label' of table in memory must have one axis; got shape \(3, 5\)"):
        Table(logit=logits(3), label=torch.ones(3, 5, dtype=torch.long))


def refused(table: Table, recipe: Recipe, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        target_column(table, recipe)


def test_constant_losses():
    refused(
        Table(loss=[0.5] * 4),
        Recipe(),
        TableError,
        "head.fit needs losses that differ; all 4 of table in memory lie between 0.5 and 0.5, so there is no order to "
        "learn.",
    )


def test_losses_within_the_leeway():
    refused(
        Table(loss=[0.5, 0.75]),
        Recipe(leeway=0.25),
        TableError,
        "head.fit needs losses that differ by more than the leeway 0.25; all 2 of table in memory lie between 0.5 and "
        "0.75, so there is no order to learn.",
    )
    assert target_column(Table(loss=[0.5, 0.75]), Recipe(leeway=0.2)).tolist() == [0.5, 0.75]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_without_meaning(bad):
    refused(
        Table(loss=[0.0, 1.0, 2.0, 3.0, bad, 1.0]),
        Recipe(),
        ValueRangeError,
        "head.fit: losses of table in memory: 1 of 6 values are NaN or infinite, the first at position 4. "
        "Check the label and the logits of that row.",
    )


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows(rows):
    refused(
        Table(loss=[1.0][:rows]),
        Recipe(),
        TableError,
        f"head.fit: table needs at least 2 rows; table in memory has {rows}. Pass a table with more rows.",
    )


def test_negative_losses_can_be_ranked_but_not_predicted():
    table = Table(loss=[-1.5, 2.0])
    assert target_column(table, Recipe()).tolist() == [-1.5, 2.0]
    refused(
        table,
        Recipe(loss="l2"),
        ValueRangeError,
        "head.fit: the l2 loss predicts losses of 0 or more; got -1.5 in table in memory. Use loss='ranking', which "
        "needs their order alone.",
    )


@pytest.mark.parametrize(
    ("target", "column", "by"),
    [
        ("observed", "loss", "head.fit"),
        ("expected", "logit", "head.fit with target 'expected'"),
        ("mixed", "loss", "head.fit with target 'mixed'"),
    ],
)
def test_missing_columns(target, column, by):
    with pytest.raises(
        MissingColumnError, match=rf"^{by} needs column '{column}'; table in memory has feature\. Pass {column}="
    ):
        target_column(Table(feature=torch.zeros(3, 2)), Recipe(target=target))
