"""A member as an ordinary module: each masked layer is a smaller dense one.

    W' = r W c over the rows and columns that are kept,   b' = r b

Between two layers that follow each other (`Link`), units = rows of the first AND columns of the second, so both shrink
and nothing stands between them; where the first drops a unit that the second keeps, b' of the second takes its constant
f(0). Elsewhere the layer picks its columns from a full vector, and puts its rows into one that is zero otherwise, which
is what masks do.
"""

import copy
from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dubito.ensembles._watch import Link
from dubito.ensembles.masks import LayerMasks


@final
class SubLinear(nn.Module):
    """A small dense layer that reads some columns of its input and fills some rows of its output.

    Args:
        linear: The dense layer.
        columns: Which of its input it reads; None: all.
        rows: Where its outputs belong; None: one after the other.
        width: Of the output, with zeros in all other places.
    """

    def __init__(
        self, linear: nn.Linear, columns: Int[Tensor, "i"] | None, rows: Int[Tensor, "o"] | None, width: int
    ) -> None:
        super().__init__()
        self.linear, self.width = linear, width
        self.register_buffer("columns", columns)
        self.register_buffer("rows", rows)

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """Of the dense layer: some modules ask a layer for its type."""
        return self.linear.weight

    @property
    def bias(self) -> Float[Tensor, "o"] | None:
        """Of the dense layer."""
        return self.linear.bias

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Pick, multiply, put."""
        columns, rows = self._buffers["columns"], self._buffers["rows"]
        y: Tensor = self.linear(x if columns is None else x.index_select(-1, columns))
        return y if rows is None else y.new_zeros(*y.shape[:-1], self.width).index_copy(-1, rows, y)


def sub_model(
    module: nn.Module,
    layers: Mapping[str, nn.Linear],
    masks: Mapping[str, LayerMasks],
    links: Mapping[str, Link],
) -> nn.Module:
    """The module with smaller layers; whatever is not masked is shared with the module, not copied.

    Args:
        module: The whole model, which is left as it is.
        layers: Its masked layers by name.
        masks: Theirs, of one member: (1, out) and (1, in).
        links: Between them, from `Watch`; none of them is needed for the same result.
    """
    joined = {name: link for name, link in links.items() if name in layers and link.to in layers}
    before = {link.to: (name, link.at_zero) for name, link in joined.items()}
    kept: dict[int, object] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    with torch.no_grad():
        for name, layer in layers.items():
            kept[id(layer)] = _smaller(name, layer, masks, joined, before)
    return copy.deepcopy(module, kept)


def _smaller(
    name: str,
    layer: nn.Linear,
    masks: Mapping[str, LayerMasks],
    joined: Mapping[str, Link],
    before: Mapping[str, tuple[str, float]],
) -> nn.Module:
    rows, columns = _row_mask(masks[name], layer), masks[name].columns[0].to(layer.weight)
    out, into = rows > 0, columns > 0
    bias = None if layer.bias is None else layer.bias.detach()
    if name in before:
        first, at_zero = before[name]
        first_rows = masks[first].rows
        lives = into if first_rows is None else into & (first_rows[0] > 0).to(into.device)
        if at_zero and bool((into & ~lives).any()):
            constant = layer.weight.detach()[:, into & ~lives] @ (columns[into & ~lives] * at_zero)
            bias = constant if bias is None else bias + constant
        into = lives
    if name in joined:
        out = out & (masks[joined[name].to].columns[0] > 0).to(out.device)
    weight = rows[out, None] * layer.weight.detach()[out][:, into] * columns[into]
    dense = _dense(weight, None if bias is None else (rows * bias)[out], like=layer)
    picked = None if name in before else _places(into)
    put = None if name in joined else _places(out)
    if picked is None and put is None:
        return dense
    return SubLinear(dense, picked, put, layer.out_features).train(layer.training)


def _row_mask(masks: LayerMasks, layer: nn.Linear) -> Float[Tensor, "out"]:
    return layer.weight.new_ones(layer.out_features) if masks.rows is None else masks.rows[0].to(layer.weight)


def _places(kept: Bool[Tensor, "w"]) -> Int[Tensor, "k"] | None:
    return None if bool(kept.all()) else kept.nonzero()[:, 0]


def _dense(weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None, *, like: nn.Linear) -> nn.Linear:
    """Made small and then filled: an empty layer, where nothing is kept, cannot be initialised without a warning."""
    dense = nn.Linear(1, 1, bias=bias is not None)
    dense.out_features, dense.in_features = weight.shape
    dense.weight = nn.Parameter(weight.contiguous(), requires_grad=like.weight.requires_grad)
    if bias is not None:
        dense.bias = nn.Parameter(bias.contiguous(), requires_grad=like.weight.requires_grad)
    return dense.train(like.training)
