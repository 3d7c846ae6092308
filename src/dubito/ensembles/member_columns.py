"""Columns of what several classifiers predict, computed from features when rows are read."""

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from dubito.metrics.streaming import SUMMARY, MemberStream
from dubito.table import Column, Exact

_ROWS, _NUMBERS = 512, 2**22
"""Most rows of a block, and most member logits in it: a few copies of 32 MB are made."""
MemberLogits = Callable[[Tensor], Tensor]
"""Maps features (n, d) to the logits of members (n, m, c)."""


def member_logits(feature: Column, predict: MemberLogits, shape: tuple[int, int]) -> Column:
    """The logits of all members, (n, m, c); `shape` is the number of members and of classes."""
    return _FromFeatures([feature], predict, shape, shape)


def class_logits(feature: Column, predict: Callable[[Tensor], Tensor], classes: int) -> Column:
    """The logits of a single classifier, (n, c)."""
    return _FromFeatures([feature], predict, (classes,), (1, classes))


def member_summary(feature: Column, predict: MemberLogits, shape: tuple[int, int]) -> Column:
    """The fields of `metrics.SUMMARY`, (n, s)."""
    return _FromFeatures([feature], lambda z: _streamed(predict(z)).summary().float(), (len(SUMMARY),), shape)


def member_losses(feature: Column, predict: MemberLogits, shape: tuple[int, int], label: Column) -> Column:
    """-log of the mean probability of the label, (n)."""
    return _FromFeatures([feature, label], lambda z, y: _streamed(predict(z)).loss(y).float(), (), shape)


@final
class _FromFeatures:
    """A column that is a function of others, in blocks of rows: intermediate results must not grow with the table."""

    def __init__(
        self, columns: list[Column], compute: Callable[..., Tensor], shape: tuple[int, ...], members: tuple[int, int]
    ) -> None:
        self._columns, self._compute = columns, compute
        self.shape = (columns[0].shape[0], *shape)
        self._rows = max(1, min(_ROWS, _NUMBERS // math.prod(members)))

    def __getitem__(self, rows: Exact) -> Tensor:
        index = torch.arange(self.shape[0])[rows] if isinstance(rows, slice) else rows
        if len(index) == 0:
            return torch.empty(0, *self.shape[1:])
        return torch.cat([self._block(part) for part in torch.split(index, self._rows)])

    def _block(self, index: Tensor) -> Tensor:
        first, last = int(index[0]), int(index[-1])
        consecutive = last - first == len(index) - 1 and bool((index.diff() == 1).all())
        rows: Any = slice(first, last + 1) if consecutive else index
        return self._compute(*(column[rows] for column in self._columns))


def _streamed(logits: Tensor) -> MemberStream:
    stream = MemberStream()
    stream.add(logits)
    return stream
