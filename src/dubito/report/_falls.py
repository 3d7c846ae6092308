"""A curve that falls, as SVG: positive values with intervals against sizes, both axes logarithmic."""

import math
from collections.abc import Sequence

_WIDTH, _HEIGHT = 300, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 24
_LOWEST = 1e-9
"""What is not above zero is drawn here."""


def fall(points: Sequence[tuple[float, float, float, float]], expected: Sequence[tuple[float, float]] = ()) -> str:
    """A line with dots and intervals, and a dashed one to compare it with.

    Args:
        points: Size, value, low and high, from the smallest size on.
        expected: Size and value.
    """
    heights = [_log(value) for point in points for value in point[1:]] + [_log(value) for _, value in expected]
    low, high = math.floor(min(heights)), math.ceil(max(heights))
    high = max(high, low + 1)
    first, last = (_log(points[place][0]) for place in (0, -1))

    def x(size: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (_log(size) - first) / max(last - first, 1e-9)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - _log(value)) / (high - low)

    grid = "".join(_power(power, y(10.0**power)) for power in range(low, high + 1))
    sizes = "".join(f'<text x="{x(s):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{s:g}</text>' for s, *_ in points)
    dashed = f'<path class="averaging" d="{_path([(x(s), y(v)) for s, v in expected])}"/>' if expected else ""
    line = f'<path class="measured" d="{_path([(x(s), y(v)) for s, v, *_ in points])}"/>'
    dots = "".join(
        f'<line class="whisker" x1="{x(s):.1f}" x2="{x(s):.1f}" y1="{y(least):.1f}" y2="{y(most):.1f}"/>'
        f'<circle class="dot" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3"/>'
        for s, v, least, most in points
    )
    told = "Mutual information: " + ", ".join(f"{value:.2g} at {size:g}" for size, value, *_ in points)
    inside = f"{grid}{sizes}{dashed}{line}{dots}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{told}">{inside}</svg>'


def _log(value: float) -> float:
    return math.log10(max(value, _LOWEST))


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _power(power: int, y: float) -> str:
    shown = f"10<tspan dy='-4' font-size='8'>{str(power).replace('-', chr(0x2212))}</tspan>"
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown if power else "1"}</text>'
    )
