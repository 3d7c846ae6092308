"""Pages as single files: a template of this package, with its styles, script and images inside.

A page loads nothing from anywhere: its Content-Security-Policy forbids it, so it opens from a disk or an e-mail. jinja2
escapes every text; only what `svg` drew and what `script_data` made safe goes in as it is.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dubito.storage import export

TEMPLATES = Path(__file__).parents[1] / "report" / "templates"
"""Of all pages, also those that results of lower rooms write."""
_NEGATIVE = re.compile(r"(?<![\w.)\]])-(?=[\d.]|cov\b)|(?<= )-(?= )")


def render(template: str, to: str | Path, **values: Any) -> Path:
    """Fill a template, write it to a file in one step and return its path; the folder is made.

    Args:
        template: File name in `templates/`, such as "map.html.j2".
        to: Path of the HTML file.
        values: What the template shows. `title` and `lead` are required; `facts`, `verdict` and `findings` are lists of
            texts, or a text, for the head of the page. A template with images, but without a script, sets `pictures`.
    """
    return export(to, fill(template, **values).encode())


def fill(template: str, **values: Any) -> str:
    """The text of a page; see `render`."""
    optional = {"facts": (), "verdict": "", "findings": (), "style": None, "script": None, "pictures": False}
    text = _environment().get_template(template).render(**optional | values)
    return text.encode(errors="replace").decode()  # names of files may hold bytes that are not UTF-8


def draw(name: str, *values: Any) -> Markup:
    """The SVG of a drawing, by a macro of templates/svg.html.j2."""
    return Markup(getattr(_environment().get_template("svg.html.j2").module, name)(*values))  # noqa: S704 (it escapes)


def script_data(value: Any) -> Markup:
    """Plain values as JSON that may stand inside a `<script>`: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (JSON without "<" cannot leave its element)


def minus(text: str) -> str:
    """With real minus signs before numbers.

    >>> minus("-0.5 [-1, 2] of log-sum-exp")
    '−0.5 [−1, 2] of log-sum-exp'
    """
    return _NEGATIVE.sub("\N{MINUS SIGN}", text)


def number(value: float, places: int = 1) -> str:
    """With thousands separators and a real minus sign, and never a negative zero.

    >>> number(-1234.56), number(-0.01)
    ('−1,234.6', '0.0')
    """
    return f"{round(value, places) + 0.0:,.{places}f}".replace("-", "\N{MINUS SIGN}")


def words(name: str) -> str:
    """A name as people read it: without underscores."""
    return name.replace("_", " ")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"minus": minus, "number": number, "code": _code, "px": "{:.1f}".format}
    environment.filters["words"] = words
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    environment.globals["asset"] = _asset
    return environment


def _asset(name: str) -> Markup:
    """A style sheet or script of this package."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 (our own file)


def _code(sentence: str) -> Markup:
    """Names between backticks as code."""
    marked = re.sub(r"`([a-z_]+)`", r"<code>\1</code>", str(escape(sentence)))
    return Markup(marked)  # noqa: S704 (escaped above)
