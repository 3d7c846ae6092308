"""Features of a table, checked and by class, batch by batch: what scores of features read."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from dubito.errors import TableError
from dubito.scores._last_layer import once
from dubito.table import Table
from dubito.types import Score, finite_batches


class ScoreOfFeatures(Score):
    """A score that reads one column of features, which must be as wide as in fit."""

    def check_width(self, batch: Table, width: int) -> None:
        """Raise TableError for features of another width than those that were learned from."""
        if batch.shape("feature")[1] != width:
            raise TableError(
                f"{self.name}.score: features must be {width} wide, as in fit; got {batch.shape('feature')[1]} "
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
    table: Table, classes: Int64[Tensor, "c"], prepare: Callable[[Tensor], Tensor] = Tensor.double, *, by: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepared features (n, d), and where each row's label stands among the classes (n)."""
    for batch in finite_batches(table.batches("feature", "label"), table.name, by=by):
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
