"""Columns of what members say, computed from features when rows are asked for."""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from dubito.metrics.streaming import SUMMARY, MemberStream
from dubito.table import Column, Exact

_ROWS, _NUMBERS = 512, 2**22
"""Rows of a block, and the members' logits in it, at most: a few copies of 32 MB are made."""
Said = Callable[[Tensor], Tensor]
"""Features (n, d) to the logits of members (n, m, c)."""


def said_by(feature: Column, said: Said, members: tuple[int, int]) -> Column:
    """The logits themselves, (n, m, c), of so many members and classes."""
    return _FromFeatures([feature], said, members, members)


def logits_of(feature: Column, said: Said, classes: int) -> Column:
    """What a single classifier says, (n, c)."""
    return _FromFeatures([feature], said, (classes,), (1, classes))


def summary_of(feature: Column, said: Said, members: tuple[int, int]) -> Column:
    """The fields of `metrics.SUMMARY`, (n, s)."""
    return _FromFeatures([feature], lambda z: _streamed(said(z)).summary().float(), (len(SUMMARY),), members)


def losses_of(feature: Column, said: Said, members: tuple[int, int], label: Column) -> Column:
    """-log of the mean probability of the label, (n)."""
    return _FromFeatures([feature, label], lambda z, y: _streamed(said(z)).loss(y).float(), (), members)


@final
class _FromFeatures:
    """A column that is a function of others, in blocks of rows: what is between must not grow with the table."""

    def __init__(
        self, columns: list[Column], make: Callable[..., Tensor], shape: tuple[int, ...], members: tuple[int, int]
    ) -> None:
        self._columns, self._make = columns, make
        self.shape = (columns[0].shape[0], *shape)
        self._rows = max(1, min(_ROWS, _NUMBERS // math.prod(members)))

    def __getitem__(self, rows: Exact) -> Tensor:
        index = torch.arange(self.shape[0])[rows] if isinstance(rows, slice) else rows
        if len(index) == 0:
            return torch.empty(0, *self.shape[1:])
        return torch.cat([self._block(part) for part in torch.split(index, self._rows)])

    def _block(self, index: Tensor) -> Tensor:
        first, last = int(index[0]), int(index[-1])
        straight = last - first == len(index) - 1 and bool((index.diff() == 1).all())
        rows: Any = slice(first, last + 1) if straight else index
        return self._make(*(column[rows] for column in self._columns))


def _streamed(logits: Tensor) -> MemberStream:
    stream = MemberStream()
    stream.add(logits)
    return stream
