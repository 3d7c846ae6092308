"""Does the network filter out what it does not know? Lengths and angles of features, of known images and of others.

    ||z||,    max_i cos(z, w_i),    cos(z, w_j) of all other classes j

Pearce et al. 2021 (arXiv 2106.04972), section 5, eq. 6 and Fig. 15: on foreign images features tend to be weaker (a
smaller ||z||) and in combinations of no class (a smaller largest cosine); both lower the confidence of softmax. How far
they do is the AUROC of -||z|| and of -max cos. It does not depend on how many rows are on either side, so none are left
out for balance. Cosines are with the weights as they are, biases apart; a feature of zeros has a cosine of 0 with all.

Tables are read once, in blocks. Two numbers a row stay in memory; the other cosines, one for each class and row, are
counted in bins of 0.001, and their quantiles are as exact as that.
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.errors import TableError
from dubito.explain._distribution import COSINE_BINS, Distribution, counted, distribution, edges_of
from dubito.explain._spread import cosines, directions
from dubito.explain.last_layer import last_layer
from dubito.explain.pictures import COLOURS, new_figure
from dubito.metrics import Interval, auroc, interval
from dubito.table import Table
from dubito.types import Classifier, Json, finite

_CELLS = 2**21
"""Of a block's cosines or features: 16 MB."""
_STRENGTH = ("Features", "weaker", "stronger", "strength")
_COMBINATION = (
    "Combinations of features",
    "less like those of a class",
    "more like those of a class",
    "combination",
)


@final
@dataclass(frozen=True)
class Responses:
    """How features of one table respond: their lengths, and their cosines with the classes' weights."""

    name: str
    rows: int
    norm: Distribution
    max_cosine: Distribution
    other_cosines: Distribution

    def to_json(self) -> Json:
        """Plain numbers."""
        shown = {key: getattr(self, key).to_json() for key in ("norm", "max_cosine", "other_cosines")}
        return {"name": self.name, "rows": self.rows, **shown}


@final
@dataclass(frozen=True)
class Filtering:
    """What `filtering` found: print it, draw it, or take it as JSON.

    Attributes:
        name: Whose last layer.
        classes: c.
        known: Of images like those of training.
        ood: Of images from elsewhere.
        norm_auroc: Of -||z||: how well weak features tell foreign images from known ones; one half is chance.
        max_cosine_auroc: The same of -max cos: unfamiliar combinations.
    """

    name: str
    classes: int
    known: Responses
    ood: Responses
    norm_auroc: Interval
    max_cosine_auroc: Interval

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "name": self.name,
            "classes": self.classes,
            "known": self.known.to_json(),
            "ood": self.ood.to_json(),
            "auroc": {"norm": self.norm_auroc._asdict(), "max_cosine": self.max_cosine_auroc._asdict()},
            "sentences": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """What the numbers mean."""
        return [
            _sentence(_STRENGTH, self.known.norm, self.ood.norm, self.norm_auroc),
            _sentence(_COMBINATION, self.known.max_cosine, self.ood.max_cosine, self.max_cosine_auroc),
        ]

    def figure(self) -> Any:
        """Fig. 15 as a matplotlib figure: lengths, all but the largest cosines, the largest cosines."""
        figure, axes = new_figure(1, 3, width=3.6, height=2.8)
        titles = {"norm": "||z||", "other_cosines": "all other cosines", "max_cosine": "largest cosine"}
        for panel, (key, title) in zip(axes[0], titles.items(), strict=True):
            for side, colour in ((self.known, COLOURS[0]), (self.ood, COLOURS[1])):
                shown: Distribution = getattr(side, key)
                share = shown.counts / shown.counts.sum()
                panel.stairs(share.tolist(), shown.edges.tolist(), fill=True, alpha=0.5, color=colour, label=side.name)
            sides = [getattr(side, key) for side in (self.known, self.ood)]
            low, high = min(side.low for side in sides), max(side.high for side in sides)
            panel.set(
                title=title, yticks=[], xlim=(low - 0.05 * (high - low + 1e-6), high + 0.05 * (high - low + 1e-6))
            )
            panel.spines[["left", "right", "top"]].set_visible(False)
        axes[0][0].legend(frameon=False, fontsize="small")
        return figure

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.known.name} ({self.known.rows} rows), {self.ood.name} ({self.ood.rows} rows)"]
        for title, key in (("||z||", "norm"), ("max cos", "max_cosine"), ("other cos", "other_cosines")):
            known, ood = getattr(self.known, key), getattr(self.ood, key)
            lines.append(f"{title:10} known {_told(known)}   ood {_told(ood)}")
        return "\n".join([*lines, *self.sentences()])


def filtering(
    of: Classifier | nn.Linear | Tensor,
    known: Table,
    ood: Table,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Filtering:
    """Compare lengths and angles of features, of known images and of images from elsewhere.

    Args:
        of: A classifier, its last layer, or that layer's weight (c, d).
        known: With features: images like those of training, but not the very same.
        ood: With features of the same model.
        confidence: Of the bootstrap intervals.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    >>> strong, weak = Table(feature=[[4.0, 0.0], [0.0, 3.0]]), Table(feature=[[1.0, 1.0], [0.5, 0.0]])
    >>> found = filtering(torch.eye(2), strong, weak, resamples=50)
    >>> found.norm_auroc.value, found.max_cosine_auroc.value  # of four pairs, all; two and two halves
    (1.0, 0.75)
    """
    name, layer = last_layer(of)
    unit = directions(layer.weight)
    sides = [_read(unit, table, name) for table in (known, ood)]
    positive = torch.arange(len(known) + len(ood)) >= len(known)

    def told(key: str) -> Interval:
        u = -torch.cat([side[key] for side in sides])
        return interval(auroc, u, positive, confidence=confidence, resamples=resamples, seed=seed)

    edges = {key: edges_of(torch.cat([side[key] for side in sides])) for key in ("norm", "max_cosine")}
    known_responses, ood_responses = (
        Responses(
            table.name,
            len(table),
            distribution(side["norm"], edges["norm"]),
            distribution(side["max_cosine"], edges["max_cosine"]),
            counted(side["other_counts"], side["other_sums"]),
        )
        for table, side in zip((known, ood), sides, strict=True)
    )
    return Filtering(name, len(layer.weight), known_responses, ood_responses, told("norm"), told("max_cosine"))


def _read(unit: Float[Tensor, "c d"], table: Table, name: str) -> dict[str, Tensor]:
    """One pass: lengths and largest cosines of every row; counts, sum, smallest and largest of all other cosines."""
    _check(unit, table, name)
    norm, largest = [], []
    counts = torch.zeros(COSINE_BINS, dtype=torch.float64)
    total, low, high = 0.0, 1.0, -1.0
    for batch in table.batches("feature", size=max(1, _CELLS // max(unit.shape))):
        z = finite(batch.feature.double(), f"filtering: features of {table.name}")
        cosine = cosines(z, unit)
        most, where = cosine.max(1)
        norm.append(z.norm(dim=1))
        largest.append(most)
        others = cosine.scatter(1, where[:, None], torch.inf)  # histc leaves out what is beyond its range
        counts += torch.histc(others, COSINE_BINS, -1, 1)
        total += float(cosine.sum() - most.sum())
        low = min(low, float(others.min()))
        high = max(high, float(others.scatter(1, where[:, None], -torch.inf).max()))
    sums = torch.tensor([total, low, high], dtype=torch.float64)
    return {"norm": torch.cat(norm), "max_cosine": torch.cat(largest), "other_counts": counts, "other_sums": sums}


def _check(unit: Float[Tensor, "c d"], table: Table, name: str) -> None:
    table.require("feature", by="filtering")
    if len(table) == 0:
        raise TableError(f"filtering: {table.name} has no rows. Give a table of at least one image.")
    width = table.shape("feature")[1]
    if width != unit.shape[1]:
        raise TableError(
            f"filtering: {table.name} has features of width {width}; {name} reads {unit.shape[1]}. "
            f"Give tables of the same model."
        )
    if len(unit) < 2:
        raise TableError(f"filtering: {name} has one class, and so no other cosines. Give a layer of two or more.")


def _sentence(words: tuple[str, str, str, str], known: Distribution, ood: Distribution, found: Interval) -> str:
    """Which way the foreign images lie, by the interval."""
    what, less, more, by = words
    medians = f"median {ood.median:.3g} against {known.median:.3g}"
    if found.low > 0.5:
        verdict = f"{what} of foreign images are {less}: {medians}; the network filters them by {by}"
    elif found.high < 0.5:
        verdict = f"{what} of foreign images are {more}: {medians}; the network does not filter them by {by}"
    else:
        verdict = f"{what} of foreign images are neither {less} nor {more}: {medians}; no filtering by {by} is seen"
    return f"{verdict} (AUROC {found.value:.3f}, {found.low:.3f} to {found.high:.3f})."


def _told(of: Distribution) -> str:
    low, mid, high = (of.quantiles[p] for p in (0.05, 0.5, 0.95))
    return f"{mid:.3f} [{low:.3f}, {high:.3f}]"
