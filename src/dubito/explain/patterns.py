"""Patterns of activation: which neurons respond to which class, and which class OOD images resemble.

    m_y = mean of z over the rows of class y;   neuron j belongs to argmax_y m_yj

Pearce et al. 2021 (arXiv 2106.04972), Figs 6 and 16, show neurons by their class, in the order of C.4.1. Ours are the
order within a class, by falling mean, and the numbers: the cosine of rows with the mean of the others of their class,
their length, and which class OOD rows resemble most. All in one class with a high cosine is Fig. 16: no score of these
features separates them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.explain.last_layer import directions
from dubito.explain.pictures import new_figure
from dubito.explain.structure import class_sums
from dubito.result import Axes, Result, plain
from dubito.table import Table
from dubito.types import finite
from dubito.validate import check_number, check_rows, check_same_model


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
