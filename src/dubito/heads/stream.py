"""Shuffled batches from a table of any size: blocks of rows in random order, shuffled again in a buffer.

    pass p      all blocks of consecutive rows in an order drawn from (seed, p)
    buffer b    the next blocks of that order, their rows in an order drawn from (seed, p, b)
    batch       the next rows of the buffer

Disks read blocks fast and single rows slowly, and a buffer of many blocks from everywhere mixes well enough. The batch
of each step depends on (seed, step) alone, so a training that was stopped continues with the same batches. A table that
fits into one buffer is read once and shuffled as a whole. A single row left over at the end of a pass could not be
ranked: it joins the batch before it.

Several processes split each buffer: of r rows, process k of w holds those from floor(r k / w) to floor(r (k + 1) / w),
and of every batch it has the rows that it holds (`shares`). All batches are those of one process.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.storage import tensors_digest
from dubito.table import Column
from dubito.table.table import take
from dubito.types import finite

_BLOCK = 512
_BUFFER_ROWS = 65_536
_BUFFER_BYTES = 1 << 28
_ROWS_COMPARED = 64


@final
@dataclass
class Stream:
    """Batches of features with their losses.

    Attributes:
        features: (n, d), a tensor or a column on disk.
        losses: (n).
        batch: Rows per batch; the last batch of a pass may have fewer, or one more instead of a batch of one row.
        seed: Seed of all orders.
        name: What errors call the table.
        rank: Which of several processes this one is.
        processes: How many processes split each buffer.
    """

    features: Column
    losses: Float[Tensor, "n"]
    batch: int
    seed: int
    name: str = "table"
    rank: int = 0
    processes: int = 1
    _kept: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)
    _space: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        n, d = self.features.shape
        fits = max(1, min(_BUFFER_ROWS, _BUFFER_BYTES // (4 * d)) // self.batch) * self.batch
        # A buffer is a whole number of batches and of blocks, so that only the last batch of a pass has another size.
        self._block = _BLOCK if fits % _BLOCK == 0 else self.batch
        self._fits_whole = fits + 1 >= n
        self._buffer = n if self._fits_whole else fits

    @property
    def batches_per_pass(self) -> int:
        """Number of batches that show every row once."""
        n = self.features.shape[0]
        return n // self.batch + (n % self.batch > 1)

    def rows_until(self, step: int) -> int:
        """Number of rows in the batches before a step."""
        passes, rest = divmod(step, self.batches_per_pass)
        return passes * self.features.shape[0] + rest * self.batch

    def digest(self) -> str:
        """A hash of some evenly spaced rows, which stand for the features."""
        n = self.features.shape[0]
        some = torch.linspace(0, n - 1, min(n, _ROWS_COMPARED)).long()
        return tensors_digest({"feature": take(self.features, some)})

    def batches(self, start: int, stop: int) -> Iterator[tuple[Float[Tensor, "b d"], Float[Tensor, "b"]]]:
        """The batches of the steps from start up to stop."""
        for rows, losses, chosen in self._batches(start, stop):
            yield rows.index_select(0, chosen), losses.index_select(0, chosen)

    def shares(
        self, start: int, stop: int
    ) -> Iterator[tuple[Float[Tensor, "own d"], Float[Tensor, "b"], Int[Tensor, "own"]]]:
        """The same batches: the rows that this process holds, the losses of all rows, and which of them it holds."""
        for rows, losses, chosen in self._batches(start, stop):
            first, end = self._held(len(losses))
            own = ((chosen >= first) & (chosen < end)).nonzero()[:, 0]
            yield rows.index_select(0, chosen[own] - first), losses.index_select(0, chosen), own

    def _batches(
        self, start: int, stop: int
    ) -> Iterator[tuple[Float[Tensor, "held d"], Float[Tensor, "r"], Int[Tensor, "b"]]]:
        """For each step: the rows of the buffer that are held, its losses, and where in the buffer the batch is."""
        step = start
        per_buffer = self.batches_per_pass if self._fits_whole else self._buffer // self.batch
        while step < stop:
            number, place = divmod(step, self.batches_per_pass)
            which, first = divmod(place, per_buffer)
            rows, losses = self._filled(number, which)
            order = torch.randperm(len(losses), generator=generator(self.seed, number, which))
            last = min(per_buffer, self.batches_per_pass - which * per_buffer, first + stop - step)
            for index in range(first, last):
                is_last = which * per_buffer + index + 1 == self.batches_per_pass
                yield rows, losses, order[index * self.batch : None if is_last else (index + 1) * self.batch]
            step += last - first

    def _held(self, rows: int) -> tuple[int, int]:
        """Which rows of a buffer this process holds."""
        return rows * self.rank // self.processes, rows * (self.rank + 1) // self.processes

    def _filled(self, number: int, which: int) -> tuple[Float[Tensor, "held d"], Float[Tensor, "r"]]:
        """The rows of a buffer: the whole table if it fits, otherwise the next blocks of the pass."""
        if self._kept is not None:
            return self._kept
        n, d = self.features.shape
        order = torch.arange(-(-n // self._block))
        if not self._fits_whole:
            full, size = n // self._block, self._buffer // self._block
            order[:full] = torch.randperm(full, generator=generator(self.seed, number))  # a short block stays last
            is_last = n - (which + 1) * self._buffer <= 1  # one more row joins it
            order = order[which * size : None if is_last else (which + 1) * size]
        spans = [(block * self._block, min((block + 1) * self._block, n)) for block in order.tolist()]
        count = sum(end - start for start, end in spans)
        held_from, held_to = self._held(count)
        if self._space is None:  # allocated once: fresh memory costs more than filling it
            most = -(-(self._buffer + 1) // self.processes)
            self._space = torch.empty(most, d), torch.empty(self._buffer + 1)
        rows, losses = self._space[0][: held_to - held_from], self._space[1][:count]
        done = 0
        for start, end in spans:
            losses[done : done + end - start] = self.losses[start:end]
            first, last = max(done, held_from), min(done + end - start, held_to)
            if first < last:
                rows[first - held_from : last - held_from] = self.features[start + first - done : start + last - done]
            done += end - start
        if not bool(rows.sum().isfinite()):  # NaN and infinity reach the sum, which is much cheaper than the check
            finite(rows, f"head.fit: features of {self.name}")
        self._kept = (rows, losses) if self._fits_whole else None
        return rows, losses


def dropped(
    rows: Float[Tensor, "own d"], share: float, seed: int, step: int, own: Int[Tensor, "own"] | None = None, b: int = 0
) -> Float[Tensor, "own d"]:
    """Dropout on the features; like the batch, it depends on the seed and the step alone.

    Args:
        rows: Rows of a batch.
        share: Share of the features that is set to zero; the rest is scaled up.
        seed: Seed of the training.
        step: Which step the batch is for.
        own: Which rows of the batch these are; None for all.
        b: Number of rows of the batch, where these are some of them.
    """
    if not share:
        return rows
    size = (len(rows) if own is None else b, rows.shape[1])
    kept = torch.rand(size, generator=generator(seed, step, "dropout")) >= share
    return rows * (kept if own is None else kept[own]) / (1 - share)


def generator(*numbers: int | str) -> torch.Generator:
    """A generator seeded by a hash of these numbers: similar numbers give unrelated streams."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
