"""Pages as single files: a template of this package, with its styles, script and images inside.

A page loads nothing from anywhere: its Content-Security-Policy forbids it, so it opens from a disk or an e-mail. jinja2
escapes every text; only what `svg` drew and what `script_data` made safe goes in as it is.
"""

import base64
import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.storage import export
from dubito.types import Images

_TEMPLATES = Path(__file__).with_name("templates")
_NEGATIVE = re.compile(r"(?<![\w.)\]])-(?=[\d.]|cov\b)|(?<= )-(?= )")


def render(template: str, to: str | Path, **values: Any) -> Path:
    """Fill a template, write it to a file in one step and return its path; the folder is made.

    Args:
        template: File name in `templates/`, such as "map.html.j2".
        to: Path of the HTML file.
        values: What the template shows. `title` and `lead` are required; `facts`, `verdict` and `findings` are lists of
            texts, or a text, for the head of the page.
    """
    optional = {"facts": (), "verdict": "", "findings": (), "style": None, "script": None}
    text = _environment().get_template(template).render(**optional | values)
    return export(to, text.encode(errors="replace"))  # names of files may hold bytes that are not UTF-8


def draw(name: str, *values: Any) -> Markup:
    """The SVG of a drawing, by a macro of templates/svg.html.j2."""
    return Markup(getattr(_environment().get_template("svg.html.j2").module, name)(*values))  # noqa: S704 (it escapes)


def script_data(value: Any) -> Markup:
    """Plain values as JSON that may stand inside a `<script>`: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (JSON without "<" cannot leave its element)


def thumbnail(image: Image.Image | Path, *, side: int = 320, quality: int = 76) -> str:
    """An image of at most `side` pixels either way, as a JPEG inside a data URL."""
    small = (image if isinstance(image, Image.Image) else Image.open(image)).convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    small.save(data, "JPEG", quality=quality, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def read_pixels(images: Images, row: int, *, by: str) -> Image.Image:
    """One image of a set; ValueRangeError where the set holds model inputs, which cannot be shown."""
    image = images.read(row)
    if isinstance(image, Tensor):
        raise ValueRangeError(
            f"{by} needs images as pixels; '{images.ids[row]}' of {images.name} is a model input. Pass the pixels."
        )
    return image


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


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"minus": minus, "number": number, "code": _code, "px": "{:.1f}".format}
    environment.filters["words"] = lambda name: name.replace("_", " ")
    environment.globals["asset"] = _asset
    return environment


def _asset(name: str) -> Markup:
    """A style sheet or script of this package."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 (our own file)


def _code(sentence: str) -> Markup:
    """Names between backticks as code."""
    marked = re.sub(r"`([a-z_]+)`", r"<code>\1</code>", str(escape(sentence)))
    return Markup(marked)  # noqa: S704 (escaped above)
