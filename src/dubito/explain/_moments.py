"""Many numbers in a few: moments of a list or of the cosines of all pairs of rows, histograms, and sums by class.

Cosines of c rows are c (c-1) / 2 numbers, so they are counted in blocks and never held at once.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.table import Table
from dubito.types import finite

_ROWS = 512
_BINS = 400


class Moments(NamedTuple):
    """Many numbers in four, and the skewness: positive where a few are far above the rest."""

    mean: float
    std: float
    low: float
    high: float
    skew: float


def moments(values: Float[Tensor, "n"]) -> Moments:
    """The moments of a list of numbers."""
    shift = float(values.mean())
    return _of_powers(_powers(values.double() - shift), shift, float(values.min()), float(values.max()))


def pair_cosines(weight: Float[Tensor, "c d"]) -> tuple[Moments, tuple[Tensor, Tensor]]:
    """Cosines of all pairs, in blocks: their moments around the optimum, and a histogram."""
    unit, shift = directions(weight), -1 / (len(weight) - 1)
    powers, counts = torch.zeros(4, dtype=torch.float64), torch.zeros(_BINS, dtype=torch.float64)
    low, high = math.inf, -math.inf
    for start in range(0, len(unit) - 1, _ROWS):
        block = unit[start : start + _ROWS] @ unit[start:].T
        cosine = block[torch.ones_like(block, dtype=torch.bool).triu(1)].clamp(-1, 1)
        powers += _powers(cosine - shift)
        counts += torch.histc(cosine, _BINS, -1, 1)
        low, high = min(low, float(cosine.min())), max(high, float(cosine.max()))
    edges = torch.linspace(-1, 1, _BINS + 1, dtype=torch.float64)
    return _of_powers(powers, shift, low, high), ((edges[1:] + edges[:-1]) / 2, counts)


def histogram(values: Float[Tensor, "n"], bins: int = 40) -> tuple[Tensor, Tensor]:
    """The middles of equal bins, and how many values each holds."""
    low, high = float(values.min()), float(values.max())
    edges = bin_edges(low, high, bins, room=1 / 20)
    return (edges[1:] + edges[:-1]) / 2, torch.histogram(values, edges).hist


def bin_edges(low: float, high: float, bins: int, *, room: float) -> Float[Tensor, "b1"]:
    """Edges of equal bins from `low` to `high`, with a share of room on either side; also where the two are equal."""
    room *= max(high - low, 1e-6 * max(abs(low), abs(high), 1.0))
    return torch.linspace(low - room, high + room, bins + 1, dtype=torch.float64)


def directions(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Every row at length one; a row of zeros stays."""
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return unit


def cosines(z: Float[Tensor, "n d"], unit: Float[Tensor, "c d"]) -> Float[Tensor, "n c"]:
    """With unit vectors; rows of zeros have none and give 0."""
    cosine: Tensor = (z @ unit.T) / z.norm(dim=1).clamp(min=1e-300)[:, None]
    return cosine.clamp(-1, 1)


def class_sums(
    table: Table, classes: Int[Tensor, "k"], *, by: str, origin: Tensor | float = 0.0
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k"], float]:
    """The sum of the features of each class, its number of rows, and the sum of all squares, in one pass.

    Args:
        table: With feature and label.
        classes: The labels, rising; all that occur must be among them.
        by: The function that the user called.
        origin: What to subtract from every feature; sums around a common mean lose no digits to it.
    """
    total = torch.zeros(len(classes), table.shape("feature")[1], dtype=torch.float64)
    count, squares = torch.zeros(len(classes), dtype=torch.float64), 0.0
    for batch in table.batches("feature", "label"):
        z = finite(batch.feature.double(), f"{by}: features of {table.name}") - origin
        place = torch.searchsorted(classes, batch.label)
        total.index_add_(0, place, z)
        count += torch.bincount(place, minlength=len(classes))
        squares += float(z.square().sum())
    return total, count, squares


def _powers(off: Float[Tensor, "n"]) -> Float[Tensor, "4"]:
    """The count, and the sums of the first three powers."""
    return torch.stack([off.new_tensor(len(off)), off.sum(), off.square().sum(), off.pow(3).sum()])


def _of_powers(powers: Float[Tensor, "4"], shift: float, low: float, high: float) -> Moments:
    """Moments from the count and the sums of the first three powers around a shift."""
    first, second, third = (powers[1:] / powers[0]).tolist()
    std = math.sqrt(max(second - first**2, 0.0))
    cubed = third - 3 * first * second + 2 * first**3
    return Moments(shift + first, std, low, high, cubed / std**3 if std > 1e-9 else 0.0)
