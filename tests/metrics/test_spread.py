"""The variance of members, taken in one by one."""

import numpy as np
import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import VarianceStream


def logits(n: int = 9, m: int = 7, c: int = 5) -> torch.Tensor:
    return 3 * torch.randn(n, m, c, generator=torch.Generator().manual_seed(0))


def variance(*blocks: torch.Tensor, **settings) -> torch.Tensor:
    stream = VarianceStream(**settings)
    for block in blocks:
        stream.add(block)
    return stream.variance()


def test_against_numpy_in_any_blocks():
    z = logits()
    expected = torch.from_numpy(z.double().softmax(-1).numpy().var(1).sum(-1))
    for blocks in ([z], z.split(1, 1), z.split(3, 1), [z.flip(1)]):
        torch.testing.assert_close(variance(*blocks), expected, rtol=1e-12, atol=0)
    warm = torch.from_numpy((z.double() / 2).softmax(-1).numpy().var(1).sum(-1))
    torch.testing.assert_close(variance(z, temperature=2.0), warm, rtol=1e-12, atol=0)


def test_of_one_member_and_of_equal_ones():
    assert variance(logits(m=1)).tolist() == [0.0] * 9
    assert variance(logits(m=1).expand(-1, 4, -1)).max() < 1e-30


def test_confident_inputs_keep_a_variance():
    # p = exp(-40), exp(-41): of squares near one, float64 would leave nothing of 1e-36.
    z = torch.tensor([[[40.0, 0.0], [41.0, 0.0]]], dtype=torch.float64)
    small = np.exp([-40.0, -41.0])
    found = float(variance(z))
    assert found == pytest.approx(small.var(), rel=1e-9)  # the variance of the other class is rounded away
    assert found > 0


def test_what_cannot_be():
    stream = VarianceStream()
    with pytest.raises(TableError, match=r"^no member was given\. Add the logits of at least one\.$"):
        stream.variance()
    stream.add(logits())
    with pytest.raises(TableError, match=r"\(n, c\) was \(9, 5\) at first and is \(8, 5\) now"):
        stream.add(logits(n=8))
    with pytest.raises(ValueRangeError, match="temperature must be positive"):
        VarianceStream(temperature=0.0)
    with pytest.raises(ValueRangeError, match="variance of members: 1 of 1 values are NaN or infinite"):
        variance(torch.tensor([[[np.nan, 0.0]]]))
