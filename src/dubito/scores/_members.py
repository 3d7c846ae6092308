"""Scores of what members say: from the summary column of an ensemble, or from the members' own logits, block by block.

A summary (n, s) suffices for what it holds. Temperatures and pooled weights need the logits (n, m, c), which are read a
few rows at a time and given to `MemberStream` a few members at a time: memory grows with neither.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics.streaming import SUMMARY, MemberStream
from dubito.table import Table, check_table
from dubito.types import Score, finite

_BYTES = 1 << 26
"""Of logits and sums at once: 64 MB."""
_ROWS = 2048


class ScoreOfMembers(Score, ABC):
    """An uncertainty of one ensemble of a table.

    Attributes:
        of: The ensemble's name: the summary column `of`, or the members' logits in `of_logit`.
        disagrees: Whether it tells how members differ, which one alone cannot.
    """

    of: str
    disagrees: bool = True

    @property
    @abstractmethod
    def field(self) -> str:
        """Which of SUMMARY it is."""

    @property
    def logits(self) -> str:
        """The column of the members' logits."""
        return f"{self.of}_logit"

    def score(self, table: Table) -> Float[Tensor, "n"]:
        """The uncertainty of every row; see `Score.score`. The summary is read where it is there, else the logits."""
        check_table(table, by=f"{self.name}.score")
        return score_blocks(self, table, self.column_in(table), self.score_batch)

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """Of one in-memory batch."""
        if self.column_in(batch) == self.logits:
            return self.of_logits(batch)
        summary: Tensor = batch.whole(self.of)
        if summary.dim() != 2 or summary.shape[1] != len(SUMMARY):
            raise TableError(
                f"{self.name}.score: column '{self.of}' must be the summary of an ensemble, (n, {len(SUMMARY)}); "
                f"got {tuple(summary.shape)} in {batch.name}. Give members' logits (n, m, c) as '{self.logits}'."
            )
        if len(summary):
            self.check_members(int(summary[:, SUMMARY.index("members")].min()), batch)
        return summary[:, SUMMARY.index(self.field)]

    def of_logits(self, batch: Table, temperature: float = 1.0) -> Float64[Tensor, "n"]:
        """Of one in-memory batch, from logits / temperature."""
        stream = MemberStream(temperature=temperature)
        for block in members_of(self, batch):
            stream.add(block)
        return stream.field(self.field)

    def column_in(self, table: Table) -> str:
        """The column to read."""
        return self.logits if self.of not in table and self.logits in table else self.of

    def check_members(self, count: int, table: Table) -> None:
        """Raise TableError where one member is to differ from itself."""
        if self.disagrees and count < 2:
            raise TableError(
                f"{self.name}.score: the ensemble '{self.of}' of {table.name} has one member, which always agrees with "
                f"itself: the score would be 0 for every image. Give at least two members."
            )


def score_blocks(score: Score, table: Table, column: str, rows: Callable[[Table], Tensor]) -> Float64[Tensor, "n"]:
    """What `Score.score` does, with as many rows at once as their members allow."""
    check_table(table, by=f"{score.name}.score")
    table.require(column, by=f"{score.name}.score")
    score.check_fitted()
    score.check_source(table)
    parts = []
    for batch in blocks(table, column):
        finite(batch.whole(column), f"{score.name}.score: column '{column}' of {table.name}")
        parts.append(rows(batch).double())
    u = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
    return finite(u, f"{score.name}.score of {table.name}")


def blocks(table: Table, column: str) -> Iterator[Table]:
    """Rows of a column in blocks of bounded size, in memory."""
    _, *tail = table.shape(column)
    m, c = tail if len(tail) == 2 else (1, 1)
    # Four bytes a logit; of every class, the sums that a stream keeps and what it needs to add to them.
    size = _BYTES // (c * (4 * m + 64)) if m * c else _ROWS
    yield from table.batches(column, size=max(1, min(_ROWS, size)))


def members_of(score: ScoreOfMembers, batch: Table, by: str = "score") -> Iterator[Float[Tensor, "n b c"]]:
    """The logits of a batch, a few members at a time, checked."""
    logits = batch.whole(score.logits)
    if logits.dim() != 3 or not logits.is_floating_point() or 0 in logits.shape[1:]:
        raise TableError(
            f"{score.name}.{by}: column '{score.logits}' must be the logits of members, (n, m, c); got "
            f"{logits.dtype} of shape {tuple(logits.shape)} in {batch.name}."
        )
    if logits.shape[2] < 2:
        raise ValueRangeError(
            f"{score.name}.{by} needs at least two classes; got logits of shape {tuple(logits.shape)}. "
            f"Give a yes-or-no model a second logit of zero."
        )
    score.check_members(logits.shape[1], batch)
    step = max(1, _BYTES // (32 * max(1, len(logits)) * logits.shape[2]))
    for start in range(0, logits.shape[1], step):
        yield logits[:, start : start + step]
