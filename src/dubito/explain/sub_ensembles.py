"""The mutual information of a table's ensemble, for every way to split its members into sub-ensembles of equal size.

From the members' logits (column NAME_logit), for any partition: random ones, averaged, or neighbours in their stored
order. Or from what the extraction summed up (NAME and NAME_between), which knows neighbours only.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.errors import MissingColumnError, TableError
from dubito.explain.diagnosis import short_name
from dubito.metrics import SUMMARY, balanced_auroc, decompose, partitioned, sub_ensembles
from dubito.metrics.bootstrap import draw_rows
from dubito.table import Table, settings_difference
from dubito.types import finite
from dubito.validate import check_rows, check_same_model

BY = "diagnose_ensemble"
_NEIGHBOURS = "neighbours, in their stored order"
_NUMBERS_AT_ONCE = 2**22
"""Probabilities in memory: a few copies of 32 MB."""


class Partitioned(NamedTuple):
    """An ensemble's uncertainties by row, in nats.

    Attributes:
        name: The name of the table.
        members: The number of members, m.
        partitions: As (how many sub-ensembles, of which size); the first is into single members.
        order: How members were put together, in words.
        total: H of the mean.
        aleatoric: The mean of the members' H.
        between: I[Y; K] by size: one or several partitions (n, r) each.
        classes: The number of classes, where logits are there.
    """

    name: str
    members: int
    partitions: tuple[tuple[int, int], ...]
    order: str
    total: Float64[Tensor, "n"]
    aleatoric: Float64[Tensor, "n"]
    between: tuple[Float64[Tensor, "n _"], ...]
    classes: int | None = None

    @property
    def first(self) -> dict[int, Float64[Tensor, "n"]]:
        """By size of sub-ensembles, MI of every row in the first partition."""
        return {size: values[:, 0] for (_, size), values in zip(self.partitions, self.between, strict=True)}


def partition(table: Table, of: str, *, partitions: int, seed: int, default_name: str = "table") -> Partitioned:
    """The ensemble called `of`: from its logits where they are there, else from its summary."""
    check_rows(table, by=BY, least=2, what=default_name)
    # `dubito.ensemble` names a table after all its members, which is too long for a sentence.
    name = default_name if table.name.startswith("ensemble of ") else short_name(table, default_name)
    if f"{of}_logit" in table:
        return _from_logits(table, of, name, partitions, seed)
    if of in table:
        return _from_summary(table, of, name)
    raise MissingColumnError(
        f"{BY} needs column '{of}_logit' or '{of}'; {table.name} has "
        f"{', '.join(table.columns) or 'no columns'}. Extract with a probe of several members, or join the tables of "
        f"several models with dubito.ensemble."
    )


def check_same(table: Table, ood: Table, of: str, inside: Partitioned, outside: Partitioned) -> None:
    """Raise TableError for tables of different ensembles, or where one is summed up and the other is not."""
    repair = "Extract both with the same settings."
    for what, mine, theirs in (
        ("members", inside.members, outside.members),
        ("partitions", inside.order, outside.order),
        ("sub-ensembles", inside.partitions, outside.partitions),
        ("classes", inside.classes, outside.classes),
    ):
        if None not in (mine, theirs) and mine != theirs:
            raise TableError(
                f"{BY}: {outside.name} must have the same {what} as {inside.name}, {mine}; got {theirs}. {repair}"
            )
    check_same_model(table, {"ood": ood}, by=BY)
    if differing := settings_difference(ood, table, of):
        raise TableError(
            f"{BY}: '{of}' of {ood.name} and of {table.name} must have the same members and settings; they differ in "
            f"{differing}. {repair}"
        )


def resampled_means(of: Partitioned, resamples: int, seed: int) -> Float64[np.ndarray, "b v"]:
    """Means of total, aleatoric and MI by size, of all images in the first row, then of every resample.

    MI is averaged over partitions before rows are drawn: intervals are those of images.
    """
    rows = torch.stack([of.total, of.aleatoric, *(values.mean(1) for values in of.between)], 1).numpy()
    drawn = [rows[line].mean(0) for block in draw_rows(len(rows), resamples, seed) for line in block]
    return np.stack([rows.mean(0), *drawn])


def resampled_aurocs(
    inside: Partitioned, outside: Partitioned, resamples: int, seed: int
) -> tuple[Float64[np.ndarray, "b q"], Float64[np.ndarray, "q"]]:
    """By size, over partitions: the mean, in the first row of balanced draws, then of resamples; and the deviation."""
    scores, ood_scores = (torch.cat(side.between, 1).T.contiguous().numpy() for side in (inside, outside))
    aurocs = balanced_auroc(scores, ood_scores, draws=5, resamples=resamples, seed=seed)
    both = np.concatenate([aurocs.drawn.mean(0, keepdims=True), aurocs.resampled])
    ends = np.cumsum([values.shape[1] for values in inside.between])
    by_size = np.split(both, ends[:-1], axis=1)
    return np.stack([part.mean(1) for part in by_size], 1), np.array([part[0].std() for part in by_size])


def _from_logits(table: Table, of: str, name: str, partitions: int, seed: int) -> Partitioned:
    column = f"{of}_logit"
    if len(table.shape(column)) != 3:
        raise TableError(
            f"{BY}: column '{column}' of {name} must be (n, m, c), logits of m members; got shape "
            f"{table.shape(column)}. Stack members along the second axis."
        )
    _, members, classes = table.shape(column)
    sizes = _sizes(members, name)
    draw = torch.Generator().manual_seed(seed)
    # The same orders of the members for all sizes, which are compared; without random ones, the stored order.
    orders = [torch.randperm(members, generator=draw) for _ in range(partitions)] or [torch.arange(members)]
    parts = []
    for batch in table.batches(column, size=max(1, _NUMBERS_AT_ONCE // (members * classes))):
        logits = finite(batch.whole(column).double(), f"column '{column}' of {name}")
        p = logits.movedim(1, 0).softmax(-1)
        whole = decompose(p)
        between = [
            torch.stack([decompose(partitioned(p[order], size).mean(1)).epistemic for order in orders], 1)
            for _, size in sizes[1:]
        ]
        parts.append([whole.total, whole.aleatoric, whole.epistemic[:, None], *between])
    total, aleatoric, *all_between = (torch.cat(values) for values in zip(*parts, strict=True))
    order = f"{partitions} random partitions of each size, averaged" if partitions else _NEIGHBOURS
    return Partitioned(name, members, sizes, order, total, aleatoric, tuple(all_between), classes)


def _from_summary(table: Table, of: str, name: str) -> Partitioned:
    if table.shape(of)[1:] != (len(SUMMARY),):
        raise TableError(
            f"{BY}: column '{of}' of {name} must be a summary (n, {len(SUMMARY)}) of an ensemble: "
            f"{', '.join(SUMMARY)}; got shape {table.shape(of)}. Extract it with a probe of members."
        )
    summary = finite(table.whole(of).double(), f"column '{of}' of {name}")
    field = {key: summary[:, place] for place, key in enumerate(SUMMARY)}
    members = int(field["members"][0])
    sizes = _sizes(members, name)
    between: tuple[Tensor, ...] = (field["epistemic"][:, None],)
    if f"{of}_between" in table and table.shape(f"{of}_between")[1] == len(sizes) - 1:
        columns = finite(table.whole(f"{of}_between").double(), f"column '{of}_between' of {name}")
        between += tuple(column[:, None] for column in columns.unbind(1))
    else:
        sizes = sizes[:1]
    return Partitioned(name, members, sizes, _NEIGHBOURS, field["total"], field["aleatoric"], between)


def _sizes(members: int, name: str) -> tuple[tuple[int, int], ...]:
    if members < 2:
        raise TableError(
            f"{BY} needs at least 2 members; {name} has {members}. One model cannot disagree with itself: add models, "
            f"or run one model several times (tiles, dropout, views, masks)."
        )
    return sub_ensembles(members)
