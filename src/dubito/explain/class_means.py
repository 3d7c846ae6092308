"""Do class means point along the class weights? The features of a table, class by class, beside the last layer.

    cos(m_i - mean_j m_j, w_i - mean_j w_j),   ||m_i - mean_j m_j||,   m_i the mean feature of class i

Pearce et al. 2021 (arXiv 2106.04972), def. 2: optimal are cosines of one, equal lengths and little variance around m_i.
Means over j are those of the classes that have rows, of m and of w alike.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from dubito.errors import TableError
from dubito.explain._moments import Moments, directions, lengths, moments
from dubito.explain.last_layer import Layer
from dubito.table import Table
from dubito.types import finite


@final
@dataclass(frozen=True)
class ClassMeans:
    """The class means of a table beside the weights.

    Attributes:
        rows: The number of rows.
        classes: How many classes have at least one row.
        alignment: Cosine of each centred class mean with its centred weight; 1 is optimal.
        norm: Lengths of the class means.
        centred_norm: Lengths of the centred class means; equal is optimal.
        within_over_between: Variance around the class means (unbiased) over that of the class means; 0 is optimal. With
            few rows per class the means are noisy and it is too small. None without a class of two rows.
    """

    rows: int
    classes: int
    alignment: Moments
    norm: Moments
    centred_norm: Moments
    within_over_between: float | None


def class_means(layer: Layer, table: Table, name: str) -> ClassMeans:
    """Measure them in one pass over the table: sums of features by class, and of squares.

    Args:
        layer: The last layer.
        table: With feature and label, the labels the model's own classes; logits, if there are, must be this layer's.
        name: The name of the layer, for errors.
    """
    table.require("feature", "label", by="structure")
    _check_table(layer, table, name)
    classes, width = layer.weight.shape
    total, count = torch.zeros(classes, width, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
    squares, origin = 0.0, None
    for batch in table.batches("feature", "label"):
        z, label = batch.feature.double(), _checked(batch.label, classes, table)
        origin = z.mean(0) if origin is None else origin  # sums around it lose no digits to a large common mean
        total.index_add_(0, label, z - origin)
        count += torch.bincount(label, minlength=classes)
        squares += float((z - origin).square().sum())
    seen = count > 0
    if int(seen.sum()) < 2 or origin is None:
        raise TableError(
            f"structure: class means need rows of two classes or more; {table.name} has rows of {int(seen.sum())}. "
            f"Give a table of labelled images of several classes."
        )
    mean = total[seen] / count[seen, None]
    finite(mean, f"class means of {table.name}")
    centred, weight = mean - mean.mean(0), layer.weight[seen]  # both around the middle of the same classes
    freedom = len(table) - len(mean)
    within = max(squares - float(count[seen] @ mean.square().sum(1)), 0.0) / max(freedom, 1)
    between = float(centred.square().sum(1).mean())
    return ClassMeans(
        rows=len(table),
        classes=len(mean),
        alignment=moments((directions(centred) * directions(weight - weight.mean(0))).sum(1)),
        norm=moments(lengths(mean + origin)),
        centred_norm=moments(lengths(centred)),
        within_over_between=within / between if freedom > 0 and between > 0 else None,
    )


def _check_table(layer: Layer, table: Table, name: str) -> None:
    """Raise TableError unless the table can be of this layer."""
    width = table.shape("feature")[1]
    if width != layer.weight.shape[1] or table.label_space != "model":
        raise TableError(
            f"structure: {table.name} has features of width {width} and labels of {table.label_space} classes; {name} "
            f"reads {layer.weight.shape[1]} and needs labels of the model's classes. Give a table of the same model."
        )
    if "logit" not in table or len(table) == 0:
        return
    rows = table.select("feature", "logit").rows(slice(0, 64))
    same_classes = rows.logit.shape[1] == len(layer.bias)
    off = (layer.logits(rows.feature) - rows.logit.double()).abs().max() if same_classes else torch.inf
    if float(off) > 1e-2 * (1 + float(rows.logit.abs().max())):
        raise TableError(
            f"structure: the logits of {table.name} are not those of {name} on its features. "
            f"Give a table that was extracted with this model, or leave the logits out."
        )


def _checked(label: Int[Tensor, "n"], classes: int, table: Table) -> Int[Tensor, "n"]:
    if bool(((label < 0) | (label >= classes)).any()):
        raise TableError(
            f"structure: labels of {table.name} must be 0 to {classes - 1}; got {int(label.min())} to "
            f"{int(label.max())}. Leave out rows without a class of the model."
        )
    return label
