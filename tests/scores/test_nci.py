import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.scores.nci import NCI, alignment, nci
from dubito.table import Table

from .last_layers import C, layer, linear


def test_by_hand():
    # Predicted 10, 4 above its mean; 5 away from the mean feature; length 7: - 4/5 - 0.1 * 7
    z, logits = torch.tensor([[3.0, -4.0]]), torch.tensor([[10.0, 0.0]])
    mean, mean_logit = torch.zeros(2).double(), torch.tensor([6.0, 9.0]).double()
    assert nci(z, logits, mean, mean_logit, 0.1).item() == pytest.approx(-4 / 5 - 0.7)


@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_with_the_weights_themselves(alpha):
    train, test = linear(), linear(40, 1)
    weight, away = layer()[0], test.feature - train.feature.mean(0)
    own = weight[test.logit.argmax(1)]
    expected = -(own * away).sum(1) / away.norm(dim=1) - alpha * test.feature.abs().sum(1)
    np.testing.assert_allclose(NCI(alpha).fit(train).score(test).numpy(), expected.numpy(), rtol=1e-9)


def test_by_default_both_terms_vary_alike_whatever_the_scale():
    train = linear()
    score = NCI().fit(train)
    along = alignment(train.feature, train.logit, score.mean_, score.mean_logit_)
    assert (score.alpha_ * train.feature.abs().sum(1)).std().item() == pytest.approx(along.std().item())
    # Features a hundred times as large, with weights that make the same logits of them: the same order.
    large = train.extended(feature=100 * train.feature)
    assert torch.equal(NCI().fit(large).score(large).argsort(), score.score(train).argsort())


def test_features_of_one_length_leave_the_length_out():
    z = torch.eye(10, dtype=torch.float64)[torch.arange(300) % 10]
    table = Table(feature=z, logit=z @ layer()[0].T)
    assert NCI().fit(table).alpha_ == 0.0


def test_one_row_is_its_own_mean():
    table = linear(1)
    assert NCI(0.0).fit(table).score(table).item() == pytest.approx(0.0, abs=1e-5)
    assert len(table.logit[0]) == C
    with pytest.raises(ValueRangeError, match=r"nci: alpha must be .*at least 0; got -1.0. 0 leaves the length out"):
        NCI(-1.0)


def test_logits_that_are_not_linear_in_the_features_are_refused():
    table = linear()
    with pytest.raises(TableError, match=r"nci.fit: logits must be linear in the features.*such as gen"):
        NCI().fit(table.extended(logit=table.logit**2))
    with pytest.raises(TableError, match=r"nci.fit needs logits before the softmax"):
        NCI().fit(table.extended(logit=table.logit.log_softmax(1)))
