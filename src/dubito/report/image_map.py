"""A map of a table: similar images lie together, and uncertain ones are larger and more transparent.

    share    s = (u - low) / (high - low), at least 0 and at most 1      low, high: the 2 % and 98 % quantiles of u
    radius   1 + 3 s          opacity   0.9 - 0.7 s

Kirchhof et al., Pretrained Visual Uncertainties (2024), Figure 9: the core of each class is then many small opaque
circles, borders and outliers are large transparent ones. The paper states neither sizes nor opacities: these are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final, get_args

import numpy as np
import torch
from jaxtyping import Float64, Int64

from dubito.active._given import ids_of
from dubito.choices import Layout
from dubito.errors import ValueRangeError
from dubito.evaluate.uncertainties import uncertainty
from dubito.metrics import Array
from dubito.report.layout import laid_out
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_rows

_ENDS = (0.02, 0.98)


def radius(share: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Of a circle, in units of the smallest one, from its share of uncertainty."""
    return 1 + 3 * share


def opacity(share: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Of a circle, from its share of uncertainty."""
    return 0.9 - 0.7 * share


@final
@dataclass(frozen=True, repr=False)
class Map:
    """Images in the plane.

    Attributes:
        name: The table.
        images: How many it has; more than there are points where a sample was drawn.
        method: By which they were laid out.
        points: (n, 2).
        u: Their uncertainties.
        rows: Of the table.
        ids: Their names.
        labels: What they are labelled, as text; None without labels.
        predictions: What the model says, as text; None without logits.
        score: What u is, such as "entropy".
    """

    name: str
    images: int
    method: str
    points: Float64[np.ndarray, "n 2"]
    u: Float64[np.ndarray, "n"]
    rows: Int64[np.ndarray, "n"]
    ids: Sequence[str]
    labels: Sequence[str] | None
    predictions: Sequence[str] | None
    score: str = "uncertainty"

    @classmethod
    def of(
        cls,
        table: Table,
        u: Array | Score,
        *,
        method: Layout = "tsne",
        perplexity: float = 30.0,
        neighbours: int = 15,
        components: int = 50,
        most: int = 20_000,
        seed: int = 0,
    ) -> "Map":
        """Lay a table out.

        Args:
            table: With features.
            u: A fitted score, or (n) uncertainties, higher = more uncertain.
            method: "tsne" or "umap", which needs umap-learn.
            perplexity: Of t-SNE.
            neighbours: Of UMAP.
            components: Principal components that are laid out.
            most: Of a larger table, so many images are drawn at random.
            seed: Of the draw and of the layout.
        """
        check_rows(table, by="map")
        table.require("feature", by="map")
        if method not in get_args(Layout) or most < 1:
            raise ValueRangeError(
                f"map: method must be one of {', '.join(get_args(Layout))} and most at least 1; method='{method}', "
                f"most={most} came. tsne and 20000 are usual."
            )
        values = uncertainty(u, table, by="map", name="u").double().numpy()
        rows = np.arange(len(table), dtype=np.int64)
        if len(rows) > most:
            rows = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
        drawn = table.select(*(name for name in ("feature", "label", "logit") if name in table))
        if len(rows) < len(table):
            drawn = drawn.rows(torch.from_numpy(rows))
        points = laid_out(drawn, method, perplexity=perplexity, neighbours=neighbours, components=components, seed=seed)
        label = drawn.label.tolist() if "label" in drawn else None
        said = None
        if "logit" in drawn:
            said = [one for batch in drawn.batches("logit") for one in batch.logit.argmax(1).tolist()]
        return cls(
            name=table.name,
            images=len(table),
            method=method,
            points=points,
            u=values[rows],
            rows=rows,
            ids=ids_of(table, rows),
            labels=_texts(label, table.label_names),
            predictions=_texts(said, table.classes),
            score=u.name if isinstance(u, Score) else "uncertainty",
        )

    def __repr__(self) -> str:
        return f"Map({self.name!r}: {len(self):,} of {self.images:,} images by {self.method}, sized by {self.score})"

    def __len__(self) -> int:
        return len(self.u)

    @property
    def ends(self) -> tuple[float, float]:
        """The uncertainties from which on circles are the smallest, and the largest."""
        low, high = np.quantile(self.u, _ENDS)
        if not high > low:
            low, high = self.u.min(), self.u.max()
        return float(low), float(high)

    @property
    def share(self) -> Float64[np.ndarray, "n"]:
        """0 for the surest images, 1 for the most uncertain; all 0 where all are alike."""
        low, high = self.ends
        found: np.ndarray = np.clip((self.u - low) / (high - low), 0, 1) if high > low else np.zeros(len(self.u))
        return found

    @property
    def radius(self) -> Float64[np.ndarray, "n"]:
        """In units of the smallest circle."""
        return radius(self.share)

    @property
    def opacity(self) -> Float64[np.ndarray, "n"]:
        """1 hides what lies behind, 0 would be invisible."""
        return opacity(self.share)


def _texts(numbers: Sequence[int] | None, classes: Sequence[str] | None) -> list[str] | None:
    if numbers is None:
        return None
    return [classes[one] if classes is not None and 0 <= one < len(classes) else str(one) for one in numbers]
