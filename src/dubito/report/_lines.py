"""Several curves on one pair of axes, as SVG: one colour a curve, the reference dashed in the colour of the text."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 300, 190
_LEFT, _TOP, _BOTTOM = 38, 8, 24
_STOPS = ((35, 120, 143), (132, 84, 158), (208, 89, 28))
"""Red, green and blue of the first, the middle and the last curve."""


def curves(
    x: Sequence[float], ys: Mapping[str, Sequence[float]], *, reference: str, span: tuple[float, float], told: str
) -> str:
    """One line a curve; all panels of a row share their span, so that they can be compared.

    Args:
        x: Levels in (0, 1].
        ys: By name.
        reference: The name that is drawn dashed.
        span: The lowest and the highest value that must have room.
        told: What is seen, for those who do not see it.
    """
    low, high = span
    if high - low <= 1e-9:
        low, high = low - 0.5, high + 0.5
    room = _HEIGHT - _TOP - _BOTTOM

    def place(level: float, value: float) -> str:
        return f"{_LEFT + (_WIDTH - _LEFT) * level:.1f} {_TOP + room * (high - value) / (high - low):.1f}"

    grid = "".join(_level(text, float(place(0.0, value).split()[1])) for value, text in _ticks(low, high))
    ticks = "".join(_quantile(level) for level in (0.0, 0.5, 1.0))
    colours = palette([name for name in ys if name != reference])
    drawn = "".join(
        f'<path class="curve{" reference" if name == reference else ""}"'
        + ("" if name == reference else f' stroke="{colours[name]}"')
        + f' d="M{"L".join(place(level, value) for level, value in zip(x, y, strict=True))}">'
        f"<title>{escape(name)}</title></path>"
        for name, y in ys.items()
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(told)}">{grid}{ticks}{drawn}</svg>'


def palette(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, from one end to the other.

    >>> palette(["2x2", "3x3"])
    {'2x2': '#23788f', '3x3': '#d0591c'}
    """
    last = max(1, len(names) - 1)
    return {name: _mixed(number / last) for number, name in enumerate(names)}


def _mixed(share: float) -> str:
    """Between two neighbouring stops."""
    place = share * (len(_STOPS) - 1)
    before = min(int(place), len(_STOPS) - 2)
    parts = [round(a + (b - a) * (place - before)) for a, b in zip(_STOPS[before], _STOPS[before + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """About four round numbers."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(step * number, f"{step * number + 0.0:.{places}f}") for number in numbers]


def _level(text: str, y: float) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _quantile(level: float) -> str:
    x = _LEFT + (_WIDTH - _LEFT) * level
    anchor = {0.0: "start", 1.0: "end"}.get(level, "middle")
    return f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{level:g}</text>'
