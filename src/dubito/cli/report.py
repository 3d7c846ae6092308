"""`dubito map` and `dubito demo`: pages that show the images of a cache, and what dubito does."""

from pathlib import Path
from typing import Annotated

from typer import BadParameter

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli.score import OneScore


@command
def map_(
    screen: Screen,
    cache: options.Cache,
    *,
    to: Annotated[Path | None, option("Write an interactive page.", "FILE")] = None,
    png: Annotated[Path | None, option("Write a figure, by matplotlib.", "FILE")] = None,
    images: Annotated[str | None, option("The images of the cache, for thumbnails.", "IMAGES")] = None,
    method: Annotated[choices.Layout, option("How the map is laid out.")] = "tsne",
    score: OneScore,
    perplexity: Annotated[float, option("Perplexity of t-SNE.", "P")] = 30.0,
    neighbours: Annotated[int, option("Neighbours of UMAP.", "K", min=2)] = 15,
    most: Annotated[int, option("Of a larger cache, this many images are drawn at random.", "N", min=1)] = 20_000,
    thumbnails: Annotated[int, option("At most this many, about 3 KB each.", "N", min=0)] = 2000,
    colour: Annotated[
        choices.Colouring | None,
        option("Of the circles; by default by class, or by uncertainty where ten colours are too few."),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Draw a map of a CACHE: similar images lie together, uncertain ones are larger and more transparent."""
    if to is None and png is None:
        raise BadParameter("give --to map.html, --png map.png, or both.")
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
        chosen = score.ready(screen, table) or dubito.Entropy()
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
    to: Annotated[Path, option("Images, cache and page go there.", "DIR")] = Path("demo"),
) -> None:
    """See it work: EfficientNet-Lite0 on photographs and their blurred, boxed, zoomed and noisy copies.

    Nothing is downloaded: weights and photographs come inside packages of the extra "demo".
    """
    screen.when_stopped = "Finished shards are safe: the same command continues from there."
    with screen.waiting("loading PyTorch"):
        report = dubito.report
    result = report.run_demo(to, progress=not screen.quiet)
    screen.show(result, written={"page": report.write_demo_page(result, to / "demo.html")})
