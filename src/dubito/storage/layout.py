"""What plain values from a file must look like: checked once when they are read, so that nothing fails later on.

A layout is written as the values are:

    int, float, str, bool, str | None    a value of this type; numbers are finite, and a float may be whole
    range(10)                            a whole number in it
    [layout, ...]                        a list of these
    [layout, layout]                     a list of exactly these
    {"key": layout, "other?": layout}    a mapping with these keys, the second of which may be missing, and any others
    {str: layout}                        a mapping whose other keys all have these
    (layout, layout)                     one or the other
    None, Any                            null; anything
"""

import math
from typing import Any

COUNT = range(1 << 62)
"""The layout of a number of things."""
_WHOLE = "its content"


def check_layout(value: Any, layout: Any, where: str = _WHOLE) -> None:
    """Raise ValueError, which says where, unless plain values are laid out as they should be.

    >>> check_layout({"rows": 3, "names": ["a"]}, {"rows": COUNT, "names": [str, ...], "gate?": float | None})
    >>> check_layout({"rows": [3, -3]}, {"rows": [COUNT, ...]})
    Traceback (most recent call last):
    ValueError: rows[1] is -3
    """
    inner = _parts(value, layout, where)
    if inner is None:
        raise ValueError(f"{where} is {value!r:.80}")
    for place, (one, expected) in inner.items():
        check_layout(one, expected, place)


def _parts(value: Any, layout: Any, where: str) -> dict[str, tuple[Any, Any]] | None:
    """By place, the parts of a value and their layouts; None where the value itself is not as it should be."""
    if isinstance(layout, tuple):
        return {} if any(_fits(value, one) for one in layout) else None
    if isinstance(layout, dict):
        return _entries(value, layout, where) if isinstance(value, dict) else None
    if not isinstance(layout, list):
        return {} if _is_a(value, layout) else None
    if not isinstance(value, list):
        return None
    layouts = layout[:1] * len(value) if layout[-1:] == [...] else layout
    if len(layouts) != len(value):
        return None
    return {f"{where}[{place}]": pair for place, pair in enumerate(zip(value, layouts, strict=True))}


def _entries(value: dict[str, Any], layout: dict[Any, Any], where: str) -> dict[str, tuple[Any, Any]]:
    """By place, the values of a mapping and their layouts."""
    above = "" if where == _WHOLE else f"{where}."
    named = {key.removesuffix("?"): expected for key, expected in layout.items() if key is not str}
    if missing := [key for key in named if key in layout and key not in value]:
        raise ValueError(f"{where} has no '{missing[0]}'")
    return {f"{above}{key}": (one, named.get(key, layout.get(str, Any))) for key, one in value.items()}


def _fits(value: Any, layout: Any) -> bool:
    try:
        check_layout(value, layout)
    except ValueError:
        return False
    return True


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value has a type; a bool is no number."""
    if kind is Any or kind is None:
        return kind is Any or value is None
    if isinstance(kind, range):
        return type(value) is int and value in kind
    if isinstance(value, bool):
        return kind is bool
    if type(value) is int and kind is not int:
        value = float(value) if abs(value) < 1 << 53 else math.nan
    return isinstance(value, kind) and not (isinstance(value, float) and not math.isfinite(value))
