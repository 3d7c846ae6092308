"""`dubito extract`: run a model over images once and keep what the scores need."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import dubito
from dubito.choices import Keep, KnownLoss, Strong
from dubito.cli import _gradient
from dubito.cli import _options as options
from dubito.cli._console import Screen, facts

if TYPE_CHECKING:
    from dubito.data import Augment
    from dubito.table import Table
    from dubito.types import Probe

_SKIPPED_SHOWN = 10


def extract(  # noqa: PLR0913 (a command's options)
    model: options.Model,
    images: options.Images,
    *,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="The cache: a new folder, or the same as before.", show_default=False),
    ],
    labels: options.Labels = None,
    label_space: options.LabelSpace = None,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", metavar="FILE", help="What the task loss compares with, if not labels: .npy, .npz."),
    ] = None,
    task_loss: Annotated[
        KnownLoss, typer.Option("--task-loss", help="Of one class an image, or of several (needs --targets).")
    ] = "cross_entropy",
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, metavar="N", help="Every image N times, each time augmented anew.")
    ] = 1,
    strong: Annotated[
        Strong | None, typer.Option("--strong", help="A strong augmentation on top, for half of the rows.")
    ] = None,
    augment_seed: Annotated[
        int | None,
        typer.Option(
            "--augment-seed",
            min=0,
            metavar="N",
            help="Another seed, other crops; augments one epoch too.",
            show_default="0",
        ),
    ] = None,
    weights: options.Weights = "pretrained",
    device: options.Device = None,
    batch_size: options.BatchSize = None,
    workers: options.Workers = None,
    no_logit: Annotated[
        bool, typer.Option("--no-logit", help="Save space: rebuild logits from features when they are asked for.")
    ] = False,
    before: Annotated[
        bool, typer.Option("--before", help="Also keep features before the last non-linearity, by a second pass.")
    ] = False,
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Also ask the tiles of every image, by the same pass: tiles_2, tiles_3 ...")
    ] = False,
    grids: Annotated[
        str | None,
        typer.Option("--grids", metavar="K,K", help="Of tiles: 2,7 for 2 x 2 and 7 x 7.", show_default="2-7"),
    ] = None,
    dropout: Annotated[
        int | None, typer.Option("--dropout", min=2, metavar="N", help="Also N passes with Monte-Carlo dropout.")
    ] = None,
    dropout_rate: Annotated[
        float | None, typer.Option("--dropout-rate", metavar="P", help="Of every dropout.", show_default="the model's")
    ] = None,
    views: Annotated[
        bool, typer.Option("--views", help="Also eight views of every image: mirrored, enlarged, cut; eight passes.")
    ] = False,
    noise: Annotated[
        int | None, typer.Option("--noise", min=2, metavar="N", help="Also N copies of every image with noise.")
    ] = None,
    noise_sigma: Annotated[
        float | None, typer.Option("--noise-sigma", metavar="S", help="Of the noise.", show_default="0.05")
    ] = None,
    keep_logits: Annotated[
        bool,
        typer.Option("--keep-logits", help="Of tiles, dropout, views, noise: for temperatures and pooled weights."),
    ] = False,
    gradient: _gradient.Asked = False,
    gradient_method: _gradient.Method = None,
    gradient_classes: _gradient.Classes = None,
    gradient_draws: _gradient.Draws = None,
    gradient_weightings: _gradient.Weightings = None,
    gradient_uniform: _gradient.Uniform = False,
    gradient_last: _gradient.Last = None,
    gradient_beta: _gradient.Beta = None,
    gradient_tolerance: _gradient.Tolerance = None,
    gradient_copies: _gradient.Copies = None,
    gradient_sigma: _gradient.Sigma = None,
    gradient_seed: _gradient.Seed = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a MODEL over IMAGES once and keep features and logits.

    Stopped at any instant, the same command goes on where it was.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    screen.when_stopped = "Finished shards are safe: the same command goes on from there."
    keep: Keep = "logits" if keep_logits else "summary"
    ensembles = _ensembles(
        keep, _grids(tiles, grids), dropout=(dropout, dropout_rate), noise=(noise, noise_sigma), views=views
    )
    gradients = _gradient.gradients(
        gradient,
        {
            "method": gradient_method,
            "classes": gradient_classes,
            "draws": gradient_draws,
            "weightings": gradient_weightings or None,
            "uniform": gradient_uniform,
            "last": gradient_last,
            "beta": gradient_beta,
            "tolerance": gradient_tolerance,
            "copies": gradient_copies,
            "sigma": gradient_sigma,
            "seed": gradient_seed,
        },
    )
    with screen.waiting(f"loading {model}"):
        classifier = dubito.load(model, weights=options.parse_weights(weights), device=device)
    there, start = _files(to), time.perf_counter()
    table = dubito.extract(
        classifier,
        images,
        to,
        labels=labels,
        label_space=label_space,
        targets=targets,
        epochs=epochs,
        augment=_augment(epochs, strong, augment_seed),
        probes=[
            dubito.probes.Forward(store_logit=not no_logit, task_loss=task_loss),
            *([dubito.probes.PreActivation()] if before else []),
            *ensembles,
            *gradients,
        ],
        batch_size=batch_size,
        workers=workers,
        progress=not quiet,
    )
    found = _summary(table, to, there, time.perf_counter() - start)
    screen.result({"model": model, "epochs": epochs, **found}, _shown(model, epochs, found))


def _grids(tiles: bool, text: str | None) -> list[int] | Literal["all"] | None:
    """Which tiles to ask; None for none.

    >>> _grids(True, "2,7"), _grids(True, None), _grids(False, None)
    ([2, 7], 'all', None)
    """
    if text is None:
        return "all" if tiles else None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--grids takes numbers with commas, such as 2,3,7; got '{text}'.") from error


def _ensembles(
    keep: Keep,
    grids: list[int] | Literal["all"] | None,
    *,
    dropout: tuple[int | None, float | None],
    noise: tuple[int | None, float | None],
    views: bool,
) -> list["Probe"]:
    """The probes of the ensembles that were asked for; what was said about none of them is a mistake."""
    from dubito.probes import Members
    from dubito.probes.tiles import Tiles

    (passes, rate), (copies, sigma) = dropout, noise
    if rate is not None and passes is None:
        raise typer.BadParameter("--dropout-rate needs --dropout N, the number of passes.")
    if sigma is not None and copies is None:
        raise typer.BadParameter("--noise-sigma needs --noise N, the number of copies.")
    found: list[Probe] = [] if grids is None else [Tiles(None if grids == "all" else grids, keep=keep)]
    found += [] if passes is None else [Members.dropout(passes, rate, keep=keep)]
    found += [Members.views(keep=keep)] if views else []
    found += [] if copies is None else [Members.noise(copies, 0.05 if sigma is None else sigma, keep=keep)]
    if keep == "logits" and not found:
        raise typer.BadParameter("--keep-logits needs an ensemble: --tiles, --dropout N, --noise N or --views.")
    return found


def _augment(epochs: int, strong: Strong | None, seed: int | None) -> "Augment | None":
    """None for one epoch of plain images: when nothing was said about augmentation."""
    from dubito.data import Augment

    if epochs == 1 and strong is None and seed is None:
        return None
    return Augment(strong=strong, seed=seed or 0)


def _summary(table: "Table", to: Path, before: dict[str, int], seconds: float) -> dict[str, Any]:
    from dubito.cache.manifest import read_manifest

    files = _files(to)
    manifest = read_manifest(to)
    shards = manifest.rows["shards"] if manifest else []
    new = sum(shard["rows"] for shard in shards if files.get(shard["name"]) != before.get(shard["name"]))
    return {
        "cache": str(to),
        "images": len(table) + len(table.skipped),
        "rows": len(table),
        "skipped": [{"id": name, "reason": why} for name, why in table.skipped],
        "columns": {column: list(table.shape(column)) for column in table.columns},
        "label_space": table.label_space if "label" in table else None,
        "labels_by_place": _by_place(table),
        "accuracy": dubito.metrics.table_accuracy(table),
        "new_rows": new,
        "seconds": round(seconds, 3),
        "images_per_second": round(new / seconds, 2) if new else None,
        "bytes": sum((to / name).stat().st_size for name in files),
    }


def _by_place(table: "Table") -> bool:
    """Whether class names were taken for the model's classes in sorted order, since it does not name them."""
    known = table.classes is None and table.label_names is not None
    return known and "label" in table and table.label_space == "model"


def _files(folder: Path) -> dict[str, int]:
    """The files of a cache and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}


def _shown(model: str, epochs: int, found: dict[str, Any]) -> Any:
    often = f" ({found['images'] // epochs} in {epochs} augmented epochs)" if epochs > 1 else ""
    pairs = {
        "model": model,
        "images": f"{found['images']}{often}" + (f", {len(found['skipped'])} skipped" if found["skipped"] else ""),
        "columns": ", ".join(f"{name} ({' x '.join(map(str, shape))})" for name, shape in found["columns"].items()),
    }
    if found["accuracy"] is not None:
        place = (
            ", class names taken in sorted order: the model does not name its own" if found["labels_by_place"] else ""
        )
        pairs["accuracy"] = f"{found['accuracy']:.4f}{place}"
    elif found["label_space"] == "own":
        pairs["labels"] = "classes of their own, not the model's: no accuracy"
    speed = f", {found['new_rows']} images at {found['images_per_second']:.1f} a second" if found["new_rows"] else ""
    pairs["time"] = f"{found['seconds']:.1f} s{speed or ', all was there already'}"
    pairs["size"] = f"{found['bytes'] / 1e6:.1f} MB"
    for entry in found["skipped"][:_SKIPPED_SHOWN]:
        pairs[f"skipped {entry['id']}"] = entry["reason"]
    return facts(found["cache"], pairs)
