import inspect
from dataclasses import dataclass

import pytest
import torch

from dubito.errors import MissingColumnError, NotFittedError, TableError, ValueRangeError
from dubito.table import Table
from dubito.types import Score, finite


@dataclass
class Norm(Score):
    """A score of the simplest kind that learns: the distance to the mean feature."""

    power: float = 1.0

    name = "norm"
    kind = "epistemic"
    needs = ("feature",)
    learns_from = ("feature", "label")
    learned = ("mean_", "count_")

    def learn(self, table: Table) -> None:
        self.mean_, self.count_ = table.feature.mean(0), len(table)

    def score_batch(self, batch: Table) -> torch.Tensor:
        return (batch.feature - self.mean_).norm(dim=1) ** self.power


@dataclass
class First(Score):
    """Learns nothing."""

    name = "first"
    kind = "total"
    needs = ("logit",)

    def score_batch(self, batch: Table) -> torch.Tensor:
        return batch.logit[:, 0]


@dataclass
class Squared(Score):
    """Overflows where logits are large."""

    name = "squared"
    kind = "total"
    needs = ("logit",)

    def score_batch(self, batch: Table) -> torch.Tensor:
        return batch.logit[:, 0].square()


TABLE = Table(feature=[[0.0, 0.0], [2.0, 0.0]], label=[0, 1], name="cache/train")


def test_fit_learns_and_returns_the_score():
    score = Norm()
    assert score.fit(TABLE) is score
    assert score.mean_.tolist() == [1.0, 0.0]
    # to the mean (1, 0): from (1, 3) three, from (5, 3) five
    assert score.score(Table(feature=[[1.0, 3.0], [5.0, 3.0]])).tolist() == [3.0, 5.0]


def test_scores_are_float64_whatever_rows_gives():
    u = First().score(Table(logit=torch.ones(2, 3)))
    assert u.dtype == torch.float64


def test_a_table_of_many_batches_is_scored_in_order():
    logit = torch.arange(20_000.0).view(-1, 1)
    assert torch.equal(First().score(Table(logit=logit)), logit[:, 0].double())


def test_an_empty_table_has_no_scores():
    assert First().score(Table(logit=torch.empty(0, 3))).shape == (0,)


def test_columns_come_before_fitting():
    with pytest.raises(MissingColumnError, match=r"norm\.fit needs column 'label'; table in memory has feature\."):
        Norm().fit(Table(feature=[[1.0]]))
    with pytest.raises(MissingColumnError, match=r"norm\.score needs column 'feature'; table in memory has logit\."):
        Norm().score(Table(logit=[[1.0]]))


def test_before_fit_the_missing_attributes_are_named():
    score = Norm()
    with pytest.raises(NotFittedError) as error:
        score.score(TABLE)
    assert str(error.value) == (
        "norm.score was called before fit (no mean_, count_). "
        "Call fit(table) first, with a table that has feature, label."
    )
    score.mean_ = torch.zeros(2)
    with pytest.raises(NotFittedError, match=r"before fit \(no count_\)"):
        score.score(TABLE)


def test_a_score_without_rows_is_no_score():
    with pytest.raises(TypeError, match="abstract"):
        Score()


def test_a_path_in_place_of_a_table_is_refused():
    # The types are checked first under test, and not where people work: the functions inside are asked.
    fitted = Norm().fit(Table(feature=[[1.0]], label=[0]))
    with pytest.raises(
        TableError, match=r'norm\.fit: table must be a table; .* Open it: dubito\.open\("cache/train"\)\.'
    ):
        inspect.unwrap(Score.fit)(fitted, "cache/train")
    assert not fitted.is_fitted
    with pytest.raises(TableError, match=r'first\.score: table must be a table; got the path "cache/test"\. Open it'):
        inspect.unwrap(Score.score)(First(), "cache/test")
    with pytest.raises(TableError, match=r"first\.score: table must be a table, from .*; got Tensor\. Make one"):
        inspect.unwrap(Score.score)(First(), torch.zeros(2, 3))


def test_scores_that_are_not_finite_are_errors():
    table = Table(logit=[[1e300], [3.0], [1e300]], name="cache/test")
    with pytest.raises(ValueRangeError) as error:
        Squared().score(table)
    assert str(error.value) == (
        "squared.score of cache/test: 2 of 3 values are NaN or infinite, the first at position 0. "
        "Uncertainties must be finite: check the logits or features of that row."
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_columns_that_are_not_finite_do_not_reach_a_score(bad):
    logit = torch.zeros(5000, 1)
    logit[4321] = bad  # not in the first batch
    with pytest.raises(
        ValueRangeError, match=rf"^first\.score: column 'logit' must be finite; row 4321 .* holds {bad}\."
    ):
        First().score(Table(logit=logit))


def test_finite_returns_what_it_was_given():
    values = torch.tensor([[1.0, -2.0], [3.4e38, 0.0]])
    assert finite(values, "x") is values
    assert finite(torch.empty(0), "x").shape == (0,)
    with pytest.raises(ValueRangeError, match="x: 1 of 4 values are NaN or infinite, the first at position 2"):
        finite(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]), "x")
