"""`dubito ensemble`: do members disagree, and does their disagreement collapse in sub-ensembles?"""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen

if TYPE_CHECKING:
    from dubito.table import Table


def ensemble(  # noqa: PLR0913 (a command's options)
    caches: Annotated[
        list[Path],
        typer.Argument(
            metavar="CACHE...",
            help="A cache with an ensemble's columns, or caches of the same images by several models: its members.",
            show_default=False,
        ),
    ],
    *,
    of: Annotated[
        str, typer.Option("--of", metavar="NAME", help="Which ensemble: members, dropout, views, tiles_7 ...")
    ] = "members",
    ood: Annotated[
        list[Path],
        typer.Option(
            "--ood", metavar="CACHE", help="Out-of-distribution images; once for each CACHE, in the same order."
        ),
    ] = [],  # noqa: B006 (typer copies it)
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", min=0, metavar="N", help="Random partitions of each size; 0: members in their order."
        ),
    ] = 5,
    resamples: Annotated[
        int, typer.Option("--resamples", min=1, metavar="N", help="Of the bootstrap intervals.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of partitions, draws and the bootstrap.")] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a curve and histograms.")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find out how much members of an ensemble disagree, alone and in sub-ensembles.

    As sub-ensembles grow, they come to agree, and what members do not know is hidden.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    if ood and len(ood) != len(caches):
        raise typer.BadParameter(
            f"--ood takes as many caches as there are members, {len(caches)}, in their order; got {len(ood)}."
        )
    with screen.waiting("opening the caches"):
        from dubito.explain.collapse import diagnose_ensemble

        table = _opened(caches)
        other = _opened(ood) if ood else None
    with screen.waiting("cutting members into sub-ensembles, with bootstrap intervals"):
        diagnosis = diagnose_ensemble(table, of=of, ood=other, partitions=partitions, resamples=resamples, seed=seed)
    result = {**diagnosis.to_dict(), "page": None}
    shown: list[RenderableType] = [diagnosis]
    if html is not None:
        from dubito.report.ensemble import write_ensemble_page

        result["page"] = str(write_ensemble_page(diagnosis, html))
        shown.append(f"The page with the pictures: {html}")
    screen.result(result, *shown)


def _opened(paths: list[Path]) -> "Table":
    """One cache as it is; of several, the members together."""
    tables = [dubito.open(path) for path in paths]
    if len(tables) == 1:
        return tables[0]
    joined: "Table" = dubito.ensemble(tables)
    joined.name = " + ".join(path.resolve().name for path in paths)
    return joined
