"""Columns that stay on disk: rows are read from memory-mapped shards when they are asked for.

Half-precision columns come out as float32; every shard's checksum is verified once, when its rows are first touched.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate
from typing import final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.cache.shard import Shard, unpack_strings
from dubito.table import Exact

_OPEN_AT_ONCE = 32


@final
class ShardedColumn:
    """One column over all shards of one probe.

    Args:
        shards: In order, with the number of rows of each.
        name: The key in every shard.
        tail: The shape of one row.
    """

    def __init__(self, shards: list[tuple[Shard, int]], name: str, tail: tuple[int, ...]) -> None:
        self._shards = [shard for shard, _ in shards]
        self._ends = list(accumulate(rows for _, rows in shards))
        self._name = name
        self.shape = (self._ends[-1] if self._ends else 0, *tail)

    def __getitem__(self, rows: Exact) -> Tensor:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            return self._between(start, stop)
        return self._gather(rows)

    def _between(self, start: int, stop: int) -> Tensor:
        parts = [self._rows(which)[rows] for which, rows in _pieces(self._ends, start, stop)]
        if not parts:
            return _widened(self._rows(0)[:0]) if self._shards else torch.empty(0, *self.shape[1:])
        return _widened(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _gather(self, index: Tensor) -> Tensor:
        if not len(index):
            return self._between(0, 0)
        ends = torch.tensor(self._ends)
        owner = torch.searchsorted(ends, index, right=True)
        parts, places = [], []
        for which in sorted(set(owner.tolist())):
            place = (owner == which).nonzero()[:, 0]
            first = self._ends[which - 1] if which else 0
            parts.append(self._rows(which)[index[place] - first])
            places.append(place)
        gathered = torch.cat(parts)
        out = torch.empty_like(gathered)
        out[torch.cat(places)] = gathered
        return _widened(out)

    def _rows(self, which: int) -> Tensor:
        return _opened(self._shards[which])[self._name]


@final
class IdColumn:
    """The images' names over all shards."""

    def __init__(self, shards: list[tuple[Shard, int]]) -> None:
        self._shards = [shard for shard, _ in shards]
        self._ends = list(accumulate(rows for _, rows in shards))
        self.shape = (self._ends[-1] if self._ends else 0,)

    def __getitem__(self, rows: Exact) -> Shaped[np.ndarray, "n"]:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            pieces = _pieces(self._ends, start, stop)
            names = [name for which, part in pieces for name in _names(self._shards[which])[part]]
            return np.asarray(names, dtype=str)
        chosen: Shaped[np.ndarray, "n"] = self[:][rows.numpy()]
        return chosen


@final
class HeadColumn:
    """Logits rebuilt from stored features and the head: W z + b."""

    def __init__(self, feature: ShardedColumn, weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"] | None) -> None:
        self._feature, self._weight, self._bias = feature, weight, bias
        self.shape = (feature.shape[0], weight.shape[0])

    def __getitem__(self, rows: Exact) -> Float[Tensor, "n c"]:
        return F.linear(self._feature[rows], self._weight, self._bias)


def forget_shards() -> None:
    """Drop what is remembered of open shards: files have changed."""
    for memory in (_opened, _names, _verify):
        memory.cache_clear()


def _pieces(ends: list[int], start: int, stop: int) -> Iterator[tuple[int, slice]]:
    """Which shards hold rows start..stop, and where in each."""
    while start < stop:
        which = bisect_right(ends, start)
        first = ends[which - 1] if which else 0
        end = min(stop, ends[which])
        yield which, slice(start - first, end - first)
        start = end


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _opened(shard: Shard) -> dict[str, Tensor]:
    _verify(shard)
    return shard.read()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _names(shard: Shard) -> list[str]:
    return unpack_strings(_opened(shard))


@cache
def _verify(shard: Shard) -> None:
    shard.check()


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
