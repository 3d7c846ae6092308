"""A map as a figure, and as one self-contained page with thumbnails on hover, to zoom, pan, search and filter.

The page loads nothing from anywhere. Pictures are in it as small JPEGs, at most so many: of a larger map, the most
uncertain and a random sample of the others have one. Names reach the page as data and are only ever shown as text.
Without scripts, the table of the most uncertain images is still there.
"""

import io
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dubito.choices import Colouring, Layout
from dubito.data import open_images
from dubito.errors import ValueRangeError
from dubito.metrics import Array
from dubito.report._document import top, write_document
from dubito.report._map_look import (
    COLOURS,
    METHODS,
    OTHER,
    check_colour,
    colouring,
    decimals,
    key,
    names_of,
    ranked,
    smallest,
    spoken,
)
from dubito.report._map_pictures import SIDE, check_thumbnails, matched, pictures_of
from dubito.report._map_places import check_places, ending, writing
from dubito.report.image_map import Map, opacity, radius
from dubito.report.map_figure import map_figure
from dubito.storage import write_file
from dubito.table import Table
from dubito.types import Json, Score

_LISTED = 20


def draw_map(
    table: Table,
    u: Array | Score,
    *,
    method: Layout = "tsne",
    to: str | Path | None = None,
    png: str | Path | None = None,
    images: Any = None,
    thumbnails: int = 2000,
    colour: Colouring | None = None,
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
        thumbnails: How many at most, about 3 KB each.
        colour: "label", "prediction" or "uncertainty"; by default labels or predictions where ten colours suffice for
            half of the images, else uncertainty. The page can change it.
        layout: perplexity, neighbours, components, most and seed of `Map.of`.
    """
    # A layout can take minutes: what can be refused is refused before it.
    check_colour(colour, [name for name, column in _COLUMNS.items() if column in table])
    check_places(to, png)
    if images is not None and to is None:
        raise ValueRangeError("draw_map: images are for the thumbnails of the page; none is written. Give to=... too.")
    opened = None if images is None else open_images(images)
    if opened is not None:
        matched(table.id.tolist() if "id" in table else [str(row) for row in range(len(table))], opened)
    check_thumbnails(thumbnails, SIDE)
    found = Map.of(table, u, method=method, **layout)
    if to is not None:
        write_map_page(found, to, images=opened, thumbnails=thumbnails, colour=colour)
    if png is not None:
        drawn, place = io.BytesIO(), Path(png)
        map_figure(found, colour=colour).savefig(drawn, dpi=150, format=ending(png))
        with writing(png):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_file(place, drawn.getvalue())
    return found


def write_map_page(
    found: Map,
    to: str | Path,
    *,
    images: Any = None,
    thumbnails: int = 2000,
    side: int = SIDE,
    seed: int = 0,
    colour: Colouring | None = None,
) -> Path:
    """Write the page and return its path.

    Args:
        found: What `Map.of` gave.
        to: Of the HTML file.
        images: Whatever dubito.open_images takes; without it there are no thumbnails.
        thumbnails: How many at most; half of them for the most uncertain images, the others drawn at random.
        side: Of a thumbnail, in pixels.
        seed: Of that draw.
        colour: What the circles are coloured by at first, as in `draw_map`.
    """
    check_thumbnails(thumbnails, side)
    first = colouring(found, colour)
    pictures = {} if images is None else pictures_of(found, open_images(images), thumbnails, side=side, seed=seed)
    title = f"A map of {len(found):,} image{'s' if len(found) > 1 else ''}"
    data = json.dumps(_data(found, pictures, first), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = [
        _header(found, title, None if images is None else len(pictures)),
        _CONTROLS,
        _sizes(found),
        f'<script type="application/json" id="data">{data}</script>',
        _most_uncertain(found, pictures),
    ]
    with writing(to):
        return write_document(to, title, parts, styles=("page.css", "map.css"), script="map.js")


_COLUMNS = {"label": "label", "prediction": "logit"}
_CONTROLS = """<form class="controls" id="controls" hidden>
<fieldset><legend>Colour by</legend><div class="choice" id="colours"></div></fieldset>
<label class="find">Find
<input type="search" id="find" list="names" placeholder="class or file" autocomplete="off"></label>
<datalist id="names"></datalist>
<fieldset class="span"><legend>Uncertainty</legend>
<label>from <input type="range" id="from" min="0" max="100" value="0"></label>
<label>to <input type="range" id="to" min="0" max="100" value="100"></label>
<output id="span"></output></fieldset>
<button type="button" id="all" hidden>show all</button>
<output id="count" aria-live="polite"></output>
</form>
<div class="map" id="map">
<noscript><p>The map itself is drawn by a script. The most uncertain images are listed below.</p></noscript>
<canvas id="canvas" tabindex="0" role="application" aria-describedby="keys" aria-label="Map of the images"></canvas>
<div class="ring" id="ring" hidden></div>
<div class="zoom" id="zoom" hidden><button type="button" data-zoom="1.5" aria-label="zoom in">+</button>
<button type="button" data-zoom="0.667" aria-label="zoom out">\N{MINUS SIGN}</button>
<button type="button" data-zoom="0" aria-label="whole map">⤢</button></div>
<div class="tip" id="tip" role="status" hidden></div></div>
<p class="fine" id="keys">Wheel or pinch to zoom, drag to move, point at a circle or tap it to see the image. With the
keyboard: arrows go from image to image, + and \N{MINUS SIGN} zoom, 0 shows the whole map, Escape lets go.</p>
<ul class="key" id="key"></ul>"""


def _data(found: Map, pictures: Mapping[int, str], first: str) -> Json:
    """All that the script needs: places from 0 to 1, and what is shown of each image."""
    middle, extent = (found.points.max(0) + found.points.min(0)) / 2, np.ptp(found.points, axis=0)
    span = float(extent.max()) or 1.0
    places = 0.5 + (found.points - middle) / span
    colourings: Json = {}
    for name, texts in names_of(found).items():
        classes = ranked(texts)
        number = {one: i for i, one in enumerate(classes)}
        colourings[name] = {"classes": classes, "of": [number[text] for text in texts]}
    ends = np.array([0.0, 1.0])
    return {
        "x": np.round(places[:, 0], 5).tolist(),
        "y": np.round(1 - places[:, 1], 5).tolist(),
        "extent": np.maximum(extent / span, 0.01).round(5).tolist(),
        "u": np.round(found.u, decimals(found) + 1).tolist(),
        "share": np.round(found.share, 3).tolist(),
        "id": list(found.ids),
        "score": found.score,
        "radius": np.round(smallest(found) * radius(ends), 2).tolist(),
        "opacity": opacity(ends).round(3).tolist(),
        "colourings": colourings,
        "first": first,
        "colours": COLOURS,
        "other": OTHER,
        "pictures": {str(place): address for place, address in pictures.items()},
    }


def _header(found: Map, title: str, pictures: int | None) -> str:
    name = found.name.rstrip("/").rpartition("/")[2]
    facts = [name, METHODS[found.method]]
    if found.score != "uncertainty":
        facts.append(f"uncertainty: {found.score.replace('_', ' ')}")
    if found.images > len(found):
        facts.append(f"drawn at random from {found.images:,} images")
    if pictures is not None:
        facts.append(
            "every image has a thumbnail"
            if pictures == len(found)
            else f"{pictures:,} of {len(found):,} images have a thumbnail"
        )
    lead = (
        "Images with similar features lie together. The more uncertain an image is, the larger and more transparent "
        "is its circle. Distances between far clusters mean little in such a map."
    )
    return top(title, lead, facts)


def _sizes(found: Map) -> str:
    """The key of sizes and opacities, with the uncertainty that each stands for."""
    steps = key(found)
    share = np.array([step for step, _ in steps])
    dots = "".join(
        f'<li><i style="--f:{step:.2f};--d:{2 * r:.1f}px;opacity:{o:.3f}"></i>{escape(text)}</li>'
        for (step, text), r, o in zip(steps, smallest(found) * radius(share), opacity(share), strict=True)
    )
    alike = " (all alike)" if len(steps) == 1 else ""
    return f"""<div class="sizes" id="sizes"><span>{escape(found.score.replace("_", " "))}{alike}</span>
<span>surest</span><ul>{dots}</ul><span>most uncertain</span></div>"""


def _most_uncertain(found: Map, pictures: Mapping[int, str]) -> str:
    """The top of the list: the largest circles are the most transparent, and easily missed."""
    order = np.argsort(-found.u, kind="stable")[:_LISTED].tolist()
    shown = names_of(found)
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "image", "u", *shown))
    body = "".join(
        f'<tr data-place="{place}"><td>{_img(pictures.get(place))}</td><th scope="row">{escape(found.ids[place])}</th>'
        f'<td class="number">{spoken(found.u[place], found)}</td>'
        f"{''.join(f'<td>{escape(texts[place])}</td>' for texts in shown.values())}</tr>"
        for place in order
    )
    return f"""<section class="listed"><h2>The most uncertain images</h2>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"""


def _img(address: str | None) -> str:
    return f'<img src="{address}" alt="">' if address else ""
