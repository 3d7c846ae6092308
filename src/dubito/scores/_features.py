"""Features of a table, checked and by class, block by block: what scores of features read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.table import Table


def finite_features(feature: Float[Tensor, "n d"], where: str) -> Float64[Tensor, "n d"]:
    """In float64; ValueRangeError for NaN and infinity, which names the row within `rows_named`."""
    z = feature.double()
    _check_finite(z, where, "the batch")
    return z


def check_width(batch: Table, width: int, by: str) -> None:
    """Raise TableError for features of another width than those that were learned from."""
    if batch.shape("feature")[1] != width:
        raise TableError(
            f"{by}.score: features must be {width} wide, as in fit; got {batch.shape('feature')[1]} in {batch.name}. "
            f"Score a table of the same model."
        )


@contextmanager
def rows_named(table: Table, column: str = "feature") -> Iterator[None]:
    """A block does not know where it stands: in here, the error of `finite_features` names the row of the table."""
    try:
        yield
    except _NotFiniteError as error:
        start = 0
        for batch in table.batches(column):
            _check_finite(batch.whole(column), error.where, table.name, start)
            start += len(batch)
        raise


class _NotFiniteError(ValueRangeError):
    """Features that are not finite, and which function met them."""

    def __init__(self, where: str, which: str) -> None:
        super().__init__(f"{where}: features must be finite; {which}. Look at that image's feature.")
        self.where = where


def _check_finite(feature: Float[Tensor, "n d"], where: str, of: str, start: int = 0) -> None:
    bad = ~torch.isfinite(feature)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        value = float(feature[row, column])
        raise _NotFiniteError(where, f"feature {column} of row {start + row} of {of} is {value}") from None


def classes_of(table: Table, where: str) -> Int64[Tensor, "c"]:
    """The labels that occur, in order; TableError if there are none."""
    classes = torch.empty(0, dtype=torch.long)
    for batch in table.batches("label"):
        classes = torch.unique(torch.cat([classes, batch.label]))
    if len(classes) == 0:
        raise TableError(f"{where} needs labelled rows; {table.name} has none. Fit on in-distribution images.")
    return classes


def labelled(
    table: Table, classes: Int64[Tensor, "c"], prepare: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepared features (n, d), and where each row's label stands among the classes (n)."""
    for batch in table.batches("feature", "label"):
        yield prepare(batch.feature), torch.searchsorted(classes, batch.label)


def means_of_classes(
    pairs: Iterator[tuple[Tensor, Tensor]], c: int, d: int
) -> tuple[Float64[Tensor, "c d"], Float64[Tensor, "c"]]:
    """The mean of every class, and how many rows it has."""
    sums, counts = torch.zeros(c, d, dtype=torch.float64), torch.zeros(c, dtype=torch.float64)
    for z, label in pairs:
        sums.index_add_(0, label, z)
        counts += torch.bincount(label, minlength=c)
    return sums / counts[:, None], counts
