"""Strategies of active learning: by uncertainty alone, and by distance from what is labelled already.

By uncertainty, the highest or a random batch that prefers high values:

    top        the highest u
    softmax    the highest  u_i + g_i / beta          p_i ~ exp(beta u_i)
    power      the highest  log u_i + g_i / beta      p_i ~ u_i^beta
    softrank   the highest  -log r_i + g_i / beta     p_i ~ r_i^-beta, r = 1 for the highest u

g are independent standard Gumbel variables: the k highest perturbed values are a draw of k without replacement with
these probabilities. Kirsch, Farquhar, Atighehchian, Jesson, Branchaud-Charron, Gal 2023 (Stochastic Batch Acquisition,
TMLR), section 3. Ties are broken by the order of the table, in softrank too.

By distance in feature space, diverse batches:

    core_set   argmax_i  d_i              greedy k-centre, Sener & Savarese 2018 (1708.00489), algorithm 1
    weighted   argmax_i  w_i d_i          ours: uncertain and far
    seeding    p_i ~ w_i d_i^2            k-means++ (Arthur & Vassilvitskii 2007) with weights; as in BADGE (Ash et al.
                                          2020, 1906.03671), which uses gradients in place of features

d_i is the Euclidean distance to the nearest image that is labelled or chosen already, w the uncertainty scaled to 0..1
over the candidates. Without any labelled image, core_set begins at the image nearest to the mean, the others by w.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.table import Column
from dubito.types import finite

_ROWS = 8192
_CENTRES = 1024
_IN_MEMORY = 2 << 30
"""Bytes of features that are kept in memory; more are read from the disk again for every choice."""


def top(u: Float64[np.ndarray, "n"], count: int) -> Int64[np.ndarray, "k"]:
    """Positions of the `count` highest, the highest first.

    >>> top(np.array([0.1, 0.9, 0.9, 0.5]), 3).tolist()
    [1, 2, 3]
    """
    return np.argsort(-u, kind="stable")[:count]


def stochastic(
    u: Float64[np.ndarray, "n"], count: int, kind: str, *, beta: float, rng: np.random.Generator
) -> Int64[np.ndarray, "k"]:
    """Positions of a random batch that prefers high uncertainties, in the order of the perturbed values.

    Args:
        u: Higher = more uncertain; for "power" not below 0.
        count: How many to choose.
        kind: "softmax", "power" or "softrank".
        beta: Inverse temperature: near 0 the draw is uniform; the larger, the closer to `top`.
        rng: Generator of the Gumbel variables.
    """
    if kind == "power" and len(u) and u.min() < 0:
        raise ValueRangeError(
            f"acquire: 'power' requires uncertainties that are not negative; got {u.min():.3g}. Choose 'softrank', "
            f"which uses the order alone, or a score that begins at 0 (entropy, mutual information)."
        )
    log_weight, gumbel = u, rng.gumbel(size=len(u))
    if kind == "softrank":
        log_weight = -np.log(np.argsort(np.argsort(-u, kind="stable")) + 1.0)
    elif kind == "power":
        with np.errstate(divide="ignore"):
            log_weight = np.log(u)  # -inf for u = 0: chosen only when nothing else is left
    # Images of probability 0 (power, u = 0) come last, in random order: a pool is often sorted by class.
    return np.lexsort((-gumbel, -(log_weight + gumbel / beta)))[:count]


@final
class Distances:
    """The distance of every row of a pool to the nearest of some centres.

    Attributes:
        squared: (n) to the nearest centre so far; infinite while there is none.
        from_mean: (n) to the mean of all rows, squared too.
    """

    def __init__(self, feature: Column) -> None:
        n, d = feature.shape
        self._feature = feature if n * d * 4 > _IN_MEMORY else feature[:].float()
        self._blocks = [slice(start, min(start + _ROWS, n)) for start in range(0, n, _ROWS)]
        self._mean = sum((self._read(block).double().sum(0) for block in self._blocks), torch.zeros(d).double()) / n
        self._mean = finite(self._mean, "acquire: features").float()
        # Around the mean, so that a common offset costs no precision.
        self.from_mean = torch.cat([(self._read(block) - self._mean).square().sum(1) for block in self._blocks])
        self.squared = torch.full((n,), torch.inf)

    def add(self, rows: Int64[np.ndarray, "k"]) -> None:
        """Make these rows centres."""
        for part in torch.split(torch.from_numpy(rows), _CENTRES) if len(rows) else ():
            centres = self._feature[part].float()
            moved = centres - self._mean
            for block in self._blocks:
                if len(part) == 1:  # as fast as the product, and exact among clusters that lie far apart
                    squared = (self._read(block) - centres).square_().sum(1)
                else:
                    product = (self._read(block) - self._mean) @ moved.T
                    squared = (self.from_mean[block, None] + moved.square().sum(1) - 2 * product).amin(1).clamp_(min=0)
                torch.minimum(self.squared[block], squared, out=self.squared[block])
            self.squared[part] = 0  # rounding would leave a little

    def _read(self, block: slice) -> Tensor:
        rows: Tensor = self._feature[block]
        return rows.float()


def diverse(
    distances: Distances,
    kind: str,
    free: Bool[np.ndarray, "n"],
    count: int,
    *,
    u: Float64[np.ndarray, "n"] | None,
    rng: np.random.Generator,
) -> Int64[np.ndarray, "k"]:
    """Choose rows one after the other; each becomes a centre for the next.

    Args:
        distances: Distances to the labelled rows; updated as rows are chosen.
        kind: "core_set", "weighted" or "seeding".
        free: Which rows may be chosen.
        count: How many to choose; at most as many as are free.
        u: Uncertainties, for "weighted" and "seeding".
        rng: Generator of the draws of "seeding".
    """
    weight = np.ones(len(free))
    if u is not None and kind != "core_set" and (low := u[free].min()) < (high := u[free].max()):
        weight = (u - low) / (high - low)
    free, chosen = free.copy(), []
    for _ in range(count):
        squared = distances.squared.double().numpy()
        begun = bool(np.isfinite(squared[:1]).all())
        if kind == "core_set":
            value = squared if begun else -distances.from_mean.double().numpy()
        else:
            value = weight * (1.0 if not begun else squared if kind == "seeding" else np.sqrt(squared))
        if kind == "seeding":
            chances = np.where(free, value, 0.0)
            cumulative = np.cumsum(chances if chances.sum() > 0 else free.astype(np.float64))
            row = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
        else:
            row = int(np.where(free, value, -np.inf).argmax())
        free[row] = False
        chosen.append(row)
        distances.add(np.array([row]))
    return np.array(chosen, dtype=np.int64)
