"""`dubito suspects`: which labels are likely wrong."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, grid, short
from dubito.cli.acquire import given_score

if TYPE_CHECKING:
    from dubito.active.label_issues import LabelIssues

_SHOWN = 20


def suspects(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write all of them as CSV.")] = None,
    neighbours: Annotated[int, typer.Option("-k", "--neighbours", min=1, metavar="K", help="How many vote.")] = 10,
    share: Annotated[
        float, typer.Option("--share", metavar="P", help="Of the images, those of lowest uncertainty are judged.")
    ] = 0.5,
    least: Annotated[float, typer.Option("--least", metavar="P", help="Show those at least so sure.")] = 0.5,
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    fit: options.Fit = None,
    head: options.OneHead = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find labels of a CACHE that are likely wrong: clear images whose neighbours agree on another class."""
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
    with screen.waiting("looking for neighbours"):
        chosen = given_score(cache, table, screen, score=score, settings=settings, fit=fit, head=head)
        suspected = dubito.find_label_issues(table, chosen, k=neighbours, share=share, least=least)
    if to is not None:
        suspected.to_csv(to)
    screen.result({**suspected.to_json(), "to": str(to) if to else None}, *_shown(suspected, to))


def _shown(found: "LabelIssues", to: Path | None) -> list[RenderableType]:
    place = [Text(f"written: {to}")] if to else []
    if not len(found):
        return [Text(found.title(), style="bold"), *place]
    header, *lines = found.lines()
    rows = [[name, short(label), short(suggested), *rest] for name, label, suggested, *rest in lines[:_SHOWN]]
    more = [Text(f"... and {len(lines) - _SHOWN} more")] if len(lines) > _SHOWN else []
    return [grid(found.title(), header, rows, numbers=3), *more, *place]
