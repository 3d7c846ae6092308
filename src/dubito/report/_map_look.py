"""How a map looks, on the page and in the figure alike: which class has which colour, and how large the circles are.

The first six colours are those of Okabe & Ito (2008); the others were chosen to stay apart from them, and from each
other, for people with red, green or blue deficient sight (Machado et al. 2009), on a white and on a dark ground.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from dubito.choices import Colouring
from dubito.errors import ValueRangeError
from dubito.report.image_map import Map

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9977ff", "#aa1100", "#883366", "#0044bb")
OTHER = "#b9b6ae"
SURE, UNSURE = "#23788f", "#d0591c"
"""The ends of a scale of uncertainty, as in page.css."""
METHODS = {"tsne": "t-SNE", "umap": "UMAP"}
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares that the key of sizes shows."""


def names_of(found: Map) -> dict[str, Sequence[str]]:
    """By what images can be coloured by class, and each image's class."""
    by = {"label": found.labels, "prediction": found.predictions}
    return {name: texts for name, texts in by.items() if texts is not None}


def check_colour(colour: str | None, there: Iterable[str]) -> None:
    """Raise ValueRangeError unless images can be coloured so; None is left to `colouring`."""
    known = (*there, "uncertainty")
    if colour is not None and colour not in known:
        raise ValueRangeError(
            f"map: colour must be one of {', '.join(known)}; got '{colour}'. "
            f"Labels and predictions are there where the table has them."
        )


def colouring(found: Map, colour: Colouring | None) -> str:
    """What was asked for; else labels or predictions if the colours suffice for half of the images, else u."""
    by = names_of(found)
    check_colour(colour, by)
    if colour is not None:
        return colour
    for name, texts in by.items():
        count = Counter(texts)
        if sum(count[one] for one in ranked(texts)[: len(COLOURS)]) >= len(found) / 2:
            return name
    return "uncertainty"


def ranked(names: Sequence[str]) -> list[str]:
    """Every class once; the first ones have the colours.

    As many classes as there are colours are in the order of their names, or of their numbers; of more, the most
    frequent come first.
    """
    count = Counter(names)
    order = sorted(count, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    return order if len(order) <= len(COLOURS) else sorted(order, key=lambda name: -count[name])


def smallest(found: Map) -> float:
    """Pixels of the smallest circle's radius: 3 for 2,000 images, less for more, which would hide each other."""
    return float(np.clip(3 * (2000 / len(found)) ** 0.4, 1, 5))


def key(found: Map) -> list[tuple[float, str]]:
    """Shares and the uncertainty of each as text; one of them where all images are alike."""
    low, high = found.ends
    if not high > low:
        return [(0.0, spoken(low, found))]
    texts = [spoken(low + step * (high - low), found) for step in STEPS]
    return list(zip(STEPS, [f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"], strict=True))


def decimals(found: Map) -> int:
    """As many as tell the map's uncertainties apart: three digits of their range; fewer than none for large ones."""
    low, high = found.ends
    return 2 - math.floor(math.log10(high - low if high > low else abs(low) or 1.0))


def spoken(value: float, found: Map) -> str:
    """An uncertainty as text, with a real minus, and no minus zero."""
    return f"{round(float(value), decimals(found)) + 0.0:.10g}".replace("-", "\N{MINUS SIGN}")


def writable(text: str) -> str:
    """With question marks for halves of letters, which names of files may have whose bytes are no UTF-8."""
    return text.encode(errors="replace").decode()


def rgb(shade: str) -> tuple[float, ...]:
    """Of "#rrggbb", from 0 to 1."""
    return tuple(int(shade[at : at + 2], 16) / 255 for at in (1, 3, 5))
