"""`dubito map`: a map of a cache, as a page and as a figure."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

import dubito
from dubito import choices
from dubito.cli import _options as options
from dubito.cli._console import Screen, facts


def map_(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write an interactive page.")] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Write a figure, by matplotlib.")] = None,
    images: Annotated[
        str | None, typer.Option("--images", metavar="IMAGES", help="The images of the cache, for thumbnails.")
    ] = None,
    method: Annotated[choices.Layout, typer.Option("--method", help="How the map is laid out.")] = "tsne",
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    fit: options.Fit = None,
    head: options.OneHead = None,
    perplexity: Annotated[float, typer.Option("--perplexity", metavar="P", help="Of t-SNE.")] = 30.0,
    neighbours: Annotated[int, typer.Option("--neighbours", min=2, metavar="K", help="Of UMAP.")] = 15,
    most: Annotated[
        int, typer.Option("--most", min=1, metavar="N", help="Of a larger cache, so many images are drawn at random.")
    ] = 20_000,
    thumbnails: Annotated[
        int, typer.Option("--thumbnails", min=0, metavar="N", help="At most so many, about 3 KB each.")
    ] = 2000,
    colour: Annotated[
        choices.Colouring | None,
        typer.Option(
            "--colour",
            help="Of the circles; by default by class, or by uncertainty where ten colours are too few.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the layout.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Draw a map of a CACHE: similar images lie together, uncertain ones are larger and more transparent."""
    screen = Screen.current(json=json, debug=debug)
    if to is None and png is None:
        raise typer.BadParameter("give --to map.html, --png map.png, or both.")
    if images is not None and to is None:
        raise typer.BadParameter("--images are for the thumbnails of the page. Give --to map.html too.")
    if head and score not in (None, "head"):
        raise typer.BadParameter(f"a map shows one uncertainty. Give --score {score} or --head {head}, not both.")
    wanted = options.parse_settings(settings)
    with screen.waiting("opening the cache"):
        from dubito.cli._scores import ready_scores

        table = dubito.open(cache)
        heads = [head] if head else []
        names = [score] if score else ["head"] if head else ["entropy"]
        chosen = ready_scores(cache, table, screen, names=names, settings=wanted, fit=fit, heads=heads, load=None)
    with screen.waiting("laying out"):
        name, used = next(iter(chosen.items()))
        layout: dict[str, Any] = {"perplexity": perplexity, "neighbours": neighbours, "most": most, "seed": seed}
        look: dict[str, Any] = {"images": images, "thumbnails": thumbnails, "colour": colour}
        found = dubito.draw_map(table, used, method=method, to=to, png=png, **look, **layout)
    written = [str(path) for path in (to, png) if path is not None]
    result = {"table": found.name, "images": found.images, "points": len(found), "method": method, "score": name}
    shown = facts(f"{found.name}: a map of {len(found)} images", {"method": method, "uncertainty": name})
    screen.result({**result, "written": written}, shown, *(Text(f"written: {path}") for path in written))
