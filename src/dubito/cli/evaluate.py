"""`dubito evaluate`: how good the scores are on a cache, with intervals."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen

if TYPE_CHECKING:
    from dubito.table import Table


def evaluate(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    fit: options.Fit = None,
    ood: Annotated[
        Path | None, typer.Option("--ood", metavar="CACHE", help="Images of things that the model does not know.")
    ] = None,
    score: options.Scores = [],  # noqa: B006 (typer copies it)
    settings: options.Settings = [],  # noqa: B006
    head: options.Heads = [],  # noqa: B006
    load: options.Load = None,
    metric: Annotated[
        list[str], typer.Option("--metric", metavar="NAME", help="Only these, such as error_auroc or r_auroc.")
    ] = [],  # noqa: B006
    resamples: Annotated[
        int, typer.Option("--resamples", min=1, metavar="N", help="Of the bootstrap intervals.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Of the bootstrap.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Evaluate scores on a CACHE with labels.

    Are wrong answers, bad neighbours and foreign images the uncertain ones? Values come with 95% intervals.
    """
    screen = Screen.current(json=json, debug=debug)
    wanted = options.parse_settings(settings)
    with screen.waiting("opening the cache"):
        from dubito.cli._scores import ready_scores

        table = dubito.open(cache)
        foreign = _foreign(ood, cache, table)
    with screen.waiting("scoring, with bootstrap intervals"):
        chosen = ready_scores(cache, table, screen, names=score, settings=wanted, fit=fit, heads=head, load=load)
        found = dubito.evaluate(chosen, table, ood=foreign, metrics=metric or None, resamples=resamples, seed=seed)
    screen.result(found.to_dict(), found)


def _foreign(ood: Path | None, cache: Path, table: "Table") -> "Table | None":
    """The images that the model does not know, of the same model; without them, labels are needed."""
    from dubito.cli._scores import check_same_model

    if ood is not None:
        foreign = dubito.open(ood)
        check_same_model(cache, ood, "--ood")
        return foreign
    if "label" not in table:
        raise dubito.DubitoError(
            f"evaluate: '{cache}' has no labels and no --ood CACHE came, so there is nothing to compare with. "
            f"Extract it with labels (class folders or --labels FILE), or give --ood."
        )
    return None
