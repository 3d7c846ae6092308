"""`dubito train`: an uncertainty head from caches, for one seed or several."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import shlex
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, facts

if TYPE_CHECKING:
    from dubito.apps.train import Training
    from dubito.heads import Recipe
    from dubito.table import Table

_FIT = "fit"


class Loss(str, Enum):
    """What the head is trained on."""

    ranking = "ranking"
    l2 = "l2"
    l1 = "l1"
    log_l2 = "log_l2"
    variance_nll = "variance_nll"


class Target(str, Enum):
    """Whose losses it learns."""

    given = "given"
    expected = "expected"
    mixed = "mixed"


class Optimizer(str, Enum):
    """The optimisers."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    lion = "lion"


class Schedule(str, Enum):
    """Learning rates after the warm-up."""

    cosine = "cosine"
    step = "step"
    constant = "constant"


def train(  # noqa: PLR0913 (a command's options)
    caches: Annotated[
        list[Path],
        typer.Argument(metavar="CACHE", help="Folders that `dubito extract` filled, joined.", show_default=False),
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
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,N,...", help="One head for each.")] = "1",
    held_out: Annotated[
        str | None,
        typer.Option(
            "--held-out", metavar="CACHE|SHARE", help="Watch R-AUROC on this cache, or on a share of the photos."
        ),
    ] = None,
    loss: Annotated[Loss, typer.Option("--loss", help="What is minimised.")] = Loss.ranking,
    target: Annotated[
        Target, typer.Option("--target", help="Losses of given labels, those that the model expects, or both.")
    ] = Target.given,
    temperature: Annotated[
        str | None,
        typer.Option(
            "--temperature",
            metavar=f"T|{_FIT}",
            help="For expected losses: how far the model is believed; fit finds it on the given labels.",
            show_default="1",
        ),
    ] = None,
    width: Annotated[int, typer.Option("--width", min=1, help="Of the hidden layers.")] = 512,
    depth: Annotated[int, typer.Option("--depth", min=0, help="How many hidden layers.")] = 2,
    margin: Annotated[float, typer.Option("--margin", help="Of the ranking loss.")] = 0.1,
    leeway: Annotated[
        float, typer.Option("--leeway", help="Losses that differ by no more than this have no order.")
    ] = 0.0,
    optimizer: Annotated[Optimizer, typer.Option("--optimizer", help="Which optimiser.")] = Optimizer.adamw,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate at a batch of 256.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="On matrices, not on biases.")] = 1e-4,
    episodes: Annotated[int, typer.Option("--episodes", help="Steps of the schedule.")] = 460,
    warmup: Annotated[int, typer.Option("--warmup", help="How many of them warm up.")] = 25,
    mix: Annotated[float, typer.Option("--mix", help="Weight of the expected loss in --target mixed.")] = 0.5,
    dropout: Annotated[
        float, typer.Option("--dropout", help="Share of the features dropped while learning; 0.8 for few photographs.")
    ] = 0.0,
    schedule: Annotated[Schedule, typer.Option("--schedule", help="After the warm-up.")] = Schedule.cosine,
    batch: Annotated[
        int | None, typer.Option("--batch", min=2, help="Rows at once.", show_default="2048, less of a small cache")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=2, help="Rows seen in all.", show_default="by the caches' size")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option("--corpus", metavar="TEXT", help="On which images, for the model card.")
    ] = None,
    float16: Annotated[bool, typer.Option("--float16", help="Keep the weights in half the space.")] = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train an uncertainty head on features and losses of CACHEs.

    Neither images nor the model are needed any more. Stopped at any instant, the same command goes on where it was.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    chosen = _seeds(seeds)
    _check_temperature(temperature, target)
    with screen.waiting("opening the caches"):
        from dubito.heads.held_out import split

        table = dubito.joined(*(dubito.open(cache) for cache in caches))
        watched = _held_out(held_out, caches)
        table_rows = len(table)
        if isinstance(watched, float):  # before anything is fitted
            table, watched = split(table, watched)
        recipe = dubito.Recipe(
            loss=loss.value,
            target=target.value,
            temperature=_temperature(temperature, table),
            margin=margin,
            leeway=leeway,
            optimizer=optimizer.value,
            lr=lr,
            schedule=schedule.value,
            weight_decay=weight_decay,
            episodes=episodes,
            warmup=warmup,
            mix=mix,
            dropout=dropout,
            batch=batch,
            rows=rows,
        )
    place, name = _place(to)
    screen.when_stopped = f"'{place}' holds all but the last seconds: the same command goes on from there."
    start = time.perf_counter()
    training = dubito.train(
        table,
        place,
        seeds=chosen,
        recipe=recipe,
        width=width,
        depth=depth,
        held_out=watched,
        progress=not quiet,
        dtype="float16" if float16 else "float32",
        trained={"corpus": corpus} if corpus else None,
    )
    found = _summary(training, recipe, place, name, time.perf_counter() - start)
    found = {"caches": [str(cache) for cache in caches], "table_rows": table_rows, **found}
    screen.result(found, _shown(found, training))


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--seeds takes whole numbers with commas, such as 1,2,3; '{text}' came.") from error


def _check_temperature(text: str | None, target: Target) -> None:
    if text is None:
        return
    if target is Target.given:
        raise typer.BadParameter("--temperature is for expected losses: --target expected, or mixed.")
    if text != _FIT and _number(text) is None:
        raise typer.BadParameter(f"--temperature takes a number, or {_FIT}; '{text}' came.")


def _temperature(text: str | None, table: "Table") -> float:
    if text == _FIT:
        return dubito.Temperature().fit(table).temperature_
    return 1.0 if text is None else float(text)


def _held_out(text: str | None, caches: list[Path]) -> "Table | float | None":
    if text is None:
        return None
    if not Path(text).exists():
        share = _number(text)
        if share is None:
            raise typer.BadParameter(f"--held-out takes a cache, or a share such as 0.1; '{text}' came.")
        return share
    from dubito.cache.fingerprint import model_digest
    from dubito.cache.manifest import read_manifest

    table = dubito.open(text)
    found = [manifest for one in (Path(text), *caches) if (manifest := read_manifest(one)) is not None]
    images = [(model_digest(one.identity), one.identity["images"]) for one in found]
    if images[0] in images[1:]:
        raise typer.BadParameter(f"--held-out: '{text}' is trained on. Give another cache, or a share such as 0.1.")
    return table


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _place(to: str) -> tuple[Path, str]:
    """The folder, and what `--head` calls it: a bare name is one on the shelf."""
    from dubito.heads.shelf import local_folder

    if "/" in to or "\\" in to or Path(to).is_dir():
        return Path(to), str(Path(to))
    return local_folder() / to, to


def _summary(training: "Training", recipe: "Recipe", place: Path, name: str, seconds: float) -> dict[str, Any]:
    seed = training.head.seed
    ends = [history[-1] for history in training.histories]
    return {
        "model": (training.head.maker_ or {}).get("model"),
        "to": str(place),
        "recipe": recipe.to_json(),
        "seeds": [
            {"seed": head.seed, "folder": str(folder), **end}
            for head, folder, end in zip(training.heads, training.folders, ends, strict=True)
        ],
        "summary": training.to_json()["summary"],
        "rows": training.head.trained_["table_rows"],
        "rows_seen": training.head.trained_["rows_seen"],
        "steps": training.head.trained_["steps"],
        "median_seed": seed,
        "head": f"{name}/seed-{seed}",
        "seconds": round(seconds, 3),
    }


def _shown(found: dict[str, Any], training: "Training") -> Any:
    from dubito.apps.train import FIGURES

    held_out = found["table_rows"] - found["rows"]
    several = len(found["seeds"]) > 1
    pairs = {
        "rows": f"{found['rows']:,}"
        + (f", and {held_out:,} held out" if held_out else "")
        + f"; {found['rows_seen']:,} seen in {found['steps']:,} steps",
        "seeds": ", ".join(str(entry["seed"]) for entry in found["seeds"]),
    }
    for figure, (median, spread) in training.summary().items():
        pairs[FIGURES[figure]] = f"{median:.4f}" + (f" ± {spread:.4f}" if several else "")
    pairs["time"] = f"{found['seconds']:.1f} s"
    pairs["kept in"] = found["to"]
    pairs["use it"] = f"dubito score CACHE --head {shlex.quote(found['head'])}"
    many = f"{len(found['seeds'])} heads" if several else "a head"
    return facts(f"{many} for {found['model'] or 'a model without a name'}", pairs)
