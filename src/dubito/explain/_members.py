"""What members of a table's ensemble say of every row, for every way to cut them into sub-ensembles of equal size.

From the members' logits (column NAME_logit), for any partition: random ones, averaged, or neighbours as they came. Or
from what the extraction summed up (NAME and NAME_between), which knows neighbours only.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.errors import MissingColumnError, TableError
from dubito.explain._given import called
from dubito.metrics import SUMMARY, decompose, partitioned, sub_ensembles
from dubito.table import Table, asked_otherwise
from dubito.types import finite

BY = "diagnose_ensemble"
_NUMBERS_AT_ONCE = 2**22
"""Probabilities in memory: a few copies of 32 MB."""


@final
@dataclass(frozen=True)
class Said:
    """By row, in nats.

    Attributes:
        name: Of the table.
        members: m.
        cuts: The partitions, as (how many, of which size); the first is into single members.
        order: How members came together, in words.
        total: H of the mean.
        aleatoric: The mean of members' H.
        between: I[Y; K] by cut: one or several partitions (n, r) each.
        model_id: Which models made the table, in which order; None where that is not known.
        classes: c, where logits tell it.
    """

    name: str
    members: int
    cuts: tuple[tuple[int, int], ...]
    order: str
    total: Float64[Tensor, "n"]
    aleatoric: Float64[Tensor, "n"]
    between: tuple[Float64[Tensor, "n _"], ...]
    model_id: str | None = None
    classes: int | None = None

    @property
    def epistemic(self) -> Float64[Tensor, "n"]:
        """I[Y; M], of single members."""
        return self.between[0][:, 0]


def said(table: Table, of: str, *, partitions: int, seed: int, otherwise: str = "known") -> Said:
    """Of the ensemble called `of`: from its logits where they are there, else from its summary."""
    name = _short(table, otherwise)
    if len(table) < 2:
        raise TableError(
            f"{BY}: {name} must have at least 2 rows; it has {len(table)}. One image has no distribution: give more."
        )
    if f"{of}_logit" in table:
        return _from_logits(table, of, name, partitions, seed)
    if of in table:
        return _from_summary(table, of, name)
    raise MissingColumnError(
        f"{BY}(of='{of}') needs column '{of}_logit' or '{of}'; {table.name} has "
        f"{', '.join(table.columns) or 'no columns'}. Extract with a probe that asks several members, or join the "
        f"tables of several models with dubito.ensemble."
    )


def check_alike(known: Said, foreign: Said) -> None:
    """Raise TableError for tables of different ensembles, or one summed up and the other not."""
    if (known.members, known.cuts, known.order) != (foreign.members, foreign.cuts, foreign.order):
        raise TableError(
            f"{BY}: {foreign.name} must come from the ensemble of {known.name}; it has {foreign.members} members "
            f"({foreign.order}), {known.name} has {known.members} ({known.order}). Extract both alike."
        )
    if None not in (known.classes, foreign.classes) and known.classes != foreign.classes:
        raise TableError(
            f"{BY}: {foreign.name} must have the classes of {known.name}, {known.classes}; got {foreign.classes}. "
            f"Members of one ensemble share their classes, in one order."
        )
    if None not in (known.model_id, foreign.model_id) and known.model_id != foreign.model_id:
        raise TableError(
            f"{BY}: {foreign.name} was made by other models than {known.name}, or by the same in another order "
            f"({foreign.model_id} and {known.model_id}). Extract both with the same members, and join them in one order."
        )


def check_asked_alike(known: Table, foreign: Table, of: str) -> None:
    """Raise TableError where caches say that their ensembles had other members or settings."""
    if differing := asked_otherwise(foreign, known, of):
        raise TableError(
            f"{BY}: '{of}' of {foreign.name} and of {known.name} must have the same members and settings; they differ "
            f"in {differing}. Extract both alike."
        )


def _short(table: Table, otherwise: str) -> str:
    """`dubito.ensemble` names a table after all its members, which is too long for a sentence."""
    return otherwise if table.name.startswith("ensemble of ") else called(table, otherwise)


def _from_logits(table: Table, of: str, name: str, partitions: int, seed: int) -> Said:
    column = f"{of}_logit"
    if len(table.shape(column)) != 3:
        raise TableError(
            f"{BY}: column '{column}' of {name} must be (n, m, c), logits of m members; shape {table.shape(column)} "
            f"came. Stack members along the second axis."
        )
    _, members, classes = table.shape(column)
    cuts = _cuts(members, name)
    orders = _orders(members, partitions, seed)
    parts = []
    for batch in table.batches(column, size=max(1, _NUMBERS_AT_ONCE // (members * classes))):
        logits = finite(batch.whole(column).double(), f"column '{column}' of {name}")
        parts.append(_decomposed(logits.movedim(1, 0).softmax(-1), cuts, orders))
    total, aleatoric, *between = (torch.cat(values) for values in zip(*parts, strict=True))
    order = f"{partitions} random partitions of each size, averaged" if partitions else "neighbours, as they came"
    return Said(name, members, cuts, order, total, aleatoric, tuple(between), table.model_id, classes)


def _decomposed(p: Float64[Tensor, "m n c"], cuts: tuple[tuple[int, int], ...], orders: list[Tensor]) -> list[Tensor]:
    """Total, aleatoric, and I[Y; K] of every cut, with one column for each order of the members."""
    whole = decompose(p)
    between = [
        torch.stack([decompose(partitioned(p[order], size).mean(1)).epistemic for order in orders], 1)
        for _, size in cuts[1:]
    ]
    return [whole.total, whole.aleatoric, whole.epistemic[:, None], *between]


def _orders(members: int, partitions: int, seed: int) -> list[Tensor]:
    """Of members: some random ones, or the given one; the same for all sizes, which are compared."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randperm(members, generator=draw) for _ in range(partitions)] or [torch.arange(members)]


def _from_summary(table: Table, of: str, name: str) -> Said:
    if table.shape(of)[1:] != (len(SUMMARY),):
        raise TableError(
            f"{BY}: column '{of}' of {name} must be a summary (n, {len(SUMMARY)}) of an ensemble: "
            f"{', '.join(SUMMARY)}; got shape {table.shape(of)}. Extract it with a probe of members."
        )
    summary = finite(table.whole(of).double(), f"column '{of}' of {name}")
    field = {key: summary[:, place] for place, key in enumerate(SUMMARY)}
    members = int(field["members"][0])
    cuts = _cuts(members, name)
    between: tuple[Tensor, ...] = (field["epistemic"][:, None],)
    if f"{of}_between" in table and table.shape(f"{of}_between")[1] == len(cuts) - 1:
        columns = finite(table.whole(f"{of}_between").double(), f"column '{of}_between' of {name}")
        between += tuple(column[:, None] for column in columns.unbind(1))
    else:
        cuts = cuts[:1]
    order = "neighbours, as they came"
    return Said(name, members, cuts, order, field["total"], field["aleatoric"], between, table.model_id)


def _cuts(members: int, name: str) -> tuple[tuple[int, int], ...]:
    if members < 2:
        raise TableError(
            f"{BY} needs at least 2 members; {name} has {members}. One model cannot disagree with itself: add models, "
            f"or ask one model several times (tiles, dropout, views, masks)."
        )
    return sub_ensembles(members)
