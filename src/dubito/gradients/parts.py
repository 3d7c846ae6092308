"""What one image adds to the gradient of one weight, kept as factors until a norm is needed.

    Outer     G = sum_t g_t a_t^T         a linear layer: what it read (t, i), and the gradient of what it gave (t, o)
    Patches   the same with a the patches under a convolution's window
    Picked    rows of G picked by index   an embedding
    Dense     G itself                    biases, norms, tokens: small

With grams A = a a^T and B = g g^T, (t, t) each, ||G||_2^2 = sum of A * B: cheaper than G where there are few positions
and many channels. Otherwise G is made, for a few images at a time. L1 norms always need G, unless t = 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
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

Measure = Literal["squares", "totals"]
"""What is measured of a gradient: its squared L2 norm, its L1 norm."""


class Part(ABC):
    """What every image adds to the gradient of one weight; tensors of its fields have one row per image."""

    def __len__(self) -> int:
        return len(next(iter(self._tensors().values())))

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def some(self, images: slice) -> "Part":
        """Of some images."""
        return replace(self, **{name: values[images] for name, values in self._tensors().items()})  # type: ignore[type-var]

    @abstractmethod
    def made(self) -> Float[Tensor, "n ..."]:
        """The gradients themselves."""

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms, the cheapest way."""
        return measured(self.made(), "squares")

    def blocks(self, made: int, *, read: int = 0) -> Iterator[Any]:
        """The same of as many images at a time as these numbers, made and read of each, allow."""
        step = max(1, min(BYTES // (4 * max(1, made)), _READ // (4 * max(1, read))))
        return (self.some(slice(start, start + step)) for start in range(0, max(1, len(self)), step))

    def _squares_in_blocks(self, made: int, *, read: int = 0) -> Float[Tensor, "n"]:
        return torch.cat([measured(some.made(), "squares") for some in self.blocks(made, read=read)])


def measured(gradients: Float[Tensor, "n ..."], measure: Measure) -> Float[Tensor, "n"]:
    """Squared L2 norms or L1 norms of gradients, one per image."""
    flat = gradients.reshape(len(gradients), -1)
    return (flat.square() if measure == "squares" else flat.abs()).sum(1)


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
        return {*self.kernel, *self.stride} == {1} and not any(self.padding) and self.groups == 1


@dataclass(frozen=True)
class Patches(Part):
    """Of a convolution: weights (n, o, i / groups, *kernel). `t` counts copies and windows of an image."""

    a: Float[Tensor, "n t i ..."]
    g: Float[Tensor, "n t o ..."]
    window: Window

    def made(self) -> Float[Tensor, "n o i ..."]:
        """The gradients: of one convolution in which every image is a group of channels of its own."""
        n, t, i, o, w = *self.a.shape[:3], self.g.shape[2], self.window
        a, g = (x.transpose(0, 1).reshape(t, n * x.shape[2], *x.shape[3:]) for x in (self.a, self.g))
        weight = a.new_empty(n * o, i // w.groups, *w.kernel)  # only its shape is read
        spec: tuple[Any, ...] = (list(w.stride), list(w.padding), list(w.dilation), False, [0] * len(w.stride))
        gradient: Tensor = torch.ops.aten.convolution_backward(
            g, a, weight, None, *spec, n * w.groups, [False, True, False]
        )[1]
        return gradient.view(n, o, i // w.groups, *w.kernel)

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms, the cheapest way."""
        w, o, places = self.window, self.g.shape[2], self.g.shape[1] * self.g[0, 0, 0].numel()
        i = self.a.shape[2] * torch.Size(w.kernel).numel()
        within, out = i // w.groups, o // w.groups
        if len(w.kernel) == 2 and _GRAMS * places * (within + out) < within * out:
            return torch.cat([some._squares_by_grams() for some in self.blocks(places * (i + 2 * places))])
        read = self.a[0].numel() + self.g[0].numel()
        if len(w.kernel) == 2 and within == torch.Size(w.kernel).numel() >= _SHIFTS and out == 1:
            return torch.cat([some._squares_by_shifts() for some in self.blocks(o * within, read=read)])
        return self._squares_in_blocks(o * within, read=read)

    def _squares_by_grams(self) -> Float[Tensor, "n"]:
        n, t, w = *self.a.shape[:2], self.window
        a = self.a.flatten(0, 1)
        if set(w.kernel) != {1} or set(w.stride) != {1} or any(w.padding):
            a = F.unfold(a, w.kernel, w.dilation, w.padding, w.stride)
        a, g = (x.view(n, t, w.groups, -1, self.g[0, 0, 0].numel()) for x in (a, self.g))
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


def by_grams(a: Float[Tensor, "n t i"], g: Float[Tensor, "n t o"]) -> Float[Tensor, "n"]:
    """||sum_t g_t a_t^T||_2^2 from the products of all pairs of positions.

    Where positions cancel almost wholly there are no digits left of the sum of products: then from the sum itself.
    """
    left, right = (a @ a.transpose(1, 2)).flatten(1), (g @ g.transpose(1, 2)).flatten(1)
    total: Tensor = torch.linalg.vecdot(left, right)
    for lost in (total < _CANCELLED * left.norm(dim=1) * right.norm(dim=1)).nonzero().flatten().tolist():
        total[lost] = (g[lost].t() @ a[lost]).square().sum()
    return total


@dataclass(frozen=True)
class Dense(Part):
    """Gradients themselves, (n, ...)."""

    values: Float[Tensor, "n ..."]

    def made(self) -> Float[Tensor, "n ..."]:
        """The gradients."""
        return self.values


@dataclass(frozen=True)
class Outer(Part):
    """Sums of outer products, (n, o, i); `turned` means that the weight is (i, o)."""

    a: Float[Tensor, "n t i"]
    g: Float[Tensor, "n t o"]
    turned: bool = False

    def made(self) -> Float[Tensor, "n ..."]:
        """The gradients."""
        left, right = (self.a, self.g) if self.turned else (self.g, self.a)
        return left.transpose(1, 2) @ right

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms, the cheaper way."""
        t, i, o = *self.a.shape[1:], self.g.shape[2]
        if t == 1:
            return self.a.flatten(1).square().sum(1) * self.g.flatten(1).square().sum(1)
        if t * (i + o) < i * o:
            return by_grams(self.a, self.g)
        return self._squares_in_blocks(i * o)


@dataclass(frozen=True)
class Picked(Part):
    """Of an embedding of `count` rows, of which each position picks one."""

    index: Int[Tensor, "n t"]
    g: Float[Tensor, "n t d"]
    count: int

    def made(self) -> Float[Tensor, "n count d"]:
        """The gradients."""
        where = self.index[..., None].expand_as(self.g)
        return self.g.new_zeros(len(self.g), self.count, self.g.shape[2]).scatter_add_(1, where, self.g)

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms, from the rows or from products of all positions, whichever are fewer."""
        pairs, rows = self.index.shape[1] ** 2, self.count * self.g.shape[2]
        if pairs >= rows:
            return self._squares_in_blocks(rows)
        blocks = ((part.g, part.index[:, :, None] == part.index[:, None]) for part in self.blocks(2 * pairs))
        return torch.cat([((g @ g.transpose(1, 2)) * same).flatten(1).sum(1) for g, same in blocks])


def norms(parts: Sequence[Part], measure: Measure) -> Float[Tensor, "n"]:
    """||G||_2^2 or ||G||_1 of every image, where G is the sum of the parts."""
    outers = [part for part in parts if isinstance(part, Outer)]
    if 1 < len(parts) == len(outers) and len({part.turned for part in outers}) == 1:  # more positions of an image
        parts = [Outer(torch.cat([p.a for p in outers], 1), torch.cat([p.g for p in outers], 1), outers[0].turned)]
    only = parts[0] if len(parts) == 1 else None
    if only is not None and measure == "squares":
        return only.squares()
    if isinstance(only, Outer) and only.a.shape[1] == 1:
        return only.a.flatten(1).abs().sum(1) * only.g.flatten(1).abs().sum(1)
    return torch.cat([measured(made, measure) for made in made_of(parts)])


def made_of(parts: Sequence[Part]) -> Iterator[Float[Tensor, "n ..."]]:
    """The sum of the parts, of a few images at a time."""
    size = parts[0].some(slice(0, 1)).made().numel()
    for together in zip(*(part.blocks(size) for part in parts), strict=True):
        yield reduce(add, (part.made() for part in together))
