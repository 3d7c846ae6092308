"""The scatter of answers to noisy copies: from the probe's column and from logits, and to first order the gradient."""

import math

import pytest
import torch
from torch import nn
from torch.func import jacrev

import dubito
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.probes import Noise
from dubito.scores import PerturbationVariance, Temperature, load_score, save_score
from dubito.table import Table


def logits(n: int = 20, m: int = 6, c: int = 4) -> torch.Tensor:
    return 2 * torch.randn(n, m, c, generator=torch.Generator().manual_seed(0))


def test_by_hand():
    # Two members, p = (3/4, 1/4) and (1/4, 3/4): each class has variance 1/16.
    one = math.log(3)
    table = Table(noise_logit=torch.tensor([[[one, 0.0], [0.0, one]], [[one, 0.0], [one, 0.0]]], dtype=torch.float64))
    assert PerturbationVariance().score(table).tolist() == pytest.approx([1 / 8, 0])
    assert PerturbationVariance().score(Table(noise_variance=[0.25, 0.5])).tolist() == [0.25, 0.5]
    assert PerturbationVariance("views").score(Table(views_variance=[0.25])).tolist() == [0.25]


def test_from_logits_as_numpy_has_it():
    z = logits()
    expected = z.double().softmax(-1).numpy().var(1).sum(-1)
    found = PerturbationVariance().score(Table(noise_logit=z))
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-10, atol=0)


def test_the_column_goes_before_the_logits():
    table = Table(noise_logit=logits(n=2), noise_variance=[0.25, 0.5])
    assert PerturbationVariance().score(table).tolist() == [0.25, 0.5]


def test_small_noise_finds_the_gradient_of_the_probabilities():
    # E sum_c Var_m p_mc = sigma^2 sum_c ||dp_c/dx||^2, times (m - 1) / m because the mean is that of the copies.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
    model = dubito.wrap(net, name="net")
    x, sigma, copies = torch.randn(5, 12), 0.01, 1009  # a prime number, which has no sub-ensembles
    columns = Noise(copies, sigma).run(model, x, None)
    jacobians = torch.stack([jacrev(lambda row: net(row).softmax(-1))(row) for row in x])
    expected = sigma**2 * jacobians.detach().square().sum((1, 2)).double()
    found = PerturbationVariance().score(Table(noise_variance=columns["noise_variance"]))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0)


def test_temperatures():
    z = logits()
    table = Table(noise_logit=z, logit=z[:, 0], label=z[:, 0].argmax(1) * (torch.arange(20) % 5 > 0))
    score = Temperature(PerturbationVariance()).fit(table)
    expected = (z.double() / score.temperature_).softmax(-1).var(1, correction=0).sum(-1)
    torch.testing.assert_close(score.score(table), expected, rtol=1e-9, atol=0)


def test_what_cannot_be():
    with pytest.raises(MissingColumnError) as error:
        PerturbationVariance().score(Table(logit=torch.ones(1, 2)))
    assert str(error.value) == (
        "perturbation_variance.score needs column 'noise_variance'; table in memory has logit. It is written by the "
        "probe of noisy copies (dubito.extract(..., probes=[dubito.probes.Noise()]))."
    )
    with pytest.raises(MissingColumnError, match=r'Views\(\)\]\)\), with keep="logits", from which it is computed\.$'):
        PerturbationVariance("views").score(Table(logit=torch.ones(1, 2)))
    with pytest.raises(TableError, match=r"must have one variance per image, \(n\); got \(1, 2\)"):
        PerturbationVariance().score(Table(noise_variance=torch.ones(1, 2)))
    with pytest.raises(TableError, match="has one member, which always agrees with itself"):
        PerturbationVariance().score(Table(noise_logit=logits(m=1)))
    with pytest.raises(ValueRangeError, match="needs at least two classes"):
        PerturbationVariance().score(Table(noise_logit=logits(c=1)))
    with pytest.raises(ValueRangeError, match=r"perturbation_variance\.score: column 'noise_variance' .* NaN"):
        PerturbationVariance().score(Table(noise_variance=[math.nan, 0.0]))
    assert PerturbationVariance().score(Table(noise_variance=torch.ones(0))).shape == (0,)


def test_saved_and_loaded(tmp_path):
    assert load_score(save_score(PerturbationVariance("views"), tmp_path)) == PerturbationVariance("views")
