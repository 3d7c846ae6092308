"""What one image adds to the gradient of a convolution's weight.

    G[o, i, k] = sum_t g[o, t] a[i, stride t + dilation k - padding]          for channels o and i of one group

Made by one of three ways, whichever is cheapest: the library's own gradient of a convolution in which every image is a
group of channels; products of grams of patches, where there are few positions and many channels; and, for large windows
on single channels, one product of shifted images for each place of the window, for which the library is slow.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from torch import Tensor

BYTES = 1 << 25
"""Of gradients that are made at a time: 32 MB."""
_READ = 1 << 23
"""Of what is read for them at a time: about what a processor's cache holds."""
_GRAMS = 1.5
"""How much dearer a product of grams is than one of the library's convolutions with as many multiplications."""
_CANCELLED = 1e-4
"""How much of the products must be left in their sum: float32 has seven digits."""
_SHIFTS = 16
"""Places of a window from which on the library's gradient of single channels is slower than shifts."""


@dataclass(frozen=True)
class Window:
    """How a convolution looks at its input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def plain(self) -> bool:
        """One position at a time, all channels together, every position: a linear layer."""
        ones = (*self.kernel, *self.stride)
        return set(ones) == {1} and not any(self.padding) and self.groups == 1


@dataclass(frozen=True)
class Patches:
    """Of a convolution: weights (n, o, i / groups, *kernel). `t` counts copies and windows of an image."""

    a: Float[Tensor, "n t i ..."]
    g: Float[Tensor, "n t o ..."]
    window: Window

    def __len__(self) -> int:
        return len(self.a)

    def some(self, images: slice) -> "Patches":
        """Of some images."""
        return replace(self, a=self.a[images], g=self.g[images])

    def made(self) -> Float[Tensor, "n o i ..."]:
        """The gradients: of one convolution in which every image is a group of channels of its own."""
        n, t, i, o, w = *self.a.shape[:3], self.g.shape[2], self.window
        a, g = (x.transpose(0, 1).reshape(t, n * x.shape[2], *x.shape[3:]) for x in (self.a, self.g))
        weight = a.new_empty(n * o, i // w.groups, *w.kernel)  # only its shape is read
        spec: tuple[Any, ...] = (list(w.stride), list(w.padding), list(w.dilation), False, [0] * len(w.stride))
        found: Tensor = torch.ops.aten.convolution_backward(
            g, a, weight, None, *spec, n * w.groups, [False, True, False]
        )[1]
        return found.view(n, o, i // w.groups, *w.kernel)

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms, the cheapest way."""
        w, o, places = self.window, self.g.shape[2], self.g.shape[1] * self.g[0, 0, 0].numel()
        i = self.a.shape[2] * torch.Size(w.kernel).numel()
        within, out = i // w.groups, o // w.groups
        if len(w.kernel) == 2 and _GRAMS * places * (within + out) < within * out:
            return in_parts(self, places * (i + 2 * places), by=Patches._squares_by_grams)
        read = self.a[0].numel() + self.g[0].numel()
        if len(w.kernel) == 2 and within == torch.Size(w.kernel).numel() >= _SHIFTS and out == 1:
            return in_parts(self, o * within, read=read, by=Patches._squares_by_shifts)
        return in_parts(self, o * within, read=read)

    def _squares_by_grams(self) -> Float[Tensor, "n"]:
        n, t, w = *self.a.shape[:2], self.window
        a = self.a.flatten(0, 1)
        if set(w.kernel) != {1} or set(w.stride) != {1} or any(w.padding):
            a = F.unfold(a, w.kernel, w.dilation, w.padding, w.stride)
        a, g = (x.view(n, t, w.groups, -1, places) for x, places in ((a, self._places), (self.g, self._places)))
        a, g = (x.permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1) for x in (a, g))  # (n groups, t places, channels)
        return by_grams(a, g).view(n, w.groups).sum(1)

    def _squares_by_shifts(self) -> Float[Tensor, "n"]:
        """Of single channels. In one long row of pixels, an image shifted by a place of the window is a later part."""
        w, (h, width) = self.window, self.g.shape[3:]
        (sy, sx), (dy, dx), (py, px) = w.stride, w.dilation, w.padding
        a, g = (x.permute(0, 1, 3, 4, 2) for x in (self.a, self.g))  # channels last: (n, t, h, w, c)
        a = F.pad(a, (0, 0, px, px, py, py))
        wide = -(-a.shape[3] // sx)
        g = F.pad(g, (0, 0, 0, wide - width)).flatten(2, 3)[:, :, : (h - 1) * wide + width]
        planes: dict[tuple[int, int], Tensor] = {}
        total = self.g.new_zeros(len(self.g))
        for y in range(0, w.kernel[0] * dy, dy):
            for x in range(0, w.kernel[1] * dx, dx):
                place = (y % sy, x % sx)
                if place not in planes:
                    plane = a[:, :, place[0] :: sy, place[1] :: sx]
                    planes[place] = F.pad(plane, (0, 0, 0, wide - plane.shape[3])).flatten(2, 3)
                start = (y // sy) * wide + x // sx
                row = planes[place][:, :, start : start + g.shape[2]]
                total += torch.linalg.vecdot(row, g, dim=2).sum(1).square().sum(1)
        return total

    @property
    def _places(self) -> int:
        return self.g[0, 0, 0].numel()


def by_grams(a: Float[Tensor, "n t i"], g: Float[Tensor, "n t o"]) -> Float[Tensor, "n"]:
    """||sum_t g_t a_t^T||_2^2 from the products of all pairs of positions.

    Where positions cancel almost wholly there are no digits left of the sum of products: then from the sum itself.
    """
    left, right = (a @ a.transpose(1, 2)).flatten(1), (g @ g.transpose(1, 2)).flatten(1)
    total: Tensor = torch.linalg.vecdot(left, right)
    for lost in (total < _CANCELLED * left.norm(dim=1) * right.norm(dim=1)).nonzero().flatten().tolist():
        total[lost] = (g[lost].t() @ a[lost]).square().sum()
    return total


def in_parts(part: Any, made: int, *, read: int = 0, by: Callable[[Any], Tensor] | None = None) -> Float[Tensor, "n"]:
    """Squared norms of a few images at a time, so that what is made for each never lies in memory for all.

    Args:
        part: With `some` images, and their gradients `made`.
        made: Numbers that are made an image.
        read: Numbers that are read an image.
        by: How squared norms are had; by default from the gradients themselves.
    """
    few = max(1, min(BYTES // (4 * max(1, made)), _READ // (4 * max(1, read))))
    done = []
    for start in range(0, len(part), few):
        some = part.some(slice(start, start + few))
        done.append(some.made().flatten(1).square().sum(1) if by is None else by(some))
    return torch.cat(done)
