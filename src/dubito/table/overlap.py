"""Which images two tables share, by what the model made of them: names may differ, and the same names mean little.

    same image   <=>   |a_j - b_j| <= 1e-3 s_j + 3e-6 max|a|   for every column j,   s_j its smaller standard deviation

Features of one image differ in their last digits between batch sizes and machines, so bytes are not compared; where a
row was kept in half precision, one step of it is allowed as well. Nearest rows are searched exactly by faiss, in at
most 64 random projections of the standardised columns, and then compared in all columns; of the larger table, one block
is in memory at a time. Rows that are not finite or have one value in all columns identify no image and never match.
In two or three columns different images come close by chance: how many do is estimated from those in a box four times
as wide, and if chance explains all matches, none is reported.
"""

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.table import Table

_OF_SPREAD, _OF_ROW, _OF_HALF = 1e-3, 3e-6, 2**-10
_MOST_OF_SPREAD = 0.2
"""In columns that hardly vary, the step of half precision is allowed only up to this share of the spread."""
_SEARCHED, _CANDIDATES, _WIDER = 64, 3, 4
_CLIP = 10.0
"""Standard deviations: far outliers would cost float32 the digits that distinguish near rows."""
_FAR = 0.15**2
"""Mean square difference, in standard deviations, above which rows are not compared in all columns."""
_AT_ONCE, _BLOCK = 2048, 16_384
"""Rows that are read at once, and projected rows that are searched at once: 4 MB."""


class Shared(NamedTuple):
    """Rows of one table that are images of another.

    Attributes:
        here: Rows of the table, in order.
        there: For each, a row of the other one that is the same image.
    """

    here: Int[Tensor, "s"]
    there: Int[Tensor, "s"]


def shared_rows(table: Table, other: Table) -> Shared:
    """Rows of `table` whose images are also in `other`, by features or, without these, by logits.

    >>> shared_rows(Table(feature=[[1.0, 5.0], [2.0, 3.0]]), Table(feature=[[2.000001, 3.0], [7.0, 8.0]])).here
    tensor([1])
    """
    same = none = Shared(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    near = 0
    both = [name for name in ("feature", "logit") if name in table and name in other]
    columns = [name for name in both if table.shape(name)[1:] == other.shape(name)[1:]]
    if not columns or not len(table) or not len(other):
        return none
    column = columns[0]
    comparison = _Comparison(table, other, column)
    candidates = comparison.nearest()
    for first in range(0, len(table), _AT_ONCE):
        ratio, which = comparison.closest(candidates[first : first + _AT_ONCE], first)
        rows = (ratio <= 1).nonzero().flatten()
        same = Shared(torch.cat([same.here, rows + first]), torch.cat([same.there, which[rows]]))
        near += int(((ratio > 1) & (ratio <= _WIDER)).sum())
    # By chance, rows lie evenly in so small a box; those of one image lie at its centre.
    by_chance = near / (float(_WIDER) ** min(table.shape(column)[1], _SEARCHED) - 1)
    return same if len(same.here) > 2 * by_chance + 3 * by_chance**0.5 else none


def example(table: Table, other: Table, shared: Shared) -> str:
    """The name of a shared image, for a message; empty if it has none."""
    if "id" not in table or not len(shared.here):
        return ""
    here = str(table.select("id").rows(shared.here[:1]).id[0])
    there = str(other.select("id").rows(shared.there[:1]).id[0]) if "id" in other else here
    return f" (such as '{here}'" + (")" if here == there else f", there '{there}')")


@final
class _Comparison:
    """One column of two tables: its spread, and a projection to at most 64 numbers that about preserves distances."""

    def __init__(self, table: Table, other: Table, column: str) -> None:
        self.table, self.other, self.column = table, other, column
        (mine, spread), (theirs, spread_there) = _moments(table, column), _moments(other, column)
        self.least, self.most = torch.minimum(spread, spread_there), torch.maximum(spread, spread_there)
        self.mean = (mine + theirs) / 2
        joint = ((spread**2 + spread_there**2) / 2 + (mine - theirs) ** 2 / 4).sqrt()
        # A column that is almost dead would be nothing but rounding.
        self.scale = 1 / (joint + 1e-3 * joint.mean()).clamp(min=torch.finfo(torch.float32).tiny)
        width, draw = len(mine), torch.Generator().manual_seed(0)
        wide = width > _SEARCHED
        self.matrix = torch.randn(width, _SEARCHED, generator=draw) / width**0.5 if wide else torch.eye(width)

    def blocks(self, table: Table) -> Iterator[Float[Tensor, "b p"]]:
        """A table's rows, projected, many at a time."""
        parts: list[Tensor] = []
        for batch in table.batches(self.column, size=_AT_ONCE):
            x = (batch.whole(self.column).double() - self.mean) * self.scale
            parts.append(x.nan_to_num(0.0).clamp(-_CLIP, _CLIP).float() @ self.matrix)
            if len(parts) == _BLOCK // _AT_ONCE:
                yield torch.cat(parts)
                parts = []
        if parts:
            yield torch.cat(parts)

    def nearest(self) -> Int[Tensor, "n k"]:
        """The nearest rows of the other table; -1 where there is none near enough."""
        if len(self.table) > len(self.other):
            bank = torch.cat(list(self.blocks(self.other)))
            pairs = [_nearest_rows(queries, bank) for queries in self.blocks(self.table)]
            distance, index = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        else:
            queries, first = torch.cat(list(self.blocks(self.table))), 0
            distance, index = torch.zeros(len(queries), 0), torch.zeros(len(queries), 0, dtype=torch.long)
            for bank in self.blocks(self.other):
                near, which = _nearest_rows(queries, bank)
                distance, index = torch.cat([distance, near], 1), torch.cat([index, which + first], 1)
                distance, best = distance.topk(min(_CANDIDATES, distance.shape[1]), largest=False)
                index, first = index.gather(1, best), first + len(bank)
        return torch.where(distance <= _FAR * self.matrix.shape[1], index, -1)

    def closest(self, candidates: Int[Tensor, "b k"], first: int) -> tuple[Float[Tensor, "b"], Int[Tensor, "b"]]:
        """The largest difference in tolerances, of each row from `first` on and the candidate that is most like it."""
        best = torch.full((len(candidates),), torch.inf, dtype=torch.float64)
        which = torch.full((len(candidates),), -1)
        for candidate in candidates.T:
            rows = (candidate >= 0).nonzero().flatten()
            if not len(rows):
                continue
            a = self.table.select(self.column).rows(rows + first).whole(self.column).double()
            b = self.other.select(self.column).rows(candidate[rows]).whole(self.column).double()
            allowed = _OF_SPREAD * self.least + _OF_ROW * a.abs().amax(1, keepdim=True)
            step = (_OF_HALF * a.abs()).minimum(_MOST_OF_SPREAD * self.most)
            both = torch.stack([a, b])
            halved = (both.half() == both).all(2).any(0)  # half precision represents all values exactly
            allowed = allowed + torch.where(halved[:, None], step, 0.0)
            ratio = ((a - b).abs() / allowed).amax(1)
            # Features of NaN, or of one value throughout, are no evidence of the same image.
            distinctive = (both.isfinite().all(2) & (both != both[..., :1]).any(2)).all(0)
            ratio = torch.where(distinctive, ratio, torch.inf)
            closer = ratio < best[rows]
            best[rows[closer]], which[rows[closer]] = ratio[closer], candidate[rows[closer]]
        return best, which


def _moments(table: Table, column: str) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    """Mean and standard deviation of finite rows."""
    width, n = table.shape(column)[1], 0
    mean, squares = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for batch in table.batches(column, size=_AT_ONCE):
        x = batch.whole(column).double()
        x = x[x.isfinite().all(1)]
        if not len(x):
            continue
        # Chan et al. 1983: no digits are lost where the mean is far from zero.
        delta, n = x.mean(0) - mean, n + len(x)
        squares += x.var(0, correction=0) * len(x) + delta**2 * (n - len(x)) * len(x) / n
        mean += delta * len(x) / n
    return mean, (squares / max(n, 1)).sqrt()


def _nearest_rows(
    queries: Float[Tensor, "n p"], bank: Float[Tensor, "b p"]
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """Squared distances and numbers of the nearest rows, the nearest first."""
    import faiss  # noqa: PLC0415 (slow to import, and only needed to compare tables)

    k = min(_CANDIDATES, len(bank))
    distance, index = faiss.knn(queries.numpy(), bank.numpy(), k, metric=faiss.METRIC_L2)
    return torch.from_numpy(distance), torch.from_numpy(index)
