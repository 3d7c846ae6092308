"""What one image adds to the gradient of one weight, kept as factors until a norm is asked for.

    Outer     G = sum_t g_t a_t^T         a linear layer: what it read (t, i), and the gradient of what it said (t, o)
    Patches   the same with a the patches under a convolution's window (patches.py)
    Picked    rows of G picked by index   an embedding
    Dense     G itself                    biases, norms, tokens: small

With grams A = a a^T and B = g g^T, (t, t) each, ||G||_2^2 = sum of A * B: cheaper than G where there are few positions
and many channels. Otherwise G is made, for a few images at a time. L1 norms always need G, unless t = 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.gradients.patches import BYTES, Patches, by_grams, in_parts


@dataclass(frozen=True)
class Dense:
    """Gradients themselves, (n, ...)."""

    values: Float[Tensor, "n ..."]

    def __len__(self) -> int:
        return len(self.values)

    def some(self, images: slice) -> "Dense":
        """Of some images."""
        return Dense(self.values[images])

    def made(self) -> Float[Tensor, "n ..."]:
        """The gradients."""
        return self.values

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms."""
        return self.values.reshape(len(self), -1).square().sum(1)


@dataclass(frozen=True)
class Outer:
    """Sums of outer products, (n, o, i); `turned` tells that the weight is (i, o)."""

    a: Float[Tensor, "n t i"]
    g: Float[Tensor, "n t o"]
    turned: bool = False

    def __len__(self) -> int:
        return len(self.a)

    def some(self, images: slice) -> "Outer":
        """Of some images."""
        return Outer(self.a[images], self.g[images], self.turned)

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
        return in_parts(self, i * o)


@dataclass(frozen=True)
class Picked:
    """Of an embedding of `count` rows, of which each position picks one."""

    index: Int[Tensor, "n t"]
    g: Float[Tensor, "n t d"]
    count: int

    def __len__(self) -> int:
        return len(self.g)

    def some(self, images: slice) -> "Picked":
        """Of some images."""
        return Picked(self.index[images], self.g[images], self.count)

    def made(self) -> Float[Tensor, "n count d"]:
        """The gradients."""
        where = self.index[..., None].expand_as(self.g)
        return self.g.new_zeros(len(self.g), self.count, self.g.shape[2]).scatter_add_(1, where, self.g)

    def squares(self) -> Float[Tensor, "n"]:
        """Squared L2 norms, from the rows or from products of all positions, whichever are fewer."""
        pairs, rows = self.index.shape[1] ** 2, self.count * self.g.shape[2]
        return in_parts(self, 2 * pairs, by=Picked._squares_by_pairs) if pairs < rows else in_parts(self, rows)

    def _squares_by_pairs(self) -> Float[Tensor, "n"]:
        same = self.index[:, :, None] == self.index[:, None, :]
        return ((self.g @ self.g.transpose(1, 2)) * same).flatten(1).sum(1)


Part = Dense | Outer | Picked | Patches


def squares(parts: Sequence[Part]) -> Float[Tensor, "n"]:
    """||G||_2^2 of every image, where G is the sum of the parts."""
    together = _together(parts)
    if len(together) == 1:
        return together[0].squares()
    return torch.cat([made.reshape(len(made), -1).square().sum(1) for _, made in made_of(together)])


def totals(parts: Sequence[Part]) -> Float[Tensor, "n"]:
    """||G||_1 of every image, where G is the sum of the parts."""
    together = _together(parts)
    only = together[0]
    if len(together) == 1 and isinstance(only, Outer) and only.a.shape[1] == 1:
        return only.a.flatten(1).abs().sum(1) * only.g.flatten(1).abs().sum(1)
    return torch.cat([made.reshape(len(made), -1).abs().sum(1) for _, made in made_of(together)])


def made_of(parts: Sequence[Part], *, each: int | None = None) -> Iterator[tuple[slice, Float[Tensor, "n ..."]]]:
    """The gradients themselves, of a few images at a time.

    Args:
        parts: What is added up.
        each: Numbers an image, where more than the gradient itself is to be held.
    """
    size = each or max(parts[0].some(slice(0, 1)).made().numel(), 1)
    few = max(1, BYTES // (4 * size))
    for start in range(0, max(1, len(parts[0])), few):
        some = slice(start, start + few)
        made = parts[0].some(some).made()
        for part in parts[1:]:
            made = made + part.some(some).made()
        yield some, made


def _together(parts: Sequence[Part]) -> list[Part]:
    """Parts of one kind as one: more positions of an image, or a sum."""
    first = parts[0]
    if len(parts) == 1:
        return [first]
    if isinstance(first, Outer) and all(isinstance(part, Outer) and part.turned == first.turned for part in parts):
        outers = [part for part in parts if isinstance(part, Outer)]
        return [Outer(torch.cat([p.a for p in outers], 1), torch.cat([p.g for p in outers], 1), first.turned)]
    return list(parts)
