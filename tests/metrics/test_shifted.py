import math

import numpy as np
import pytest
import scipy.special
import torch

from dubito.metrics import shifted as module
from dubito.metrics.shifted import shifted, shifted_blocks


def together(logits: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = [(top.clone(), z.clone()) for _, top, z, _ in shifted_blocks(logits, temperature)]
    tops, zs = zip(*blocks, strict=True)
    return torch.cat(tops), torch.cat(zs)


def test_by_hand():
    # (2, -1, 6) / 2 = (1, -0.5, 3), of which 3 is the largest
    ((rows, top, z, spare),) = shifted_blocks(torch.tensor([[2.0, -1.0, 6.0]]), 2.0)
    assert (rows, top.tolist(), z.tolist()) == (slice(0, 1, None), [3.0], [[-2.0, -3.5, 0.0]])
    assert spare.shape == z.shape


def test_the_log_of_a_softmax_follows():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 9, (30, 50)))
    top, z = shifted(logits)
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    assert log_p.numpy() == pytest.approx(scipy.special.log_softmax(logits.numpy(), axis=1), rel=1e-12)
    assert top.tolist() == logits.max(1).values.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_blocks_are_all_rows_once_and_in_order(monkeypatch, dtype):
    monkeypatch.setattr(module, "_NUMBERS", 3 * 7)
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    kept = logits.clone()
    assert [rows for rows, *_ in shifted_blocks(logits)] == [slice(a, min(a + 3, 11)) for a in (0, 3, 6, 9)]
    for ours, expected in zip(together(logits), shifted(logits), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, expected)
    assert torch.equal(logits, kept)


def test_one_row_more_classes_than_a_block_and_no_rows(monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", 4)
    top, z = together(torch.arange(9.0).expand(2, 9))
    assert (top.tolist(), z[1].tolist()) == ([8.0, 8.0], [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0])
    assert list(shifted_blocks(torch.empty(0, 3))) == []


def test_huge_logits_do_not_overflow():
    _, z = shifted(torch.tensor([[1e30, -1e30]]))
    assert z.exp().sum().item() == 1
    assert math.isfinite(z.min().item())
