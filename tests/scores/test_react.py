import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from dubito.errors import TableError, ValueRangeError
from dubito.scores.react import ReAct, percentile_of, react

from .last_layers import layer, linear


def test_by_hand():
    # Clipped at 4: - log(e^(3 + 4) + e^(2 * 3))
    u = react(torch.tensor([[3.0, 9.0]]), torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.zeros(2), 4.0)
    assert u.item() == pytest.approx(-np.logaddexp(7, 6))


@pytest.mark.parametrize("percentile", [0.9, 0.5, 1.0])
@pytest.mark.parametrize("signed", [False, True])
def test_as_numpy(percentile, signed):
    train, test = linear(signed=signed), linear(40, 1, signed=signed)
    weight, bias = layer()
    threshold = np.percentile(train.feature.numpy(), 100 * percentile)
    logits = np.minimum(test.feature.numpy(), threshold) @ weight.numpy().T + bias.numpy() + 3
    score = ReAct(percentile).fit(train)
    assert score.threshold_ == pytest.approx(threshold, rel=1e-6)
    np.testing.assert_allclose(score.score(test).numpy(), -logsumexp(logits, axis=1), rtol=1e-5)


@pytest.mark.parametrize("share", [0.001, 0.1, 1 / 3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("kind", ["signed", "ties", "wide", "one"])
def test_the_percentile_is_exact(share, kind):
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=draw)
    values = {
        "signed": values,
        "ties": values.round().relu(),
        "wide": values * torch.logspace(-30, 30, 1000),
        "one": values[:1],
    }[kind]
    expected = np.percentile(values.double().numpy(), 100 * share)
    for size in (7, 1000):
        assert percentile_of(lambda size=size: iter(values.split(size)), share) == pytest.approx(expected, rel=1e-9)


def test_settings_and_logits_that_are_not_linear():
    for percentile in (0.0, 90.0):
        with pytest.raises(ValueRangeError, match=r"react: percentile must be .*The paper takes 0.90"):
            ReAct(percentile)
    with pytest.raises(TableError, match=r"react\.fit: logits must be linear in the features"):
        ReAct().fit(linear().extended(logit=linear(seed=5).logit))
