"""Masks on the linear layers of a model: one vector of rows and one of columns per layer and member.

    y = r_m * (W (c_m * x) + b)        q = sigmoid(theta / tau),   r_m and c_m are parts of q_m

The outer product of rows and columns selects the weights, and a bias goes with its row (Kirsch 2024, section 4.1 and
A.4). How different members are is the mutual information between the mask and the member's index,

    I[mask; M] = sum_j H_b(mean_m q_mj) - mean_m H_b(q_mj)

with H_b the entropy of a coin, in nats: zero where all members keep the same units, log 2 per unit where half of them
keep it and half do not. The paper names this quantity and its weight of 2.0, but not how it is computed: the sum over
independent units is our reading, and so is what it is divided by (`over`).
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DiversityOver = Literal["units", "masks", "sum"]
"""How the diversity is normalised: the mean over all units, the mean within each mask, or no mean at all."""

_NEAREST = 1e-6
"""Probabilities stay this far from 0 and 1, where the slope of the entropy is infinite."""


class LayerMasks(NamedTuple):
    """The masks of one layer, one row per member; `rows` is None where all rows stay, as those of classes."""

    rows: Float[Tensor, "m out"] | None
    columns: Float[Tensor, "m in"]


class Span(NamedTuple):
    """One part of the vector q_m: the rows or the columns of a layer."""

    layer: str
    side: str
    width: int


def mask_diversity(q: Float[Tensor, "m j"]) -> Float[Tensor, "j"]:
    """H_b(mean_m q_mj) - mean_m H_b(q_mj) of every unit: its information about the member, from 0 to log 2.

    >>> per_unit = mask_diversity(torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 0.5]]))
    >>> [round(float(unit), 3) for unit in per_unit]
    [0.693, 0.0, 0.0]
    """
    q = q.clamp(_NEAREST, 1 - _NEAREST)
    return _coin_entropy(q.mean(0)) - _coin_entropy(q).mean(0)


def diversity(q: Float[Tensor, "m j"], spans: Iterable[Span], over: DiversityOver) -> Float[Tensor, ""]:
    """I[mask; M], normalised.

    Args:
        q: All masks, one row per member.
        spans: The layer and side of each part of a row.
        over: "units": the mean over all units. "masks": the mean within each vector of rows or columns, summed over the
            vectors. "sum": the plain sum, which outweighs the cross-entropy by far.
    """
    each = mask_diversity(q)
    if over == "units":
        return each.mean()
    if over == "masks":
        return torch.stack([part.mean() for part in torch.split(each, [span.width for span in spans])]).sum()
    return each.sum()


def by_layer(q: Float[Tensor, "m j"], spans: Iterable[Span]) -> dict[str, LayerMasks]:
    """The masks of all members by layer."""
    spans = list(spans)
    parts: dict[tuple[str, str], Tensor] = {}
    for span, part in zip(spans, torch.split(q, [span.width for span in spans], dim=1), strict=True):
        parts[span.layer, span.side] = part
    return {
        span.layer: LayerMasks(parts.get((span.layer, "rows")), parts[span.layer, "columns"])
        for span in spans
        if span.side == "columns"
    }


def binarised(q: Float[Tensor, "m j"], spans: Iterable[Span]) -> Float[Tensor, "m j"]:
    """1 where q is above one half, otherwise 0; a mask that would keep nothing keeps its most likely unit."""
    spans = list(spans)
    parts = [_cut(part) for part in torch.split(q, [span.width for span in spans], dim=1)]
    return torch.cat([part.to(q.dtype) for part in parts], dim=1)


def of_member(masks: Mapping[str, LayerMasks], member: int) -> dict[str, LayerMasks]:
    """The masks of one member, as those of an ensemble of one."""
    one = slice(member, member + 1)
    return {
        name: LayerMasks(None if mask.rows is None else mask.rows[one], mask.columns[one])
        for name, mask in masks.items()
    }


def _cut(q: Float[Tensor, "m w"]) -> Bool[Tensor, "m w"]:
    kept = q > 0.5
    best = torch.nn.functional.one_hot(q.argmax(1), q.shape[1]).bool()
    return kept | (best & ~kept.any(1, keepdim=True))


def _coin_entropy(q: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return -(q * q.log() + (1 - q) * (-q).log1p())
