"""One self-contained HTML page of pictures, ordered by uncertainty: styles, script and thumbnails are all inside.

It opens from a disk or an e-mail, loads nothing from anywhere, and without scripts still shows every picture in order.
Bars and colours compare the pictures of one page with each other: (u - min) / (max - min), by score.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import final

from PIL import Image

from dubito.errors import ValueRangeError
from dubito.report._document import top, write_document
from dubito.report._thumbnail import thumbnail


@final
@dataclass(frozen=True)
class Card:
    """One picture with its answer and scores.

    Attributes:
        image: The picture, or the path of its file.
        title: The answer, such as the predicted class.
        detail: Beside the title, such as its probability.
        caption: What the picture is; its text for those who do not see it.
        group: What can be filtered by.
        scores: By name, higher = more uncertain; the same names on every card.
        mark: A short remark, such as "answer changed"; empty for none.
    """

    image: Image.Image | Path
    title: str
    detail: str
    caption: str
    group: str
    scores: Mapping[str, float]
    mark: str = ""


@final
@dataclass(frozen=True)
class Cell:
    """One value of a summary; with a share 0..1 it is coloured from sure to uncertain."""

    text: str
    small: str = ""
    share: float | None = None


@final
@dataclass(frozen=True)
class Summary:
    """A small table above the pictures: a name and some cells in each row."""

    title: str
    header: Sequence[str]
    rows: Mapping[str, Sequence[Cell]]
    remarks: Sequence[str] = field(default=())


def write_page(
    path: str | Path,
    title: str,
    cards: Sequence[Card],
    *,
    lead: str,
    facts: Sequence[str] = (),
    about: Mapping[str, str] | None = None,
    summary: Summary | None = None,
) -> Path:
    """Write the page and return its path.

    Args:
        path: Of the HTML file.
        title: The heading: what the page shows.
        cards: At least one; they are ordered by their first score, the most uncertain first.
        lead: The sentences below the heading.
        facts: Short ones, such as the model's name and the number of pictures.
        about: By score, one sentence on what it measures.
        summary: Above the pictures.
    """
    names = _names(cards)
    ordered = sorted(cards, key=lambda card: -card.scores[names[0]])
    spans = {name: _span([card.scores[name] for card in cards]) for name in names}
    parts = [
        _head(title, lead, facts),
        _summary(summary) if summary else "",
        _controls(names, list(dict.fromkeys(card.group for card in cards)), len(cards)),
        '<main class="cards" id="cards">',
        *(_card(card, spans) for card in ordered),
        "</main>",
        _about(about or {}),
    ]
    return write_document(path, title, parts, styles=("page.css",), script="page.js")


def _names(cards: Sequence[Card]) -> list[str]:
    """The scores that all cards have, each of them finite."""
    if not cards:
        raise ValueRangeError("write_page needs at least one card; got none. Give it some pictures.")
    names = list(cards[0].scores)
    for card in cards:
        if not names or list(card.scores) != names or not all(map(math.isfinite, card.scores.values())):
            raise ValueRangeError(
                f"write_page: every card must have the same finite scores, {', '.join(names) or 'at least one'}; "
                f"'{card.caption}' has {dict(card.scores)}. Score all pictures alike."
            )
    return names


def _head(title: str, lead: str, facts: Sequence[str]) -> str:
    legend = """<div class="legend">
<span>surest picture here</span><span class="scale"></span><span>most uncertain picture here</span>
</div>
<p class="fine">Higher is always more uncertain. Bars and colours compare the pictures of this page with each
other.</p>"""
    return top(title, lead, facts, more=legend)


def _summary(summary: Summary) -> str:
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in summary.header)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for name, cells in summary.rows.items()
    )
    remarks = "".join(f"<p>{escape(remark)}</p>" for remark in summary.remarks)
    return f"""<section class="summary">
<div class="table"><table><caption>{escape(summary.title)}</caption>
<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>
<div class="remarks">{remarks}</div>
</section>"""


def _cell(cell: Cell) -> str:
    style = "" if cell.share is None else f' class="heat" style="--f:{cell.share:.3f}"'
    small = f" <small>{escape(cell.small)}</small>" if cell.small else ""
    return f"<td{style}><b>{escape(cell.text)}</b>{small}</td>"


def _controls(names: Sequence[str], groups: Sequence[str], count: int) -> str:
    shown = [("", "all"), *((group, group) for group in groups)]
    return f"""<form class="controls" id="controls" hidden>
{_choice("Order by", "order", [(str(i), _spoken(name)) for i, name in enumerate(names)]) if len(names) > 1 else ""}
{_choice("Show", "group", shown) if len(groups) > 1 else ""}
<label class="flip"><input type="checkbox" name="flip"> surest first</label>
<output id="count" aria-live="polite">{count} pictures</output>
</form>"""


def _choice(legend: str, name: str, options: Sequence[tuple[str, str]]) -> str:
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{"" if i else " checked"}>'
        f"<span>{escape(text)}</span></label>"
        for i, (value, text) in enumerate(options)
    )
    return f'<fieldset><legend>{escape(legend)}</legend><div class="choice">{inputs}</div></fieldset>'


def _card(card: Card, spans: Mapping[str, tuple[float, float]]) -> str:
    shares = {name: _share(value, spans[name]) for name, value in card.scores.items()}
    bars = "".join(
        f"<div{'' if i else ' class=chosen'}><dt>{escape(_spoken(name))}</dt>"
        f'<dd><i style="--f:{shares[name]:.3f}"></i><span>{_number(value, spans[name])}</span></dd></div>'
        for i, (name, value) in enumerate(card.scores.items())
    )
    data = escape(json.dumps([[value, round(shares[name], 3)] for name, value in card.scores.items()]))
    mark = f'<span class="mark">{escape(card.mark)}</span>' if card.mark else ""
    first = next(iter(shares.values()))
    return f"""<article data-group="{escape(card.group)}" data-scores="{data}" style="--f:{first:.3f}">
<img src="{thumbnail(card.image)}" alt="{escape(card.caption)}" loading="lazy">
<div class="text"><p class="caption"><span>{escape(card.caption)}</span>{mark}</p>
<h2><span>{escape(card.title)}</span> <small>{escape(card.detail)}</small></h2>
<dl>{bars}</dl></div>
</article>"""


def _about(about: Mapping[str, str]) -> str:
    if not about:
        return ""
    told = "".join(f"<dt>{escape(_spoken(name))}</dt><dd>{escape(text)}</dd>" for name, text in about.items())
    return f'<footer><h2>What the scores measure</h2><dl class="about">{told}</dl></footer>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _share(value: float, span: tuple[float, float]) -> float:
    low, high = span
    return (value - low) / (high - low) if high > low else 0.0


def _number(value: float, span: tuple[float, float]) -> str:
    """Two decimals, more where the pictures of a page are close to each other; a real minus, and no minus zero."""
    width = span[1] - span[0]
    places = min(max(2 - round(math.log10(width)), 2), 6) if width > 0 else 2
    return f"{round(value, places) + 0.0:.{places}f}".replace("-", "\N{MINUS SIGN}")


def _spoken(name: str) -> str:
    return name.replace("_", " ")
