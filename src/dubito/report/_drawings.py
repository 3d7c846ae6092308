"""Small drawings as SVG, coloured by the page's style: two histograms on one axis, and bars with intervals."""

import math
from collections.abc import Mapping
from html import escape

import numpy as np
from jaxtyping import Float, Int64

_WIDTH, _HEIGHT = 300, 130
_FLOOR = 1e-16
"""Of a logarithmic axis: in float64, one minus a probability has no smaller size but zero."""
_BINS = 36
_TAIL = 0.005
_LEFT, _ROW = 92, 30


def histogram(inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"], *, log: bool = False) -> str:
    """Two histograms on one axis, each with an area of its own; the tails are in the outermost bars.

    Args:
        inside: Values of known images.
        outside: Values of foreign ones.
        log: Whether the axis is logarithmic; what is below 1e-16 counts as that.
    """
    known, foreign = (np.log10(np.maximum(values, _FLOOR)) if log else values for values in (inside, outside))
    edges = _edges(known, foreign)
    heights = [np.histogram(values.clip(edges[0], edges[-1]), edges)[0] for values in (known, foreign)]
    shares = [count / count.sum() for count in heights]
    top = max(float(share.max()) for share in shares)
    steps = "".join(
        f'<path class="{name}" d="{_steps(share / top)}"/>' for name, share in zip(("in", "out"), shares, strict=True)
    )
    ticks = "".join(_tick(place, text) for place, text in _ticks(float(edges[0]), float(edges[-1]), log))
    axis = f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{_HEIGHT}" y2="{_HEIGHT}"/>'
    return _svg(_HEIGHT + 20, _told(heights), f"{steps}{axis}{ticks}")


def bars(parts: Mapping[str, tuple[float, float, float]], span: tuple[float, float]) -> str:
    """Horizontal bars from zero, each with its interval and its value.

    Args:
        parts: By name: value, low and high.
        span: The lowest and the highest number that must have room.
    """
    low, high = span
    room = _WIDTH - _LEFT - 44

    def x(value: float) -> float:
        return _LEFT + room * (value - low) / (high - low)

    rows = []
    for row, (name, (value, least, most)) in enumerate(parts.items()):
        y = row * _ROW + 8
        start, end = sorted((x(0.0), x(value)))
        negative = " negative" if value < 0 else ""
        rows.append(
            f'<text class="name" x="0" y="{y + 11}">{escape(name)}</text>'
            f'<rect class="bar{negative}" x="{start:.1f}" y="{y}" width="{max(end - start, 0.5):.1f}" height="14"/>'
            f'<line class="whisker" x1="{x(least):.1f}" x2="{x(most):.1f}" y1="{y + 7}" y2="{y + 7}"/>'
            f'<text class="value" x="{x(max(most, 0.0)) + 6:.1f}" y="{y + 11}">{_number(value)}</text>'
        )
    bottom = len(parts) * _ROW
    zero = f'<line class="axis" x1="{x(0.0):.1f}" x2="{x(0.0):.1f}" y1="0" y2="{bottom}"/>'
    told = ", ".join(f"{name} {_number(value)}" for name, (value, _, _) in parts.items())
    return _svg(bottom, told, f"{''.join(rows)}{zero}")


def _svg(height: int, told: str, inside: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(told)}">{inside}</svg>'


def _edges(known: Float[np.ndarray, "n"], foreign: Float[np.ndarray, "m"]) -> Float[np.ndarray, "_"]:
    """Over all but the outermost values of either set."""
    ends = [np.quantile(values, (_TAIL, 1 - _TAIL)) for values in (known, foreign)]
    low, high = min(float(end[0]) for end in ends), max(float(end[1]) for end in ends)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, _BINS + 1)


def _steps(heights: Float[np.ndarray, "bins"]) -> str:
    """The outline of a histogram, from the axis up and back to it."""
    wide = _WIDTH / len(heights)
    points = [f"M0 {_HEIGHT}"]
    for place, height in enumerate(heights):
        y = _HEIGHT - (_HEIGHT - 8) * float(height)
        points.append(f"L{place * wide:.1f} {y:.1f}L{(place + 1) * wide:.1f} {y:.1f}")
    return "".join([*points, f"L{_WIDTH} {_HEIGHT}Z"])


def _ticks(low: float, high: float, log: bool) -> list[tuple[float, str]]:
    """About four round numbers: where they stand, from 0 to 1, and how they are written."""
    step = _round_step((high - low) / 4)
    if log:
        step = float(math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    values = [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return [((value - low) / (high - low), _power(value) if log else _number(value, places)) for value in values]


def _round_step(step: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9)))


def _tick(place: float, text: str) -> str:
    x = place * _WIDTH
    anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
    return (
        f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEIGHT}" y2="{_HEIGHT + 4}"/>'
        f'<text x="{x:.1f}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
    )


def _power(exponent: float) -> str:
    return "1" if exponent == 0 else f'10<tspan dy="-4" font-size="8">{_number(exponent, 0)}</tspan>'


def _number(value: float, places: int = 1) -> str:
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "\N{MINUS SIGN}")


def _told(heights: list[Int64[np.ndarray, "bins"]]) -> str:
    known, foreign = (int(count.sum()) for count in heights)
    return f"Histogram of {known} known and {foreign} foreign images"
