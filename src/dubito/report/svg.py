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
from markupsafe import Markup, escape

_WIDTH, _HEIGHT, _BASE, _ROW = 300, 190, 130, 30
"""In pixels: the width of all drawings, the height of lines, of a histogram above its ticks, and of each bar."""
_TOP = 8
_BINS = 36
_TAIL = 0.005
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
    """

    low: float
    high: float
    log: bool = False
    floor: float = 1e-16

    @classmethod
    def over(cls, values: Sequence[float], *, log: bool = False, floor: float = 1e-16, whole: bool = False) -> "Axis":
        """From the smallest to the largest value; with `whole`, up to whole powers of ten on either side."""
        scaled = [math.log10(max(value, floor)) if log else value for value in values]
        low, high = min(scaled), max(scaled)
        if whole:
            low, high = float(math.floor(low)), float(max(math.ceil(high), math.floor(low) + 1))
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
            low, high = low - 0.5, high + 0.5
        return cls(low, high, log, floor)

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
        return [((v - self.low) / span, _power(v) if self.log else number(v, places)) for v in values]


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
    """

    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    colour: str | None = None
    dashed: bool = False
    intervals: Sequence[tuple[float, float]] = ()


def lines(drawn: Sequence[Line], *, x: Axis, y: Axis, label: str, x_ticks: Sequence[float]) -> Markup:
    """Several lines on one pair of axes, over a grid of values.

    Args:
        drawn: The first one lies at the bottom.
        x: The horizontal axis.
        y: The vertical axis; panels that are to be compared share one.
        label: Description for people who do not see the drawing.
        x_ticks: Values written below the horizontal axis.
    """
    frame = _Frame(x, y, left=40, right=_WIDTH - 8, bottom=_HEIGHT - 24)
    grid = "".join(
        f'<line class="grid" x1="{frame.left}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
        f'<text x="{frame.left - 6}" y="{height + 4:.1f}" text-anchor="end">{text}</text>'
        for height, text in ((frame.height(share), text) for share, text in y.ticks())
    )
    ticks = "".join(
        f'<text x="{frame.x(value):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{value:g}</text>' for value in x_ticks
    )
    return _svg(_HEIGHT, label, f"{grid}{ticks}{''.join(_line(frame, line) for line in drawn)}")


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
    drawn = ""
    for name, share in zip(("in", "out"), shares, strict=True):
        # The outline, from the axis up and back to it.
        outline = zip(np.repeat(edges, 2).tolist(), [0.0, *np.repeat(share, 2).tolist(), 0.0], strict=True)
        drawn += f'<path class="{name}" d="{frame.path(outline)}Z"/>'
    drawn += f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{_BASE}" y2="{_BASE}"/>'
    for place, text in Axis(linear.low, linear.high, log).ticks():
        x, anchor = place * _WIDTH, "start" if place < 0.04 else "end" if place > 0.96 else "middle"
        drawn += (
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_BASE}" y2="{_BASE + 4}"/>'
            f'<text x="{x:.1f}" y="{_BASE + 16}" text-anchor="{anchor}">{text}</text>'
        )
    label = f"Histogram of {len(both[0])} in-distribution and {len(both[1])} out-of-distribution images"
    return _svg(_BASE + 20, label, drawn)


def bars(values: Mapping[str, tuple[float, float, float]], x: Axis) -> Markup:
    """Horizontal bars that start at zero, each with its interval and its value.

    Args:
        values: By name: value, low and high.
        x: The horizontal axis.
    """
    frame = _Frame(x, Axis(0.0, 1.0), left=92, right=_WIDTH - 44)
    zero, drawn = frame.x(0.0), ""
    for place, (name, (value, low, high)) in enumerate(values.items()):
        y = place * _ROW + 8
        start, end = sorted((zero, frame.x(value)))
        drawn += (
            f'<text class="name" x="0" y="{y + 11}">{escape(name)}</text>'
            f'<rect class="bar{" negative" if value < 0 else ""}" x="{start:.1f}" y="{y}" '
            f'width="{max(end - start, 0.5):.1f}" height="14"/>'
            f'<line class="whisker" x1="{frame.x(low):.1f}" x2="{frame.x(high):.1f}" y1="{y + 7}" y2="{y + 7}"/>'
            f'<text class="value" x="{frame.x(max(high, 0.0)) + 6:.1f}" y="{y + 11}">{number(value)}</text>'
        )
    drawn += f'<line class="axis" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{len(values) * _ROW}"/>'
    label = ", ".join(f"{name} {number(value)}" for name, (value, _, _) in values.items())
    return _svg(len(values) * _ROW, label, drawn)


def palette(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, from one end of a scale to the other.

    >>> palette(["2x2", "3x3"])
    {'2x2': '#23788f', '3x3': '#d0591c'}
    """
    places = np.linspace(0, len(_STOPS) - 1, len(names))
    parts = [np.interp(places, range(len(_STOPS)), part).round().astype(int) for part in zip(*_STOPS, strict=True)]
    return {name: "#" + bytes(mixed).hex() for name, *mixed in zip(names, *parts, strict=True)}


def number(value: float, places: int = 1) -> str:
    """With thousands separators and a real minus sign, and never a negative zero.

    >>> number(-1234.56), number(-0.01)
    ('−1,234.6', '0.0')
    """
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class _Frame:
    """Two axes and the pixels between which they lie."""

    across: Axis
    up: Axis
    left: int = 0
    right: int = _WIDTH
    bottom: int = 0

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * self.across.share(value)

    def y(self, value: float) -> float:
        return self.height(self.up.share(value))

    def height(self, share: float) -> float:
        return self.bottom - (self.bottom - _TOP) * share

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)


def _line(frame: _Frame, line: Line) -> str:
    stroke = f' style="stroke: {line.colour}"' if line.colour else ""
    title = f"<title>{escape(line.name)}</title>" if line.name else ""
    css = "line dashed" if line.dashed else "line"
    drawn = f'<path class="{css}"{stroke} d="{frame.path(zip(line.x, line.y, strict=True))}">{title}</path>'
    for value, y, (low, high) in zip(line.x, line.y, line.intervals, strict=False):
        x = frame.x(value)
        drawn += (
            f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{frame.y(y):.1f}" r="3"/>'
        )
    return drawn


def _svg(height: int, label: str, content: str) -> Markup:
    return Markup(  # noqa: S704 (every text in the content is escaped or a number)
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{content}</svg>'
    )


def _power(exponent: float) -> str:
    return "1" if exponent == 0 else f'10<tspan dy="-4" font-size="8">{number(exponent, 0)}</tspan>'
