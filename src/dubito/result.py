"""What every function that finds something returns: one contract for numbers, tables, sentences and pictures.

A result is a dataclass that says what it is about (`title`), its main table (`records`: one mapping per row, with raw
values) and what that means (`findings`: sentences). `Result` turns these into text, JSON, CSV, pandas, a rich print, a
notebook view and a page. Where a picture says more, a result has `plot(ax=None)`, which returns matplotlib's axes. A
result of several panels makes its own figure and returns its axes as a list.
"""

import base64
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from dubito.errors import DubitoError, MissingPackageError
from dubito.storage import export, printable, write_csv

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes as Axes  # noqa: PLC0414 (every result with a plot imports it from here)
    from rich.console import Console, ConsoleOptions, RenderableType
else:
    Axes = Any  # for annotations: matplotlib is optional

Json = dict[str, Any]
_Any = TypeVar("_Any", bound="Result")
_LEGIBLE = 20
"""Letters of a line of text in a column, however narrow the terminal."""
_BETWEEN = 2
"""Columns of a terminal between two columns of a table; both ends of a line take as much together."""
_NOTEBOOK_ROWS = 30
"""Rows of a long table that a notebook shows."""
_PAGE_ROWS = 1000
"""Rows of a long table on a page; a CSV has all of them."""
_NUMBER = re.compile(r"[-\N{MINUS SIGN}+]?[\d.,]+( ?%|e[-+]\d+)?( \[.*\])?$|-$")
"""Cells that are aligned to the right: a number, one with its interval, or a dash for none."""
_CARD = "display:flex;gap:1em;align-items:flex-start;margin:.5em 0;padding-left:.75em;border-left:4px solid"
_PICTURE = "width:9em;height:9em;object-fit:contain;object-position:left top;margin:0"


class Result:
    """Numbers, a table and sentences: print it, or take it as a dict, JSON, CSV, pandas or a page.

    Subclasses are dataclasses. They override what they have to say; everything else follows from it.

    Attributes:
        titles: By key of `records`, the heading people see; keys without one are their own heading.
        text_rows: How many rows of a long table are shown as text; all of them if None.
        columns: Keys of `records` that are shown as text; all of them if empty.
        naming: How many of the first columns name the row: a terminal too narrow for a table repeats them.
        keys: Keys of `records` where these are always the same, so that a file without rows has a header, too.
        skipped: Images that could not be decoded, by id, each with the reason: they have no record.
    """

    titles: ClassVar[Mapping[str, str]] = {}
    text_rows: ClassVar[int | None] = None
    columns: ClassVar[Sequence[str]] = ()
    naming: ClassVar[int] = 1
    keys: ClassVar[Sequence[str]] = ()
    skipped: Sequence[tuple[str, str]] = ()

    def __init_subclass__(cls) -> None:
        # Set before the dataclass looks: a repr of all fields would fill the screen.
        cls.__repr__ = cls.__dict__.get("__repr__", Result.__repr__)  # type: ignore[method-assign]

    def title(self) -> str:
        """What the result is about, in one line."""
        return type(self).__name__

    def facts(self) -> dict[str, str]:
        """A few named facts to show above the table."""
        return {}

    def records(self) -> list[dict[str, Any]]:
        """The main table, one mapping per row. Values are raw: numbers, texts, intervals, None."""
        return []

    def findings(self) -> list[str]:
        """What the numbers mean, in whole sentences."""
        return []

    def heading(self, key: str) -> str:
        """The heading of a column of `records`."""
        return self.titles.get(key, key.replace("_", " "))

    def cell(self, key: str, value: Any) -> str:  # noqa: ARG002 (for subclasses that format by key)
        """One value of `records` as people see it."""
        return cell(value)

    def to_dict(self) -> Json:
        """Everything as plain values, ready for JSON."""
        values: Json = plain(self)
        return {**values, "findings": self.findings()} if self.findings() else values

    def to_json(self, path: str | Path | None = None) -> str:
        """`to_dict` as JSON text, also written to `path`, if there is one."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        if path is not None:
            export(path, text.encode())
        return text

    def to_csv(self, path: str | Path) -> Path:
        """Write `records` as CSV; an interval becomes three columns. What was skipped has a row with id and reason."""
        flat = [_flat(record) for record in self.records()]
        flat += [{"id": name, "reason": reason} for name, reason in self.skipped]
        header = list(dict.fromkeys([*self.keys, *_keys(flat)]))
        return write_csv(path, [header, *([record.get(key) for key in header] for record in flat)])

    def to_pandas(self) -> "pandas.DataFrame":
        """`records` as a DataFrame; an interval becomes three columns."""
        try:
            import pandas  # noqa: PLC0415 (optional)
        except ImportError as error:
            raise MissingPackageError("to_pandas needs pandas: pip install pandas") from error
        flat = [_flat(record) for record in self.records()]
        columns: Json = {key: [record.get(key) for record in flat] for key in _keys(flat) or self.keys}
        for key, values in columns.items():  # names of files may be any bytes, which a column of text cannot hold
            if any(isinstance(value, str) and printable(value) != value for value in values):
                columns[key] = pandas.Series(values, dtype=object)
        return pandas.DataFrame(columns)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> Path: ...
    def to_html(self, path: str | Path | None = None) -> str | Path:
        """One self-contained page with everything that the text has, and with the plot, if there is one.

        Args:
            path: The file to write, whose path is returned; without it, the page itself is.
        """
        page = self._page()
        return page if path is None else export(path, page.encode())

    def _page(self) -> str:
        """The page; results with more to show override it."""
        from dubito.page.render import fill  # noqa: PLC0415 (only for pages)

        shown = self.limited(_PAGE_ROWS)
        return fill(
            "result.html.j2",
            title=self.title(),
            named=self.facts(),
            body=shown._html_body(),
            sentences=shown._sentences(),
            picture=_picture(self),
        )

    def limited(self: _Any, rows: int | None) -> _Any:
        """The same result, but its text has only so many rows of the table; None for all of them."""
        shown = copy(self)
        object.__setattr__(shown, "text_rows", rows)  # frozen dataclasses, too
        return shown

    def lines(self) -> list[list[str]]:
        """The table as text: a header and one line per row, at most `text_rows`; empty without records."""
        records = self.records()[: self.text_rows]
        keys = self.columns or _keys(records)
        header = [self.heading(key) for key in keys]
        return [header, *([self.cell(key, one.get(key)) for key in keys] for one in records)] if records else []

    def _sentences(self) -> list[str]:
        """What stands below the table of a text."""
        left = len(self.records()) - self.text_rows if self.text_rows is not None else 0
        return [*([f"and {left:,} more"] if left > 0 else []), *self.findings()]

    def __str__(self) -> str:
        facts = aligned(list(self.facts().items()))
        return printable("\n".join([self.title(), *facts, *aligned(self.lines()), *self._sentences()]))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["RenderableType"]:
        from rich.table import Column, Table  # noqa: PLC0415 (only to print)
        from rich.text import Text  # noqa: PLC0415

        yield Text(self.title(), style="bold")
        named, width = self.facts(), options.max_width
        short = max(map(len, named), default=0) <= width // 2
        name_column = Column(style="dim", overflow="fold", no_wrap=short)
        facts = Table(name_column, Column(overflow="fold"), box=None, show_header=False, pad_edge=False)
        for name, text in named.items():
            facts.add_row(Text(name), Text(text))
        if named:
            yield facts
        yield from self._blocks(width)
        for sentence in self._sentences():
            yield Text(sentence)

    def _blocks(self, width: int) -> Iterator["RenderableType"]:
        """The table in blocks of columns that fit a width; every block begins with the columns that name the row."""
        from rich.box import SIMPLE_HEAD  # noqa: PLC0415 (only to print)
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        # A value above its interval: several metrics side by side fit a terminal.
        header, *rows = [[text.replace(" [", "\n[") for text in line] for line in self.lines()] or [[]]
        columns = [[one.get(key) for one in self.records()] for key in self.columns or _keys(self.records())]
        numbers = len(list(takewhile(lambda values: all(map(_is_number, values)), reversed(columns))))
        texts = len(header) - numbers
        foldable = [width // 2 // self.naming] * self.naming + [_LEGIBLE] * (texts - self.naming)
        ranges = [
            _width_range([row[place] for row in rows], name, foldable[place] if place < texts else None)
            for place, name in enumerate(header)
        ]
        for block in _fitting(ranges, self.naming, width) if rows else ():
            table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
            for place, size in block.items():
                table.add_column(
                    header[place], justify="left" if place < texts else "right", width=size, overflow="fold"
                )
            for row in rows:
                table.add_row(*(Text(row[place]) for place in block))
            yield table

    def __repr__(self) -> str:
        name, title = type(self).__name__, self.title()
        return f"{name}()" if title == name else f"{name}({title})"

    def _repr_html_(self) -> str:
        shown = self if self.text_rows is not None else self.limited(_NOTEBOOK_ROWS)
        facts = [f"{soft(name)} {escape(text)}" for name, text in self.facts().items()]
        parts = [f"<strong>{escape(self.title())}</strong>", *facts, shown._html_body()]
        return "".join(f"<div>{part}</div>" for part in (*parts, *map(escape, shown._sentences())) if part)

    def _html_body(self) -> str:
        """What a notebook shows between facts and sentences: the table."""
        return html_table(self.lines())


def plain(value: Any) -> Any:
    """Any value of a result as JSON knows it: dataclasses and named tuples by field, arrays as lists, paths as text.

    Fields that a dataclass leaves out of its repr (values of every image) are left out here too. NaN and infinity,
    which JSON does not have, become None.

    >>> from pathlib import PurePosixPath
    >>> plain({"a": (1, PurePosixPath("x/y"))})
    {'a': [1, 'x/y']}
    """
    if is_dataclass(value) and not isinstance(value, type):
        shown = [one.name for one in fields(value) if one.repr and not one.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in shown}
    mapping = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(mapping, Mapping):
        return {str(key): plain(one) for key, one in mapping.items()}
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def cell(value: Any) -> str:
    """A value as text: three decimals, with the interval if there is one; a dash for what could not be computed.

    >>> cell(0.12345), cell(None), cell(True), cell(12)
    ('0.123', '-', 'yes', '12')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_interval(value):
        return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
    return f"{value:.3f}" if isinstance(value, float) else printable(str(value))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as lines of text, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def html_table(lines: Sequence[Sequence[str]]) -> str:
    """A header and lines of cells as HTML, numbers to the right; nothing for no lines."""
    if not lines:
        return ""
    header, *body = lines
    sides = ["right" if all(map(_NUMBER.match, column)) else "left" for column in zip(*body, strict=True)]

    def row(tag: str, texts: Sequence[str]) -> str:
        cells = zip(sides, texts, strict=True)
        return "".join(f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>' for side, text in cells)

    rows = "".join(f"<tr>{row('td', line)}</tr>" for line in body)
    return f"<table><thead><tr>{row('th', header)}</tr></thead><tbody>{rows}</tbody></table>"


def html_card(
    heading: str, detail: str, verdict: str, reason: str, *, good: bool, below: str, picture: str = ""
) -> str:
    """One image with its verdict, for a notebook: readable on light and dark backgrounds, and nothing to load.

    Args:
        heading: The prediction.
        detail: Shown beside it, such as the probability.
        verdict: One or two words.
        reason: Why, in words.
        good: Whether the verdict is a good one.
        below: Small print, such as the image's name.
        picture: A data URL of the image.
    """
    colour = "#2a8299" if good else "#c9561a"
    image = f'<img src="{escape(picture)}" alt="" style="{_PICTURE}">' if picture else ""
    badge = f'<span style="color:{colour};font-weight:600">{escape(verdict)}</span>'
    words = f"<div><strong>{escape(heading)}</strong> {escape(detail)}</div><div>{badge}: {escape(reason)}</div>"
    return f'<div style="{_CARD};border-left-color:{colour}">{image}<div>{words}{soft(below)}</div></div>'


def soft(text: str) -> str:
    """Small print, as HTML."""
    return f'<span style="opacity:.7;font-size:90%;overflow-wrap:anywhere">{escape(text)}</span>' if text else ""


def axes(ax: Axes | None = None, *, size: tuple[float, float] = (5, 4)) -> Axes:
    """The axes to draw on: `ax`, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise MissingPackageError("plot needs matplotlib: pip install 'dubito[figures]'") from error
    return plt.subplots(figsize=size, layout="constrained")[1]


def _picture(result: Result) -> str:
    """The plot of a result as an SVG image inside a data URL; empty where it has none, or matplotlib is missing."""
    plot = getattr(result, "plot", None)
    try:
        drawn = None if plot is None else plot()
    except DubitoError:  # no matplotlib, or this result lacks what its plot shows
        drawn = None
    if drawn is None:
        return ""
    from matplotlib import pyplot, rc_context  # noqa: PLC0415 (optional, and there: something was drawn)

    figure, data = (drawn[0] if isinstance(drawn, list) else drawn).figure, io.BytesIO()
    with rc_context({"svg.hashsalt": "dubito"}):  # equal results give equal pages
        figure.savefig(data, format="svg", metadata={"Date": None})
    pyplot.close(figure)  # or a notebook would show it, too
    return f"data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}"


def plot_intervals(picture: Axes, series: Mapping[str, Mapping[str, Any]]) -> Axes:
    """Draw values with their intervals: one line per name, one colour per series; None is left out."""
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    for place, (label, values) in enumerate(series.items()):
        shown = {name: one for name, one in values.items() if one is not None}
        rows = [names.index(name) + 0.6 * ((place + 0.5) / len(series) - 0.5) for name in shown]
        # A value may lie outside its percentile interval.
        below = [max(0.0, one.value - one.low) for one in shown.values()]
        above = [max(0.0, one.high - one.value) for one in shown.values()]
        centre = [one.value for one in shown.values()]
        picture.errorbar(centre, rows, xerr=[below, above], fmt="o", capsize=3, label=label)
    picture.set_yticks(range(len(names)), names)
    picture.invert_yaxis()
    if len(series) > 1:
        picture.legend(frameon=False)
    return picture


def _width_range(cells: Sequence[str], heading: str, least: int | None) -> tuple[int, int]:
    """The least width of a column, and the one that it takes where there is room.

    Args:
        cells: Its texts.
        heading: Its heading, which may be broken between words.
        least: Width that longer texts may be folded to; None for numbers, which are never broken.
    """
    from rich.cells import cell_len  # noqa: PLC0415 (only to print)

    widest = max((cell_len(line) for text in cells for line in text.split("\n")), default=0)
    word = max(map(cell_len, heading.split()), default=0)
    return max(word, widest if least is None else min(least, widest)), max(cell_len(heading), widest)


def _fitting(ranges: Sequence[tuple[int, int]], naming: int, width: int) -> list[dict[int, int]]:
    """Columns and their widths, block by block; a block begins with the naming columns, and is no wider than `width`.

    >>> _fitting([(5, 5), (8, 20), (6, 6)], 1, 20)
    [{0: 5, 1: 11}, {0: 5, 2: 6}]
    """
    blocks = [list(range(naming))]
    for place in range(naming, len(ranges)):
        least = sum(ranges[one][0] + _BETWEEN for one in [*blocks[-1], place])
        if least > width and len(blocks[-1]) > naming:
            blocks.append(list(range(naming)))
        blocks[-1].append(place)
    fitted = []
    for places in blocks:
        sizes = {place: ranges[place][0] for place in places}
        for place in places:  # what is left of the width, to the first columns first
            left = width - sum(size + _BETWEEN for size in sizes.values())
            sizes[place] += max(0, min(ranges[place][1] - sizes[place], left))
        fitted.append(sizes)
    return fitted


def _is_interval(value: Any) -> bool:
    return all(hasattr(value, part) for part in ("value", "low", "high"))


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Intervals as three columns, everything else as it is."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if _is_interval(value):
            flat |= {key: value.value, f"{key}_low": value.low, f"{key}_high": value.high}
        else:
            flat[key] = plain(value)
    return flat


def _keys(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for record in records for key in record))


def _is_number(value: Any) -> bool:
    """Whether a value, an interval or a missing value may stand in a column of numbers."""
    return _is_interval(value) or not isinstance(value, str | bool | list | tuple)
