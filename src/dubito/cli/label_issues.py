"""`dubito label-issues`: which labels are likely wrong."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen
from dubito.cli.acquire import given_score


def label_issues(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write all of them as CSV.")] = None,
    neighbours: Annotated[
        int, typer.Option("-k", "--neighbours", min=1, metavar="K", help="How many neighbours vote.")
    ] = 10,
    share: Annotated[
        float, typer.Option("--share", metavar="P", help="The share of images that is examined: the most certain ones.")
    ] = 0.5,
    least: Annotated[float, typer.Option("--least", metavar="P", help="The smallest vote margin to report.")] = 0.5,
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    fit: options.Fit = None,
    head: options.OneHead = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find labels of a CACHE that are likely wrong: certain images whose neighbours agree on another class."""
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
    with screen.waiting("looking for neighbours"):
        chosen = given_score(cache, table, screen, score=score, settings=settings, fit=fit, head=head)
        issues = dubito.find_label_issues(table, chosen, k=neighbours, share=share, least=least)
    if to is not None:
        issues.to_csv(to)
    screen.result(
        {**issues.to_dict(), "to": str(to) if to else None}, issues, *([Text(f"written: {to}")] if to else [])
    )
