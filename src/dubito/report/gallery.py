"""Images as cards, ordered by uncertainty, and the most certain and the most uncertain images of a set on one page.

Bars and colours show ranks: the share of the other images that are less uncertain, by each score. Without scripts, the
page still shows every image in order.

Kirchhof et al., Pretrained Visual Uncertainties (2024), Figure 5, show random examples out of both tails
(u <= 0.04 and u >= 0.38 on Stanford Online Products). By default `write_gallery` shows the extremes; `tail` draws from
the tails.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from PIL import Image

from dubito.data import open_images
from dubito.data.thumbnails import read_pixels, thumbnail
from dubito.errors import TableError, ValueRangeError
from dubito.guard.thresholds import percent
from dubito.metrics import Array
from dubito.page.render import fill, minus, words
from dubito.storage import export
from dubito.table import to_tensor
from dubito.types import Images, finite
from dubito.validate import check_number

_SHOWN = ("title", "detail", "caption", "group", "mark", "verdict", "reason", "tone")
CERTAIN, UNCERTAIN = "most certain", "most uncertain"


@final
@dataclass(frozen=True)
class Card:
    """One image with its prediction, verdict and scores.

    Attributes:
        image: The image, or the path of its file; None if there is none to show.
        title: The predicted class, or "label: " and the true one.
        detail: Shown beside the title, such as the probability.
        caption: What the image is; also its text alternative.
        group: What the page can filter by.
        scores: By name, higher = more uncertain; every card has the same names.
        mark: A short remark, such as "prediction changed"; empty for none.
        verdict: One or two words on how far to trust the prediction; empty for none.
        reason: Why, in words.
        tone: Colour of the verdict: "good", "fair" or "bad".
        ranks: By score, the share of the other images that are less uncertain; by default of the page's own images.
    """

    image: Image.Image | Path | None
    title: str
    detail: str
    caption: str
    group: str
    scores: Mapping[str, float]
    mark: str = ""
    verdict: str = ""
    reason: str = ""
    tone: str = "fair"
    ranks: Mapping[str, float] = field(default_factory=dict)


class Summary(NamedTuple):
    """What stands above the cards: a small table or a drawing with a small text beside its title, and remarks.

    By name of a row its cells: a text, a small text, and a share from 0, certain, to 1, which colours it; or None.
    """

    title: str
    header: Sequence[str] = ()
    rows: Mapping[str, Sequence[tuple[str, str, float | None]]] = {}
    remarks: Sequence[str] = ()
    drawing: str = ""
    small: str = ""


def cards_page(
    title: str,
    cards: Sequence[Card],
    *,
    lead: str,
    facts: Sequence[str] = (),
    about: Mapping[str, str] | None = None,
    summary: Summary | None = None,
    order: str = "",
) -> str:
    """Cards as the text of one self-contained page.

    Args:
        title: The heading: what the page shows.
        cards: At least one card. Without `order` they are ordered by their first score, the most uncertain first.
        lead: The sentences below the heading.
        facts: Short facts, such as the model's name and the number of images.
        about: By score, one sentence on what it measures.
        summary: A table or a drawing above the cards.
        order: What the page calls the order of the cards, which is kept then.
    """
    if not cards:
        raise ValueRangeError("cards_page needs at least one card; got none. Pass some images.")
    names = list(cards[0].scores)
    for card in cards:
        if not names or list(card.scores) != names or not all(map(math.isfinite, card.scores.values())):
            raise ValueRangeError(
                f"cards_page: every card must have the same finite scores, {', '.join(names) or 'at least one'}; "
                f"'{card.caption}' has {dict(card.scores)}. Pass the same scores for every image."
            )
    ranks = {name: shares_below([card.scores[name] for card in cards]) for name in names}
    ranked = [
        replace(card, ranks={name: float(ranks[name][place]) for name in names} | dict(card.ranks))
        for place, card in enumerate(cards)
    ]
    return fill(
        "cards.html.j2",
        title=title,
        lead=lead,
        facts=facts,
        about=about or {},
        summary=summary,
        orders=[*([("given", order)] if order else []), *((str(i), words(name)) for i, name in enumerate(names))],
        groups=[(group, group) for group in dict.fromkeys(card.group for card in cards)],
        cards=[
            render_card(card) for card in (ranked if order else sorted(ranked, key=lambda one: -one.scores[names[0]]))
        ],
    )


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
    title: str = "What is the model sure of, and what not?",
) -> Path:
    """Write a self-contained page of `count` images from either end and return its path.

    Args:
        images: Anything that dubito.open_images accepts, as long as it holds pixels.
        u: (n) one uncertainty per image, higher = more uncertain.
        to: Path of the HTML file.
        ids: Names of the images that `u` belongs to, such as `table.id`: a table may lack images that could not be
            decoded. Without them, `u` is in the order of the images.
        count: Largest number of images from either end; no image is shown twice.
        tail: Draw them at random from this share of the images at either end, 0 to 0.5; 0 shows the extremes.
        seed: Seed of that draw.
        score: Name of the uncertainty.
        title: The heading.
    """
    opened = open_images(images)
    check_number(count, "[1, inf)", by="write_gallery", what="count", whole=True, hint="12 is usual.")
    check_number(tail, "[0, 0.5]", by="write_gallery", what="tail", hint="0 shows the extremes.")
    values = finite(to_tensor(u, "write_gallery: u").double(), "write_gallery: u").numpy()
    rows = _rows(opened, ids, values.shape)
    order = np.argsort(values, kind="stable")
    rank = {position: len(order) - place for place, position in enumerate(order.tolist())}
    certain, uncertain = _ends(order, count, tail, seed)
    shares, cards = shares_below(values), []
    for group, chosen in ((UNCERTAIN, uncertain), (CERTAIN, certain)):
        for place in sorted(chosen.tolist(), key=rank.__getitem__):
            row, heading = rows[place], group
            if opened.labels is not None and opened.classes is not None:
                heading = f"label: {opened.classes[int(opened.labels[row])]}"
            image, scores = read_pixels(opened, row, by="write_gallery"), {score: float(values[place])}
            where, ranks = f"{rank[place]} of {len(values)}", {score: float(shares[place])}
            cards.append(Card(image, heading, where, opened.ids[row], group, scores, ranks=ranks))
    lead = _lead(opened.name, len(uncertain), len(certain), len(values), tail)
    facts = (f"{len(values)} images", f"median {score.replace('_', ' ')} {np.median(values):.3g}")
    return export(to, cards_page(title, cards, lead=lead, facts=facts).encode())


def shares_below(values: Sequence[float] | Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Of each value, the share of the others that are smaller: 0 for the smallest, 1 for the largest alone.

    >>> shares_below([5.0, 1.0, 3.0, 3.0]).round(2).tolist()
    [1.0, 0.0, 0.33, 0.33]
    """
    ordered = np.sort(values)
    return np.searchsorted(ordered, values, side="left") / max(len(ordered) - 1, 1)


def render_card(card: Card) -> dict[str, Any]:
    """What the template shows of a card."""
    ranks = [card.ranks[name] for name in card.scores]
    return {
        **{name: getattr(card, name) for name in _SHOWN},
        "address": "" if card.image is None else thumbnail(card.image),
        "data": json.dumps([[value, round(rank, 4)] for value, rank in zip(card.scores.values(), ranks, strict=True)]),
        "bars": [
            (name, f"{rank:.3f}", percent(rank), minus(f"{value + 0.0:.4g}"))
            for (name, value), rank in zip(card.scores.items(), ranks, strict=True)
        ],
    }


def _lead(name: str, uncertain: int, certain: int, count: int, tail: float) -> str:
    short = "/".join(name.split("/")[-2:])  # where the images lie on this machine is nobody else's business
    shown = f"The {uncertain} most uncertain and the {certain} most certain images of {short}."
    if tail:
        shown = (
            f"{uncertain} of the most uncertain and {certain} of the most certain images of {short}, drawn at random "
            f"from the {tail:.0%} at either end."
        )
    return f"{shown} Each shows its rank among all {count}: 1 is the most uncertain."


def _ends(order: Int64[np.ndarray, "n"], count: int, tail: float, seed: int) -> list[Int64[np.ndarray, "_"]]:
    """Positions of the most certain and the most uncertain images; an odd one in the middle is in neither."""
    most = min(count, len(order) // 2)
    if not most:
        return [order[:0], order]
    size = min(max(most, round(tail * len(order))), len(order) // 2)
    rng = np.random.default_rng(seed)
    return [end if size == most else rng.choice(end, most, replace=False) for end in (order[:size], order[-size:])]


def _rows(images: Images, ids: Sequence[str] | Shaped[np.ndarray, "n"] | None, shape: tuple[int, ...]) -> Sequence[int]:
    """Which image each uncertainty belongs to."""
    names = list(images.ids) if ids is None else [str(name) for name in ids]
    if shape != (len(names),) or not names:
        raise TableError(
            f"write_gallery: u must have one value per image, ({len(names)},); got shape {shape}. "
            f"Pass the ids of the scored rows too: ids=table.id."
        )
    row_of = {name: row for row, name in enumerate(images.ids)}
    if unknown := [name for name in names if name not in row_of]:
        raise TableError(
            f"write_gallery: ids must be images of {images.name}; '{unknown[0]}' is not. Open the same images."
        )
    return [row_of[name] for name in names]
