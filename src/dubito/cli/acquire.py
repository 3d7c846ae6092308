"""`dubito acquire`: which images of a pool to label next."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

import dubito
from dubito import choices
from dubito.cli import _options as options
from dubito.cli._console import Screen, grid

if TYPE_CHECKING:
    from dubito.apps.acquire import Picks
    from dubito.table import Table

_SHOWN = 20


def acquire(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    strategy: Annotated[
        choices.Strategy, typer.Option("--strategy", help="How images are chosen; see the guide.")
    ] = "top",
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="How many images.")] = 100,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write the picks as CSV.")] = None,
    labelled: Annotated[
        list[Path],
        typer.Option(
            "--labelled", metavar="FILE", help="A CSV with a column id, such as earlier picks: not chosen again."
        ),
    ] = [],  # noqa: B006 (typer copies it)
    score: Annotated[
        str | None, typer.Option("--score", "-s", metavar="NAME", help="The uncertainty; by default the entropy.")
    ] = None,
    settings: options.Settings = [],  # noqa: B006
    fit: options.Fit = None,
    head: Annotated[
        str | None, typer.Option("--head", metavar="NAME|PATH|HUB", help="A trained uncertainty head as the score.")
    ] = None,
    of: Annotated[
        str, typer.Option("--of", metavar="NAME", help="The ensemble for bald and batch_bald, such as members.")
    ] = "members",
    beta: Annotated[
        float, typer.Option("--beta", metavar="B", help="Of softmax, power and softrank: larger is closer to top.")
    ] = 1.0,
    number: Annotated[int, typer.Option("--round", min=0, metavar="N", help="Which round it is, for the CSV.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Choose images of a CACHE to label next."""
    screen = Screen.current(json=json, debug=debug)
    wanted = options.parse_settings(settings)
    with screen.waiting("opening the cache"):
        from dubito.cli._scores import ready_scores

        table = dubito.open(cache)
        known = _known(table, labelled, screen)
    with screen.waiting("choosing"):
        chosen = None
        if score or head:
            names, heads = ([score] if score else ["head"]), ([head] if head else [])
            found = ready_scores(cache, table, screen, names=names, settings=wanted, fit=fit, heads=heads, load=None)
            chosen = next(iter(found.values()))
        maker = dubito.Acquire(strategy, chosen, of=of, beta=beta, seed=seed)
        picks = maker.pick(table, count, labelled=known, round=number)
    if to is not None:
        picks.to_csv(to)
    screen.result({**picks.to_json(), "to": str(to) if to else None}, *_shown(picks, to))


def _known(table: "Table", files: list[Path], screen: Screen) -> list[int]:
    """The rows whose ids stand in these files."""
    names: set[str] = set()
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if "id" not in (rows.fieldnames or []):
                raise dubito.DubitoError(
                    f"--labelled: '{path}' must have a column id; it has {', '.join(rows.fieldnames or ['none'])}."
                )
            names |= {row["id"] for row in rows}
    found = [row for row, name in enumerate(table.id) if str(name) in names] if names else []
    if len(found) < len(names):
        screen.note(f"--labelled: {len(names) - len(found)} of {len(names)} ids are not in {table.name}.")
    return found


def _shown(picks: "Picks", to: Path | None) -> list[RenderableType]:
    header, *lines = picks.lines()
    short = [[name, number, u and f"{float(u):.4g}", rank] for name, number, u, rank in lines[:_SHOWN]]
    title = f"{len(picks)} images to label, by {picks.strategy}"
    rest = [Text(f"... and {len(lines) - _SHOWN} more")] if len(lines) > _SHOWN else []
    return [grid(title, header, short, numbers=3), *rest, *([Text(f"written: {to}")] if to else [])]
