"""`draw_map`, and the page of a map: thumbnails on hover, zoom, pan, search and filters in one self-contained file.

Thumbnails are small JPEGs inside the page, up to a limit: of a larger map, the most uncertain images and a random
sample of the others have one. Names reach the page as data and are only ever shown as text. Without scripts, the page
still lists the most uncertain images.
"""

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dubito.choices import Colouring, Layout
from dubito.data import open_images
from dubito.data.thumbnails import read_pixels, thumbnail
from dubito.errors import ArtefactError, BrokenImageError, ValueRangeError
from dubito.explain.pictures import new_figure
from dubito.metrics import Array
from dubito.page.render import fill, script_data
from dubito.report import map as maps
from dubito.report.layout import METHODS
from dubito.report.map import Map, format_u
from dubito.report.page import match_images
from dubito.storage import export
from dubito.table import Table, check_table
from dubito.types import Images, Json, Score
from dubito.validate import check_choice, check_number

SIDE = 96
_QUALITY = 60
_LISTED = 20
_COLUMNS = {"label": "label", "predicted": "logit"}


def draw_map(
    table: Table,
    u: Array | Score | None = None,
    *,
    method: Layout = "tsne",
    to: str | Path | None = None,
    png: str | Path | None = None,
    images: Any = None,
    thumbnails: int = 2000,
    colour: Colouring | None = None,
    **layout: Any,
) -> Map:
    """Lay out a table, and write it as a page, as a figure, or both.

    Args:
        table: A table with features.
        u: A fitted score, or (n) uncertainties, higher = more uncertain; by default as in `Map.of`.
        method: "tsne" or "umap".
        to: Path of the HTML page.
        png: Path of the figure; any file type that matplotlib writes.
        images: Anything that dubito.open_images accepts, for thumbnails on the page.
        thumbnails: Largest number of thumbnails, about 3 KB each.
        colour: "label", "predicted" or "uncertainty"; by default labels or predictions where ten colours suffice for
            half of the images, else uncertainty. The page can change it.
        layout: perplexity, neighbours, components, most and seed of `Map.of`.
    """
    # A layout can take minutes: whatever can be rejected is rejected before it.
    check_table(table, by="map")
    available = [name for name, column in _COLUMNS.items() if column in table]
    check_choice(colour or "uncertainty", [*available, "uncertainty"], by="map", what="colour")
    _check_paths(to, png)
    opened = None if images is None else open_images(images)
    if opened is not None:
        match_images(table.row_ids(), opened, by="draw_map")
    _check_thumbnails(thumbnails, SIDE)
    drawn = replace(Map.of(table, u, method=method, **layout), pictures=opened)
    if to is not None:
        write_map_page(drawn, to, images=opened, thumbnails=thumbnails, colour=colour)
    if png is not None:
        data = io.BytesIO()
        maps.map_figure(drawn, colour=colour).savefig(data, dpi=150, format=Path(png).suffix[1:].lower())
        export(png, data.getvalue())
    return drawn


def write_map_page(
    drawn: Map,
    to: str | Path,
    *,
    images: Any = None,
    thumbnails: int = 2000,
    side: int = SIDE,
    seed: int = 0,
    colour: Colouring | None = None,
) -> Path:
    """Write the page of a map and return its path.

    Args:
        drawn: The result of `Map.of` or `draw_map`.
        to: Path of the HTML file.
        images: Anything that dubito.open_images accepts; without it there are no thumbnails.
        thumbnails: Largest number of thumbnails; half of them for the most uncertain images, the rest drawn at random.
        side: Largest side of a thumbnail, in pixels.
        seed: Seed of that draw.
        colour: What the circles are coloured by at first, as in `draw_map`.
    """
    page = map_page(drawn, images=images, thumbnails=thumbnails, side=side, seed=seed, colour=colour)
    return export(to, page.encode())


def map_page(
    drawn: Map,
    *,
    images: Any = None,
    thumbnails: int = 2000,
    side: int = SIDE,
    seed: int = 0,
    colour: Colouring | None = None,
) -> str:
    """The text of the page of a map; see `write_map_page`."""
    _check_thumbnails(thumbnails, side)
    first = maps.colour_by(drawn, colour)
    shown = {} if images is None else _thumbnails(drawn, open_images(images), thumbnails, side=side, seed=seed)
    facts = [drawn.name.rstrip("/").rpartition("/")[2], METHODS[drawn.method]]
    if drawn.score != "uncertainty":
        facts.append(f"uncertainty: {drawn.score.replace('_', ' ')}")
    if drawn.images > len(drawn):
        facts.append(f"drawn at random from {drawn.images:,} images")
    if images is not None:
        facts.append(f"{len(shown):,} of {len(drawn):,} images have a thumbnail")
    order = np.argsort(-drawn.u, kind="stable")
    return fill(
        "map.html.j2",
        title=f"A map of {len(drawn):,} image{'s' if len(drawn) > 1 else ''}",
        facts=facts,
        sizes=[
            (f"{share:.2f}", f"{2 * drawn.smallest * maps.radius(share):.1f}", f"{maps.opacity(share):.3f}", text)
            for share, text in maps.size_key(drawn)
        ],
        data=script_data(_data(drawn, shown, first)),
        drawn=drawn,
        ringed=int(drawn.ringed.sum()),
        thumbnails=shown,
        most_uncertain={place: format_u(drawn.u[place], drawn) for place in order[:_LISTED].tolist()},
    )


def _data(drawn: Map, thumbnails: Mapping[int, str], first: str) -> Json:
    """Everything the script needs: coordinates from 0 to 1, and what is shown of each image."""
    middle, span = (drawn.points.max(0) + drawn.points.min(0)) / 2, float(np.ptp(drawn.points, axis=0).max()) or 1.0
    places = 0.5 + (drawn.points - middle) / span
    colourings: Json = {}
    for name, texts in drawn.class_names.items():
        number = {one: i for i, one in enumerate(maps.ranked(texts))}
        colourings[name] = {"classes": list(number), "of": [number[text] for text in texts]}
    ends = np.array([0.0, 1.0])
    return {
        "x": np.round(places[:, 0], 5).tolist(),
        "y": np.round(1 - places[:, 1], 5).tolist(),
        "u": np.round(drawn.u, drawn.decimals + 1).tolist(),
        "share": np.round(drawn.share, 3).tolist(),
        "id": list(drawn.ids),
        "score": drawn.score,
        "radius": np.round(drawn.smallest * maps.radius(ends), 2).tolist(),
        "opacity": maps.opacity(ends).round(3).tolist(),
        "ringed": np.flatnonzero(drawn.ringed).tolist(),
        "colourings": colourings,
        "first": first,
        "colours": maps.COLOURS,
        "other": maps.OTHER,
        "thumbnails": {str(place): address for place, address in thumbnails.items()},
    }


def _thumbnails(drawn: Map, images: Images, most: int, *, side: int, seed: int) -> dict[int, str]:
    """By place in the map: half of at most `most` for the most uncertain images, the others drawn at random.

    Images that are missing, or cannot be read, have none.
    """
    row_of = match_images(drawn.ids, images, by="write_map_page")
    places = np.array(list(row_of), dtype=np.int64)
    if len(places) > most:
        order = places[np.argsort(-drawn.u[places], kind="stable")]
        rest = np.random.default_rng(seed).permutation(order[most - most // 2 :])
        places = np.concatenate([order[: most - most // 2], rest[: most // 2]])
    shown = {}
    for place in places.tolist():
        try:
            image = read_pixels(images, row_of[place], by="write_map_page")
        except BrokenImageError:
            continue
        shown[place] = thumbnail(image, side=side, quality=_QUALITY)
    return shown


def _check_thumbnails(thumbnails: int, side: int) -> None:
    check_number(thumbnails, "[0, inf)", by="write_map_page", what="thumbnails", whole=True, hint="2000 is usual.")
    check_number(side, "[8, inf)", by="write_map_page", what="side", whole=True, hint="96 is usual.")


def _check_paths(to: str | Path | None, png: str | Path | None) -> None:
    """Raise before a long layout for what could not be written after it."""
    paths = {name: Path(path).absolute() for name, path in (("to", to), ("png", png)) if path is not None}
    for name, path in paths.items():
        if path.is_dir():
            raise ValueRangeError(f"draw_map: {name} must be a file; '{path}' is a folder. Pass '{path}/map.html'.")
        parent = next(one for one in path.parents if os.path.exists(one))  # noqa: PTH110 (a Path would raise)
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            why = "is not a folder" if not parent.is_dir() else "is not writable"
            raise ArtefactError(f"draw_map: '{path}' cannot be written ('{parent}' {why}). Choose another place.")
    if len({*paths.values()}) < len(paths):
        raise ValueRangeError(f"draw_map: to and png must be two files; got '{to}' for both. Give them two names.")
    if png is not None:
        endings = new_figure(1, 1)[0].canvas.get_supported_filetypes()
        if Path(png).suffix[1:].lower() not in endings:
            raise ValueRangeError(
                f"draw_map: png must end in one of {', '.join(sorted(endings))}; got '{png}'. Name it map.png."
            )
