"""A map of a table: similar images lie together, and uncertain ones are larger and more transparent.

    share    s = (u - low) / (high - low), clipped to 0..1      low, high: the 2 % and 98 % quantiles of u
    radius   1 + 3 s          opacity   0.9 - 0.7 s             a ring: the 5 % of the images with the highest u

Kirchhof et al., Pretrained Visual Uncertainties (2024), Figure 9: the core of each class is then many small opaque
circles, borders and outliers are large transparent ones. The paper states neither sizes nor opacities: these are ours.
The ring is ours too: the most transparent circles would be those that are looked for and cannot be seen.

The first six colours are those of Okabe & Ito (2008); the others were chosen to stay apart from them, and from each
other, for people with red, green or blue colour vision deficiency (Machado et al. 2009), on light and dark backgrounds.

Where images lie is computed in `layout`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, ClassVar, final, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from dubito.choices import Colouring, Layout
from dubito.evaluate.evaluate import uncertainty
from dubito.explain.pictures import new_figure
from dubito.metrics import Array
from dubito.report.layout import METHODS, lay_out, principal_components
from dubito.result import Axes, Result, axes
from dubito.scores import Entropy
from dubito.scores.available import default_score
from dubito.table import Table
from dubito.types import Images, Json, Score
from dubito.validate import check_choice, check_number, check_rows

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9977ff", "#aa1100", "#883366", "#0044bb")
OTHER = "#b9b6ae"
_CERTAIN, _UNCERTAIN = "#23788f", "#d0591c"
"""The ends of the scale of uncertainty, as in page.css."""
_QUANTILES = (0.02, 0.98)
_RINGED = 0.05
_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares that the key of sizes shows."""
_LONG = 32
_INLINE = 300
"""Thumbnails of a map inside a notebook, which stores them."""
_FRAME = "width:100%;height:46rem;border:0"
_KEY = {"frameon": False, "fontsize": "small", "title_fontsize": "small", "alignment": "left"}


def radius(share: Any) -> Any:
    """Radius of a circle, in units of the smallest one, from its share of uncertainty, or of many from an array."""
    return 1 + 3 * share


def opacity(share: Any) -> Any:
    """Opacity of a circle, from its share of uncertainty: 1 hides what lies behind, 0 would be invisible."""
    return 0.9 - 0.7 * share


@final
@dataclass(frozen=True)
class Map(Result):
    """Images in the plane.

    Attributes:
        name: Name of the table.
        images: Rows of the table; more than there are points if a sample was drawn.
        method: How they were laid out.
        points: (n, 2) coordinates.
        u: Their uncertainties.
        rows: Their rows in the table.
        ids: Their names.
        labels: Their labels as text; None without labels.
        predicted: The model's predictions as text; None without logits.
        score: Name of the uncertainty, such as "entropy".
        pictures: The images themselves, if they are at hand.
    """

    name: str
    images: int
    method: str
    points: Float64[np.ndarray, "n 2"] = field(repr=False)
    u: Float64[np.ndarray, "n"] = field(repr=False)
    rows: Int64[np.ndarray, "n"] = field(repr=False)
    ids: Sequence[str] = field(repr=False)
    labels: Sequence[str] | None = field(repr=False)
    predicted: Sequence[str] | None = field(repr=False)
    score: str = "uncertainty"
    pictures: Images | None = field(default=None, repr=False, compare=False)

    titles: ClassVar = {"u": "uncertainty"}
    text_rows: ClassVar = 10

    @classmethod
    def of(
        cls,
        table: Table,
        u: Array | Score | None = None,
        *,
        method: Layout = "tsne",
        perplexity: float = 30.0,
        neighbours: int = 15,
        components: int = 50,
        most: int = 20_000,
        seed: int = 0,
    ) -> "Map":
        """Lay out a table.

        Args:
            table: A table with features.
            u: A fitted score, or (n) uncertainties, higher = more uncertain. By default the entropy; without logits,
                the distance to the tenth nearest of the other images (`Neighbours`).
            method: "tsne" or "umap", which requires umap-learn.
            perplexity: Perplexity of t-SNE, at least 1; at most a third of the other rows is used.
            neighbours: Number of neighbours of UMAP; at most the number of other rows is used.
            components: Number of principal components that are laid out.
            most: Of a larger table, this many images are drawn at random.
            seed: Seed of the draw and of the layout.
        """
        check_rows(table, by="map")
        table.require("feature", by="map")
        check_choice(method, get_args(Layout), by="map", what="method")
        check_number(most, "[1, inf)", by="map", what="most", whole=True, hint="20000 is usual.")
        u = default_score(table, Entropy())[0] if u is None else u
        values = uncertainty(u, table, by="map", name="u").double().numpy()
        rows = np.arange(len(table), dtype=np.int64)
        if len(rows) > most:
            rows = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
        drawn = table.select(*(name for name in ("feature", "label", "logit", "id") if name in table))
        if len(rows) < len(table):
            drawn = drawn.rows(torch.from_numpy(rows))
        x = principal_components(drawn, components, seed=seed)
        points = lay_out(x, method, perplexity=perplexity, neighbours=neighbours, seed=seed, name=table.name)
        labels = drawn.label.tolist() if "label" in drawn else None
        predicted = None
        if "logit" in drawn:
            predicted = [one for batch in drawn.batches("logit") for one in batch.logit.argmax(1).tolist()]
        return cls(
            name=table.name,
            images=len(table),
            method=method,
            points=points,
            u=values[rows],
            rows=rows,
            ids=table.row_ids(rows),
            labels=_class_names(labels, table.label_names),
            predicted=_class_names(predicted, table.classes),
            score=u.name if isinstance(u, Score) else "uncertainty",
        )

    def __len__(self) -> int:
        return len(self.u)

    @property
    def ends(self) -> tuple[float, float]:
        """The uncertainties at which circles are smallest and largest."""
        low, high = np.quantile(self.u, _QUANTILES)
        if not high > low:
            low, high = self.u.min(), self.u.max()
        return float(low), float(high)

    @property
    def share(self) -> Float64[np.ndarray, "n"]:
        """0 for the most certain images, 1 for the most uncertain; all 0 where all are equal."""
        low, high = self.ends
        share: np.ndarray = np.clip((self.u - low) / (high - low), 0, 1) if high > low else np.zeros(len(self.u))
        return share

    @property
    def radius(self) -> Float64[np.ndarray, "n"]:
        """Radius of every circle, in units of the smallest one."""
        return np.asarray(radius(self.share))

    @property
    def opacity(self) -> Float64[np.ndarray, "n"]:
        """Opacity of every circle."""
        return np.asarray(opacity(self.share))

    @property
    def ringed(self) -> Bool[np.ndarray, "n"]:
        """The most uncertain images, 5 % of all and at least one; none where all are equal."""
        most: np.ndarray = self.u > self.u.min()
        most[np.argsort(-self.u, kind="stable")[max(1, round(_RINGED * len(self))) :]] = False
        return most

    @property
    def class_names(self) -> dict[str, Sequence[str]]:
        """Each image's class by "label" and by "predicted", where there are any: what circles can be coloured by."""
        by = {"label": self.labels, "predicted": self.predicted}
        return {name: texts for name, texts in by.items() if texts is not None}

    @property
    def smallest(self) -> float:
        """Radius of the smallest circle in pixels: 3 for 2,000 images, less for more, which would hide each other."""
        return float(np.clip(3 * (2000 / len(self)) ** 0.4, 1, 5))

    @property
    def decimals(self) -> int:
        """Decimals that tell the uncertainties apart: three digits of their range; negative for large ones."""
        low, high = self.ends
        return 2 - math.floor(math.log10(high - low if high > low else abs(low) or 1.0))

    def title(self) -> str:
        """What was laid out and how."""
        return f"{self.name}: a map of {len(self):,} images by {METHODS[self.method]}"

    def facts(self) -> dict[str, str]:
        """The uncertainty, and how many images there are in all."""
        return {"uncertainty": self.score, "images": f"{self.images:,}"}

    def records(self) -> list[dict[str, Any]]:
        """One row per image, the most uncertain first."""
        return [
            {
                "id": self.ids[place],
                "u": float(self.u[place]),
                "x": float(self.points[place, 0]),
                "y": float(self.points[place, 1]),
                **{name: texts[place] for name, texts in self.class_names.items()},
            }
            for place in np.argsort(-self.u, kind="stable").tolist()
        ]

    def to_dict(self) -> Json:
        """A summary; `to_csv`, `to_pandas` and the page have every image."""
        low, high = self.ends
        return {**super().to_dict(), "shown": len(self), "u": {"low": low, "high": high}}

    def _repr_html_(self) -> str:
        """The page in a frame of its own."""
        from dubito.report.map_page import map_page  # noqa: PLC0415 (it imports this module)

        page = map_page(self, images=self.pictures, thumbnails=_INLINE)
        # The frame's own origin is opaque: the script inside can reach neither the notebook nor its files.
        return f'<iframe sandbox="allow-scripts" srcdoc="{escape(page)}" style="{_FRAME}"></iframe>'

    def plot(self, ax: Axes | None = None, *, colour: Colouring | None = None) -> Axes:
        """Draw the circles on matplotlib axes; `map_figure` adds the keys of classes and sizes."""
        panel = axes(ax, size=(7.6, 5.8))
        names = self.class_names.get(colour_by(self, colour), ())
        paint = dict(zip(ranked(names), COLOURS, strict=False))
        shades = _rgb([paint.get(name, OTHER) for name in names]) if names else _shades(self.share)
        rgba = np.column_stack([shades, self.opacity])
        # The uncertain ones first, so that the certain ones stay visible on top of them.
        order = np.argsort(-self.share, kind="stable")
        x, y = self.points[order].T
        panel.scatter(x, y, s=_area(self, self.share)[order], c=rgba[order], linewidths=0)
        # Their rings lie above everything, on a wider white line that sets them apart from circles of their own colour.
        x, y = self.points[self.ringed].T
        for width, edges in ((2.2, "white"), (1.0, shades[self.ringed])):
            size = _area(self, self.share)[self.ringed]
            panel.scatter(x, y, s=size, facecolors="none", edgecolors=edges, linewidths=width)
        title = (
            f"{len(self):,} images by {METHODS[self.method]}; larger, more transparent = more uncertain; ring: top 5 %"
        )
        panel.set(xticks=[], yticks=[])
        panel.set_aspect("equal", adjustable="datalim")
        panel.set_title(title, fontsize="medium", loc="left")
        panel.spines[:].set_visible(False)
        return panel


def map_figure(drawn: Map, *, colour: Colouring | None = None) -> Any:
    """The map as a matplotlib figure, with a key of sizes and a key of classes.

    Args:
        drawn: The result of `Map.of` or `draw_map`.
        colour: "label", "predicted" or "uncertainty"; by default labels or predictions where ten colours suffice for
            half of the images, else uncertainty.
    """
    figure, panels = new_figure(1, 1, width=7.6, height=5.8)
    panel = drawn.plot(panels[0][0], colour=colour)
    by = colour_by(drawn, colour)
    names, steps = drawn.class_names.get(by, ()), size_key(drawn)
    share = np.array([step for step, _ in steps])
    shades = np.full((len(steps), 3), 0.35) if names else _shades(share)
    rgba = np.column_stack([shades, opacity(share)])
    sizes = zip(_area(drawn, share), rgba, (text for _, text in steps), strict=True)
    keys: dict[str, tuple[str, Iterable[Any]]] = {"lower": (drawn.score.replace("_", " "), sizes)}
    if names:
        paint = dict(zip(ranked(names), COLOURS, strict=False))
        other = [("other", OTHER)] if len(set(names)) > len(paint) else []
        keys["upper"] = (by, [(25.0, shade, _short(name)) for name, shade in (*paint.items(), *other)])
    for place, (title, entries) in keys.items():
        dots = [(panel.scatter([], [], s=size, color=shade, lw=0), text) for size, shade, text in entries]
        figure.legend(*zip(*dots, strict=True), title=title, loc=f"outside right {place}", **_KEY)
    return figure


def colour_by(drawn: Map, colour: Colouring | None) -> str:
    """`colour`, or without it labels or predictions if colours suffice for half of the images, else uncertainty."""
    if colour is not None:
        check_choice(colour, [*drawn.class_names, "uncertainty"], by="map", what="colour")
        return colour
    for name, texts in drawn.class_names.items():
        count = Counter(texts)
        if sum(count[one] for one in ranked(texts)[: len(COLOURS)]) >= len(drawn) / 2:
            return name
    return "uncertainty"


def ranked(names: Sequence[str]) -> list[str]:
    """Every class once; the first ones get the colours.

    Up to as many classes as there are colours are in the order of their names, or of their numbers; of more, the most
    frequent come first.
    """
    count = Counter(names)
    order = sorted(count, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    return order if len(order) <= len(COLOURS) else sorted(order, key=lambda name: -count[name])


def size_key(drawn: Map) -> list[tuple[float, str]]:
    """Shares and the uncertainty of each as text; a single one where all images are equal."""
    low, high = drawn.ends
    if not high > low:
        return [(0.0, format_u(low, drawn))]
    texts = [format_u(low + step * (high - low), drawn) for step in _STEPS]
    return list(zip(_STEPS, [f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"], strict=True))


def format_u(value: float, drawn: Map) -> str:
    """An uncertainty as text, with a real minus sign and no negative zero."""
    return f"{round(float(value), drawn.decimals) + 0.0:.10g}".replace("-", "\N{MINUS SIGN}")


def _class_names(numbers: Sequence[int] | None, classes: Sequence[str] | None) -> list[str] | None:
    if numbers is None:
        return None
    return [classes[one] if classes is not None and 0 <= one < len(classes) else str(one) for one in numbers]


def _short(name: str) -> str:
    """At most 32 letters; names of files may hold bytes that are not UTF-8, which matplotlib cannot draw."""
    return (name if len(name) <= _LONG else f"{name[: _LONG - 1]}…").encode(errors="replace").decode()


def _shades(share: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n 3"]:
    certain, uncertain = _rgb([_CERTAIN, _UNCERTAIN])
    shades: np.ndarray = certain + share[:, None] * (uncertain - certain)
    return shades


def _area(drawn: Map, share: Float64[np.ndarray, "n"]) -> Any:
    """In matplotlib's unit: squared points of a diameter."""
    return np.square(1.1 * drawn.smallest * radius(share))


def _rgb(colours: Sequence[str]) -> Float64[np.ndarray, "n 3"]:
    """Of "#rrggbb", from 0 to 1."""
    return np.array([[*bytes.fromhex(one[1:])] for one in colours]) / 255
