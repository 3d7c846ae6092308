"""Which labels are likely wrong? Those of clear images whose neighbours agree on another class.

    s_i(c)  = share of the k nearest other images (cosine of features) with label c
    sure_i  = max_{c != y_i} s_i(c) - s_i(y_i)                 1 where all neighbours have one other label

Only images of low uncertainty are judged: an ambiguous image may well disagree with its neighbours and be labelled
right. The uncertainty must not have seen the labels of these images; the model's entropy has not, where it was trained
on others. `sure` is an order and no probability: look at the images from the top. The search is exact, by faiss.
Neighbours' votes are as old as k-NN editing (Wilson 1972); judging only the images of low u is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import faiss
import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64

from dubito.active._given import ids_of
from dubito.errors import TableError, ValueRangeError
from dubito.evaluate.uncertainties import uncertainty
from dubito.metrics import Array
from dubito.result import aligned
from dubito.scores import Entropy
from dubito.storage import write_csv
from dubito.table import Table
from dubito.types import Json, Score
from dubito.validate import check_rows

_AT_ONCE = 4096
_SHOWN = 20
COLUMNS = ("id", "label", "suggested", "sure", "u", "row")


def find_label_issues(
    table: Table,
    score: Array | Score | None = None,
    *,
    k: int = 10,
    share: float = 0.5,
    least: float = 0.5,
) -> "LabelIssues":
    """Images whose labels are likely wrong, the surest first.

    Args:
        table: With features and labels.
        score: The uncertainty, or (n) values of it; by default the entropy of the logits. It must not have been
            fitted on these labels.
        k: How many neighbours vote.
        share: Of the images, those of lowest uncertainty are judged; 1 judges all.
        least: Only those at least so sure, above 0 and at most 1.

    >>> feature = [[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0], [0.1, 1.0], [0.2, 1.0]]
    >>> table = Table(feature=feature, label=[0, 1, 0, 1, 1, 1])
    >>> find_label_issues(table, [0.0] * 6, k=2, share=1.0).rows.tolist()
    [1]
    """
    check_rows(table, by="find_label_issues")
    table.require("feature", "label", by="find_label_issues")
    if not 0 < share <= 1 or not 0 < least <= 1:
        raise ValueRangeError(
            f"find_label_issues: share and least must be above 0 and at most 1; got share={share}, least={least}."
        )
    if not 1 <= k < len(table):
        raise ValueRangeError(
            f"find_label_issues: k must be from 1 to {len(table) - 1}, the other images of {table.name}; got {k}."
        )
    label = table.label.numpy().astype(np.int64)
    if (label < 0).any():
        raise TableError(
            f"find_label_issues: all labels must be from 0 on; {(label < 0).sum()} of {len(label)} of {table.name} are "
            f"below, as of images that have none yet. Leave them out: table.rows(table.label >= 0)."
        )
    u = uncertainty(Entropy() if score is None else score, table, by="find_label_issues", name="score").double().numpy()
    judged = np.sort(np.argsort(u, kind="stable")[: max(1, round(share * len(table)))])
    own, other, suggested = _votes(label, judged, _neighbours(table, judged, k))
    sure = (other - own) / k  # of counts: 0.7 - 0.2 is a little below 0.5
    order = np.lexsort((u[judged], -sure))
    order = order[sure[order] >= least]
    rows = judged[order]
    return LabelIssues(
        name=table.name,
        judged=len(judged),
        images=len(table),
        rows=rows,
        ids=ids_of(table, rows),
        label=label[rows],
        suggested=suggested[order],
        sure=sure[order],
        u=u[rows],
        largest=int(np.bincount(label).max()),
        needed=int(np.argmax(np.arange(1, k + 1) / k >= least)) + 1,
        classes=None if table.label_names is None else list(table.label_names),
    )


@final
@dataclass(frozen=True)
class LabelIssues:
    """Labels that are likely wrong: print them, or take CSV or JSON.

    Attributes:
        name: The table.
        judged: How many images were looked at.
        images: How many there are.
        rows: Of the table, the surest first.
        ids: Their names.
        label: What they are labelled.
        suggested: What most of their neighbours are labelled.
        sure: How far the neighbours agree on it, 0 to 1.
        u: The uncertainty.
        largest: How many images the largest class has.
        needed: How many neighbours must agree, at least; a smaller class is never suggested.
        classes: Names of the labels, where they are known.
    """

    name: str
    judged: int
    images: int
    rows: Int64[np.ndarray, "k"]
    ids: Sequence[str]
    label: Int64[np.ndarray, "k"]
    suggested: Int64[np.ndarray, "k"]
    sure: Float64[np.ndarray, "k"]
    u: Float64[np.ndarray, "k"]
    largest: int
    needed: int
    classes: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def lines(self) -> list[list[str]]:
        """A header and one line a suspect: id, label, suggested, sure, u, row."""
        numbers = zip(self.ids, self.label, self.suggested, self.sure, self.u, self.rows, strict=True)
        body = [
            [name, self._class(a), self._class(b), f"{sure:.3f}", f"{u:.4g}", str(row)]
            for name, a, b, sure, u, row in numbers
        ]
        return [list(COLUMNS), *body]

    def to_csv(self, path: str | Path) -> Path:
        """Write all of them as CSV, and return its path."""
        return write_csv(path, self.lines())

    def to_json(self) -> Json:
        """Plain numbers, labels by the names of their classes where these are known."""
        numbers = zip(self.sure.tolist(), self.u.tolist(), self.rows.tolist(), strict=True)
        return {
            "table": self.name,
            "images": self.images,
            "judged": self.judged,
            "largest_class": self.largest,
            "needed": self.needed,
            "suspects": [
                dict(zip(COLUMNS, (*line[:3], *last), strict=True))
                for line, last in zip(self.lines()[1:], numbers, strict=True)
            ],
        }

    def title(self) -> str:
        """How many there are, or why there can be none."""
        if self.largest < self.needed:
            return (
                f"{self.name}: labels cannot be judged, as no class has enough images: the largest has {self.largest}, "
                f"and {self.needed} neighbours must agree. Take fewer neighbours (k), or more images of each class."
            )
        found = f"{len(self)} labels are" if len(self) != 1 else "1 label is"
        return f"{self.name}: {found} likely wrong, among the {self.judged} clearest of {self.images} images"

    def __str__(self) -> str:
        return "\n".join([self.title(), *(aligned(self.lines()[: _SHOWN + 1]) if len(self) else [])])

    def _class(self, label: np.int64) -> str:
        known = self.classes is not None and 0 <= label < len(self.classes)
        return self.classes[int(label)] if known and self.classes is not None else str(label)


def _neighbours(table: Table, judged: Int64[np.ndarray, "j"], k: int) -> Int64[np.ndarray, "j k"]:
    """The k nearest other rows by cosine, of duplicates too."""
    index = faiss.IndexFlatIP(table.shape("feature")[1])
    for batch in table.batches("feature", size=_AT_ONCE):
        index.add(_directions(batch))
    found = np.empty((len(judged), k), dtype=np.int64)
    chosen = table.select("feature")
    for start in range(0, len(judged), _AT_ONCE):
        rows = judged[start : start + _AT_ONCE]
        _, near = index.search(_directions(chosen.rows(torch.from_numpy(rows))), k + 1)
        # Itself is among them, unless more than k duplicates come before it: then the last one goes.
        itself = near == rows[:, None]
        itself[~itself.any(axis=1), k] = True
        found[start : start + len(rows)] = near[~itself].reshape(-1, k)
    return found


def _directions(batch: Table) -> Float32[np.ndarray, "n d"]:
    z: np.ndarray = batch.feature.double().numpy()
    norm = np.linalg.norm(z, axis=1, keepdims=True)
    if not np.isfinite(norm).all() or (norm == 0).any():
        raise TableError(
            f"find_label_issues: features must be finite and not all zero; those of {batch.name} are not. "
            f"Leave such images out."
        )
    return np.ascontiguousarray(z / norm, dtype=np.float32)


def _votes(
    label: Int64[np.ndarray, "n"], judged: Int64[np.ndarray, "j"], near: Int64[np.ndarray, "j k"]
) -> tuple[Int64[np.ndarray, "j"], Int64[np.ndarray, "j"], Int64[np.ndarray, "j"]]:
    """How many neighbours have the own label, how many at most have another one, and which; ties: the lowest."""
    votes, own = np.sort(label[near], axis=1), label[judged]
    k = votes.shape[1]
    same: np.ndarray = (votes == own[:, None]).sum(axis=1)
    best, suggested = np.zeros(len(judged), dtype=np.int64), own.copy()
    for place in range(k):  # over neighbours, never over images
        count = (votes == votes[:, place : place + 1]).sum(axis=1)
        better = (count > best) & (votes[:, place] != own)
        best[better], suggested[better] = count[better], votes[better, place]
    return same, best, suggested
