"""Results as text: aligned columns, and numbers as they stand in them."""

from collections.abc import Sequence

from dubito.metrics import Interval


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells as lines of text, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def cell(value: Interval | float | None) -> str:
    """Three decimals, with the interval if there is one; a dash for what could not be computed."""
    if value is None:
        return "-"
    if isinstance(value, Interval):
        return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
    return f"{value:.3f}"
