"""Tiles from watched calls: what a head reads or says at every position of a feature map, as rows."""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from torch import Tensor

from dubito.models._plan import Plan
from dubito.models._spy import Call


def said_map(calls: dict[int, Call], plan: Plan) -> Float[Tensor, "n c h w"]:
    """What a convolutional head says at every position: that which is pooled to the module's output."""
    if plan.pool is None:
        raise AssertionError("a convolutional head always has a pool behind it")
    return calls[plan.pool].source


def tile_features(calls: dict[int, Call], plan: Plan) -> Float[Tensor, "n t d"]:
    """What a convolutional head reads at every position, with the residual of the non-linearity behind it."""
    head = calls[plan.heads[0]]
    parts = [head.source]
    if plan.lift and head.before is not None:
        parts.append(said_map(calls, plan) - head.before)
    return torch.cat(parts, dim=1).flatten(2).transpose(1, 2)


def tiles_as_rows(call: Call, patches: tuple[int, int] | None) -> Tensor:
    """(n, .., tiles, ..) to (n * tiles, ..) in the shape of the pool's own output."""
    if call.role == "token":
        h, w = grid_of(call, patches)
        return call.source[:, call.source.shape[1] - h * w :].flatten(0, 1)
    axes = call.reduced
    rest = [axis for axis in range(1, call.source.dim()) if axis not in axes]
    tiles = call.source.permute(0, *axes, *rest).flatten(0, len(axes))
    return tiles.reshape(-1, *call.output.shape[1:])


def grid_of(call: Call, patches: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width of the tiles; patch tokens stand on the grid of the embedding, behind all other tokens."""
    if len(call.grid) == 2:
        return call.grid[0], call.grid[1]
    count = call.grid[0]
    if patches is None or patches[0] * patches[1] > count:
        raise ValueError(f"{count} tokens do not stand on a grid of patches")
    return patches


def with_own_rows(call: Call, n: int) -> Tensor:
    """A hidden layer's output, its first n rows as they come without tiles: a longer product may round otherwise."""
    if call.weight is None or len(call.source) <= n:
        return call.output
    layer = F.linear if call.role == "linear" else F.conv2d
    own = layer(call.source[:n], call.weight, call.bias)
    return torch.cat([own, call.output[n:]]) if own.shape[1:] == call.output.shape[1:] else call.output
