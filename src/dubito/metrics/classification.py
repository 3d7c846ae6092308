"""How good are the predictions themselves? From logits, in float64: p = softmax(logits), y the true class.

    accuracy = mean 1[argmax_c p_c = y]            tied logits: the lowest class
    NLL      = mean -log p_y                       in nats
    Brier    = mean Σ_c (p_c - 1[c = y])²          summed over classes: 0 is sure and right, 2 sure and wrong

Each is the mean of a column with one value per row (`correct`, `nll_per_row`, `brier_per_row`), which rejection curves
take. `wrong_predictions` is the one answer to "which rows of this table does the model get wrong?".
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError
from dubito.metrics._arrays import Array, integers, same_length
from dubito.metrics.shifted import shifted_blocks, softmax_blocks
from dubito.table import Table, to_tensor
from dubito.types import finite
from dubito.validate import check_classes, check_model_labels, has_model_labels

_ROWS = 8192


def accuracy(logits: Array, labels: Array) -> float:
    """The share of rows whose highest logit is the label's.

    >>> accuracy([[2.0, 0.0], [0.0, 1.0]], [0, 0])
    0.5
    """
    return float(correct(logits, labels).double().mean())


def nll(logits: Array, labels: Array) -> float:
    """The mean negative log-likelihood of the labels, in nats.

    >>> round(nll([[0.0, 0.0]], [1]), 6)  # log 2
    0.693147
    """
    return float(nll_per_row(logits, labels).mean())


def brier(logits: Array, labels: Array) -> float:
    """The mean squared distance of the probabilities to the label's corner, summed over classes: 0 to 2.

    >>> brier([[0.0, 0.0]], [1])  # (1/2)² + (1/2 - 1)²
    0.5
    """
    return float(brier_per_row(logits, labels).mean())


def correct(logits: Array, labels: Array) -> Bool[Tensor, "n"]:
    """Is the highest logit the label's, row by row?"""
    return _each_row("correct", _rows, lambda z, y: predicted_classes(z) == y, logits, labels)


def predicted_classes(logits: Float[Tensor, "n c"]) -> Int64[Tensor, "n"]:
    """The class of the largest logit of each row, by numpy: a tenth of the time that torch takes.

    >>> predicted_classes(torch.tensor([[0.0, 2.0, 2.0]])).tolist()  # of equal ones the first
    [1]
    """
    exact = logits.detach().float() if logits.dtype == torch.bfloat16 else logits.detach()  # which numpy does not have
    return torch.from_numpy(exact.numpy().argmax(axis=1))


def nll_per_row(logits: Array, labels: Array) -> Float64[Tensor, "n"]:
    """The negative log-likelihood of each label, in nats."""

    def log_loss(_: Tensor, z: Float64[Tensor, "b c"], spare: Tensor, y: Int[Tensor, "b"]) -> Float64[Tensor, "b"]:
        return torch.exp(z, out=spare).sum(1).log() - z.gather(1, y[:, None])[:, 0]

    return _each_row("nll", shifted_blocks, log_loss, logits, labels)


def brier_per_row(logits: Array, labels: Array) -> Float64[Tensor, "n"]:
    """The Brier score of each row, summed over classes."""

    def squared_distance(p: Float64[Tensor, "b c"], y: Int[Tensor, "b"]) -> Tensor:
        p[torch.arange(len(y)), y] -= 1
        return p.square_().sum(1)

    return _each_row("brier", softmax_blocks, squared_distance, logits, labels)


def confidence(logits: Array) -> Float64[Tensor, "n"]:
    """The probability of the predicted class, max_c softmax(logits)_c, row by row.

    >>> confidence([[0.0, 0.0], [0.0, 0.0]]).tolist()
    [0.5, 0.5]
    """
    return _each_row("confidence", softmax_blocks, lambda p: p.amax(1), logits)


def wrong_predictions(table: Table, *, by: str, repair: str = "Pass labelled images.") -> Bool[Tensor, "n"]:
    """Which rows of a table the model predicts wrong.

    Args:
        table: Images with logits, and labels that are the model's own classes.
        by: The function that the user called, for errors.
        repair: What to do about a table without rows, for errors.

    >>> wrong_predictions(Table(logit=[[1.0, 0.0], [0.0, 2.0]], label=[0, 0]), by="here").tolist()
    [False, True]
    """
    check_model_labels(table, by=by)
    blocks = labelled_logits(table, by=by, repair=repair)
    return torch.cat([predicted_classes(logit) != label for logit, label in blocks])


def table_accuracy(table: Table, *, by: str = "accuracy") -> float | None:
    """The accuracy of a table's predictions; None where its labels are not the model's own classes."""
    return float((~wrong_predictions(table, by=by)).double().mean()) if has_model_labels(table) else None


def labelled_logits(
    table: Table, *, by: str, repair: str = "Pass labelled images."
) -> Iterator[tuple[Float[Tensor, "b c"], Int64[Tensor, "b"]]]:
    """Logits and labels of a table, block by block.

    Raises:
        TableError: There are no rows, of which `repair` says what to do, or labels are not columns of the logits.
        ValueRangeError: Logits are not finite.
    """
    if len(table) == 0:
        raise TableError(f"{by} needs labelled rows; {table.name} has none. {repair}")
    for batch in table.batches("logit", "label"):
        finite(batch.logit, f"{by}: logits of {table.name}")
        check_classes(batch.label, batch.logit.shape[1], by=by, of=f"the labels of {table.name}")
        yield batch.logit, batch.label


def _rows(logits: Float[Tensor, "n c"]) -> Iterator[tuple[slice, Float[Tensor, "b c"]]]:
    """The logits themselves, a few rows at a time."""
    for start in range(0, len(logits), _ROWS):
        yield slice(start, start + _ROWS), logits[start : start + _ROWS]


def _each_row(
    by: str, blocks: Callable[[Tensor], Iterator[Any]], per_row: Callable[..., Tensor], logits: Array, *labels: Array
) -> Shaped[Tensor, "n"]:
    """A function of what blocks hold of the logits, and of labels if there are any."""
    z = to_tensor(logits, f"{by}: logits")
    if z.ndim == 1 and any(to_tensor(one, f"{by}: labels").ndim == 2 for one in labels):
        raise TableError(f"{by} takes logits first and labels second; these look swapped. Swap them.")
    if z.ndim != 2 or 0 in z.shape:
        raise TableError(
            f"{by}: logits must have the axes (n, c), neither of them empty; got shape {tuple(z.shape)}. "
            f"Pass one row per image, one column per class."
        )
    columns = [integers(one, f"{by}: labels") for one in labels]
    for y in columns:
        same_length(by, logits=len(z), labels=len(y))
        check_classes(y, z.shape[1], by=by)
    for rows, block in _rows(z):
        # NaN and infinity reach the sum, which is much cheaper than the check.
        if not bool(block.sum().isfinite()):
            finite(block, f"{by}: logits from row {rows.start} on")
    return torch.cat([per_row(*block, *(y[rows] for y in columns)) for rows, *block in blocks(z)])
