"""Gradients of some parameters image by image, for what no rule knows: by torch.func's vmap, or by a loop."""

import warnings
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vmap

from dubito.gradients.borrowed import Borrowed
from dubito.gradients.patches import BYTES


def one_by_one(
    borrowed: Borrowed,
    names: Sequence[str],
    x: Float[Tensor, "rows ..."],
    cotangent: Float[Tensor, "rows c"],
    images: int,
) -> Iterator[tuple[slice, dict[str, Float[Tensor, "n ..."]]]]:
    """The gradients of named parameters for each image, those of its copies added up; of a few images at a time."""
    x, cotangent = (rows.view(images, -1, *rows.shape[1:]) for rows in (x, cotangent))
    leaves = {name: borrowed.leaves[name].detach() for name in names}
    few = max(1, BYTES // (4 * sum(leaf.numel() for leaf in leaves.values())))
    for start in range(0, images, few):
        some = slice(start, start + few)
        yield some, _vmapped(borrowed, leaves, x[some], cotangent[some])


def _vmapped(
    borrowed: Borrowed, leaves: dict[str, Tensor], x: Float[Tensor, "n r ..."], cotangent: Float[Tensor, "n r c"]
) -> dict[str, Float[Tensor, "n ..."]]:
    def said(chosen: dict[str, Tensor], one: Tensor, c: Tensor) -> Tensor:
        return (borrowed.logits(one, chosen) * c).sum()

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*performance drop")  # we have said that it is slow
            found: dict[str, Tensor] = vmap(grad(said), in_dims=(None, 0, 0))(leaves, x, cotangent)
        return found
    except (RuntimeError, ValueError):  # control flow that depends on data, operations without a batching rule
        rows = [_alone(borrowed, leaves, one, c) for one, c in zip(x, cotangent, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in leaves}


def _alone(borrowed: Borrowed, leaves: dict[str, Tensor], one: Tensor, c: Tensor) -> dict[str, Tensor]:
    own = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    said = borrowed.logits(one.clone(), own)
    found = torch.autograd.grad(said, list(own.values()), c, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(own.items(), found, strict=True)
    }
