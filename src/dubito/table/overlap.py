"""Which images two tables share, by what the model made of them: names may differ, and the same names mean little.

    same image   <=>   |a_j - b_j| <= 1e-3 s_j + 3e-6 max|a|   for every column j,   s_j its smaller standard deviation

Features of one image differ in their last digits between batch sizes and machines, so bytes are not compared; where a
row was kept in half precision, one step of it is allowed as well. Rows whose mean square difference exceeds 0.15²
variances are never the same: a single huge column would otherwise excuse all others. Rows that are not finite or have
one value in all columns identify no image and never match.

Rows are joined by a grid, in time linear in the rows. Cells are some tolerances wide in a few columns; every row of the
smaller table is filed under its cell (16 bytes per row), and every row of the larger one, read block by block, is
compared in all columns with the rows of each cell that its tolerance reaches. Which columns, and how wide the cells
are, is decided on a sample: the grid that leaves the fewest comparisons. Where a cell holds more than 256 rows, as of
copies of one image, a row is compared with 256 of them.

In two or three columns different images come close by chance: how many do is estimated from those in a box four times
as wide, and if chance explains all matches, none is reported.

A sketch, for whoever keeps no table, is eight random projections of each image, compared in the same way.
"""

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.table import Table

_OF_SPREAD, _OF_ROW, _OF_HALF = 1e-3, 3e-6, 2**-10
_MOST_OF_SPREAD = 0.2
"""In columns that hardly vary, the step of half precision is allowed only up to this share of the spread."""
_WIDER = 4.0
_SKETCHED, _FEWEST_SKETCHED = 8, 4
"""Numbers that a sketch has of each image; images with fewer than four are alike too often."""
_CLIP = 10.0
"""Standard deviations beyond which a difference no longer counts."""
_FAR = 0.15**2
"""Mean square difference, in variances, above which rows are different images."""
_AT_ONCE, _COMPARED = 2048, 4096
"""Rows that are read at once, and pairs of rows that are compared at once."""
_MERGED = 256
"""Comparisons whose results are kept before those of one row are reduced to the best."""
_IN_CELL, _PROBES = 256, 4096
"""Rows of one cell that a row is compared with, and cells it may reach before it is compared with all rows."""
_SAMPLE, _TRIED = 2048, 256
"""Rows of each table, and columns, that a grid is chosen on."""
_CELLS = (32.0, 8.0, 2.0)
"""Widths of cells, in tolerances, to choose from."""
_MOST_CELLS = 2.0**40
_ALL = slice(None)

Pairs = tuple[Int[Tensor, "p"], Int[Tensor, "p"]]
"""Rows of two tables that are compared: of the first, and of the second."""
Matches = tuple[Tensor, Tensor, Tensor]
"""Pairs of rows, and the ratio of each."""


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
    none = Shared(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    both = [name for name in ("feature", "logit") if name in table and name in other]
    columns = [name for name in both if table.shape(name)[1:] == other.shape(name)[1:]]
    if not columns or not len(table) or not len(other) or table.shape(columns[0])[1] < 2:
        return none
    chance = _WIDER ** min(table.shape(columns[0])[1], 64) - 1
    # With no more rows than this, chance could not explain even one match, however many rows are near.
    wider = _WIDER if len(table) > 0.05 * chance else 1.0
    comparison = _Comparison(table, other, columns[0], wider)
    here, there, ratio = comparison.closest()
    same = ratio <= 1
    # By chance, rows lie evenly in so small a box; those of one image lie at its centre.
    by_chance = int((~same).sum()) / chance
    return Shared(here[same], there[same]) if int(same.sum()) > 2 * by_chance + 3 * by_chance**0.5 else none


def sketch(table: Table) -> Float[Tensor, "n p"] | None:
    """At most eight numbers per image, of features or, without these, of logits, by which `shared_rows` recognises it.

    None where there are fewer than four.

    >>> sketch(Table(feature=[[1.0, 5.0, 2.0, 3.0]]))
    tensor([[1., 5., 2., 3.]])
    """
    column = "feature" if "feature" in table else "logit"
    width = table.shape(column)[1]
    if width < _FEWEST_SKETCHED:
        return None
    matrix = _projection(width, _SKETCHED).double()
    batches = table.batches(column, size=_AT_ONCE)
    rows = [(batch.whole(column).double() @ matrix).float() for batch in batches]
    return torch.cat([torch.zeros(0, matrix.shape[1]), *rows])


def example(table: Table, other: Table, shared: Shared) -> str:
    """The name of a shared image, for a message; empty if it has none."""
    if "id" not in table or not len(shared.here):
        return ""
    here = str(table.select("id").rows(shared.here[:1]).id[0])
    there = str(other.select("id").rows(shared.there[:1]).id[0]) if "id" in other else here
    return f" (such as '{here}'" + (")" if here == there else f", there '{there}')")


@final
class _Comparison:
    """One column of two tables: how far rows of one image may differ, and which rows do not differ more."""

    def __init__(self, table: Table, other: Table, column: str, wider: float) -> None:
        self.table, self.other, self.column, self.wider = table.select(column), other.select(column), column, wider
        (mine, spread, half), (theirs, spread_there, half_there) = _moments(table, column), _moments(other, column)
        self.least, self.most = torch.minimum(spread, spread_there), torch.maximum(spread, spread_there)
        self.halved = half or half_there
        self.mean = (mine + theirs) / 2
        joint = ((spread**2 + spread_there**2) / 2 + (mine - theirs) ** 2 / 4).sqrt()
        # A column that is almost dead would be nothing but rounding.
        self.scale = 1 / (joint + 1e-3 * joint.mean()).clamp(min=torch.finfo(torch.float32).tiny)

    def closest(self) -> Matches:
        """Rows of the table in order, the row of the other one that is most like each, and their ratio (`ratios`)."""
        none = torch.zeros(0, dtype=torch.long)
        best = [(none, none, torch.zeros(0, dtype=torch.float64))]
        for here, there in self._pairs():
            for i, j in zip(torch.split(here, _COMPARED), torch.split(there, _COMPARED), strict=True):
                ratio = self.ratios(i, j)
                near = ratio <= self.wider
                best.append((i[near], j[near], ratio[near]))
            if len(best) > _MERGED:
                best = [_least_ratio(best)]
        return _least_ratio(best)

    def ratios(self, here: Int[Tensor, "p"], there: Int[Tensor, "p"]) -> Float[Tensor, "p"]:
        """The largest difference of each pair of rows, in tolerances; infinite where they are not one image."""
        a, b = _read(self.table, self.column, here), _read(self.other, self.column, there)
        both = torch.stack([a, b])
        halved = (both.half() == both).all(2).any(0)  # half precision represents all values exactly
        ratio = ((a - b).abs() / self._allowed(a.abs(), a.abs().amax(1), halved)).amax(1)
        # Features of NaN, or of one value throughout, are no evidence of the same image.
        distinctive = (both.isfinite().all(2) & (both != both[..., :1]).any(2)).all(0)
        x = ((both - self.mean) * self.scale).clamp(-_CLIP, _CLIP)
        close = (x[0] - x[1]).square().mean(1) <= _FAR
        return torch.where(distinctive & close, ratio, torch.inf)

    def reach(
        self, x: Float[Tensor, "b k"], largest: Float[Tensor, "b"], columns: slice | Int[Tensor, "k"]
    ) -> Float[Tensor, "b k"]:
        """How far at most a row of either table may be from these, in some columns, to be compared in all."""
        step = _MOST_OF_SPREAD * self.most if self.halved else 0.0
        apart = self.wider * (_OF_SPREAD * self.least + step)
        magnitude, halved = 1.001 * (x.abs() + apart[columns]), torch.full((len(x),), self.halved)
        allowed = self._allowed(magnitude, 1.001 * (largest + apart.max()), halved, columns)
        return 1.001 * self.wider * allowed  # more than any rounding

    def _allowed(
        self,
        magnitude: Float[Tensor, "b k"],
        largest: Float[Tensor, "b"],
        halved: Bool[Tensor, "b"],
        columns: slice | Int[Tensor, "k"] = _ALL,
    ) -> Float[Tensor, "b k"]:
        """The tolerance in some columns, of rows with these magnitudes."""
        allowed = _OF_SPREAD * self.least[columns] + _OF_ROW * largest[:, None]
        step = (_OF_HALF * magnitude).minimum(_MOST_OF_SPREAD * self.most[columns])
        return allowed + step * halved[:, None]

    def _pairs(self) -> Iterator[Pairs]:
        """Rows of the table and of the other one that may be the same image, many at a time."""
        swapped = len(self.table) < len(self.other)
        small, large = (self.table, self.other) if swapped else (self.other, self.table)
        sample = torch.cat([_sample(small, self.column), _sample(large, self.column)])
        if not len(sample):
            return
        grid = _choose_grid(sample, self.reach(sample, sample.abs().amax(1), _ALL), len(small))
        filed = _file(small, self.column, grid)
        for rows, x, largest in _finite_rows(large, self.column, grid.columns):
            for which, candidates in _candidates(grid, filed, x, self.reach(x, largest, grid.columns)):
                yield (candidates, rows[which]) if swapped else (rows[which], candidates)


def _projection(width: int, most: int) -> Float[Tensor, "d p"]:
    """From so many columns to at most a number of them, about preserving distances; always the same."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(width, most, generator=draw) / width**0.5 if width > most else torch.eye(width)


@final
class _Grid(NamedTuple):
    """Cells in some columns. Zero is in the middle of a cell, because many features are zero."""

    columns: Int[Tensor, "k"]
    widths: Float[Tensor, "k"]
    factors: Int[Tensor, "k"]

    def cells(self, x: Float[Tensor, "b k"]) -> Int[Tensor, "b k"]:
        """The cells of values; they rise with the values, whatever is rounded."""
        return (x / self.widths + 0.5).floor().clamp(-_MOST_CELLS, _MOST_CELLS).long()

    def keys(self, cells: Int[Tensor, "b k"]) -> Int[Tensor, "b"]:
        """One number per row, equal in the same cell and hardly ever in different ones."""
        return (cells * self.factors).sum(1)

    def reached(
        self, x: Float[Tensor, "b k"], reach: Float[Tensor, "b k"]
    ) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b k"]]:
        """The lowest cells within reach of each row, and how many there are in each column."""
        lowest = self.cells(x - reach)
        return lowest, self.cells(x + reach) - lowest + 1

    def probes(self, lowest: Int[Tensor, "b k"], counts: Int[Tensor, "b k"]) -> Pairs:
        """Rows, and the keys of all cells that each reaches."""
        rows, keys = torch.arange(len(lowest)), self.keys(lowest)
        for column, factor in enumerate(self.factors.tolist()):
            if bool((counts[:, column] > 1).any()):
                which, step = _spread_out(counts[rows, column])
                rows, keys = rows[which], keys[which] + step * factor
        return rows, keys


def _choose_grid(sample: Float[Tensor, "s d"], reach: Float[Tensor, "s d"], rows: int) -> _Grid:
    """The grid in which rows of a table of so many rows reach, and are compared with, the fewest."""
    usual = reach.kthvalue(max(1, round(0.99 * len(reach))), dim=0).values.clamp(min=torch.finfo(torch.float64).tiny)
    grids = [_grid(sample, width * usual, rows) for width in _CELLS]

    def work(choice: tuple[_Grid, float]) -> float:
        grid, share = choice
        probes = (
            grid.reached(sample[:, grid.columns], reach[:, grid.columns])[1].double().prod(1).clamp(max=_PROBES).mean()
        )
        return float(probes) * (1 + rows * share)

    return min(grids, key=work)[0]


def _grid(sample: Float[Tensor, "s d"], widths: Float[Tensor, "d"], rows: int) -> tuple[_Grid, float]:
    """Columns that separate the sample with cells of these widths, and the share of pairs in the same cell."""
    factors = torch.randint(-(2**62), 2**62, widths.shape, generator=torch.Generator().manual_seed(0)) | 1
    every = _Grid(torch.arange(len(widths)), widths, factors)
    cells = every.cells(sample)
    # Images that both tables share, and copies, are in the same cell whatever the columns are: one of each counts.
    cells = cells[_first_rows(every.keys(cells))]
    alone = torch.tensor([_collisions(column) for column in cells.T])
    chosen, keys = [], torch.zeros(len(cells), dtype=torch.long)
    measured = expected = 1.0
    for column in alone.argsort()[:_TRIED].tolist():
        separated = keys + cells[:, column] * factors[column]
        share = _collisions(separated)
        # Below one pair of the sample nothing is measured: columns are then taken to be independent.
        if share < 0.9 * measured or measured == 0:
            chosen.append(column)
            keys, measured, expected = separated, share, expected * max(float(alone[column]), 1 / len(sample))
        if measured == 0 and expected < 1e-3 / rows:
            break
    columns = torch.tensor(chosen, dtype=torch.long)
    return _Grid(columns, widths[columns], factors[columns]), max(measured, expected)


def _collisions(keys: Int[Tensor, "s"]) -> float:
    """The share of pairs of rows that have the same key."""
    counts = torch.unique(keys, return_counts=True)[1].double()
    return float((counts * (counts - 1)).sum()) / max(1, len(keys) * (len(keys) - 1))


def _first_rows(keys: Int[Tensor, "s"]) -> Int[Tensor, "u"]:
    """The first row of every key, in the order of the keys."""
    order = keys.argsort(stable=True)
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = keys[order][1:] != keys[order][:-1]
    return order[first]


def _file(table: Table, column: str, grid: _Grid) -> Pairs:
    """The sorted keys of a table's rows, and the row of each; rows that are not finite have none."""
    keys, rows = torch.empty(2, len(table), dtype=torch.long)
    n = 0
    for number, x, _ in _finite_rows(table, column, grid.columns):
        keys[n : n + len(x)], rows[n : n + len(x)] = grid.keys(grid.cells(x)), number
        n += len(x)
    ordered, order = keys[:n].sort(stable=True)
    return ordered, rows[order]


def _candidates(grid: _Grid, filed: Pairs, x: Float[Tensor, "b k"], reach: Float[Tensor, "b k"]) -> Iterator[Pairs]:
    """Rows of `x`, and the filed rows in the cells that each reaches."""
    keys, numbers = filed
    lowest, counts = grid.reached(x, reach)
    many = counts.double().prod(1) > _PROBES
    for row in many.nonzero().flatten().tolist():  # so large that its tolerance is, too
        yield torch.full_like(numbers, row), numbers
    usual = (~many).nonzero().flatten()
    rows, reached = grid.probes(lowest[usual], counts[usual])
    start = torch.searchsorted(keys, reached)
    sizes = (torch.searchsorted(keys, reached, right=True) - start).clamp(max=_IN_CELL)
    for part in torch.split(sizes.nonzero().flatten(), _COMPARED):
        which, step = _spread_out(sizes[part])
        yield usual[rows[part][which]], numbers[start[part][which] + step]


def _spread_out(counts: Int[Tensor, "b"]) -> Pairs:
    """Every row as often as it counts, and which of its copies each is: 2, 1 gives rows 0, 0, 1 and copies 0, 1, 0."""
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    return rows, torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]


def _least_ratio(parts: list[Matches]) -> Matches:
    """Of each row its pair with the least ratio, of equal ones the first row there."""
    here, there, ratio = (torch.cat(part) for part in zip(*parts, strict=True))
    order = there.argsort(stable=True)
    order = order[ratio[order].argsort(stable=True)]
    best = order[_first_rows(here[order])]
    return here[best], there[best], ratio[best]


def _finite_rows(
    table: Table, column: str, columns: Int[Tensor, "k"]
) -> Iterator[tuple[Int[Tensor, "b"], Float[Tensor, "b k"], Float[Tensor, "b"]]]:
    """The numbers of rows, block by block, their values in some columns, and the largest magnitude in all columns."""
    first = 0
    for batch in table.batches(size=_AT_ONCE):
        x = batch.whole(column)
        largest = x.abs().amax(1)
        finite = largest.isfinite().nonzero().flatten()
        yield finite + first, x[finite][:, columns].double(), largest[finite].double()
        first += len(x)


def _read(table: Table, column: str, rows: Int[Tensor, "p"]) -> Float[Tensor, "p d"]:
    """Some rows; each is read once, in order, however often it is asked for."""
    unique, place = torch.unique(rows, return_inverse=True)
    values: Tensor = table.rows(unique).whole(column)
    return values.double()[place]


def _sample(table: Table, column: str) -> Float[Tensor, "s d"]:
    """Finite rows from all over a table."""
    rows = torch.arange(len(table)) if len(table) <= _SAMPLE else torch.arange(_SAMPLE) * len(table) // _SAMPLE
    x: Tensor = table.rows(rows).whole(column)
    return x[x.abs().amax(1).isfinite()].double()


def _moments(table: Table, column: str) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"], bool]:
    """Mean and standard deviation of finite rows, and whether any row may have been kept in half precision."""
    width, n, half = table.shape(column)[1], 0, False
    mean, squares = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for batch in table.batches(column, size=_AT_ONCE):
        x = batch.whole(column)
        half = half or bool(((x.half() == x).all(1) & (x != x[:, :1]).any(1)).any())
        x = x[x.abs().amax(1).isfinite()].double()
        if not len(x):
            continue
        # Chan et al. 1983: no digits are lost where the mean is far from zero.
        delta, n = x.mean(0) - mean, n + len(x)
        squares += (x - x.mean(0)).square().sum(0) + delta**2 * (n - len(x)) * len(x) / n
        mean += delta * len(x) / n
    return mean, (squares / max(n, 1)).sqrt(), half
