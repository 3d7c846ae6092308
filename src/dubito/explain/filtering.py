"""Does the network filter out what it does not know? Lengths, angles and patterns of features, in and out.

    ||z||,    max_i cos(z, w_i),    cos(z, w_j) of all other classes j                                   `filtering`
    m_y = mean of z over the rows of class y;   neuron j belongs to argmax_y m_yj                         `patterns`

Pearce et al. 2021 (arXiv 2106.04972), section 5, eq. 6 and Fig. 15: on OOD images features tend to be weaker (a smaller
||z||) and in combinations of no class (a smaller largest cosine); both lower the confidence of softmax. How far they do
is the AUROC of -||z|| and of -max cos, on all rows. Cosines are with the weights as they are, without biases; a feature
of zeros has a cosine of 0 with all. Tables are read once, in blocks; the other cosines, one for each class and row, are
counted in bins of 0.001, and their quantiles are as exact as that.

Patterns, Figs 6 and 16, show neurons by their class, in the order of C.4.1. Ours are the order within a class, by
falling mean, and the numbers: the cosine of rows with the mean of the others of their class, their length, and which
class OOD rows resemble most. All in one class with a high cosine is Fig. 16: no score of these features separates them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from dubito.errors import TableError, ValueRangeError
from dubito.explain.last_layer import cosines, directions, last_layer
from dubito.explain.pictures import COLOURS, bin_edges, new_figure
from dubito.explain.structure import class_sums
from dubito.metrics import Interval, auroc, interval, join_ood
from dubito.result import Axes, Result, plain
from dubito.table import Table
from dubito.types import Classifier, finite
from dubito.validate import check_number, check_rows, check_same_model

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
    of: Classifier | nn.Linear | Tensor,
    table: Table,
    ood: Table,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Filtering:
    """Compare lengths and angles of features, of in-distribution and of out-of-distribution images.

    Args:
        of: A classifier, its last layer, or that layer's weight (c, d).
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
    name, layer = last_layer(of)
    unit = directions(layer.weight)
    if len(unit) < 2:
        raise TableError(f"filtering: {name} has one class, and so no other cosines. Pass a layer of two or more.")
    for one in (table, ood):
        check_rows(one, by="filtering")
        layer.check_table(one, by="filtering", name=name)
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


@final
@dataclass(frozen=True)
class Patterns(Result):
    """What `patterns` returns; neurons are in the order of `order` everywhere.

    Attributes:
        in_distribution: The name of the in-distribution table.
        ood: The name of the OOD table.
        classes: (k) the labels that occur.
        names: The names of these classes.
        order: (d) which neuron stands at each place.
        owner: (d) of each place, the position in `classes` that it belongs to.
        mean: (k, d) mean pattern of every class.
        ood_mean: (d) mean pattern of the OOD rows.
        examples: Of every class, up to `examples` rows (_, d).
        ood_examples: Some OOD rows (m, d).
        own_cosine: (k) mean cosine of the rows of a class with the mean of its other rows; NaN for a single row.
        own_norm: (k) mean length of the rows of a class.
        ood_share: (k) which share of the OOD rows resembles this class's pattern most.
        ood_cosine: Mean cosine of OOD rows with the pattern that they resemble most.
        ood_norm: Mean length of OOD rows.
    """

    text_rows: ClassVar[int | None] = 10
    titles: ClassVar[Mapping[str, str]] = {
        "own_cosine": "cosine with its class",
        "own_norm": "length",
        "ood_share": "share of OOD rows",
    }

    in_distribution: str
    ood: str
    classes: Int64[Tensor, "k"]
    names: list[str]
    order: Int64[Tensor, "d"] = field(repr=False)
    owner: Int64[Tensor, "d"] = field(repr=False)
    mean: Float[Tensor, "k d"] = field(repr=False)
    ood_mean: Float[Tensor, "d"] = field(repr=False)
    examples: list[Float[Tensor, "_ d"]] = field(repr=False)
    ood_examples: Float[Tensor, "m d"] = field(repr=False)
    own_cosine: Float[Tensor, "k"]
    own_norm: Float[Tensor, "k"]
    ood_share: Float[Tensor, "k"]
    ood_cosine: float
    ood_norm: float

    def title(self) -> str:
        """The two tables."""
        return f"{self.in_distribution} ({len(self.classes)} classes) against {self.ood}"

    def records(self) -> list[dict[str, Any]]:
        """One row per class, those that OOD rows resemble most first."""
        columns = {"class": self.names, **{key: plain(getattr(self, key)) for key in self.titles}}
        order = self.ood_share.argsort(descending=True, stable=True).tolist()
        return [{key: values[i] for key, values in columns.items()} for i in order]

    def findings(self) -> list[str]:
        """What the numbers mean."""
        own, length = float(self.own_cosine.nanmean()), float(self.own_norm.mean())
        most = int(self.ood_share.argmax())
        own_most, beside = float(self.own_cosine[most]), f"{self.ood_cosine:.2f} with the pattern they resemble most"
        return [
            f"Every class has one row, so none has a cosine with others of its class; OOD rows have one of {beside}."
            if math.isnan(own)
            else f"Rows have a cosine of {own:.2f} with the mean of others of their class, OOD rows one of {beside}.",
            f"OOD rows are {self.ood_norm / max(length, 1e-300):.2f} times as long as in-distribution rows.",
            f"{float(self.ood_share[most]):.0%} of the OOD rows resemble '{self.names[most]}' most; "
            + (
                "that class has one row."
                if math.isnan(own_most)
                else f"for rows of that class the cosine is {own_most:.2f}."
            ),
        ]

    def plot(self, classes: Sequence[int] | None = None, *, most: int = 10) -> list[Axes]:
        """Fig. 6: one panel per class and one for OOD rows; one row per image, one column per neuron.

        Args:
            classes: Labels to show; by default the first.
            most: How many classes to show if none are named.
        """
        place = {y: i for i, y in enumerate(self.classes.tolist())}
        shown = list(place)[:most] if classes is None else classes
        if not shown or any(y not in place for y in shown):
            raise ValueRangeError(
                f"Patterns.plot: classes must be labels that occur, such as {list(place)[:10]}; got {list(shown)}."
            )
        panels = [(self.names[place[y]], self.examples[place[y]]) for y in shown] + [(self.ood, self.ood_examples)]
        _, grid = new_figure(len(panels), 1, width=6.5, height=1.0)
        edges = ((self.owner[1:] != self.owner[:-1]).nonzero()[:, 0] + 0.5).tolist() if len(self.classes) <= 20 else []
        low, high = (float(torch.cat([rows.flatten() for _, rows in panels]).quantile(p)) for p in (0.01, 0.99))
        for panel, (title, rows) in zip(grid[:, 0], panels, strict=True):
            panel.imshow(rows.numpy(), aspect="auto", cmap="magma", vmin=min(low, 0.0), vmax=max(high, 1e-6))
            panel.set(xticks=[], yticks=[])
            # The first of a class's names, or the end of a path, so that a picture has room for itself.
            name = title.partition(",")[0].rstrip("/").rpartition("/")[2]
            short = name if len(name) <= 18 else name[:17] + "…"
            panel.set_ylabel(short, rotation=0, ha="right", va="center", fontsize="small")
            for edge in edges:
                panel.axvline(edge, color="white", linewidth=0.6)
        return list(grid[:, 0])


def patterns(table: Table, ood: Table, *, examples: int = 8, seed: int = 0) -> Patterns:
    """Mean patterns of every class, rows of each, and OOD rows, with the neurons grouped by class.

    Args:
        table: In-distribution images, with feature and label.
        ood: Out-of-distribution images, with features of the same model.
        examples: How many rows of each class, and of the OOD table, to draw at random.
        seed: Seed of the draw.

    >>> table = Table(feature=[[0.0, 4.0], [0.0, 2.0], [3.0, 0.0]], label=[0, 0, 1])
    >>> result = patterns(table, Table(feature=[[1.0, 1.0]]))
    >>> result.order.tolist(), result.mean.tolist()  # neuron 1 belongs to class 0 and is shown first
    ([1, 0], [[3.0, 0.0], [0.0, 3.0]])
    """
    for what, one, columns in (("table", table, ("feature", "label")), ("ood", ood, ("feature",))):
        check_rows(one, by="patterns", what=what)
        one.require(*columns, by="patterns")
    check_same_model(table, {"ood": ood}, by="patterns")
    check_number(examples, "[1, inf)", by="patterns", what="examples", whole=True, hint="8 are usual.")
    classes = torch.tensor(sorted(set(table.label.tolist())))
    lowest, what = int(classes[0]), f"every label of {table.name}"
    check_number(lowest, "[0, inf)", by="patterns", what=what, hint="Leave out the others.", error=TableError)
    total, count, _ = class_sums(table, classes, by="patterns")
    mean = total / count[:, None]
    draw = torch.Generator().manual_seed(seed)
    chosen = _examples(table, count, examples, draw)
    ood_rows = torch.randperm(len(ood), generator=draw)[:examples].sort().values
    own_cosine, own_norm = _own(table, classes, mean, count)
    ood_mean, ood_share, ood_cosine, ood_norm = _resembled(ood, mean)
    names = table.label_names
    owner, by_mean = mean.argmax(0), mean.amax(0).argsort(descending=True, stable=True)
    order = by_mean[owner[by_mean].argsort(stable=True)]  # by class, within a class by falling mean
    return Patterns(
        in_distribution=table.name,
        ood=ood.name,
        classes=classes,
        names=[str(y) if names is None else names[y] for y in classes.tolist()],
        order=order,
        owner=owner[order],
        mean=mean[:, order],
        ood_mean=ood_mean[order],
        examples=[rows[:, order] for rows in chosen],
        ood_examples=ood.select("feature").rows(ood_rows).feature[:, order],
        own_cosine=own_cosine,
        own_norm=own_norm,
        ood_share=ood_share,
        ood_cosine=ood_cosine,
        ood_norm=ood_norm,
    )


def _own(
    table: Table, classes: Int64[Tensor, "k"], mean: Float[Tensor, "k d"], count: Float[Tensor, "k"]
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """By class, the mean cosine of its rows with the mean of the others, and their mean length."""
    sums = torch.zeros(2, len(classes), dtype=torch.float64)
    for batch in table.batches("feature", "label"):
        z, at = batch.feature.double(), torch.searchsorted(classes, batch.label)
        # A row left in its own mean would resemble it for that reason alone.
        others = count[at, None] * mean[at] - z
        sums[0].index_add_(0, at, (directions(z) * directions(others)).sum(1))
        sums[1].index_add_(0, at, z.norm(dim=1))
    return torch.where(count > 1, sums[0] / count, torch.nan), sums[1] / count


def _resembled(table: Table, mean: Float[Tensor, "k d"]) -> tuple[Tensor, Float[Tensor, "k"], float, float]:
    """The mean of OOD rows, their share by most similar pattern, and on average that cosine and their length."""
    total, share = torch.zeros(mean.shape[1], dtype=torch.float64), torch.zeros(len(mean), dtype=torch.float64)
    cosine, length, unit = 0.0, 0.0, directions(mean)
    for batch in table.batches("feature"):
        z = finite(batch.feature.double(), f"patterns: features of {table.name}")
        most, at = (directions(z) @ unit.T).max(1)
        total += z.sum(0)
        share += torch.bincount(at, minlength=len(mean))
        cosine += float(most.sum())
        length += float(z.norm(dim=1).sum())
    n = len(table)
    return total / n, share / n, cosine / n, length / n


def _examples(
    table: Table, count: Float[Tensor, "k"], examples: int, draw: torch.Generator
) -> list[Float[Tensor, "_ d"]]:
    """Some rows of every class, in the order of the table."""
    order, features = torch.randperm(len(table), generator=draw), table.select("feature")
    by_class = order[table.label[order].argsort(stable=True)].tensor_split(count.cumsum(0)[:-1].long())
    return [features.rows(rows[:examples].sort().values).feature for rows in by_class]
