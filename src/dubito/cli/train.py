"""`dubito train`: an uncertainty head from caches, for one seed or several."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, command

if TYPE_CHECKING:
    from dubito.heads import Recipe
    from dubito.table import Table

_FIT = "fit"


@command
def train(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    caches: Annotated[
        list[Path],
        typer.Argument(metavar="CACHE...", help="Folders that `dubito extract` filled, joined.", show_default=False),
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="NAME|DIR",
            help="A name, which `dubito list heads` will show, or a path.",
            show_default=False,
        ),
    ],
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,N,...", help="One head for each seed.")] = "1",
    held_out: Annotated[
        str | None,
        typer.Option(
            "--held-out", metavar="CACHE|SHARE", help="Measure R-AUROC on this cache, or on a share of the images."
        ),
    ] = None,
    settings: Annotated[
        list[options.Assignments],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            parser=options.Assignments.parse,
            help="A setting of the recipe, such as target=expected or lr=0.001; repeat it for several. temperature=fit "
            "estimates the temperature from labels. Keys and defaults: `dubito list recipe`.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    width: Annotated[int, typer.Option("--width", min=1, help="Width of the hidden layers.")] = 512,
    depth: Annotated[int, typer.Option("--depth", min=0, help="Number of hidden layers.")] = 2,
    corpus: Annotated[
        str | None, typer.Option("--corpus", metavar="TEXT", help="Which images these are, for the model card.")
    ] = None,
    float16: Annotated[bool, typer.Option("--float16", help="Save the weights in half the space.")] = False,
) -> None:
    """Train an uncertainty head on features and losses of CACHEs.

    Neither images nor the model are needed any more. Stopped at any instant, the same command continues where it was.
    """
    chosen = _seeds(seeds)
    with screen.waiting("opening the caches"):
        from dubito.cli._results import TrainingRun

        texts = {key: text for one in settings for key, text in one.items()}
        recipe = _recipe(texts)
        table = dubito.concat(*(dubito.open(cache) for cache in caches))
        learned, watched = _split(table, held_out)
        if texts.get("temperature") == _FIT:
            recipe = replace(recipe, temperature=dubito.Temperature().fit(learned).temperature_)
    place, name = _place(to)
    screen.when_stopped = f"'{place}' holds all but the last seconds: the same command continues from there."
    start = time.perf_counter()
    training = dubito.train(
        learned,
        place,
        seeds=chosen,
        recipe=recipe,
        width=width,
        depth=depth,
        held_out=watched,
        progress=not screen.quiet,
        dtype="float16" if float16 else "float32",
        trained={"corpus": corpus} if corpus else None,
    )
    screen.show(TrainingRun(training, caches, len(table), recipe, place, name, time.perf_counter() - start))


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--seeds takes whole numbers with commas, such as 1,2,3; got '{text}'.") from error


def _recipe(texts: dict[str, str]) -> "Recipe":
    """The recipe of `--set`; a temperature that is to be fitted is set later."""
    from dubito.heads import Recipe
    from dubito.validate import settings_from_text

    fixed = {key: text for key, text in texts.items() if (key, text) != ("temperature", _FIT)}
    with options.reading():
        settings = settings_from_text(Recipe, fixed, by="--set")
    recipe = Recipe(**settings)
    if "temperature" in texts and recipe.target == "observed":
        raise typer.BadParameter("--set temperature is for expected losses: --set target=expected, or mixed.")
    return recipe


def _split(table: "Table", held_out: str | None) -> tuple["Table", "Table | None"]:
    """The rows to learn from, and those that are held out: another cache, or a share of the images."""
    from dubito.heads.held_out import split
    from dubito.validate import check_disjoint

    if held_out is None:
        return table, None
    if not Path(held_out).exists():
        try:
            share = float(held_out)
        except ValueError as error:
            raise typer.BadParameter(f"--held-out takes a cache, or a share such as 0.1; got '{held_out}'.") from error
        # Split off here, before a temperature is fitted to what is left.
        return split(table, share)
    watched = dubito.open(held_out)
    harm = "A head orders images that it has learned too well. Give another cache, or a share such as 0.1."
    check_disjoint(watched, table, by="--held-out", what="the training images", harm=harm)
    return table, watched


def _place(to: str) -> tuple[Path, str]:
    """The folder, and what `--head` calls it: a bare name is one on the shelf."""
    from dubito.heads.shelf import local_folder

    if "/" in to or "\\" in to or Path(to).is_dir():
        return Path(to), str(Path(to))
    return local_folder() / to, to
