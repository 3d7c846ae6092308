"""Linear classifiers on labelled rows: scikit-learn's optimum, members that differ, columns made when asked for."""

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression

from dubito import MutualInformation, Table
from dubito.active.linear import LinearTrainer
from dubito.errors import MissingColumnError, TableError, ValueRangeError


def pool(n: int = 80, seed: int = 0) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    return Table(feature=3 * torch.eye(3, 6)[label] + torch.randn(n, 6, generator=draw), label=label)


def test_fewer_rows_than_features_are_no_other_classifier():
    """The trainer looks in the span of the rows; scikit-learn looks everywhere."""
    draw = torch.Generator().manual_seed(1)
    table = Table(feature=torch.randn(50, 30, generator=draw) + 5, label=torch.arange(50) % 3)
    result = LinearTrainer(strength=2.0)(table, torch.arange(12))
    x = (table.feature.double().numpy() - result.mean) / result.scale
    theirs = LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000).fit(x[:12], table.label[:12].numpy())
    np.testing.assert_allclose(result.heads[0, :-1], theirs.coef_.T, atol=1e-4)


def test_a_member_is_the_optimum_around_its_own_prior():
    feature, y = np.random.default_rng(0).normal(size=(10, 30)), np.arange(10) % 3
    trained = LinearTrainer(members=2, strength=2.0)(Table(feature=feature, label=y), torch.arange(10))
    x, head = (feature - trained.mean) / trained.scale, trained.heads[1]
    prior = np.random.default_rng([0, 10]).normal(scale=2.0**-0.5, size=(30, 3))  # seeded by the seed and the rows
    p = softmax(x @ head[:-1] + head[-1], axis=1) - np.eye(3)[y]
    np.testing.assert_allclose(x.T @ p + 2.0 * (head[:-1] - prior), 0, atol=1e-3)  # the slope of the penalised loss
    np.testing.assert_allclose(p.sum(0), 0, atol=1e-3)


def test_members_differ_most_where_nothing_is_labelled():
    """A bootstrap's members are all flat across directions without labels; those of a prior are not."""
    draw = torch.Generator().manual_seed(0)
    feature = torch.zeros(200, 10)
    feature[:100, :5], feature[100:, 5:] = torch.randn(2, 100, 5, generator=draw)
    predicted = LinearTrainer(members=20)(
        table := Table(feature=feature, label=torch.arange(200) % 3), torch.arange(60)
    )
    information = MutualInformation().score(predicted.extend(table))
    assert information[100:].median() > 1.5 * information[:100].median()


def test_a_class_without_a_label_is_never_predicted():
    table = pool()
    rows = torch.tensor([row for row in range(20) if table.label[row] != 2])
    predicted = LinearTrainer()(table, rows).extend(table)
    assert predicted.logit.shape == (80, 3)
    assert 2 not in predicted.logit.argmax(1).tolist()


def test_the_first_labels_may_be_all_alike():
    """People begin with a few images, and all of them are cats."""
    table = pool().select("feature").extended(label=torch.where(torch.arange(80) < 5, 0, -1))
    predicted = LinearTrainer(members=3)(table, torch.arange(5)).extend(table)
    assert predicted.shape("logit") == (80, 2)
    assert MutualInformation().score(predicted).isfinite().all()


def test_columns_are_alike_in_blocks_and_as_a_whole():
    table = pool(700)
    predicted = LinearTrainer(members=3)(table, torch.arange(30)).extend(table)
    assert predicted.shape("members_logit") == (700, 3, 3)
    rows = torch.tensor([650, 3, 600])
    torch.testing.assert_close(predicted.rows(rows).logit, predicted.logit[rows])
    assert predicted.rows([]).logit.shape == (0, 3)
    assert (predicted.logit.argmax(1) == table.label).double().mean() > 0.9
    members = predicted.whole("members_logit")
    assert not torch.allclose(members[:, 0], members[:, 1])


def test_predictions_of_another_model_are_dropped():
    table = pool().extended(loss=torch.zeros(80), members=torch.zeros(80, 7), logit=torch.zeros(80, 3))
    predicted = LinearTrainer()(table, torch.arange(30)).extend(table)
    assert set(predicted.columns) == {"feature", "label", "logit"}


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(TableError, match=r"at least one labelled row; got none. Begin with start=10 or more"):
        LinearTrainer()(pool(), torch.arange(0))
    with pytest.raises(MissingColumnError, match="LinearTrainer needs column 'feature'"):
        LinearTrainer()(Table(label=[0, 1]), torch.arange(2))
    with pytest.raises(TableError, match=r"2 of 2 rows of table in memory have no label yet \(-1\)"):
        LinearTrainer()(Table(feature=torch.zeros(3, 2)), torch.arange(2))
    with pytest.raises(ValueRangeError, match=r"members must be a whole number, at least 2; got 1"):
        LinearTrainer(members=1)
    with pytest.raises(ValueRangeError, match="strength must be a number, above 0; got nan"):
        LinearTrainer(strength=float("nan"))
    with pytest.raises(TableError, match=r"the labels must be classes from 0 to 1; got 0 to 2\. Name other classes"):
        LinearTrainer()(pool().extended(logit=torch.zeros(80, 2)), torch.arange(9))
    with pytest.raises(TableError, match=r"must be 6 wide, as those of the training; got 2. Extract both"):
        LinearTrainer()(pool(), torch.arange(9)).extend(Table(feature=torch.zeros(3, 2)))
