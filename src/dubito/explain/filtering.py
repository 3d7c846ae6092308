"""Does the network filter out what it does not know? Lengths and angles of features, in and out.

    ||z||,    max_i cos(z, w_i),    cos(z, w_j) of all other classes j

Pearce et al. 2021 (arXiv 2106.04972), section 5, eq. 6 and Fig. 15: on OOD images features tend to be weaker (a smaller
||z||) and in combinations of no class (a smaller largest cosine); both lower the confidence of softmax. How far they do
is the AUROC of -||z|| and of -max cos, on all rows. Cosines are with the weights as they are, without biases; a feature
of zeros has a cosine of 0 with all. Tables are read once, in blocks; the other cosines, one for each class and row, are
counted in bins of 0.001, and their quantiles are as exact as that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from dubito.errors import TableError
from dubito.explain.last_layer import cosines, directions, last_layer
from dubito.explain.pictures import COLOURS, bin_edges, new_figure
from dubito.metrics import Interval, auroc, interval, join_ood
from dubito.result import Axes, Result
from dubito.table import Table
from dubito.types import Classifier, finite
from dubito.validate import check_bootstrap, check_rows, check_same_model

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_CELLS = 2**21
"""Of a block's cosines or features: 16 MB."""
_COSINE_BINS = 2000
"""Of values between -1 and 1 that are counted: a thousandth wide."""
_PER_BAR = 20
"""So many of those make one bar of the histogram."""
_BINS = 60
_QUANTITIES = {"norm": "||z||", "other_cosines": "all other cosines", "max_cosine": "largest cosine"}
_STRENGTH = ("Features", "weaker", "stronger", "strength")
_COMBINATION = ("Combinations of features", "less like those of a class", "more like those of a class", "combination")


@final
@dataclass(frozen=True)
class Distribution:
    """Many numbers as a few.

    Attributes:
        mean: The mean.
        low: The smallest number.
        high: The largest number.
        quantiles: By probability; that of one half is the median.
        edges: The edges of the histogram's bins.
        counts: How many numbers lie in each bin.
    """

    mean: float
    low: float
    high: float
    quantiles: dict[float, float]
    edges: Float64[Tensor, "b1"] = field(compare=False)
    counts: Float64[Tensor, "b"] = field(compare=False)

    @property
    def median(self) -> float:
        """One half lies below."""
        return self.quantiles[0.5]

    @property
    def central(self) -> Interval:
        """The median, and the range of the central 90 %."""
        return Interval(self.median, self.quantiles[0.05], self.quantiles[0.95], 0.9)


class Responses(NamedTuple):
    """How features of one table respond: their lengths, and their cosines with the classes' weights."""

    name: str
    rows: int
    norm: Distribution
    max_cosine: Distribution
    other_cosines: Distribution


@final
@dataclass(frozen=True)
class Filtering(Result):
    """What `filtering` returns: print it, plot it, or take it as JSON.

    Attributes:
        name: The name of the model or layer.
        classes: The number of classes, c.
        in_distribution: The responses to in-distribution images.
        ood: The responses to out-of-distribution images.
        norm_auroc: The AUROC of -||z||: how well weak features detect OOD images; one half is chance.
        max_cosine_auroc: The AUROC of -max cos: unfamiliar combinations.
    """

    titles: ClassVar[Mapping[str, str]] = {
        "of": "",
        "in_distribution": "in-distribution",
        "ood": "OOD",
        "auroc": "AUROC",
    }

    name: str
    classes: int
    in_distribution: Responses
    ood: Responses
    norm_auroc: Interval
    max_cosine_auroc: Interval

    def title(self) -> str:
        """The layer and the two tables."""
        tables = (f"{side.name} ({side.rows} rows)" for side in (self.in_distribution, self.ood))
        return f"{self.name}: {', '.join(tables)}"

    def records(self) -> list[dict[str, Any]]:
        """One row per quantity: median and central 90 % on either side, and the AUROC."""
        return [
            {
                "of": title,
                "in_distribution": getattr(self.in_distribution, key).central,
                "ood": getattr(self.ood, key).central,
                "auroc": getattr(self, f"{key}_auroc", None),
            }
            for key, title in _QUANTITIES.items()
        ]

    def findings(self) -> list[str]:
        """What the numbers mean."""
        sentences = []
        for key, (what, less, more, by) in {"norm": _STRENGTH, "max_cosine": _COMBINATION}.items():
            inside, ood = (getattr(side, key).median for side in (self.in_distribution, self.ood))
            value: Interval = getattr(self, f"{key}_auroc")
            which, how = f"neither {less} nor {more}", f"no filtering by {by} is seen"
            if value.low > 0.5:
                which, how = less, f"the network filters them by {by}"
            elif value.high < 0.5:
                which, how = more, f"the network does not filter them by {by}"
            sentences.append(
                f"{what} of OOD images are {which}: median {ood:.3g} against {inside:.3g}; {how} "
                f"(AUROC {value.value:.3f}, {value.low:.3f} to {value.high:.3f})."
            )
        return sentences

    def plot(self) -> list[Axes]:
        """Fig. 15: histograms of lengths, of all but the largest cosines, and of the largest cosines."""
        _, grid = new_figure(1, 3, width=3.6, height=2.8)
        for panel, (key, title) in zip(grid[0], _QUANTITIES.items(), strict=True):
            sides = [(side.name, getattr(side, key)) for side in (self.in_distribution, self.ood)]
            for (name, shown), colour in zip(sides, COLOURS, strict=False):
                share = shown.counts / shown.counts.sum()
                panel.stairs(share.tolist(), shown.edges.tolist(), fill=True, alpha=0.5, color=colour, label=name)
            low, high = min(shown.low for _, shown in sides), max(shown.high for _, shown in sides)
            room = 0.05 * (high - low + 1e-6)
            panel.set(title=title, yticks=[], xlim=(low - room, high + room))
            panel.spines[["left", "right", "top"]].set_visible(False)
        grid[0][0].legend(frameon=False, fontsize="small")
        return list(grid[0])


def filtering(
    of: Classifier | str | nn.Linear | Tensor,
    table: Table,
    ood: Table,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Filtering:
    """Compare lengths and angles of features, of in-distribution and of out-of-distribution images.

    Args:
        of: A classifier or its name, its last layer, or that layer's weight (c, d).
        table: In-distribution images with features, but not those that were trained on.
        ood: Out-of-distribution images with features of the same model.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the bootstrap.

    >>> strong, weak = Table(feature=[[4.0, 0.0], [0.0, 3.0]]), Table(feature=[[1.0, 1.0], [0.5, 0.0]])
    >>> result = filtering(torch.eye(2), strong, weak, resamples=50)
    >>> result.norm_auroc.value, result.max_cosine_auroc.value  # of four pairs, all; two and two halves
    (1.0, 0.75)
    """
    check_bootstrap(by="filtering", confidence=confidence, resamples=resamples, seed=seed)
    name, layer = last_layer(of)
    unit = directions(layer.weight)
    if len(unit) < 2:
        raise TableError(f"filtering: {name} has one class, and so no other cosines. Pass a layer of two or more.")
    for one in (table, ood):
        check_rows(one, by="filtering")
        layer.check_table(one, by="filtering", name=name)
    check_same_model(table, {"ood": ood}, by="filtering")
    sides = [_read(unit, one) for one in (table, ood)]
    norms, largest, others = zip(*sides, strict=True)
    bootstrap = partial(interval, auroc, confidence=confidence, resamples=resamples, seed=seed)
    aurocs = [bootstrap(*join_ood(-inside, -outside)) for inside, outside in (norms, largest)]
    of_sides = zip(_distributions(norms), _distributions(largest), others, strict=True)
    inside, outside = (Responses(one.name, len(one), *of) for one, of in zip((table, ood), of_sides, strict=True))
    return Filtering(name, len(layer.weight), inside, outside, *aurocs)


def _read(unit: Float[Tensor, "c d"], table: Table) -> tuple[Tensor, Tensor, Distribution]:
    """One pass: lengths and largest cosines of every row, and the distribution of all other cosines.

    These are counted: a quantile is the upper edge of the bin in which it lies.
    """
    norm, largest = [], []
    counts, total, low, high = torch.zeros(_COSINE_BINS, dtype=torch.float64), 0.0, 1.0, -1.0
    for batch in table.batches("feature", size=max(1, _CELLS // max(unit.shape))):
        z = finite(batch.feature.double(), f"filtering: features of {table.name}")
        cosine = cosines(z, unit)
        most, where = cosine.max(1)
        norm.append(z.norm(dim=1))
        largest.append(most)
        others = cosine.scatter(1, where[:, None], torch.inf)  # histc leaves out what is beyond its range
        counts += torch.histc(others, _COSINE_BINS, -1, 1)
        total += float(cosine.sum() - most.sum())
        low = min(low, float(others.min()))
        high = max(high, float(others.scatter(1, where[:, None], -torch.inf).max()))
    edges, running = torch.linspace(-1, 1, _COSINE_BINS + 1, dtype=torch.float64), counts.cumsum(0)
    rank = torch.tensor(QUANTILES, dtype=torch.float64) * running[-1]
    at = edges[1:][torch.searchsorted(running, rank).clamp(max=_COSINE_BINS - 1)].clamp(low, high)
    quantiles, bars = dict(zip(QUANTILES, at.tolist(), strict=True)), counts.view(-1, _PER_BAR).sum(1)
    other = Distribution(total / float(running[-1]), low, high, quantiles, edges[::_PER_BAR].clone(), bars)
    return torch.cat(norm), torch.cat(largest), other


def _distributions(sides: Sequence[Float64[Tensor, "_"]]) -> list[Distribution]:
    """The exact distribution of the values of either side, in bins that hold those of both."""
    edges, distributions = bin_edges(torch.cat(list(sides)), _BINS, room=1 / 100), []
    for values in sides:
        quantiles = dict(zip(QUANTILES, np.quantile(values.numpy(), QUANTILES).tolist(), strict=True))
        mean, low, high = float(values.mean()), float(values.min()), float(values.max())
        distributions.append(Distribution(mean, low, high, quantiles, edges, torch.histogram(values, edges).hist))
    return distributions
