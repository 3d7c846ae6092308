"""Label issues: labels of confident images whose neighbours agree on another class.

    s_i(c)    = share of the k nearest other images (cosine of features) with label c
    margin_i  = max_{c != y_i} s_i(c) - s_i(y_i)                 1 where all neighbours have one other label

Only images of low uncertainty are examined: an ambiguous image may well disagree with its neighbours and be labelled
correctly. The margin is an order and no probability: check the images from the top. The search is exact, by faiss.
Neighbours' votes are as old as k-NN editing (Wilson 1972); examining only images of low u is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import faiss
import numpy as np
from jaxtyping import Float64, Int64

from dubito.errors import TableError
from dubito.evaluate.evaluate import uncertainty
from dubito.metrics import Array
from dubito.result import Result, cell
from dubito.scores import Entropy
from dubito.table import Table
from dubito.types import Json, Score
from dubito.validate import check_number, check_rows

_AT_ONCE = 4096


def find_label_issues(
    table: Table, score: Array | Score | None = None, *, k: int = 10, share: float = 0.5, least: float = 0.5
) -> "LabelIssues":
    """Find images whose labels are likely wrong, those with the largest margin first.

    Args:
        table: A table with features and labels.
        score: The uncertainty, or (n) values of it; by default the entropy of the logits. It must not have been fitted
            on these labels, nor the model trained on them.
        k: The number of neighbours that vote.
        share: The share of images that is examined, those of lowest uncertainty; 1 examines all.
        least: The smallest margin that is reported, above 0 and at most 1.

    >>> feature = [[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0], [0.1, 1.0], [0.2, 1.0]]
    >>> table = Table(feature=feature, label=[0, 1, 0, 1, 1, 1])
    >>> find_label_issues(table, [0.0] * 6, k=2, share=1.0).rows.tolist()
    [1]
    """
    check_rows(table, by="find_label_issues", least=2)
    table.require("feature", "label", by="find_label_issues")
    for what, value in {"share": share, "least": least}.items():
        check_number(value, "(0, 1]", by="find_label_issues", what=what, hint="0.5 is usual.")
    hint = f"They are the other images of {table.name}."
    check_number(k, f"[1, {len(table) - 1}]", by="find_label_issues", what="k", whole=True, hint=hint)
    label = table.label.numpy().astype(np.int64)
    if (label < 0).any():
        raise TableError(
            f"find_label_issues: all labels must be from 0 on; {(label < 0).sum()} of {len(label)} of {table.name} are "
            f"below, as for images without a label. Leave them out: table.rows(table.label >= 0)."
        )
    u = uncertainty(Entropy() if score is None else score, table, by="find_label_issues", name="score").double().numpy()
    examined = np.sort(np.argsort(u, kind="stable")[: max(1, round(share * len(table)))])
    own, other, suggested = _votes(label, examined, _neighbours(table, examined, k))
    margin = (other - own) / k  # of counts: 0.7 - 0.2 is a little below 0.5
    order = np.lexsort((u[examined], -margin))
    order = order[margin[order] >= least]
    rows = examined[order]
    return LabelIssues(
        name=table.name,
        examined=len(examined),
        images=len(table),
        rows=rows,
        ids=table.row_ids(rows),
        label=label[rows],
        suggested=suggested[order],
        margin=margin[order],
        u=u[rows],
        largest=int(np.bincount(label).max()),
        needed=int(np.argmax(np.arange(1, k + 1) / k >= least)) + 1,
        classes=None if table.label_names is None else list(table.label_names),
    )


@final
@dataclass(frozen=True)
class LabelIssues(Result):
    """Labels that are likely wrong, those with the largest margin first.

    Attributes:
        name: The name of the table.
        examined: The number of images that were examined.
        images: The number of images in the table.
        rows: The rows of the issues.
        ids: Their ids.
        label: Their labels.
        suggested: The labels of most of their neighbours.
        margin: How far the neighbours agree on it, 0 to 1.
        u: Their uncertainties.
        largest: The number of images in the largest class.
        needed: How many neighbours must agree, at least; a smaller class is never suggested.
        classes: The class names, where they are known.
    """

    text_rows: ClassVar = 20
    keys: ClassVar = ("id", "label", "suggested", "margin", "u", "row")

    name: str
    examined: int
    images: int
    rows: Int64[np.ndarray, "k"]
    ids: Sequence[str]
    label: Int64[np.ndarray, "k"]
    suggested: Int64[np.ndarray, "k"]
    margin: Float64[np.ndarray, "k"]
    u: Float64[np.ndarray, "k"]
    largest: int
    needed: int
    classes: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def title(self) -> str:
        """How many there are, or why there can be none."""
        if self.largest < self.needed:
            return (
                f"{self.name}: labels cannot be examined, because the largest class has {self.largest} images, and "
                f"{self.needed} neighbours must agree. Use fewer neighbours (k), or more images per class."
            )
        issues = f"{len(self)} labels are" if len(self) != 1 else "1 label is"
        return f"{self.name}: {issues} likely wrong, among the {self.examined} most certain of {self.images} images"

    def records(self) -> list[dict[str, Any]]:
        """One row per issue; labels by class name where names are known."""
        names = dict(enumerate(self.classes or ()))
        labels = ([names.get(one, str(one)) for one in column.tolist()] for column in (self.label, self.suggested))
        columns = (self.ids, *labels, self.margin.tolist(), self.u.tolist(), self.rows.tolist())
        return [dict(zip(self.keys, values, strict=True)) for values in zip(*columns, strict=True)]

    def cell(self, key: str, value: Any) -> str:
        """Class names without their synonyms, uncertainties with four digits."""
        if key in ("label", "suggested"):
            return str(value).split(",")[0]
        return f"{value:.4g}" if key == "u" else cell(value)

    def to_dict(self) -> Json:
        """Plain values, one entry per issue."""
        counts = {"images": self.images, "examined": self.examined, "largest_class": self.largest}
        return {"table": self.name, **counts, "needed": self.needed, "issues": self.records()}


def _neighbours(table: Table, examined: Int64[np.ndarray, "j"], k: int) -> Int64[np.ndarray, "j k"]:
    """The k nearest other rows by cosine, of duplicates too."""
    unit, start = np.empty(table.shape("feature"), dtype=np.float32), 0
    for batch in table.batches("feature", size=_AT_ONCE):
        z = batch.feature.double().numpy()
        norm = np.linalg.norm(z, axis=1, keepdims=True)
        if not np.isfinite(norm).all() or (norm == 0).any():
            raise TableError(
                f"find_label_issues: features must be finite and not all zero; those of {batch.name} are not. "
                f"Leave such images out."
            )
        unit[start : start + len(z)] = z / norm
        start += len(z)
    nearest = np.empty((len(examined), k), dtype=np.int64)
    for start in range(0, len(examined), _AT_ONCE):
        rows = examined[start : start + _AT_ONCE]
        _, near = faiss.knn(unit[rows], unit, k + 1, metric=faiss.METRIC_INNER_PRODUCT)
        # Itself is among them, unless more than k duplicates come before it: then the last one goes.
        itself = near == rows[:, None]
        itself[~itself.any(axis=1), k] = True
        nearest[start : start + len(rows)] = near[~itself].reshape(-1, k)
    return nearest


def _votes(
    label: Int64[np.ndarray, "n"], examined: Int64[np.ndarray, "j"], near: Int64[np.ndarray, "j k"]
) -> tuple[Int64[np.ndarray, "j"], Int64[np.ndarray, "j"], Int64[np.ndarray, "j"]]:
    """How many neighbours have the own label, how many at most have another one, and which; ties: the lowest."""
    votes, own = np.sort(label[near], axis=1), label[examined]
    k = votes.shape[1]
    same: np.ndarray = (votes == own[:, None]).sum(axis=1)
    best, suggested = np.zeros(len(examined), dtype=np.int64), own.copy()
    for place in range(k):  # over neighbours, never over images
        count = (votes == votes[:, place : place + 1]).sum(axis=1)
        better = (count > best) & (votes[:, place] != own)
        best[better], suggested[better] = count[better], votes[better, place]
    return same, best, suggested
