import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from dubito.errors import ValueRangeError
from dubito.scores.ash import ASH, ash
from dubito.table import Table

from .last_layers import C, D, layer, linear


def test_by_hand():
    # 4 and 2 are kept, 6 of 8: r = 4/3; the logits are 4 + 2 and 2.
    z, weight = torch.tensor([[4.0, 1.0, 2.0, 1.0]]), torch.tensor([[1.0, 9.0, 1.0, 9.0], [0.0, 0.0, 1.0, 5.0]])
    factor = math.exp(8 / 6)
    assert ash(z, weight, torch.zeros(2), 0.5).item() == pytest.approx(-np.logaddexp(6 * factor, 2 * factor), rel=1e-6)


@pytest.mark.parametrize("percentile", [0.9, 0.5, 0.0])
def test_as_numpy(percentile):
    train, test = linear(), linear(40, 1)
    z, (weight, bias) = test.feature.numpy(), layer()
    kept = D - int(np.round(D * percentile))
    pruned = np.where(z >= np.sort(z, axis=1)[:, [-kept]], z, 0.0)
    logits = (np.exp(z.sum(1) / pruned.sum(1))[:, None] * pruned) @ weight.numpy().T + bias.numpy() + 3
    u = ASH(percentile).fit(train).score(test)
    np.testing.assert_allclose(u.numpy(), -logsumexp(logits, axis=1), rtol=1e-5)


def test_a_row_without_activations_has_the_energy_of_the_biases():
    u = ASH().fit(linear()).score(Table(feature=torch.zeros(1, D), logit=torch.zeros(1, C)))
    assert u.item() == pytest.approx(-float((layer()[1] + 3).logsumexp(0)), rel=1e-5)


def test_settings_are_checked():
    with pytest.raises(ValueRangeError, match=r"ash: percentile must be .*90 % is 0.9. The paper takes 0.90"):
        ASH(90.0)


def test_ties_are_kept_together_whatever_the_order_of_features():
    # Of 3, 1, 1, 1 two are above the percentile; all tie with the second: r = 1, and the logit is e (3 + 2 + 3 + 4).
    z, weight = torch.tensor([[3.0, 1.0, 1.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        u = ash(z[:, order], weight[:, order], torch.zeros(1), 0.5)
        assert u.item() == pytest.approx(-12 * math.e, rel=1e-6)
