import mpmath
import numpy as np
import pytest
import torch
from scipy.special import softmax

from dubito.errors import ValueRangeError
from dubito.scores.gen import GEN, gen
from dubito.table import Table


def rows(n: int = 40, c: int = 7, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(n, c, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_by_hand():
    # p = 1/2, 1/4, 1/4; gamma = 1/2: sqrt(1/4) + 2 sqrt(3/16) = 0.5 + 0.8660
    logits = torch.tensor([[2.0, 1.0, 1.0]]).log()
    assert gen(logits, 0.5).item() == pytest.approx(0.5 + 2 * (3 / 16) ** 0.5)
    assert gen(logits, 0.5, top=2).item() == pytest.approx(0.5 + (3 / 16) ** 0.5)
    assert gen(logits, 0.5, top=1).item() == pytest.approx(0.5)


@pytest.mark.parametrize("top", [1, 3, 7, 100])
def test_as_numpy_and_only_the_largest_count(top):
    p = np.sort(softmax(rows().numpy(), axis=1), axis=1)[:, ::-1][:, :top]
    np.testing.assert_allclose(gen(rows(), 0.1, top).numpy(), (p**0.1 * (1 - p) ** 0.1).sum(1), rtol=1e-9)
    np.testing.assert_allclose(gen(rows().float(), 0.1, top).numpy(), gen(rows(), 0.1, top).numpy(), rtol=1e-6)


def test_gamma_1_is_gini_impurity():
    p = rows().softmax(1)
    assert torch.allclose(gen(rows(), 1.0), 1 - p.square().sum(1))


@pytest.mark.parametrize("gap", [50.0, 200.0])
def test_confident_rows_keep_their_digits(gap):
    # p of the other two is e^-gap each; of the first, 1 - p is their sum, which float64 would round to 0.
    mpmath.mp.dps = 200
    p = mpmath.e ** -mpmath.mpf(gap)
    first = 1 / (1 + 2 * p)
    expected = sum((one * (1 - one)) ** mpmath.mpf(0.1) for one in (first, p * first, p * first))
    for dtype in (torch.float32, torch.float64):
        assert gen(torch.tensor([[gap, 0.0, 0.0]], dtype=dtype)).item() == pytest.approx(float(expected), rel=1e-6)


def test_shifted_logits_and_permuted_classes_are_the_same():
    u = gen(rows())
    assert torch.allclose(gen(rows() + 100), u)
    assert torch.allclose(gen(rows().flip(1)), u)


def test_ties_and_one_class():
    assert gen(torch.zeros(1, 4), 0.1).item() == pytest.approx(4 * (3 / 16) ** 0.1)
    with pytest.raises(ValueRangeError, match="gen needs at least two classes"):
        GEN().score(Table(logit=[[1.0]]))


@pytest.mark.parametrize("settings", [{"gamma": 0.0}, {"top": 0}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueRangeError, match=rf"gen: {next(iter(settings))} must be a .*The paper takes"):
        GEN(**settings)
