import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.scores.residual import Residual, residual_norm
from dubito.table import Table

from .last_layers import D, layer, linear


def expected(train: Table, test: Table, dimension: int, lift: float = 3.0) -> np.ndarray:
    """Written down from the formula, with numpy's pseudo-inverse and singular vectors."""
    weight, bias = (one.numpy() for one in layer())
    origin = -np.linalg.pinv(weight) @ (bias + lift)
    _, _, rows = np.linalg.svd(train.feature.numpy() - origin)
    rest = rows[dimension:]
    return np.linalg.norm((test.feature.numpy() - origin) @ rest.T, axis=1)


def test_by_hand():
    # From (1, 1, 1), (9, 4, 5) is (8, 3, 4); without the first axis (3, 4), of length 5.
    z = torch.tensor([[9.0, 4.0, 5.0]])
    assert residual_norm(z, torch.ones(3).double(), torch.eye(3)[:, 1:]).item() == pytest.approx(5.0)


@pytest.mark.parametrize("dimension", [None, 1, 7, D - 1])
@pytest.mark.parametrize("signed", [False, True])
def test_as_numpy(dimension, signed):
    train, test = linear(signed=signed), linear(40, 1, signed=signed)
    u = Residual(dimension).fit(train).score(test)
    np.testing.assert_allclose(u.numpy(), expected(train, test, dimension or D // 2), rtol=1e-5)
    single = Table(feature=train.feature.float(), logit=train.logit.float())
    np.testing.assert_allclose(Residual(dimension).fit(single).score(test).numpy(), u.numpy(), rtol=1e-3)


def test_more_classes_than_features():
    weight = torch.randn(30, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z = linear().feature
    score = Residual().fit(Table(feature=z, logit=z @ weight.T + 1))
    np.testing.assert_allclose(score.origin_.numpy(), -np.linalg.pinv(weight.numpy()) @ np.ones(30), atol=1e-7)


def test_dimensions_and_logits_that_do_not_fit():
    for dimension in (D, D + 5):
        with pytest.raises(TableError, match=r"residual\.fit: dimension .*less than the number of features, 10\."):
            Residual(dimension).fit(linear())
    with pytest.raises(ValueRangeError, match="residual: dimension must be a whole number, at least 1; got 0"):
        Residual(0)
    with pytest.raises(TableError, match=r"residual\.fit: logits must be linear in the features; .*such as energy"):
        Residual().fit(linear().extended(logit=linear(seed=5).logit))
    with pytest.raises(TableError, match=r"residual\.fit: weights of 10 independent features need more than 11 rows"):
        Residual().fit(linear(11))
    with pytest.raises(TableError, match=r"residual\.fit: .*number of features must be .*at least 2; got 1"):
        Residual().fit(Table(feature=torch.rand(9, 1), logit=torch.rand(9, 2)))
