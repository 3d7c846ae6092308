"""One self-contained HTML file: what a page shows, its styles and script inside; nothing is loaded from anywhere."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from dubito.storage import write_file

_ALONE = "default-src 'none'; style-src 'unsafe-inline'"
_WITH_SCRIPT = f"{_ALONE}; img-src data:; script-src 'unsafe-inline'"


def write_document(
    path: str | Path, title: str, parts: Sequence[str], *, styles: Sequence[str], script: str | None = None
) -> Path:
    """Write the file and return its path.

    Args:
        path: Of the HTML file; its folder is made.
        title: As the browser shows it.
        parts: HTML of the body, one below the other; empty ones are left out.
        styles: Files of this package, in order.
        script: Another, at the end; only a page that has one may hold pictures.
    """
    policy = _ALONE if script is None else _WITH_SCRIPT
    if script is not None:
        parts = [*parts, f"<script>\n{_text(script)}</script>"]
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>
{"".join(map(_text, styles))}</style>
</head>
<body>
{chr(10).join(filter(None, parts))}
</body>
</html>
"""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode(errors="replace"))  # names of files may have bytes that are no UTF-8
    return path


def top(
    title: str, lead: str, facts: Sequence[str], *, verdict: str = "", words: Sequence[str] = (), more: str = ""
) -> str:
    """The top of a page: what it is, what it is about, what was found, and what it was made of.

    Args:
        title: Of the page.
        lead: One or two sentences on what is to be seen.
        facts: Short ones, in a row.
        verdict: The finding in a sentence.
        words: Further findings.
        more: HTML below all that; everything else is plain text.
    """
    lines = [
        '<p class="brand">dubito</p>',
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead)}</p>',
        f'<p class="verdict">{escape(verdict)}</p>' if verdict else "",
        _listed("words", words) if words else "",
        _listed("facts", facts),
        more,
    ]
    return "\n".join(["<header>", *filter(None, lines), "</header>"])


def _listed(kind: str, texts: Sequence[str]) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def _text(name: str) -> str:
    return files("dubito.report").joinpath(name).read_text(encoding="utf-8")
