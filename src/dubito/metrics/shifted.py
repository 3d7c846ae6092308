"""Logits less the largest of their row, in float64, or their softmax: what functions of a softmax are computed from.

    z_y = logit_y - max_k logit_k,   Z = sum_y exp z_y,   p_y = exp(z_y) / Z,   -log p_y = log Z - z_y

No exponential overflows, Z is at least 1, and what a confident row has beyond 1 stays in the digits of Z. Blocks of a
large table share one buffer: memory that is allocated anew for each of them costs more than the exponentials.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Float64
from torch import Tensor

_NUMBERS = 1 << 18
"""Of a block: 2 MB, which stay in the cache."""


def shifted(logits: Float[Tensor, "*n c"]) -> tuple[Float64[Tensor, "*n"], Float64[Tensor, "*n c"]]:
    """The largest logit of every row, and all of them less it.

    >>> shifted(torch.tensor([[1.0, 3.0]]))[1].tolist()
    [[-2.0, 0.0]]
    """
    z = logits.double()
    top = z.amax(-1)
    return top, z - top[..., None]


def shifted_blocks(
    logits: Float[Tensor, "n c"], temperature: float = 1.0
) -> Iterator[tuple[slice, Float64[Tensor, "b"], Float64[Tensor, "b c"], Float64[Tensor, "b c"]]]:
    """The same of logits / temperature, a few rows at a time: which rows, the largest of each, and all less it.

    The last is memory of that shape for intermediate results. The next block overwrites it and the one before, into
    which may be written, too.

    >>> for rows, top, z, _ in shifted_blocks(torch.tensor([[1.0, 3.0]]), 2.0):
    ...     print(rows, top.tolist(), z.tolist())
    slice(0, 1, None) [1.5] [[-1.0, 0.0]]
    """
    n, c = logits.shape
    size = max(1, min(n, _NUMBERS // c))
    buffer, spare = torch.empty(2, size, c, dtype=torch.float64)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        z = buffer[: rows.stop - start].copy_(logits[rows])
        if temperature != 1:
            z.div_(temperature)
        top = z.amax(1)
        yield rows, top, z.sub_(top[:, None]), spare[: len(z)]


def softmax_blocks(logits: Float[Tensor, "n c"]) -> Iterator[tuple[slice, Float64[Tensor, "b c"]]]:
    """The softmax in float64, a few rows at a time, which may be written into, and the next block overwrites.

    >>> for rows, p in softmax_blocks(torch.tensor([[0.0, 0.0]])):
    ...     print(rows, p.tolist())
    slice(0, 1, None) [[0.5, 0.5]]
    """
    n, c = logits.shape
    size = max(1, min(n, _NUMBERS // c))
    buffer, converted = torch.empty(2, size, c, dtype=torch.float64)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        z = converted[: rows.stop - start].copy_(logits[rows])
        yield rows, torch.softmax(z, 1, out=buffer[: len(z)])
