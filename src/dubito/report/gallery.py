"""The most certain and the most uncertain images of a set on one page, to see what an uncertainty is about.

Kirchhof et al., Pretrained Visual Uncertainties (2024), Figure 5, show random examples out of both tails
(u <= 0.04 and u >= 0.38 on Stanford Online Products). By default these are the very extremes; `tail` draws from tails.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from dubito.data import open_images
from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array
from dubito.report._thumbnail import picture
from dubito.report.page import Card, write_page
from dubito.table import to_tensor
from dubito.types import Images, finite

CERTAIN, UNCERTAIN = "most certain", "most uncertain"


def write_gallery(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    images: Any,
    u: Array,
    to: str | Path,
    *,
    ids: Sequence[str] | Shaped[np.ndarray, "n"] | None = None,
    count: int = 12,
    tail: float = 0.0,
    seed: int = 0,
    score: str = "uncertainty",
    title: str = "What is clear, and what is not?",
) -> Path:
    """Write one self-contained page of `count` images from either end, and return its path.

    Args:
        images: Whatever dubito.open_images takes, as long as it gives pictures.
        u: (n) one uncertainty an image, higher = more uncertain.
        to: Of the HTML file.
        ids: Whose uncertainties they are, such as `table.id`: a table may lack images that could not be decoded.
            Without them, u is in the order of the images.
        count: How many at most from either end; no image is shown twice.
        tail: Draw them at random from this share of the images at either end, 0 to 0.5; 0 shows the extremes.
        seed: Of that draw.
        score: How the uncertainty is called.
        title: The heading.
    """
    opened = open_images(images)
    if count < 1 or not 0 <= tail <= 0.5:
        raise ValueRangeError(
            f"write_gallery: count must be at least 1 and tail a share from 0 to 0.5; got count={count}, tail={tail}. "
            f"12 and 0 are usual."
        )
    values = finite(to_tensor(u, "write_gallery: u").double(), "write_gallery: u").numpy()
    rows = _rows(opened, ids, values.shape)
    order = np.argsort(values, kind="stable")
    rank = {position: len(order) - place for place, position in enumerate(order.tolist())}
    certain, uncertain = _ends(order, count, tail, seed)
    cards = [
        _card(opened, rows[position], {score: float(values[position])}, group, f"{rank[position]} of {len(values)}")
        for group, chosen in ((UNCERTAIN, uncertain), (CERTAIN, certain))
        for position in sorted(chosen.tolist(), key=rank.__getitem__)
    ]
    return write_page(
        to,
        title,
        cards,
        lead=_lead(opened.name, len(uncertain), len(certain), len(values), tail),
        facts=(f"{len(values)} images", f"median {score.replace('_', ' ')} {np.median(values):.3g}"),
    )


def _lead(name: str, uncertain: int, certain: int, count: int, tail: float) -> str:
    short = "/".join(name.split("/")[-2:])  # where it lies on this machine does not matter to whoever opens the page
    found = f"The {uncertain} most uncertain and the {certain} most certain images of {short}."
    if tail:
        found = (
            f"{uncertain} of the most uncertain and {certain} of the most certain images of {short}, drawn at random "
            f"from the {tail:.0%} at either end."
        )
    return f"{found} Each has its place among all {count}: 1 is the most uncertain."


def _ends(
    order: Int64[np.ndarray, "n"], count: int, tail: float, seed: int
) -> tuple[Int64[np.ndarray, "a"], Int64[np.ndarray, "b"]]:
    """Positions of the most certain and the most uncertain; with an odd middle image on neither side."""
    most = min(count, len(order) // 2)
    if not most:
        return order[:0], order
    size = min(max(most, round(tail * len(order))), len(order) // 2)
    rng = np.random.default_rng(seed)
    ends = [order[:size], order[-size:]]
    low, high = (end if size == most else rng.choice(end, most, replace=False) for end in ends)
    return low, high


def _rows(images: Images, ids: Sequence[str] | Shaped[np.ndarray, "n"] | None, shape: tuple[int, ...]) -> Sequence[int]:
    """Which image each uncertainty belongs to."""
    names = list(images.ids) if ids is None else [str(name) for name in ids]
    if shape != (len(names),) or not names:
        raise TableError(
            f"write_gallery: u must have one value an image, ({len(names)},); got shape {shape}. "
            f"Give the ids of the scored rows too: ids=table.id."
        )
    row_of = {name: row for row, name in enumerate(images.ids)}
    strange = [name for name in names if name not in row_of]
    if strange:
        raise TableError(
            f"write_gallery: ids must be images of {images.name}; '{strange[0]}' is not. Open the same images."
        )
    return [row_of[name] for name in names]


def _card(images: Images, row: int, scores: dict[str, float], group: str, place: str) -> Card:
    image = picture(images, row, by="write_gallery")
    known = images.labels is not None and images.classes is not None
    title = images.classes[int(images.labels[row])] if known else group  # type: ignore[index]
    return Card(image, title, place, images.ids[row], group, scores)
