"""Which neurons answer to which class, and how do foreign images look among them? Patterns of activation by class.

    m_y = mean of z over the rows of class y;   neuron j belongs to argmax_y m_yj;   neurons are shown by their class

Pearce et al. 2021 (arXiv 2106.04972), section 5, Fig. 6, and E.2, Fig. 16; the order is that of C.4.1, and within a
class by falling mean, which is ours. The paper shows pictures only. Ours come with numbers: the cosine of rows with the
mean of the other rows of their class, how long they are, and for foreign rows which class they resemble most. All in
one class with a high cosine is Fig. 16: features overlap, and no score of these features can tell the images apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.explain._spread import directions
from dubito.explain.pictures import new_figure
from dubito.table import Table
from dubito.types import Json, finite


@final
@dataclass(frozen=True)
class Patterns:
    """What `patterns` found; neurons are in the order of `order` everywhere.

    Attributes:
        known: The name of the known table.
        ood: The name of the foreign table.
        classes: (k) the labels that occur.
        names: Of these classes.
        order: (d) which neuron stands at each place.
        owner: (d) of each place, the position in `classes` that it belongs to.
        mean: (k, d) mean pattern of every class.
        ood_mean: (d) mean pattern of the foreign rows.
        examples: Of every class, some rows (at most as many as asked for, d).
        ood_examples: Some foreign rows (m, d).
        own_cosine: (k) mean cosine of the rows of a class with the mean of its other rows; NaN for a class of one
            row, which has no others.
        own_norm: (k) mean length of the rows of a class.
        ood_share: (k) which share of the foreign rows resembles this class's pattern most.
        ood_cosine: Mean cosine of foreign rows with the pattern that they resemble most.
        ood_norm: Mean length of foreign rows.
    """

    known: str
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

    def to_json(self) -> Json:
        """Plain numbers, without examples."""
        return {
            "known": self.known,
            "ood": self.ood,
            "classes": self.classes.tolist(),
            "names": self.names,
            "own_cosine": [None if math.isnan(value) else value for value in self.own_cosine.tolist()],
            "own_norm": self.own_norm.tolist(),
            "ood_share": self.ood_share.tolist(),
            "ood_cosine": self.ood_cosine,
            "ood_norm": self.ood_norm,
            "sentences": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """What the numbers mean."""
        own, length = float(self.own_cosine.nanmean()), float(self.own_norm.mean())
        most = int(self.ood_share.argmax())
        likest, beside = float(self.own_cosine[most]), f"{self.ood_cosine:.2f} with the pattern that they resemble most"
        return [
            f"Every class has one known row, so none has a cosine with others of its class; foreign rows have one of "
            f"{beside}."
            if math.isnan(own)
            else f"Known rows have a cosine of {own:.2f} with the mean of the others of their class, foreign rows one "
            f"of {beside}.",
            f"Foreign rows are {self.ood_norm / max(length, 1e-300):.2f} times as long as known ones.",
            f"{float(self.ood_share[most]):.0%} of the foreign rows resemble '{self.names[most]}' most; "
            + (
                "that class has one known row."
                if math.isnan(likest)
                else f"for known rows of that class the cosine is {likest:.2f}."
            ),
        ]

    def figure(self, classes: Sequence[int] | None = None, *, most: int = 10) -> Any:
        """Fig. 6 as a matplotlib figure: one panel a class and one for foreign rows; a row an image, a column a neuron.

        Args:
            classes: Labels to show; by default the first.
            most: How many, if none are named.
        """
        shown = _positions(self.classes, self.classes[:most].tolist() if classes is None else classes)
        panels = [(self.names[i], self.examples[i]) for i in shown] + [(self.ood, self.ood_examples)]
        figure, axes = new_figure(len(panels), 1, width=6.5, height=1.0)
        edges = ((self.owner[1:] != self.owner[:-1]).nonzero()[:, 0] + 0.5).tolist() if len(self.classes) <= 20 else []
        low, high = (float(torch.cat([rows.flatten() for _, rows in panels]).quantile(p)) for p in (0.01, 0.99))
        for panel, (title, rows) in zip(axes[:, 0], panels, strict=True):
            panel.imshow(rows.numpy(), aspect="auto", cmap="magma", vmin=min(low, 0.0), vmax=max(high, 1e-6))
            panel.set(xticks=[], yticks=[])
            panel.set_ylabel(_short(title), rotation=0, ha="right", va="center", fontsize="small")
            for edge in edges:
                panel.axvline(edge, color="white", linewidth=0.6)
        return figure

    def __str__(self) -> str:
        return "\n".join([f"{self.known} ({len(self.classes)} classes) against {self.ood}", *self.sentences()])


def patterns(known: Table, ood: Table, *, examples: int = 8, seed: int = 0) -> Patterns:
    """Mean patterns of every class, rows of each, and foreign rows, with the neurons grouped by class.

    Args:
        known: With feature and label.
        ood: With features of the same model.
        examples: Rows of each class, and of the foreign table, drawn at random.
        seed: Of the draw.

    >>> known = Table(feature=[[0.0, 4.0], [0.0, 2.0], [3.0, 0.0]], label=[0, 0, 1])
    >>> found = patterns(known, Table(feature=[[1.0, 1.0]]))
    >>> found.order.tolist(), found.mean.tolist()  # neuron 1 belongs to class 0 and is shown first
    ([1, 0], [[3.0, 0.0], [0.0, 3.0]])
    """
    _check(known, ood, examples)
    classes, mean, count = _means(known)
    draw = torch.Generator().manual_seed(seed)
    chosen = _examples(known, classes, examples, draw)
    foreign = ood.select("feature").rows(torch.randperm(len(ood), generator=draw)[:examples].sort().values).feature
    own_cosine, own_norm = _own(known, classes, mean, count)
    ood_mean, ood_share, ood_cosine, ood_norm = _resembled(ood, mean)
    names = known.label_names
    owner = mean.argmax(0)
    order = _grouped(owner, mean)
    return Patterns(
        known=known.name,
        ood=ood.name,
        classes=classes,
        names=[str(y) if names is None else names[y] for y in classes.tolist()],
        order=order,
        owner=owner[order],
        mean=mean[:, order],
        ood_mean=ood_mean[order],
        examples=[rows[:, order] for rows in chosen],
        ood_examples=foreign[:, order],
        own_cosine=own_cosine,
        own_norm=own_norm,
        ood_share=ood_share,
        ood_cosine=ood_cosine,
        ood_norm=ood_norm,
    )


def _grouped(owner: Int64[Tensor, "d"], mean: Float[Tensor, "k d"]) -> Int64[Tensor, "d"]:
    """Neurons by their class, within a class by falling mean; two stable sorts."""
    by_mean = mean.amax(0).argsort(descending=True, stable=True)
    return by_mean[owner[by_mean].argsort(stable=True)]


def _means(table: Table) -> tuple[Int64[Tensor, "k"], Float[Tensor, "k d"], Float[Tensor, "k"]]:
    """The labels that occur, the mean feature of each, and how many rows it has."""
    classes = torch.tensor(sorted(set(table.label.tolist())))
    if int(classes[0]) < 0:
        raise TableError(f"patterns: labels of {table.name} must not be negative; got {int(classes[0])}. Leave it out.")
    sums = torch.zeros(len(classes), table.shape("feature")[1], dtype=torch.float64)
    count = torch.zeros(len(classes), dtype=torch.float64)
    for batch in table.batches("feature", "label"):
        z, at = _finite(batch, table), torch.searchsorted(classes, batch.label)
        sums.index_add_(0, at, z)
        count += torch.bincount(at, minlength=len(classes))
    return classes, sums / count[:, None], count


def _own(
    table: Table, classes: Int64[Tensor, "k"], mean: Float[Tensor, "k d"], count: Float[Tensor, "k"]
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """By class, the mean cosine of its rows with the mean of the others, and their mean length.

    A row left in its own mean would resemble it for that reason alone, the more the fewer rows there are.
    """
    sums = torch.zeros(2, len(classes), dtype=torch.float64)
    for batch in table.batches("feature", "label"):
        z, at = batch.feature.double(), torch.searchsorted(classes, batch.label)
        others = count[at, None] * mean[at] - z
        sums[0].index_add_(0, at, (directions(z) * directions(others)).sum(1))
        sums[1].index_add_(0, at, z.norm(dim=1))
    return torch.where(count > 1, sums[0] / count, torch.nan), sums[1] / count


def _resembled(table: Table, mean: Float[Tensor, "k d"]) -> tuple[Tensor, Float[Tensor, "k"], float, float]:
    """Of foreign rows the mean, the share by most similar pattern, that cosine and the length, on average."""
    total, share = torch.zeros(mean.shape[1], dtype=torch.float64), torch.zeros(len(mean), dtype=torch.float64)
    cosine, length, unit = 0.0, 0.0, directions(mean)
    for batch in table.batches("feature"):
        z = _finite(batch, table)
        most, at = (directions(z) @ unit.T).max(1)
        total += z.sum(0)
        share += torch.bincount(at, minlength=len(mean))
        cosine += float(most.sum())
        length += float(z.norm(dim=1).sum())
    n = len(table)
    return total / n, share / n, cosine / n, length / n


def _examples(
    table: Table, classes: Int64[Tensor, "k"], examples: int, draw: torch.Generator
) -> list[Float[Tensor, "_ d"]]:
    """Some rows of every class, in the order of the table."""
    label = table.label
    order = torch.randperm(len(label), generator=draw)
    by_class = order[label[order].argsort(stable=True)]
    starts = torch.searchsorted(label[by_class], classes).tolist()
    ends = [*starts[1:], len(label)]
    chosen = [by_class[start : min(start + examples, end)] for start, end in zip(starts, ends, strict=True)]
    return [table.select("feature").rows(rows.sort().values).feature for rows in chosen]


def _short(name: str, most: int = 18) -> str:
    """The first of a class's names, or the end of a path, so that a picture has room for itself."""
    name = name.partition(",")[0].rstrip("/").rpartition("/")[2]
    return name if len(name) <= most else name[: most - 1] + "…"


def _positions(classes: Int64[Tensor, "k"], asked: Sequence[int]) -> list[int]:
    known = {y: i for i, y in enumerate(classes.tolist())}
    missing = [y for y in asked if y not in known]
    if missing or not asked:
        raise ValueRangeError(
            f"figure of patterns: classes must be labels that occur; got {list(missing) or 'none'}. "
            f"There are {', '.join(map(str, list(known)[:10]))}{' and more' if len(known) > 10 else ''}."
        )
    return [known[y] for y in asked]


def _check(known: Table, ood: Table, examples: int) -> None:
    known.require("feature", "label", by="patterns")
    ood.require("feature", by="patterns")
    for table in (known, ood):
        if len(table) == 0:
            raise TableError(f"patterns: {table.name} has no rows. Give a table of at least one image.")
    width, other = known.shape("feature")[1], ood.shape("feature")[1]
    if width != other:
        raise TableError(
            f"patterns: features must be of one model; {known.name} has {width}, {ood.name} {other}. Extract both anew."
        )
    if examples < 1:
        raise ValueRangeError(f"patterns: examples must be at least 1; got {examples}. 8 are usual.")


def _finite(batch: Table, table: Table) -> Float[Tensor, "n d"]:
    return finite(batch.feature.double(), f"patterns: features of {table.name}")
