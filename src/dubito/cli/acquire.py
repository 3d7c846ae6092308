"""`dubito acquire`: which images of a pool to label next."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import csv
import io
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
    from dubito.types import Score

_SHOWN = 20


def acquire(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    strategy: Annotated[
        choices.Strategy,
        typer.Option("--strategy", help="How images are chosen; see the guide. power needs scores of 0 and above."),
    ] = "power",
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="How many images.")] = 100,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write the picks as CSV.")] = None,
    labelled: Annotated[
        list[Path],
        typer.Option(
            "--labelled", metavar="FILE", help="A CSV with a column id, such as earlier picks: not chosen again."
        ),
    ] = [],  # noqa: B006 (typer copies it)
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006
    fit: options.Fit = None,
    head: options.OneHead = None,
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
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
        known = _known(table, labelled, screen)
    with screen.waiting("choosing"):
        chosen = given_score(cache, table, screen, score=score, settings=settings, fit=fit, head=head)
        maker = dubito.Acquire(strategy, chosen, of=of, beta=beta, seed=seed)
        picks = maker.pick(table, count, labelled=known, round=number)
    if to is not None:
        picks.to_csv(to)
    screen.result({**picks.to_json(), "to": str(to) if to else None}, *_shown(picks, to))


def given_score(
    cache: Path,
    table: "Table",
    screen: Screen,
    *,
    score: str | None,
    settings: list[str],
    fit: Path | None,
    head: str | None,
) -> "Score | None":
    """The one score that --score or --head names, ready; None for neither."""
    from dubito.cli._scores import ready_scores

    wanted = options.parse_settings(settings)
    if not score and not head:
        if wanted or fit:
            raise dubito.DubitoError("--set and --fit belong to a score; none is named. Give --score NAME, too.")
        return None
    names, heads = ([score] if score else ["head"]), ([head] if head else [])
    found = ready_scores(cache, table, screen, names=names, settings=wanted, fit=fit, heads=heads, load=None)
    return next(iter(found.values()))


def _known(table: "Table", files: list[Path], screen: Screen) -> list[int]:
    """The rows whose ids stand in these files."""
    names: set[str] = set()
    for path in files:
        try:
            # Spreadsheets write a mark in front, which utf-8-sig takes off.
            rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig")))
        except OSError as error:
            raise dubito.DubitoError(
                f"--labelled: '{path}' cannot be read ({error.strerror}). Give a CSV with a column id."
            ) from error
        except UnicodeDecodeError as error:
            raise dubito.DubitoError(
                f"--labelled: '{path}' must be a CSV in UTF-8; it is not ({error.reason})."
            ) from error
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
