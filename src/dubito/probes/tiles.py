"""The tiles probe: one model as an ensemble of its predictions for the parts of an image, from one forward pass.

    a_t          the whole head on tile t of the feature map, instead of on the mean over tiles      logits (c)
    l_k = P_k a  the mean of tile logits over the windows of a k x k grid: k * k members
    I[Y; M]      the disagreement of the members, for every k, as of any ensemble (`dubito.metrics.SUMMARY`)

Kirsch (2024), section 4.1 and A.4: the global average pool is left out, every tile is classified, and tile logits are
averaged to grids of 2 x 2 to 7 x 7, to 16 x 16 for MaxViT. Windows are those of adaptive_avg_pool2d, which overlap
where k does not divide the map; the paper does not specify its own. With a linear head, averaging features gives the
same; with norms or hidden layers behind the pool it does not, so everything behind the pool runs on every tile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import isqrt
from typing import final, get_args

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor

from dubito.choices import Keep, Precision
from dubito.errors import ModelError, ValueRangeError
from dubito.metrics.streaming import check_temperature, summarise_groups
from dubito.probes.forward import as_classes, stored
from dubito.types import Classifier, Inputs, Json, Targets, Tiled, Tiling
from dubito.validate import check_choice

_LARGEST = 7
"""The largest grid by default: the paper's, and the map of a ResNet at 224 pixels."""
_COMPUTED = 2**24
"""Bytes of tile logits that are computed at a time: one long product with the head is faster than many short ones."""
_WORKED = 2**21
"""Bytes of members' logits that are worked on at a time: a few images, which a processor's cache holds."""


@final
@dataclass(frozen=True)
class Tiles:
    """Uncertainty among the tiles of an image: columns `tiles_2` .. `tiles_7`, and `tiles_2_loss` .. where labels are.

    Attributes:
        grids: Sides k of grids of k x k tiles. By default 2 to 7, or to the smaller side of the feature map.
        keep: "summary" keeps what every score needs at temperature 1. "logits" also keeps `tiles_2_logit` ..
            (n, k * k, c), which other temperatures and weights need: 139 rows of logits per image for grids 2 to 7.
        temperature: Divides logits before the summary; kept logits are not divided.
        dtype: Precision of kept logits on disk.
    """

    grids: Sequence[int] | None = None
    _: KW_ONLY
    keep: Keep = "summary"
    temperature: float = 1.0
    dtype: Precision = "float16"

    name = "tiles"
    price = "1 forward pass, the same as the forward probe's"

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_choice(self.keep, get_args(Keep), by="tiles", what="keep")
        check_choice(self.dtype, get_args(Precision), by="tiles", what="dtype")
        if self.grids is None:
            return
        grids = tuple(sorted(self.grids))
        if not grids or grids[0] < 2 or len(set(grids)) < len(grids):
            raise ValueRangeError(
                f"grids must be different numbers of at least 2; got {list(self.grids)}. [2, 7] gives 2 x 2 and 7 x 7 "
                f"tiles per image; None gives all from 2 to 7."
            )
        object.__setattr__(self, "grids", grids)

    def run(self, model: Classifier, x: Inputs, label: Targets | None) -> Mapping[str, Tensor]:
        """The columns of one batch, for every grid k: tiles_k, tiles_k_loss, tiles_k_logit."""
        return self.run_and_share(model, x, label)[0]

    def run_and_share(
        self, model: Classifier, x: Inputs, label: Targets | None
    ) -> tuple[Mapping[str, Tensor], Float[Tensor, "n d"]]:
        """The columns, and the features of the same pass."""
        tiled = model.tiled(x) if isinstance(model, Tiling) else _in_two_passes(model, x)
        grids = self._fitting(tiled.grid, model.name)
        pool = pooling(tiled.grid, grids).to(tiled.features.device)
        classes = tiled.logits(0, 0).shape[-1]
        targets = as_classes(label, classes)
        parts: list[dict[str, Tensor]] = []
        block = _at_once(len(x), 4 * sum(pool.shape) * classes, _WORKED)
        for start in range(0, max(1, len(x)), step := _at_once(len(x), 4 * pool.shape[1] * classes, _COMPUTED)):
            # Every tile is classified once: the predictions of each grid are means over tiles.
            tiles = tiled.logits(start, start + step)
            tiles = tiles.to(torch.promote_types(tiles.dtype, pool.dtype))
            for first in range(0, max(1, len(tiles)), block):
                own = None if targets is None else targets[start : start + step][first : first + block]
                parts.append(self._columns(grids, pool.to(tiles) @ tiles[first : first + block], own))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, tiled.features

    def settings(self) -> Json:
        """The settings themselves; the precision of logits only where they are kept."""
        grids = None if self.grids is None else list(self.grids)
        kept = {"dtype": self.dtype} if self.keep == "logits" else {}
        return {"grids": grids, "keep": self.keep, "temperature": self.temperature, **kept}

    def _columns(
        self, grids: Sequence[int], members: Float[Tensor, "n m c"], label: Int[Tensor, "n"] | None
    ) -> dict[str, Tensor]:
        """Those of consecutive images, by name."""
        sizes = [k * k for k in grids]
        summary, loss = summarise_groups(members, sizes, label, temperature=self.temperature)
        columns = {f"tiles_{k}": one.float() for k, one in zip(grids, summary, strict=True)}
        if loss is not None:
            columns |= {f"tiles_{k}_loss": one.float() for k, one in zip(grids, loss, strict=True)}
        if self.keep == "logits":
            kept = stored(members, self.dtype, "tiles: logits", "Tiles(keep='logits', dtype='float32')")
            split = torch.split(kept, sizes, dim=1)
            columns |= {f"tiles_{k}_logit": one for k, one in zip(grids, split, strict=True)}
        return columns

    def _fitting(self, grid: tuple[int, int], model: str) -> tuple[int, ...]:
        """The grids to compute, if the feature map has as many tiles."""
        size, side = f"{grid[0]} x {grid[1]}", min(grid)
        if side < 2:
            raise ModelError(
                f"tiles: the feature map of {model} is {size} for these inputs, so there are no tiles to compare. "
                f"Use larger inputs, or a model that pools later."
            )
        if self.grids is None:
            return tuple(range(2, min(_LARGEST, side) + 1))
        if self.grids[-1] > side:
            raise ValueRangeError(
                f"tiles: grids must not be finer than the feature map, which is {size} for {model} and these inputs; "
                f"got {self.grids[-1]}. Give grids of 2 to {side}, or larger inputs."
            )
        return tuple(self.grids)


def pooling(grid: tuple[int, int], sides: Sequence[int]) -> Float[Tensor, "m t"]:
    """The matrix from tiles (h * w) to the means over k x k windows, one block of k * k rows for each k.

    >>> pooling((2, 3), [2])[0].tolist()  # the middle column is in both windows
    [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    """
    h, w = grid
    tiles = torch.eye(h * w).view(1, h * w, h, w)
    return torch.cat([F.adaptive_avg_pool2d(tiles, k).view(h * w, k * k).T for k in sides])


def _at_once(images: int, size: int, most: int) -> int:
    """How many images of a size to work on together: as many as fit, in parts of equal length."""
    parts = -(-images * size // most)
    return -(-images // parts) if parts > 1 else max(1, images)


def _in_two_passes(model: Classifier, x: Inputs) -> Tiled:
    """For a classifier whose features and feature map take a pass each."""
    tiles = model.feature_map(x)
    side = isqrt(tiles.shape[1])
    if side * side != tiles.shape[1]:
        raise ModelError(
            f"tiles: the feature map of {model.name} has {tiles.shape[1]} tiles, which form no square, and it does not "
            f"report their height and width. Give the classifier a method tiled(x), see `dubito.types.Tiling`."
        )
    return Tiled(model.features(x), (side, side), lambda start, stop: model.logits(tiles[start:stop]))
