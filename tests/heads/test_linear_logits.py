"""The classifying layer found again: against numpy's least squares, for dead features, and where nothing is linear."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from dubito.errors import TableError
from dubito.heads.linear_logits import Pairs, linear_logits


def drawn(n: int = 90, d: int = 5, c: int = 3, *, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(n, d, generator=draw, dtype=torch.float64) + 4
    weight = torch.randn(c, d, generator=draw, dtype=torch.float64)
    return z, z @ weight.T + torch.arange(c) + noise * torch.randn(n, c, generator=draw, dtype=torch.float64)


def blocks(z: Tensor, y: Tensor, size: int = 32) -> Pairs:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(z.split(size), y.split(size), strict=True)

    return pairs


@pytest.mark.parametrize("size", [1, 32, 90])
def test_least_squares_as_numpy_finds_it(size):
    z, y = drawn(noise=0.5)
    result = linear_logits(blocks(z, y, size))
    expected, left, rank, _ = np.linalg.lstsq(np.c_[z.numpy(), np.ones(90)], y.numpy(), rcond=None)
    np.testing.assert_allclose(torch.cat([result.weight, result.bias[:, None]], 1).numpy(), expected.T, atol=1e-9)
    assert (result.rank, result.rows) == (rank - 1, 90)
    # 90 rows, 5 features and a constant: 84 degrees of freedom are left of 89
    share = (left.sum() / 84) / (((y - y.mean(0)) ** 2).sum().item() / 89)
    assert result.missed == pytest.approx(share**0.5, rel=1e-9)


def test_a_feature_that_never_varies_or_repeats_another_does_not_count():
    z, y = drawn()
    wide = torch.cat([z, torch.full((90, 1), 7.0), z[:, :1]], 1)
    result = linear_logits(blocks(wide, y))
    assert result.rank == 5
    assert result.weight[:, 5].abs().max().item() < 1e-9
    assert torch.allclose(result.weight[:, 0], result.weight[:, 6], atol=1e-9)  # the smallest weights share it
    assert torch.allclose(wide @ result.weight.T + result.bias, y, atol=1e-9)


@pytest.mark.parametrize(("n", "known"), [(5, False), (6, False), (7, True)])
def test_what_is_missed_needs_more_rows_than_features(n, known):
    # Five features and a constant explain any six rows.
    z, _ = drawn(n)
    noise = torch.randn(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (linear_logits(blocks(z, noise)).missed is not None) == known


def test_one_row_has_no_weights_but_its_own_logits_as_bias():
    z, y = drawn(1)
    result = linear_logits(blocks(z, y))
    assert (result.rank, result.missed) == (0, None)
    assert not result.weight.any()
    assert torch.equal(result.bias, y[0])


def test_logits_that_are_not_linear_are_reported_with_the_share_and_the_repair():
    z, y = drawn()
    linear_logits(blocks(z, y)).check_linear("cache/a", by="x.fit", repair="or do y")
    linear_logits(blocks(*drawn(noise=0.3))).check_linear("cache/a", by="x.fit", repair="or do y")
    turned = linear_logits(blocks(z, y.flip(0)))
    with pytest.raises(
        TableError,
        match=rf"^x\.fit: logits must be linear in the features; a linear layer misses those of cache/a by "
        rf"{turned.missed:.0%} of their deviation\. Pass features and logits of the same layer and model, or do y\.$",
    ):
        turned.check_linear("cache/a", by="x.fit", repair="or do y")


def test_logits_that_never_vary_are_explained_by_no_feature():
    z, _ = drawn()
    assert linear_logits(blocks(z, torch.ones(90, 3, dtype=torch.float64))).missed == 1.0
