import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from dubito.errors import TableError, ValueRangeError
from dubito.scores.residual import Residual
from dubito.scores.vim import ViM, vim
from dubito.table import Table

from .last_layers import C, D, layer, linear
from .test_residual import expected as residual_of


def test_by_hand():
    # 2 * 3 - log(e^0 + e^0)
    assert vim(torch.tensor([3.0]).double(), torch.zeros(1, 2), 2.0).item() == pytest.approx(6 - np.log(2))


@pytest.mark.parametrize("dimension", [None, 3])
def test_as_numpy(dimension):
    train, test = linear(), linear(40, 1)
    size = dimension or D // 2
    alpha = train.logit.numpy().max(1).mean() / residual_of(train, train, size).mean()
    expected = alpha * residual_of(train, test, size) - logsumexp(test.logit.numpy(), axis=1)
    score = ViM(dimension).fit(train)
    assert score.alpha_ == pytest.approx(alpha, rel=1e-5)
    np.testing.assert_allclose(score.score(test).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_alpha_can_be_set():
    train, test = linear(), linear(40, 1)
    u = ViM(alpha=0.5).fit(train).score(test)
    expected = 0.5 * Residual().fit(train).score(test) - test.logit.logsumexp(1)
    assert torch.allclose(u, expected)


def test_a_mean_largest_logit_below_zero_is_refused():
    train = linear(lift=-50.0)
    with pytest.raises(ValueRangeError, match=r"vim\.fit: the mean of the largest logits must be positive.*; got -"):
        ViM().fit(train)
    assert len(ViM(alpha=1.0).fit(train).score(train)) == len(train)


def test_features_without_a_residual_are_refused():
    # The last five features never vary and have no weight: all lies in the first five dimensions around the origin.
    weight, _ = layer()
    z = linear(signed=True).feature.clone()
    z[:, 5:] = 0
    train = Table(feature=z, logit=z @ weight.T + torch.arange(C))
    with pytest.raises(TableError, match=r"lie in a subspace of 6 dimensions, .*Set a smaller dimension"):
        ViM(6).fit(train)


@pytest.mark.parametrize("settings", [{"dimension": 0}, {"alpha": 0.0}, {"alpha": -1.0}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueRangeError, match=f"vim: {next(iter(settings))} must be"):
        ViM(**settings)
