"""`dubito train`: an uncertainty head from caches, for one seed or several."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

import dubito
from dubito.cli._console import Assignments, CommandResult, Screen, command, option, read_settings
from dubito.storage import Place, to_place

if TYPE_CHECKING:
    from dubito.heads import Recipe
    from dubito.heads.score import Training

_FIT = "fit"


@command
def train(
    screen: Screen,
    caches: Annotated[list[Place], Argument(metavar="CACHE...", help="Folders that `dubito extract` filled, joined.")],
    *,
    to: Annotated[str, option("A name, which `dubito list heads` will show, or a path.", "NAME|DIR")],
    seeds: Annotated[str, option("One head for each seed.", "N,N,...")] = "1",
    held_out: Annotated[
        str | None, option("Measure R-AUROC on this cache, or on a share of the images.", "CACHE|SHARE")
    ] = None,
    settings: Annotated[
        list[Assignments],
        Option(
            "--set",
            metavar="KEY=VALUE",
            parser=Assignments.parse,
            help="A setting of the recipe, such as target=expected or lr=0.001; repeat it for several. temperature=fit "
            "estimates the temperature from labels. Keys and defaults: `dubito list recipe`.",
        ),
    ] = [],
    width: Annotated[int, option("Width of the hidden layers.", min=1)] = 512,
    depth: Annotated[int, option("Number of hidden layers.", min=0)] = 2,
    processes: Annotated[
        int | None,
        option("Processes of this machine that train together. Under torchrun, all that it has started do.", min=1),
    ] = None,
    corpus: Annotated[str | None, option("Which images these are, for the model card.", "TEXT")] = None,
    float16: Annotated[bool, Option("--float16", help="Save the weights in half the space.")] = False,
) -> None:
    """Train an uncertainty head on features and losses of CACHEs.

    Needs neither the images nor the model. If it is interrupted, run the same command again: it continues.
    On several machines, run it under torchrun on each: `torchrun ... -m dubito train ...`.
    """
    from dubito.heads.workers import launched

    leads = processes == 1 or launched()[0] == 0
    screen.quiet = screen.quiet or not leads  # one process of several speaks
    try:
        chosen = [int(part) for part in seeds.split(",")]
    except ValueError as error:
        raise BadParameter(f"--seeds takes whole numbers with commas, such as 1,2,3; got '{seeds}'.") from error
    with screen.waiting("opening the caches"):
        texts = {key: text for one in settings for key, text in one.items()}
        recipe = _recipe(texts)
        table = dubito.concat([dubito.open(cache) for cache in caches])
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
        processes=processes,
        progress=not screen.quiet,
        dtype="float16" if float16 else "float32",
        trained={"corpus": corpus} if corpus else None,
    )
    if not leads:
        return
    seconds, head = time.perf_counter() - start, f"{name}/seed-{training.head.seed}"
    called = {"caches": list(map(str, caches)), "to": str(place), "recipe": recipe.to_json(), "head": head}
    screen.show(_summary(training, len(table), seconds, called), *training.findings())


def _summary(training: "Training", rows: int, seconds: float, called: dict[str, Any]) -> CommandResult:
    """What was learned from, how well, and how to use it; the histories are in the folder."""
    trained, count, provenance = training.head.trained_, len(training.heads), training.head.provenance_
    model = provenance.model if provenance else None
    held_out = rows - trained["table_rows"]
    facts = {
        "rows": f"{trained['table_rows']:,}"
        + (f", and {held_out:,} held out" if held_out else "")
        + f"; {trained['rows_seen']:,} seen in {trained['steps']:,} steps",
        "seeds": ", ".join(str(head.seed) for head in training.heads),
        **training.facts(),
        "time": f"{seconds:.1f} s",
        "saved in": called["to"],
        "use it": f"dubito score CACHE --head {shlex.quote(called['head'])}",
    }
    ends = zip(training.heads, training.folders, training.histories, strict=True)
    values = called | {
        "table_rows": rows,
        "model": model,
        "seeds": [{"seed": head.seed, "folder": str(folder), **history[-1]} for head, folder, history in ends],
        **{key: training.to_dict()[key] for key in ("summary", "beside")},
        "rows": trained["table_rows"],
        "rows_seen": trained["rows_seen"],
        "steps": trained["steps"],
        "median_seed": training.head.seed,
        "seconds": round(seconds, 3),
    }
    title = f"{'a head' if count == 1 else f'{count} heads'} for {model or 'a model without a name'}"
    return CommandResult(title, values, facts)


def _recipe(texts: dict[str, str]) -> "Recipe":
    """The recipe of `--set`; a temperature that is to be fitted is set later."""
    fixed = {key: text for key, text in texts.items() if (key, text) != ("temperature", _FIT)}
    recipe = dubito.heads.Recipe(**read_settings(dubito.heads.Recipe, fixed, "--set"))
    if "temperature" in texts and recipe.target == "observed":
        raise BadParameter("--set temperature is for expected losses: --set target=expected, or mixed.")
    return recipe


def _split(table: "dubito.Table", held_out: str | None) -> tuple["dubito.Table", "dubito.Table | None"]:
    """The rows to learn from, and those that are held out: another cache, or a share of the images."""
    from dubito.heads.held_out import split
    from dubito.validate import check_disjoint

    if held_out is None:
        return table, None
    if not to_place(held_out).exists():
        try:
            share = float(held_out)
        except ValueError as error:
            raise BadParameter(f"--held-out takes a cache, or a share such as 0.1; got '{held_out}'.") from error
        # Split off here, before a temperature is fitted to what is left.
        return split(table, share)
    watched = dubito.open(held_out)
    harm = "A head orders images that it has learned too well. Pass another cache, or a share such as 0.1."
    check_disjoint(watched, table, by="--held-out", what="the training images", harm=harm)
    return table, watched


def _place(to: str) -> tuple[Place, str]:
    """The folder, and what `--head` calls it: a bare name is one on the shelf."""
    from dubito.heads.shelf import local_folder

    if "/" in to or "\\" in to or Path(to).is_dir():
        return to_place(to), str(to_place(to))
    return local_folder() / to, to
