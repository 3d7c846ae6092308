import numpy as np
import pytest
import torch

from dubito.errors import TableError
from dubito.scores.fdbd import FDBD, boundary_shares, fdbd
from dubito.table import Table

from .last_layers import C, D, layer, linear


def test_by_hand():
    # Weights 5 and 10 apart from the first: (6/5 + 4/10) / 2 over the distance 2 from the mean, negated.
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0], [-6.0, 8.0]]).double()
    u = fdbd(
        torch.tensor([[2.0, 0.0]]), torch.tensor([[6.0, 0.0, 2.0]]), torch.zeros(2).double(), boundary_shares(weight)
    )
    assert u.item() == pytest.approx(-(6 / 5 + 4 / 10) / 2 / 2)


def test_as_a_loop_over_classes():
    train, test = linear(), linear(40, 1)
    weight, mean = layer()[0], train.feature.mean(0)
    expected = []
    for z, logits in zip(test.feature, test.logit, strict=True):
        y = int(logits.argmax())
        others = [float((logits[y] - logits[k]) / (weight[y] - weight[k]).norm()) for k in range(C) if k != y]
        expected.append(-sum(others) / (C - 1) / float((z - mean).norm()))
    np.testing.assert_allclose(FDBD().fit(train).score(test).numpy(), expected, rtol=1e-6)


def test_classes_with_the_same_weights_have_no_boundary():
    # The third class repeats the first, apart from its bias: for both, only the second counts.
    weight = layer()[0][[0, 1, 0]]
    z = linear().feature
    train = Table(feature=z, logit=z @ weight.T + torch.tensor([0.0, 0.0, -1.0]))
    u = FDBD().fit(train).score(train)
    first = train.logit.argmax(1) == 0
    gap = (train.logit[:, 0] - train.logit[:, 1]) / (weight[0] - weight[1]).norm()
    expected = -gap / (z - z.mean(0)).norm(dim=1)
    assert torch.allclose(u[first], expected[first], rtol=1e-5)
    assert 0 < int(first.sum()) < len(first)


def test_a_last_layer_without_boundaries_is_refused():
    z = linear().feature
    same = Table(feature=z, logit=(z @ layer()[0][0])[:, None] + torch.arange(3))
    with pytest.raises(TableError, match=r"fdbd\.fit needs a boundary between two classes.* same weights for all 3"):
        FDBD().fit(same)


def test_the_mean_feature_itself_has_a_finite_score():
    train = linear()
    score = FDBD().fit(train)
    at_mean = Table(feature=score.mean_[None], logit=torch.arange(C)[None].double())
    assert -1e12 < score.score(at_mean).item() < -1e5
    with pytest.raises(TableError, match=rf"fdbd\.score: features must be {D} wide"):
        score.score(Table(feature=torch.ones(1, 3), logit=torch.ones(1, C)))
