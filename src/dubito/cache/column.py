"""Columns that stay on disk: rows are read from memory-mapped shards when they are needed.

Half-precision columns come out as float32; every shard's checksum is verified once, when its rows are first touched.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.cache.shard import Shard, unpack_strings
from dubito.table import Column, Exact
from dubito.table.views import Stacked

_OPEN_AT_ONCE = 32


@final
class ShardedColumn:
    """One column over all shards of one probe.

    Args:
        shards: In order, with the number of rows of each; at least one.
        name: The key in every shard.
        tail: The shape of one row.
    """

    def __init__(self, shards: list[tuple[Shard, int]], name: str, tail: tuple[int, ...]) -> None:
        self._stored = Stacked([_InShard(shard, name, (rows, *tail)) for shard, rows in shards])
        self.shape = self._stored.shape

    def __getitem__(self, rows: Exact) -> Tensor:
        values: Tensor = self._stored[rows]
        return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def id_column(shards: list[tuple[Shard, int]]) -> Column:
    """The images' names over all shards."""
    return Stacked([_IdsInShard(shard, (rows,)) for shard, rows in shards])


@final
@dataclass(frozen=True)
class _InShard:
    """One column of one shard."""

    shard: Shard
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, rows: Exact) -> Tensor:
        return _opened(self.shard)[self.name][rows]


@final
@dataclass(frozen=True)
class _IdsInShard:
    """The images' names of one shard."""

    shard: Shard
    shape: tuple[int, ...]

    def __getitem__(self, rows: Exact) -> Shaped[np.ndarray, "n"]:
        names: Shaped[np.ndarray, "n"] = _names(self.shard)[rows if isinstance(rows, slice) else rows.numpy()].copy()
        return names


@final
class HeadColumn:
    """Logits rebuilt from stored features and the head: W z + b."""

    def __init__(self, feature: Column, weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"] | None) -> None:
        self._feature, self._weight, self._bias = feature, weight, bias
        self.shape = (feature.shape[0], weight.shape[0])

    def __getitem__(self, rows: Exact) -> Float[Tensor, "n c"]:
        return F.linear(self._feature[rows], self._weight, self._bias)


def forget_shards() -> None:
    """Drop what is remembered of open shards: files have changed."""
    for memory in (_opened, _names, _verify):
        memory.cache_clear()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _opened(shard: Shard) -> dict[str, Tensor]:
    _verify(shard)
    return shard.read()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _names(shard: Shard) -> Shaped[np.ndarray, "n"]:
    return np.asarray(unpack_strings(_opened(shard)), dtype=str)


@cache
def _verify(shard: Shard) -> None:
    shard.check()
