"""`dubito score`: the uncertainty of every image of a cache, and the most uncertain ones."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import Annotated

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, command

_ENDINGS = (".csv", ".npz")


@command
def score(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    score: options.Scores = [],  # noqa: B006 (typer copies it)
    train: options.Train = None,
    settings: options.Settings = [],  # noqa: B006
    head: options.Heads = [],  # noqa: B006
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write the scores of all images as .csv or .npz.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Show the N most uncertain images.")] = 10,
    save: Annotated[Path | None, typer.Option("--save", metavar="DIR", help="Keep the fitted scores there.")] = None,
    load: options.Load = None,
) -> None:
    """Score every image of a CACHE: higher = more uncertain, always.

    The most uncertain ones are shown, by the first score.
    """
    if to is not None and to.suffix.lower() not in _ENDINGS:
        raise typer.BadParameter(f"--to takes a file that ends in {' or '.join(_ENDINGS)}; got '{to}'.")
    with screen.waiting("opening the cache"):
        from dubito.cli._results import ScoredImages, folder_name
        from dubito.cli._scores import ready_scores

        table = dubito.open(cache)
    with screen.waiting("scoring"):
        chosen = ready_scores(screen, table, names=score, settings=settings, train=train, heads=head, load=load)
        scored = ScoredImages(cache, table, chosen, top)
    if save is not None:
        for name, one in chosen.items():
            dubito.save_score(one, save / folder_name(name))
    if to is not None:
        scored.write(to)
    screen.show(scored, written={"to": to, "saved": save})
