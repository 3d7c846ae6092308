"""`dubito train`: an uncertainty head from caches, for one seed or several."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli import _recipe as setting
from dubito.cli._console import Screen, facts

if TYPE_CHECKING:
    from dubito.heads import Recipe
    from dubito.heads.training import Training
    from dubito.table import Table


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
    width: Annotated[int, typer.Option("--width", min=1, help="Of the hidden layers.")] = 512,
    depth: Annotated[int, typer.Option("--depth", min=0, help="How many hidden layers.")] = 2,
    corpus: Annotated[
        str | None, typer.Option("--corpus", metavar="TEXT", help="On which images, for the model card.")
    ] = None,
    float16: Annotated[bool, typer.Option("--float16", help="Keep the weights in half the space.")] = False,
    loss: setting.Loss = "ranking",
    margin: setting.Margin = 0.1,
    leeway: setting.Leeway = 0.0,
    target: setting.Target = "observed",
    temperature: setting.Temperature = None,
    mix: setting.Mix = 0.5,
    optimizer: setting.Optimizer = "adamw",
    lr: setting.Lr = 1e-3,
    betas: setting.Betas = "0.8,0.95",
    weight_decay: setting.WeightDecay = 1e-4,
    schedule: setting.Schedule = "cosine",
    warmup_lr: setting.WarmupLr = 1e-4,
    final_lr: setting.FinalLr = 1e-8,
    episodes: setting.Episodes = 460,
    warmup: setting.Warmup = 25,
    batch: setting.Batch = None,
    rows: setting.Rows = None,
    dropout: setting.Dropout = 0.0,
    init: setting.Init = "default",
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train an uncertainty head on features and losses of CACHEs.

    Neither images nor the model are needed any more. Stopped at any instant, the same command goes on where it was.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    chosen, pair = _seeds(seeds), setting.parse_betas(betas)
    setting.check_temperature(temperature, target)
    with screen.waiting("opening the caches"):
        recipe = dubito.heads.Recipe(
            loss=loss,
            margin=margin,
            leeway=leeway,
            target=target,
            mix=mix,
            optimizer=optimizer,
            lr=lr,
            betas=pair,
            weight_decay=weight_decay,
            schedule=schedule,
            warmup_lr=warmup_lr,
            final_lr=final_lr,
            episodes=episodes,
            warmup=warmup,
            batch=batch,
            rows=rows,
            dropout=dropout,
            init=init,
        )
        tables = _tables(caches, held_out)
        recipe = replace(recipe, temperature=_temperature(temperature, tables.learned))
    place, name = _place(to)
    screen.when_stopped = f"'{place}' holds all but the last seconds: the same command goes on from there."
    start = time.perf_counter()
    training = _trained(
        tables, recipe, place, seeds=chosen, width=width, depth=depth, float16=float16, corpus=corpus, quiet=quiet
    )
    found = _summary(training, tables, recipe, place, name, time.perf_counter() - start)
    screen.result(found, _shown(found, training))


@dataclass(frozen=True)
class _Tables:
    """The caches' rows, of which some may be held out.

    Attributes:
        caches: Where they come from.
        rows: All of them.
        learned: Those to learn from.
        watched: Others, on which figures are watched meanwhile.
    """

    caches: list[Path]
    rows: int
    learned: "Table"
    watched: "Table | None"


def _tables(caches: list[Path], held_out: str | None) -> _Tables:
    from dubito.heads.held_out import split

    table = dubito.concat(*(dubito.open(cache) for cache in caches))
    watched = _held_out(held_out, caches)
    # A share is split off here, before a temperature is fitted to what is left.
    learned, watched = split(table, watched) if isinstance(watched, float) else (table, watched)
    return _Tables(caches, len(table), learned, watched)


def _trained(  # noqa: PLR0913 (the command's options, passed on)
    tables: _Tables,
    recipe: "Recipe",
    place: Path,
    *,
    seeds: list[int],
    width: int,
    depth: int,
    float16: bool,
    corpus: str | None,
    quiet: bool,
) -> "Training":
    return dubito.train(
        tables.learned,
        place,
        seeds=seeds,
        recipe=recipe,
        width=width,
        depth=depth,
        held_out=tables.watched,
        progress=not quiet,
        dtype="float16" if float16 else "float32",
        trained={"corpus": corpus} if corpus else None,
    )


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--seeds takes whole numbers with commas, such as 1,2,3; got '{text}'.") from error


def _temperature(text: str | None, table: "Table") -> float:
    if text == setting.FIT:
        return dubito.Temperature().fit(table).temperature_
    return 1.0 if text is None else float(text)


def _held_out(text: str | None, caches: list[Path]) -> "Table | float | None":
    if text is None:
        return None
    if not Path(text).exists():
        share = setting.number(text)
        if share is None:
            raise typer.BadParameter(f"--held-out takes a cache, or a share such as 0.1; got '{text}'.")
        return share
    from dubito.cache.manifest import read_manifest
    from dubito.table.provenance import MODEL_PARTS

    table = dubito.open(text)
    found = [manifest for one in (Path(text), *caches) if (manifest := read_manifest(one)) is not None]
    images = [(*(one.identity.get(part) for part in MODEL_PARTS), one.identity["images"]) for one in found]
    if images[0] in images[1:]:
        raise typer.BadParameter(f"--held-out: '{text}' is trained on. Give another cache, or a share such as 0.1.")
    return table


def _place(to: str) -> tuple[Path, str]:
    """The folder, and what `--head` calls it: a bare name is one on the shelf."""
    from dubito.heads.shelf import local_folder

    if "/" in to or "\\" in to or Path(to).is_dir():
        return Path(to), str(Path(to))
    return local_folder() / to, to


def _summary(
    training: "Training", tables: _Tables, recipe: "Recipe", place: Path, name: str, seconds: float
) -> dict[str, Any]:
    seed = training.head.seed
    ends = [history[-1] for history in training.histories]
    return {
        "caches": [str(cache) for cache in tables.caches],
        "table_rows": tables.rows,
        "model": training.head.provenance_.model if training.head.provenance_ else None,
        "to": str(place),
        "recipe": recipe.to_json(),
        "seeds": [
            {"seed": head.seed, "folder": str(folder), **end}
            for head, folder, end in zip(training.heads, training.folders, ends, strict=True)
        ],
        "summary": training.to_dict()["summary"],
        "rows": training.head.trained_["table_rows"],
        "rows_seen": training.head.trained_["rows_seen"],
        "steps": training.head.trained_["steps"],
        "median_seed": seed,
        "head": f"{name}/seed-{seed}",
        "seconds": round(seconds, 3),
    }


def _shown(found: dict[str, Any], training: "Training") -> Any:
    held_out = found["table_rows"] - found["rows"]
    several = len(found["seeds"]) > 1
    pairs = {
        "rows": f"{found['rows']:,}"
        + (f", and {held_out:,} held out" if held_out else "")
        + f"; {found['rows_seen']:,} seen in {found['steps']:,} steps",
        "seeds": ", ".join(str(entry["seed"]) for entry in found["seeds"]),
    }
    pairs |= training.facts()
    pairs["time"] = f"{found['seconds']:.1f} s"
    pairs["kept in"] = found["to"]
    pairs["use it"] = f"dubito score CACHE --head {shlex.quote(found['head'])}"
    many = f"{len(found['seeds'])} heads" if several else "a head"
    return facts(f"{many} for {found['model'] or 'a model without a name'}", pairs)
