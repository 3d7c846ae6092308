"""A map as a figure, and as one self-contained page with thumbnails on hover, to zoom and pan.

The page loads nothing from anywhere. Pictures are in it as small JPEGs, at most so many: of a larger map, the most
uncertain and a random sample of the others have one. Names reach the page as data and are only ever shown as text.
Without scripts, the table of the most uncertain images is still there.
"""

import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dubito.apps.map import Map
from dubito.choices import Layout
from dubito.data import open_images
from dubito.diagnosis.pictures import new_figure
from dubito.errors import BrokenImageError, TableError, ValueRangeError
from dubito.metrics import Array
from dubito.report._document import write_document
from dubito.report._thumbnail import thumbnail
from dubito.table import Table
from dubito.types import Json, Score

COLOURS = ("#23788f", "#d0591c", "#5a8f3c", "#8a4f9e", "#c9a227", "#b3304a", "#4067b0", "#2f9e8f", "#a86b3c", "#7a7f87")
OTHER, ALL = "#b9b6ae", "#23788f"
_QUALITY = 60
_LISTED = 20
_POINT = 3.0
"""Pixels of the smallest circle's radius."""


def draw_map(
    table: Table,
    u: Array | Score,
    *,
    method: Layout = "tsne",
    to: str | Path | None = None,
    png: str | Path | None = None,
    images: Any = None,
    thumbnails: int = 1000,
    **layout: Any,
) -> Map:
    """Lay a table out, and write it as a page, as a figure, or both.

    Args:
        table: With features.
        u: A fitted score, or (n) uncertainties, higher = more uncertain.
        method: "tsne" or "umap".
        to: Of the HTML page.
        png: Of the figure; any ending that matplotlib knows.
        images: Whatever dubito.open_images takes, for thumbnails on the page.
        thumbnails: How many at most.
        layout: perplexity, neighbours, components, most and seed of `Map.of`.
    """
    found = Map.of(table, u, method=method, **layout)
    if to is not None:
        write_map_page(found, to, images=images, thumbnails=thumbnails)
    if png is not None:
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        map_figure(found).savefig(png, dpi=150)
    return found


def map_figure(found: Map, *, colour: str | None = None) -> Any:
    """The map as a matplotlib figure.

    Args:
        found: What `Map.of` gave.
        colour: "label" or "prediction"; by default labels where there are any, else predictions.
    """
    names = _names(found, colour)
    figure, axes = new_figure(1, 1, width=7.0, height=6.0)
    panel = axes[0][0]
    groups, order = _groups(names), np.argsort(-found.share, kind="stable")
    paint = dict(groups)
    shades = np.array([_rgb(paint.get(name, OTHER)) for name in names] if names else [_rgb(ALL)] * len(found))
    rgba = np.concatenate([shades, found.opacity[:, None]], axis=1)
    # The uncertain ones first, so that the clear ones stay visible on top of them.
    size = np.square(_POINT * found.radius)
    panel.scatter(*found.points[order].T, s=size[order], c=rgba[order], linewidths=0)
    for name, shade in groups:
        panel.scatter([], [], s=25, color=shade, label=name if len(name) <= 30 else f"{name[:29]}…")
    if groups:
        panel.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    panel.set(xticks=[], yticks=[], title=f"{len(found)} images by {_METHODS[found.method]}; larger = more uncertain")
    panel.spines[:].set_visible(False)
    return figure


def write_map_page(
    found: Map, to: str | Path, *, images: Any = None, thumbnails: int = 1000, side: int = 72, seed: int = 0
) -> Path:
    """Write the page and return its path.

    Args:
        found: What `Map.of` gave.
        to: Of the HTML file.
        images: Whatever dubito.open_images takes; without it there are no thumbnails.
        thumbnails: How many at most; half of them for the most uncertain images, the others drawn at random.
        side: Of a thumbnail, in pixels.
        seed: Of that draw.
    """
    if thumbnails < 0 or side < 8:
        raise ValueRangeError(
            f"write_map_page: thumbnails must not be negative and side at least 8; thumbnails={thumbnails}, "
            f"side={side} came. 1000 and 72 are usual."
        )
    pictures = {} if images is None else _pictures(found, images, thumbnails, side, seed)
    title = f"A map of {len(found)} images"
    data = json.dumps(_data(found, pictures), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = [
        _header(found, title, len(pictures)),
        _CANVAS,
        f'<script type="application/json" id="data">{data}</script>',
        _most_uncertain(found, pictures),
    ]
    return write_document(to, title, parts, styles=("page.css", "map.css"), script="map.js")


_METHODS = {"tsne": "t-SNE", "umap": "UMAP"}
_CANVAS = """<form class="controls" id="controls" hidden>
<fieldset><legend>Colour by</legend><div class="choice" id="colours"></div></fieldset>
<div class="zoom"><button type="button" data-zoom="1.5">zoom in</button>
<button type="button" data-zoom="0.667">zoom out</button> <button type="button" data-zoom="0">whole map</button></div>
<output id="count" aria-live="polite"></output>
</form>
<div class="map" id="map">
<canvas id="canvas" role="img" aria-label="The map. The most uncertain images are listed below."></canvas>
<div class="tip" id="tip" hidden></div></div>
<ul class="key" id="key"></ul>"""


def _data(found: Map, pictures: dict[int, str]) -> Json:
    """All that the script needs: places from 0 to 1, and what is shown of each image."""
    low, span = found.points.min(0), max(float(np.ptp(found.points, axis=0).max()), 1e-300)
    places = (found.points - low + (span - np.ptp(found.points, axis=0)) / 2) / span
    colourings: Json = {}
    for name, texts in (("label", found.labels), ("prediction", found.predictions)):
        if texts is not None:
            groups = _groups(texts)
            number = {one: i for i, (one, _) in enumerate(groups)}
            colourings[name] = {
                "groups": [[one, shade] for one, shade in groups] + [["other", OTHER]],
                "of": [number.get(text, len(groups)) for text in texts],
            }
    return {
        "x": np.round(places[:, 0], 5).tolist(),
        "y": np.round(1 - places[:, 1], 5).tolist(),
        "u": [float(f"{one:.4g}") for one in found.u],
        "radius": np.round(_POINT * found.radius, 2).tolist(),
        "opacity": np.round(found.opacity, 3).tolist(),
        "share": np.round(found.share, 3).tolist(),
        "id": list(found.ids),
        "label": found.labels,
        "prediction": found.predictions,
        "pictures": {str(place): address for place, address in pictures.items()},
        "colourings": colourings,
    }


def _pictures(found: Map, images: Any, most: int, side: int, seed: int) -> dict[int, str]:
    """By place in the map; images that are not there, or cannot be read, have none."""
    opened = open_images(images)
    row_of = {name: row for row, name in enumerate(opened.ids)}
    known = np.array([place for place, name in enumerate(found.ids) if name in row_of], dtype=np.int64)
    if not len(known):
        raise TableError(
            f"write_map_page: ids of the map must be images of {opened.name}; '{found.ids[0]}' is not, nor any other. "
            f"Open the same images."
        )
    if len(known) > most:
        order = known[np.argsort(-found.u[known], kind="stable")]
        rest = np.random.default_rng(seed).permutation(order[most - most // 2 :])
        known = np.concatenate([order[: most - most // 2], rest[: most // 2]])
    pictures = {}
    for place in known.tolist():
        try:
            image = opened.read(row_of[found.ids[place]])
        except BrokenImageError:
            continue
        if isinstance(image, Tensor):
            raise ValueRangeError(
                f"write_map_page needs pictures; '{found.ids[place]}' of {opened.name} is a model input. "
                f"Give the pixels."
            )
        pictures[place] = thumbnail(image, side=side, quality=_QUALITY)
    return pictures


def _header(found: Map, title: str, pictures: int) -> str:
    facts = [found.name.rstrip("/").rpartition("/")[2], _METHODS[found.method], f"{len(found)} images"]
    if found.images > len(found):
        facts.append(f"drawn at random from {found.images}")
    if pictures:
        facts.append(f"{pictures} thumbnails")
    listed = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return f"""<header>
<p class="brand">dubito</p>
<h1>{escape(title)}</h1>
<p class="lead">Images with similar features lie together. The more uncertain an image is, the larger and the more
transparent is its circle. Distances between far clusters mean little in such a map.</p>
<ul class="facts">{listed}</ul>
</header>"""


def _most_uncertain(found: Map, pictures: dict[int, str]) -> str:
    """The top of the list; the last circles on the map that one would miss."""
    order = np.argsort(-found.u, kind="stable")[:_LISTED].tolist()
    columns = [("label", found.labels), ("prediction", found.predictions)]
    shown = [(name, texts) for name, texts in columns if texts is not None]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "image", "u", *(name for name, _ in shown)))
    body = "".join(
        f'<tr data-place="{place}"><td>{_img(pictures.get(place))}</td><th scope="row">{escape(found.ids[place])}</th>'
        f"<td>{found.u[place]:.4g}</td>{''.join(f'<td>{escape(texts[place])}</td>' for _, texts in shown)}</tr>"
        for place in order
    )
    return f"""<section class="listed"><h2>The most uncertain images</h2>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"""


def _img(address: str | None) -> str:
    return f'<img src="{address}" alt="">' if address else ""


def _names(found: Map, colour: str | None) -> Sequence[str]:
    by = {"label": found.labels, "prediction": found.predictions}
    if colour is not None and by.get(colour) is None:
        there = [name for name, texts in by.items() if texts is not None]
        raise ValueRangeError(
            f"map_figure: colour must be one of {', '.join(there) or 'none'}; '{colour}' came. "
            f"Labels and predictions are there where the table has them."
        )
    return (by[colour] if colour else found.labels or found.predictions) or []


def _groups(names: Sequence[str]) -> list[tuple[str, str]]:
    """The most frequent names with a colour each; ties by the alphabet."""
    counted = sorted(Counter(names).items(), key=lambda one: (-one[1], one[0]))
    return [(name, shade) for (name, _), shade in zip(counted, COLOURS, strict=False)]


def _rgb(shade: str) -> tuple[float, ...]:
    return tuple(int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5))
