import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from dubito.errors import TableError, ValueRangeError
from dubito.scores import available_scores
from dubito.scores._activations import number_kept
from dubito.scores.scale import SCALE, scale
from dubito.table import Table

from .last_layers import D, layer, linear


def test_by_hand():
    # The larger two of four hold 6 of 8: r = 4/3. Logits above the bias 1 are 2 and 4.
    z, logits = torch.tensor([[4.0, 1.0, 2.0, 1.0]]), torch.tensor([[3.0, 5.0]])
    factor = math.exp(8 / 6)
    u = scale(z, logits, torch.ones(2).double(), 0.5)
    assert u.item() == pytest.approx(-np.logaddexp(2 * factor + 1, 4 * factor + 1))


@pytest.mark.parametrize("percentile", [0.85, 0.5, 0.0])
def test_as_numpy(percentile):
    train, test = linear(), linear(40, 1)
    z, (weight, bias) = test.feature.numpy(), layer()
    kept = D - int(np.round(D * percentile))
    ratio = z.sum(1) / np.sort(z, axis=1)[:, -kept:].sum(1)
    logits = (np.exp(ratio)[:, None] * z) @ weight.numpy().T + bias.numpy() + 3
    u = SCALE(percentile).fit(train).score(test)
    np.testing.assert_allclose(u.numpy(), -logsumexp(logits, axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", ["scale", "ash"])
def test_features_of_a_transformer_are_refused_and_compare_leaves_the_score_out(name):
    train = linear(signed=True)
    share = float(train.feature.clamp(max=0).sum().abs() / train.feature.abs().sum())
    result = available_scores(train, train)
    assert name not in result.scores
    assert result.left_out[name].startswith(
        f"{name}.fit: features must be activations of a ReLU or alike, hardly any of them negative; of those of table "
        f"in memory, {share:.0%} by absolute value are, as of a transformer"
    )
    with pytest.raises(ValueRangeError, match="Use another score"):
        available_scores(train, train, names=[name])


@pytest.mark.parametrize("name", ["scale", "ash"])
def test_a_few_negative_values_are_not_refused(name):
    train = linear()
    smooth = train.feature - 0.02  # as a smooth activation, whose lowest value is a little below zero
    table = Table(feature=smooth, logit=train.logit)
    assert name in available_scores(table, table).scores


def test_a_row_without_activations_has_the_energy_of_the_biases():
    score = SCALE().fit(linear())
    bias = layer()[1] + 3
    u = score.score(Table(feature=torch.zeros(1, D), logit=bias[None]))
    assert u.item() == pytest.approx(-float(bias.logsumexp(0)), rel=1e-6)


def test_at_least_one_activation_is_kept():
    assert [number_kept(D, share) for share in (0.0, 0.85, 0.9, 0.99)] == [10, 2, 1, 1]
    with pytest.raises(ValueRangeError, match=r"scale: percentile must be .*85 % is 0.85. The paper takes 0.85"):
        SCALE(85.0)
    with pytest.raises(TableError, match=r"scale\.score: features must be 10 wide"):
        SCALE().fit(linear()).score(Table(feature=torch.ones(1, 3), logit=torch.ones(1, 5)))
