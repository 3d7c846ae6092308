"""Images that lie apart from each other and from what is labelled, by features.

    core_set   argmax_i  d_i              greedy k-centre, Sener & Savarese 2018 (1708.00489), algorithm 1
    weighted   argmax_i  w_i d_i          ours: uncertain and far
    seeding    p_i ~ w_i d_i^2            k-means++ (Arthur & Vassilvitskii 2007) with weights; as in BADGE (Ash et al.
                                          2020, 1906.03671), which seeds so in gradients, not in features

d_i is the Euclidean distance to the nearest image that is labelled or chosen already, w the uncertainty moved to 0..1
on the images that may be chosen. Without any labelled image, core_set begins at the image nearest to the mean, the
others by w alone. A choice costs one pass over the features, in blocks of rows.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from dubito.table import Column
from dubito.types import finite

_ROWS = 8192
_CENTRES = 1024
_IN_MEMORY = 2 << 30
"""Bytes of features that are kept in memory; more are read from the disk again for every choice."""


@final
class Distances:
    """The distance of every row of a pool to the nearest of some centres.

    Attributes:
        squared: (n) to the nearest centre so far; infinite while there is none.
    """

    def __init__(self, feature: Column) -> None:
        n, d = feature.shape
        self._feature = feature if n * d * 4 > _IN_MEMORY else feature[:].float()
        self._blocks = [slice(start, min(start + _ROWS, n)) for start in range(0, n, _ROWS)]
        self._mean = sum((self._read(block).double().sum(0) for block in self._blocks), torch.zeros(d).double()) / n
        self._mean = finite(self._mean, "acquire: features").float()
        # Around the mean, so that sums of squares lose no digits to a common offset.
        self._norms = torch.cat([(self._read(block) - self._mean).square().sum(1) for block in self._blocks])
        self.squared = torch.full((n,), torch.inf)

    def nearest_to_mean(self) -> Float64[np.ndarray, "n"]:
        """How near each row lies to the mean of all."""
        return -self._norms.double().numpy()

    def add(self, rows: Int64[np.ndarray, "k"]) -> None:
        """These rows are centres now."""
        for part in torch.split(torch.from_numpy(rows), _CENTRES) if len(rows) else ():
            centres = self._feature[part].float()
            for block in self._blocks:
                squared = self._to_one(block, centres) if len(part) == 1 else self._to_nearest(block, centres)
                torch.minimum(self.squared[block], squared, out=self.squared[block])
            self.squared[part] = 0  # rounding would leave a little

    def _to_one(self, block: slice, centre: Float32[Tensor, "1 d"]) -> Float32[Tensor, "b"]:
        """As quick as the product of `_to_nearest` is for one centre, and exact among clusters that lie far apart."""
        return (self._read(block) - centre).square_().sum(1)

    def _to_nearest(self, block: slice, centres: Float32[Tensor, "k d"]) -> Float32[Tensor, "b"]:
        moved = centres - self._mean
        product = (self._read(block) - self._mean) @ moved.T
        return (self._norms[block, None] + moved.square().sum(1) - 2 * product).amin(1).clamp_(min=0)

    def _read(self, block: slice) -> Tensor:
        rows: Tensor = self._feature[block]
        return rows.float()


def spread_out(
    distances: Distances,
    kind: str,
    free: Bool[np.ndarray, "n"],
    count: int,
    *,
    u: Float64[np.ndarray, "n"] | None,
    rng: np.random.Generator,
) -> Int64[np.ndarray, "k"]:
    """Rows, one after the other, each of which is a centre for the next.

    Args:
        distances: To the labelled rows; changed as rows are chosen.
        kind: "core_set", "weighted" or "seeding".
        free: Which rows may be chosen.
        count: How many; at most as many as are free.
        u: For the last two.
        rng: For the last.
    """
    weight = _shares(u, free) if u is not None and kind != "core_set" else np.ones(len(free))
    free, chosen = free.copy(), []
    for _ in range(count):
        squared = distances.squared.double().numpy()
        begun = bool(np.isfinite(squared[:1]).all())
        if kind == "core_set":
            value = squared if begun else distances.nearest_to_mean()
        else:
            value = weight * (1.0 if not begun else squared if kind == "seeding" else np.sqrt(squared))
        row = _drawn(value, free, rng) if kind == "seeding" else int(np.where(free, value, -np.inf).argmax())
        free[row] = False
        chosen.append(row)
        distances.add(np.array([row]))
    return np.array(chosen, dtype=np.int64)


def _shares(u: Float64[np.ndarray, "n"], free: Bool[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """0 for the surest of the free rows, 1 for the most uncertain; all alike where they are."""
    low, high = u[free].min(), u[free].max()
    shares: np.ndarray = (u - low) / (high - low) if high > low else np.ones(len(u))
    return shares


def _drawn(value: Float64[np.ndarray, "n"], free: Bool[np.ndarray, "n"], rng: np.random.Generator) -> int:
    chances = np.where(free, value, 0.0)
    if chances.sum() <= 0:
        chances = free.astype(np.float64)
    edges = np.cumsum(chances)
    return int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
