"""Features of a table, checked and by class, batch by batch: what scores of features read."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.scores._last_layer import once
from dubito.table import Table
from dubito.table.folds import folds_of
from dubito.types import Score, finite_batches

_AT_ONCE = 8192


class ScoreOfFeatures(Score):
    """A score that reads one column of features, which must be as wide as in fit."""

    def check_width(self, batch: Table, width: int) -> None:
        """Raise TableError for features of another width than those that were learned from."""
        if (got := batch.shape(self.needs[0])[1]) != width:
            raise TableError(
                f"{self.name}.score: features must be {width} wide, as in fit; got {got} "
                f"in {batch.name}. Score a table of the same model."
            )


def mean_feature(table: Table, *, by: str) -> Float64[Tensor, "d"]:
    """The mean of the features of all rows, computed once for scores that share; see `_last_layer.sharing`."""

    def mean() -> Tensor:
        total = torch.zeros(table.shape("feature")[1], dtype=torch.float64)
        for batch in finite_batches(table.batches("feature"), table.name, by=by):
            total += batch.feature.sum(0, dtype=torch.float64)
        return total / len(table)

    return once("mean feature", table, mean)


def classes_of(table: Table, where: str) -> Int64[Tensor, "c"]:
    """The labels that occur, in order; TableError if there are none."""
    classes = torch.empty(0, dtype=torch.long)
    for batch in table.batches("label"):
        classes = torch.unique(torch.cat([classes, batch.label]))
    if len(classes) == 0:
        raise TableError(f"{where} needs labelled rows; {table.name} has none. Fit on in-distribution images.")
    return classes


def labelled(
    table: Table,
    classes: Int64[Tensor, "c"],
    prepare: Callable[[Tensor], Tensor] = Tensor.double,
    *,
    by: str,
    column: str = "feature",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepared features (n, d), and where each row's label stands among the classes (n)."""
    for batch in finite_batches(table.batches(column, "label"), table.name, by=by):
        yield prepare(batch.whole(column)), torch.searchsorted(classes, batch.label)


def means_of_classes(
    pairs: Iterator[tuple[Tensor, Tensor]], c: int, d: int
) -> tuple[Float64[Tensor, "c d"], Float64[Tensor, "c"]]:
    """The mean of every class, and how many rows it has."""
    sums, counts = torch.zeros(c, d, dtype=torch.float64), torch.zeros(c, dtype=torch.float64)
    for z, label in pairs:
        sums.index_add_(0, label, z)
        counts += torch.bincount(label, minlength=c)
    return sums / counts[:, None], counts


def fifths(table: Table, seed: int, by: str) -> Int64[Tensor, "n"]:
    """The fold of every row, one of five, drawn at random by image; TableError for fewer than five images."""
    fold = folds_of(table, 5, seed=seed)
    if (images := len(torch.unique(fold))) < 5:  # each image is a fold of its own
        raise TableError(
            f"{by}: table needs at least 5 images, to hold some out; {table.name} has {images}. Pass a table with more."
        )
    return fold


def held_out(table: Table, seed: int, by: str) -> Bool[Tensor, "n"]:
    """Which rows to hold out: those of a fifth of the images, drawn at random; TableError for fewer than five."""
    return fifths(table, seed, by) == 0


def with_held_out(
    table: Table, classes: Int64[Tensor, "c"], out: Bool[Tensor, "n"], *, by: str, column: str = "feature"
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As `labelled`, with which rows are held out (n)."""
    start = 0
    for z, label in labelled(table, classes, by=by, column=column):
        yield z, label, out[start : start + len(label)]
        start += len(label)


def lengths(feature: Float[Tensor, "n d"], by: str) -> Float[Tensor, "n"]:
    """The length of every row; ValueRangeError for a row that has no direction."""
    norm: Tensor = torch.linalg.vector_norm(feature, dim=-1)
    bad = ~torch.isfinite(norm) | (norm == 0)
    if bool(bad.any()):
        raise ValueRangeError(
            f"{by}: features must be finite and not all zero; row {int(bad.nonzero()[0, 0])} of the batch "
            f"is not. Look at that image's feature."
        )
    return norm


def unit(feature: Float[Tensor, "n d"], power: float = 1.0) -> Float[Tensor, "n d"]:
    """Rows divided by their length to a power; a row of zeros, as dead units leave it, has no direction and stays zero.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double()).tolist()
    [[0.6, 0.8], [0.0, 0.0]]
    """
    norm = torch.linalg.vector_norm(feature, dim=-1, keepdim=True)
    divided: Tensor = feature / norm.masked_fill(norm == 0, 1.0) ** power
    return divided


def unit_bank(table: Table, rows: Int64[Tensor, "b"] | None, by: str) -> Float[Tensor, "b d"]:
    """Some rows of a table, all by default, at length one in float32."""
    size = len(table) if rows is None else len(rows)
    bank, features = torch.empty(size, table.shape("feature")[1]), table.select("feature")
    for start in range(0, size, _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, size))
        # A slice of a table in memory is a view: nothing is copied but the quotient.
        feature = features.rows(part if rows is None else rows[part]).feature
        torch.div(feature, lengths(feature, by)[:, None], out=bank[part])
    return bank


def drawn(table: Table, size: int | None, seed: int) -> Int64[Tensor, "b"] | None:
    """So many rows, drawn at random and in their order; None for all, where there are no more."""
    if size is None or size >= len(table):
        return None
    return torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))[:size].sort().values
