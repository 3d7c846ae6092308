"""`dubito map` and `dubito demo`: pages that show the images of a cache, and what dubito does."""

from pathlib import Path
from typing import Annotated

import typer

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command
from dubito.cli.score import one_score


@command
def map_(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an interactive page.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a figure, by matplotlib.")] = None,
    images: Annotated[
        str | None, typer.Option(metavar="IMAGES", help="The images of the cache, for thumbnails.")
    ] = None,
    method: Annotated[choices.Layout, typer.Option(help="How the map is laid out.")] = "tsne",
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    train: options.Train = None,
    head: options.OneHead = None,
    perplexity: Annotated[float, typer.Option(metavar="P", help="Perplexity of t-SNE.")] = 30.0,
    neighbours: Annotated[int, typer.Option(min=2, metavar="K", help="Neighbours of UMAP.")] = 15,
    most: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a larger cache, this many images are drawn at random.")
    ] = 20_000,
    thumbnails: Annotated[int, typer.Option(min=0, metavar="N", help="At most this many, about 3 KB each.")] = 2000,
    colour: Annotated[
        choices.Colouring | None,
        typer.Option(help="Of the circles; by default by class, or by uncertainty where ten colours are too few."),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Draw a map of a CACHE: similar images lie together, uncertain ones are larger and more transparent."""
    if to is None and png is None:
        raise typer.BadParameter("give --to map.html, --png map.png, or both.")
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
        chosen = one_score(screen, table, score=score, settings=settings, train=train, head=head) or dubito.Entropy()
    with screen.waiting("laying out"):
        drawn = dubito.draw_map(
            table,
            chosen,
            method=method,
            to=to,
            png=png,
            images=images,
            thumbnails=thumbnails,
            colour=colour,
            perplexity=perplexity,
            neighbours=neighbours,
            most=most,
            seed=seed,
        )
    screen.show(drawn, written={"page": to, "figure": png})


@command
def demo(
    screen: Screen,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Images, cache and page go there.")] = Path("demo"),
) -> None:
    """See it work: EfficientNet-Lite0 on photographs and their blurred, boxed, zoomed and noisy copies.

    Nothing is downloaded: weights and photographs come inside packages of the extra "demo".
    """
    screen.when_stopped = "Finished shards are safe: the same command continues from there."
    with screen.waiting("loading PyTorch"):
        report = dubito.report
    result = report.run_demo(to, progress=not screen.quiet)
    screen.show(result, written={"page": report.write_demo_page(result, to / "demo.html")})
