"""A map as a matplotlib figure, with a key of classes and a key of sizes."""

from typing import Any

import numpy as np
from jaxtyping import Float64

from dubito.choices import Colouring
from dubito.explain.pictures import new_figure
from dubito.report._map_look import (
    COLOURS,
    METHODS,
    OTHER,
    SURE,
    UNSURE,
    colouring,
    key,
    names_of,
    ranked,
    rgb,
    smallest,
    writable,
)
from dubito.report.image_map import Map, opacity, radius

_LONG = 32
_KEY = {"frameon": False, "fontsize": "small", "title_fontsize": "small", "alignment": "left"}


def map_figure(found: Map, *, colour: Colouring | None = None) -> Any:
    """The map as a matplotlib figure.

    Args:
        found: What `Map.of` gave.
        colour: "label", "prediction" or "uncertainty"; by default labels or predictions where ten colours suffice for
            half of the images, else uncertainty.
    """
    chosen = colouring(found, colour)
    figure, axes = new_figure(1, 1, width=7.6, height=5.8)
    panel = axes[0][0]
    names = names_of(found).get(chosen, ())
    paint = dict(zip(ranked(names), COLOURS, strict=False))
    shades = np.array([rgb(paint.get(name, OTHER)) for name in names]) if names else _shades(found.share)
    rgba = np.concatenate([shades, found.opacity[:, None]], axis=1)
    # The uncertain ones first, so that the clear ones stay visible on top of them.
    order = np.argsort(-found.share, kind="stable")
    panel.scatter(*found.points[order].T, s=_area(found, found.share)[order], c=rgba[order], linewidths=0)
    _sizes(figure, panel, found, shaded=not names)
    if names:
        _classes(figure, panel, paint, other=len(set(names)) > len(paint), title=chosen)
    title = f"{len(found):,} images by {METHODS[found.method]}; larger and more transparent = more uncertain"
    panel.set(xticks=[], yticks=[])
    panel.set_aspect("equal", adjustable="datalim")
    panel.set_title(title, fontsize="medium", loc="left")
    panel.spines[:].set_visible(False)
    return figure


def _sizes(figure: Any, panel: Any, found: Map, *, shaded: bool) -> None:
    steps = key(found)
    share = np.array([step for step, _ in steps])
    shades = _shades(share) if shaded else np.full((len(steps), 3), 0.35)
    rgba = np.concatenate([shades, opacity(share)[:, None]], axis=1)
    dots = [panel.scatter([], [], s=s, color=c, lw=0) for s, c in zip(_area(found, share), rgba, strict=True)]
    texts = [text for _, text in steps]
    figure.legend(dots, texts, title=found.score.replace("_", " "), loc="outside right lower", **_KEY)


def _classes(figure: Any, panel: Any, paint: dict[str, str], *, other: bool, title: str) -> None:
    shown = [*paint.items(), *([("other", OTHER)] if other else [])]
    dots = [panel.scatter([], [], s=25, color=shade, lw=0) for _, shade in shown]
    texts = [writable(name if len(name) <= _LONG else f"{name[: _LONG - 1]}…") for name, _ in shown]
    figure.legend(dots, texts, title=title, loc="outside right upper", **_KEY)


def _shades(share: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n 3"]:
    sure, unsure = np.array(rgb(SURE)), np.array(rgb(UNSURE))
    shades: np.ndarray = sure + share[:, None] * (unsure - sure)
    return shades


def _area(found: Map, share: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """In matplotlib's unit: squared points of a diameter."""
    area: np.ndarray = np.square(1.1 * smallest(found) * radius(share))
    return area
