"""Is the most similar other image of the same class, and does the score know when it is not?

    NN(i)    = argmax_{j != i} cos(z_i, z_j)     itself excluded by index: duplicates exist
    Recall@1 = mean 1[y_NN(i) = y_i]
    R-AUROC  = AUROC of the scores against "y_NN(i) != y_i"                         (Kirchhof et al. 2024)

The search is exact in float64, whatever the machine: float32 products of blocks, each pair of blocks multiplied once
and read both ways, find the blocks that can hold the nearest row within float32's rounding bound; float64 decides among
them. Cosines that agree to 1e-12 are a tie, and ties go to the lowest index. It needs less than 1 KB per row beyond the
features, which are read block by block, again for every pair: a column of a cache stays on disk. Rows with a norm
outside [1e-30, 1e30], zero vectors among them, have no usable direction and are an error.
"""

import math
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array, integers, same_length
from dubito.metrics.ranking import auroc
from dubito.table import Column, to_tensor

_BLOCK = 1024
"""Rows of a block: small enough for its products to stay in the processor's cache."""
_MOST_BLOCKS = 128
"""Blocks grow beyond that many, so that the table of maxima stays smaller than the features."""
_TIE = 1e-12


def nearest(features: Array | Column) -> Int64[Tensor, "n"]:
    """The index of every row's most similar other row by cosine, over the whole set.

    Args:
        features: (n, d) of any float type, at least two rows; a column on disk is read block by block.

    >>> nearest([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.0]]).tolist()  # rows 0 and 3 are the same
    [3, 0, 1, 0]
    """
    z = _Directions(features)
    return torch.from_numpy(_decide(z, _block_maxima(z)))


def neighbour_matches(features: Array | Column, labels: Array) -> Bool[Tensor, "n"]:
    """Has every row's nearest other row the same label?

    Args:
        features: (n, d) of any float type, at least two rows, or a column.
        labels: (n) integers.
    """
    y, rows = integers(labels, "neighbour_matches: labels"), _readable(features)
    same_length("neighbour_matches", features=rows.shape[0], labels=len(y))
    return y[nearest(rows)] == y


def recall_at_1(features: Array | Column, labels: Array) -> float:
    """The share of rows whose nearest other row has the same label.

    >>> recall_at_1([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], [7, 7, 8])
    0.6666666666666666
    """
    return float(neighbour_matches(features, labels).double().mean())


def r_auroc(scores: Array, features: Array | Column, labels: Array) -> float:
    """The AUROC of the scores against "the nearest other row has another label".

    >>> r_auroc([0.1, 0.2, 0.9], [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], [7, 7, 8])
    1.0
    """
    if to_tensor(scores, "r_auroc: scores").ndim == 2:
        raise TableError("r_auroc takes scores first, then features and labels; these look swapped. Swap them.")
    return auroc(scores, ~neighbour_matches(features, labels))


@final
class _Directions:
    """The rows as unit vectors, made on access."""

    def __init__(self, features: Array | Column) -> None:
        self.rows = _readable(features)
        shape = tuple(self.rows.shape)
        if len(shape) != 2 or shape[0] < 2:
            raise TableError(
                f"nearest: features must have the axes (n, d) and at least two rows; got shape {shape}. "
                f"Pass one row per image: a row alone has no neighbour."
            )
        self.n, self.d = shape
        self.size = max(_BLOCK, math.ceil(self.n / _MOST_BLOCKS))
        self.blocks = [slice(k, min(k + self.size, self.n)) for k in range(0, self.n, self.size)]
        self.inverse_norm = 1 / np.concatenate([self._norm(block) for block in self.blocks])

    def unit(self, rows: slice | Int64[np.ndarray, "r"], dtype: type) -> Shaped[np.ndarray, "_ d"]:
        """Unit vectors, in float32 to multiply them fast or in float64 to multiply them exactly."""
        unit: np.ndarray = self._read(rows).astype(dtype, copy=False) * self.inverse_norm[rows, None].astype(dtype)
        return unit

    def _read(self, rows: slice | Int64[np.ndarray, "r"]) -> Shaped[np.ndarray, "_ d"]:
        if isinstance(self.rows, np.ndarray):
            return self.rows[rows]
        block = to_tensor(self.rows[rows if isinstance(rows, slice) else torch.from_numpy(rows)], "nearest: features")
        return (block.float() if block.dtype == torch.bfloat16 else block).numpy()

    def _norm(self, block: slice) -> Float64[np.ndarray, "_"]:
        norm: np.ndarray = np.linalg.norm(self._read(block).astype(np.float64, copy=False), axis=1)
        usable = (norm >= 1e-30) & (norm <= 1e30)
        if not usable.all():
            first = int(np.argmin(usable))
            raise ValueRangeError(
                f"nearest: features must be finite, with norms between 1e-30 and 1e30; row {block.start + first} has "
                f"the norm {norm[first]:g}. Drop such rows (a zero vector has no direction), or rescale all."
            )
        return norm


def _block_maxima(z: _Directions) -> Float32[np.ndarray, "b n"]:
    """The highest cosine of every row within every block, itself excluded, up to float32 rounding."""
    highest = np.empty((len(z.blocks), z.n), dtype=np.float32)
    for i, block in enumerate(z.blocks):
        left = z.unit(block, np.float32)
        for j, other in enumerate(z.blocks[i:], start=i):
            # numpy's product, not torch's: it has no switch that lowers the precision under the bound.
            cosine = left @ (left if i == j else z.unit(other, np.float32)).T
            if i == j:
                np.fill_diagonal(cosine, -np.inf)
            highest[j, block] = cosine.max(axis=1)
            highest[i, other] = cosine.max(axis=0)
    return highest


def _decide(z: _Directions, highest: Float32[np.ndarray, "b n"]) -> Int64[np.ndarray, "n"]:
    """The nearest row in float64, looked for in the blocks whose float32 maximum can hold it."""
    # A float32 dot product of unit vectors errs by at most d/2 eps in any order of summation, their
    # own rounding by less than 4 eps; both the maximum and its rival may err.
    slack = (z.d + 8) * np.finfo(np.float32).eps
    hopeful = highest >= highest.max(axis=0) - slack
    best, index = np.full(z.n, -np.inf), np.zeros(z.n, dtype=np.int64)
    for block, in_block in zip(z.blocks, hopeful, strict=True):
        columns = z.unit(block, np.float64)
        candidates = np.flatnonzero(in_block)
        for start in range(0, len(candidates), z.size):
            rows = candidates[start : start + z.size]
            cosine = z.unit(rows, np.float64) @ columns.T
            inside = (rows >= block.start) & (rows < block.stop)
            cosine[inside, rows[inside] - block.start] = -np.inf
            top = cosine.max(axis=1)
            first = (cosine >= top[:, None] - _TIE).argmax(axis=1)
            closer = top > best[rows] + _TIE
            best[rows[closer]], index[rows[closer]] = top[closer], block.start + first[closer]
    return index


def _readable(features: Array | Column) -> Shaped[np.ndarray, "..."] | Column:
    """Rows to read by slice or index: tensors, arrays and columns are, the rest (lists, frames) becomes a tensor."""
    if isinstance(features, np.ndarray) or (isinstance(features, Column) and not hasattr(features, "__array__")):
        return features
    return to_tensor(features, "nearest: features")
