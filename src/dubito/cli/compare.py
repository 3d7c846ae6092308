"""`dubito compare`: which score for this model, on these images, and which differences are noise."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen

if TYPE_CHECKING:
    from dubito.table import Table


def compare(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    ood: Annotated[
        list[Path],
        typer.Option("--ood", metavar="CACHE", help="Images of things that the model does not know; several times."),
    ] = [],  # noqa: B006 (typer copies it)
    train: Annotated[
        Path | None,
        typer.Option("--train", metavar="CACHE", help="Other known images, for scores that learn."),
    ] = None,
    score: options.Scores = [],  # noqa: B006
    settings: options.Settings = [],  # noqa: B006
    head: options.Heads = [],  # noqa: B006
    load: options.Load = None,
    confidence: Annotated[
        float, typer.Option("--confidence", metavar="P", help="Of intervals and verdicts, between 0 and 1.")
    ] = 0.95,
    resamples: Annotated[int, typer.Option("--resamples", min=2, metavar="N", help="Of the paired bootstrap.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare all scores that a CACHE allows: which one finds the model's errors, or foreign images, best?

    Ranked with paired intervals and cost. Scores whose gap to the best may be noise are marked "=".
    """
    screen = Screen.current(json=json, debug=debug)
    wanted = options.parse_settings(settings)
    with screen.waiting("opening the caches"):
        from dubito.cli._scores import check_same_model, open_fit, ready_scores

        table = dubito.open(cache)
        foreign = _foreign(ood)
        for path in ood:
            check_same_model(cache, path, "--ood")
    with screen.waiting("scoring, with a paired bootstrap"):
        given = None
        if score or wanted or head or load:
            given = ready_scores(
                cache,
                table,
                screen,
                names=score,
                settings=wanted,
                fit=train,
                heads=head,
                load=load,
                option="--train",
            )
        found = dubito.compare(
            table,
            ood=foreign,
            # Scores that are given have learned from it already; whether its images are others is asked all the same.
            train=open_fit(train, cache, "--train") if given is None or train is None else dubito.open(train),
            scores=given,
            confidence=confidence,
            resamples=resamples,
            seed=seed,
        )
    screen.result(found.to_dict(), found)


def _foreign(paths: list[Path]) -> "dict[str, Table] | None":
    """By the names of their folders, or by their paths where these are the same."""
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else list(map(str, paths))
    return {name: dubito.open(path) for name, path in zip(names, paths, strict=True)} or None
