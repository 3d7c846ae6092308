"""One small plotter for pages: lines, histograms and bars as SVG, coloured by the page's style sheet.

An `Axis` maps values to a share of its length and has about four round ticks. Every drawing is one `<svg>` that scales
with its box and carries a description for people who do not see it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from dubito.page.render import draw, minus, number

_WIDTH, _HEIGHT, _BASE = 300, 190, 130
"""In pixels: the width of all drawings, the height of lines, and of a histogram above its ticks."""
_TOP, _NAME = 8, 16
"""Above every drawing, and for the name of an axis."""
_BINS = 36
_TAIL = 0.005
SERIES = (("first", ""), ("second", "7 3"), ("third", "2 2"), ("fourth", "9 3 2 3"), ("fifth", "4 4"))
"""Kinds and dashes of lines that are told apart by colour or by dashes; the style sheet has the colours."""
_STOPS = ((35, 120, 143), (132, 84, 158), (208, 89, 28))
"""Red, green and blue of the first, the middle and the last colour of a palette."""


@final
@dataclass(frozen=True)
class Axis:
    """The range of values that has room, linear or logarithmic.

    Attributes:
        low: Lower end; the exponent of ten on a logarithmic axis.
        high: Upper end, in the same unit.
        log: Whether the axis is logarithmic.
        floor: Smallest value that a logarithmic axis shows; anything below is drawn there. The default is the smallest
            difference from 1 that a probability in float64 can have.
        name: What it measures, written beside it.
    """

    low: float
    high: float
    log: bool = False
    floor: float = 1e-16
    name: str = ""

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        *,
        log: bool = False,
        floor: float = 1e-16,
        whole: bool = False,
        name: str = "",
    ) -> "Axis":
        """From the smallest to the largest value; with `whole`, up to whole powers of ten on either side."""
        scaled = [math.log10(max(value, floor)) if log else value for value in values]
        low, high = min(scaled), max(scaled)
        if whole:
            low, high = float(math.floor(low)), float(max(math.ceil(high), math.floor(low) + 1))
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
            low, high = low - 0.5, high + 0.5
        return cls(low, high, log, floor, name)

    def share(self, value: float) -> float:
        """Where a value stands: 0 at the lower end, 1 at the upper."""
        scaled = math.log10(max(value, self.floor)) if self.log else value
        return (scaled - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """About four round numbers: where each stands, from 0 to 1, and its text as SVG."""
        span = self.high - self.low
        power = 10.0 ** math.floor(math.log10(span / 4))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 4 * (1 - 1e-9))
        step = float(math.ceil(step)) if self.log else step
        places = max(0, -math.floor(math.log10(step) + 1e-9))
        multiples = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        values = [step * i for i in multiples]
        return [((v - self.low) / span, _power(v) if self.log else _tick(v, places)) for v in values]


@final
@dataclass(frozen=True)
class Line:
    """Points joined by a line.

    Attributes:
        x: Where the points stand.
        y: Their values.
        name: Shown when somebody points at the line.
        colour: As "#rrggbb"; the style sheet's without one.
        dashed: For a reference that others are compared with.
        intervals: Low and high of every point; with them, points are marked.
        kind: Class of the style sheet, which has the colour.
        pattern: Lengths of dashes and gaps, such as "7 3", for people who do not see the colour.
    """

    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    colour: str | None = None
    dashed: bool = False
    intervals: Sequence[tuple[float, float]] = ()
    kind: str = ""
    pattern: str = ""


@final
@dataclass(frozen=True)
class Span:
    """A part of the horizontal axis, shaded, with a line and a text where it ends.

    Attributes:
        low: Where it begins.
        high: Where it ends.
        text: A few letters, as there is little room.
        name: Shown when somebody points at it.
        kind: Class of the style sheet, which has the colour.
    """

    low: float
    high: float
    text: str
    name: str = ""
    kind: str = ""


def lines(
    drawn: Sequence[Line],
    *,
    x: Axis,
    y: Axis,
    label: str,
    x_ticks: Sequence[float] | None = None,
    spans: Sequence[Span] = (),
) -> Markup:
    """Several lines on one pair of axes, over a grid of values.

    Args:
        drawn: The first one lies at the bottom.
        x: The horizontal axis.
        y: The vertical axis; panels that are to be compared share one.
        label: Description for people who do not see the drawing.
        x_ticks: Values written below the horizontal axis; by default about four round ones.
        spans: Parts of the horizontal axis to point out.
    """
    top = _TOP + (_NAME if y.name else 0)
    frame = _Frame(x, y, left=40, right=_WIDTH - 8, bottom=_HEIGHT - 24 - _TOP + top, top=top)
    ticks = x.ticks() if x_ticks is None else [(x.share(value), f"{value:g}") for value in x_ticks]
    return draw("lines", frame, drawn, ticks, label, spans)


def histogram(in_distribution: Float[np.ndarray, "n"], ood: Float[np.ndarray, "m"], *, log: bool = False) -> Markup:
    """Two histograms on one axis, each of area one; the outermost half percent of the values is in the last bins.

    Args:
        in_distribution: Values of the in-distribution images.
        ood: Values of the out-of-distribution images.
        log: Whether the axis is logarithmic; values below 1e-16 count as 1e-16.
    """
    both = [np.log10(np.maximum(values, Axis.floor)) if log else values for values in (in_distribution, ood)]
    ends = np.concatenate([np.quantile(values, (_TAIL, 1 - _TAIL)) for values in both])
    linear = Axis.over(ends.tolist())
    edges = np.linspace(linear.low, linear.high, _BINS + 1)
    shares = [np.histogram(values.clip(edges[0], edges[-1]), edges)[0] / len(values) for values in both]
    frame = _Frame(linear, Axis(0.0, float(np.max(shares))), bottom=_BASE)
    # The outline, from the axis up and back to it.
    corners = [(np.repeat(edges, 2), [0.0, *np.repeat(share, 2), 0.0]) for share in shares]
    outlines = {name: frame.path(*points) for name, points in zip(("in", "out"), corners, strict=True)}
    label = f"Histogram of {len(both[0])} in-distribution and {len(both[1])} out-of-distribution images"
    return draw("histogram", frame, outlines, Axis(linear.low, linear.high, log).ticks(), label)


def stairs(
    edges: Float[np.ndarray, "k1"], counts: Float[np.ndarray, "k"], *, label: str, mark: tuple[float, str] | None = None
) -> Markup:
    """One histogram from its counts.

    Args:
        edges: Of the bins.
        counts: Of each bin.
        label: Description for people who do not see the drawing.
        mark: A value with a text, as a dashed line.
    """
    ends = [float(edges[0]), float(edges[-1]), *([] if mark is None else [mark[0]])]
    axis = Axis(min(ends), max(ends))
    frame = _Frame(axis, Axis(0.0, float(np.max(counts))), bottom=_BASE)
    outline = frame.path(np.repeat(edges, 2), [0.0, *np.repeat(counts, 2), 0.0])
    return draw("histogram", frame, {"in": outline}, axis.ticks(), label, mark)


def bars(values: Mapping[str, tuple[float, float, float]], x: Axis) -> Markup:
    """Horizontal bars that start at zero, each with its interval and its value.

    Args:
        values: By name: value, low and high.
        x: The horizontal axis.
    """
    label = ", ".join(f"{name} {number(value)}" for name, (value, _, _) in values.items())
    return draw("bars", _Frame(x, Axis(0.0, 1.0), left=92, right=_WIDTH - 44), values, label)


def palette(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, from one end of a scale to the other.

    >>> palette(["2x2", "3x3"])
    {'2x2': '#23788f', '3x3': '#d0591c'}
    """
    places = np.linspace(0, len(_STOPS) - 1, len(names))
    parts = [np.interp(places, range(len(_STOPS)), part).round().astype(int) for part in zip(*_STOPS, strict=True)]
    return {name: "#" + bytes(mixed).hex() for name, *mixed in zip(names, *parts, strict=True)}


@dataclass(frozen=True)
class _Frame:
    """Two axes and the pixels between which they lie."""

    across: Axis
    up: Axis
    left: int = 0
    right: int = _WIDTH
    bottom: int = 0
    width: int = _WIDTH
    top: int = _TOP

    def x(self, value: float) -> float:
        return self.along(self.across.share(value))

    def along(self, share: float) -> float:
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        return self.height(self.up.share(value))

    def height(self, share: float) -> float:
        return self.bottom - (self.bottom - self.top) * share

    def path(self, x: Iterable[float], y: Iterable[float]) -> str:
        return "M" + "L".join(f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in zip(x, y, strict=True))


def _tick(value: float, places: int) -> str:
    """A round number; of very small ones, the power of ten instead of many zeros."""
    return number(value, places) if places <= 4 or value == 0 else minus(f"{value:.0e}")


def _power(exponent: float) -> str:
    text = Markup('10<tspan dy="-4" font-size="8">{}</tspan>').format(number(exponent, 0))
    return "1" if exponent == 0 else text
