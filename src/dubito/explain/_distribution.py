"""Many numbers as a few: mean, quantiles and a histogram, of values in memory or of values that were only counted."""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.types import Json

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COSINE_BINS = 2000
"""Of values between -1 and 1 that are counted: a thousandth wide."""
_SHOWN = 20
"""Of those, so many make one bar of the histogram."""
_BINS = 60


@final
@dataclass(frozen=True)
class Distribution:
    """Many numbers as a few.

    Attributes:
        mean: Of all.
        low: The smallest.
        high: The largest.
        quantiles: By probability: of one half, the median.
        edges: Of the histogram's bins.
        counts: How many numbers lie in each bin.
    """

    mean: float
    low: float
    high: float
    quantiles: dict[float, float]
    edges: Float64[Tensor, "b1"] = field(repr=False, compare=False)
    counts: Float64[Tensor, "b"] = field(repr=False, compare=False)

    @property
    def median(self) -> float:
        """One half lies below."""
        return self.quantiles[0.5]

    def to_json(self) -> Json:
        """Plain numbers, the histogram among them."""
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "quantiles": {f"{p:g}": value for p, value in self.quantiles.items()},
            "edges": [round(edge, 6) for edge in self.edges.tolist()],
            "counts": [int(count) for count in self.counts.tolist()],
        }


def edges_of(values: Float64[Tensor, "n"]) -> Float64[Tensor, "b1"]:
    """Of bins that hold all values, with room for equal ones."""
    low, high = float(values.min()), float(values.max())
    room = max(high - low, 1e-6 * max(abs(low), abs(high), 1.0))
    return torch.linspace(low - room / 100, high + room / 100, _BINS + 1, dtype=torch.float64)


def distribution(values: Float64[Tensor, "n"], edges: Float64[Tensor, "b1"]) -> Distribution:
    """Of values in memory, exact; torch.quantile takes no more than 16 million, so they are sorted."""
    ordered = values.sort().values
    place = torch.tensor(QUANTILES, dtype=torch.float64) * (len(ordered) - 1)
    below, above = ordered[place.floor().long()], ordered[place.ceil().long()]
    at = below + (place - place.floor()) * (above - below)
    counts = torch.histogram(values, edges).hist
    return Distribution(
        float(values.mean()),
        float(ordered[0]),
        float(ordered[-1]),
        dict(zip(QUANTILES, at.tolist(), strict=True)),
        edges,
        counts,
    )


def counted(counts: Float64[Tensor, "b"], sums: Float64[Tensor, "3"]) -> Distribution:
    """Of counted values: a quantile is the upper edge of the bin in which it lies."""
    edges = torch.linspace(-1, 1, len(counts) + 1, dtype=torch.float64)
    running = counts.cumsum(0)
    total, low, high = sums.tolist()
    rank = torch.tensor(QUANTILES, dtype=torch.float64) * float(running[-1])
    at = edges[1:][torch.searchsorted(running, rank).clamp(max=len(counts) - 1)].clamp(low, high)
    return Distribution(
        total / float(running[-1]),
        low,
        high,
        dict(zip(QUANTILES, at.tolist(), strict=True)),
        edges[::_SHOWN].clone(),
        counts.view(-1, _SHOWN).sum(1),
    )
