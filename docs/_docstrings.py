"""Docstrings on the API pages as they were typed: doctests and aligned formulas become code blocks.

Without it, Markdown reads ">>>" as three quotations and runs the lines of a formula together.
"""

import re
from typing import Any

import griffe

_FORMULA = re.compile(r" {4}|.*\S {3,}\S")
_LISTED = re.compile(r"\s*([-|]|\d+\.) ?")


class Typed(griffe.Extension):
    """Rewrites every docstring once, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around what must keep its spaces; formulas stand in the docstrings of modules only."""
        if obj.docstring is not None:
            lines = [*obj.docstring.value.splitlines(), ""]
            obj.docstring.value = "\n".join(_fenced(lines, formulas=obj.is_module)).rstrip()


def _fenced(lines: list[str], *, formulas: bool) -> list[str]:
    out: list[str] = []
    inside = ""
    for line in lines:
        kind = _kind(line, inside, formulas)
        if kind != inside:
            out += ["```", ""] if inside else []
            out += ["", f"```{kind}"] if kind else []
        inside = kind
        out.append(line)
    return out


def _kind(line: str, inside: str, formulas: bool) -> str:
    """The language of the block that a line belongs to; empty for prose."""
    if line.startswith(">>> ") or (inside == "pycon" and line):
        return "pycon"
    return "text" if formulas and _FORMULA.match(line) and not _LISTED.match(line) else ""
