"""`dubito extract`: run a model over images once and keep what the scores need."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, command

if TYPE_CHECKING:
    from dubito.data import Augment
    from dubito.types import Probe


@command
def extract(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    model: options.Model,
    images: options.Images,
    *,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="DIR", help="The cache: a new folder, or the same as before.", show_default=False),
    ],
    probe: Annotated[
        list[options.ProbeSettings],
        typer.Option(
            "--probe",
            "-p",
            metavar="NAME[:KEY=VALUE,...]",
            parser=options.ProbeSettings.parse,
            help="Also run a probe, such as tiles:grids=2,7 or dropout:passes=10,rate=0.1; repeat it for several. "
            "forward:... sets features, logits and the task loss. Names and keys: `dubito list probes`.",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    labels: options.Labels = None,
    label_space: options.LabelSpace = None,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", metavar="FILE", help="What the task loss compares with, if not labels: .npy, .npz."),
    ] = None,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, metavar="N", help="Every image N times, each time augmented anew.")
    ] = 1,
    augment: Annotated[
        options.Assignments | None,
        typer.Option(
            "--augment",
            metavar="KEY=VALUE,...",
            parser=options.Assignments.parse,
            help="How images are augmented, such as strong=mixup,seed=1; see `dubito list augment`.",
        ),
    ] = None,
    weights: options.Weights = "pretrained",
    device: options.Device = None,
    batch_size: options.BatchSize = None,
    workers: options.Workers = None,
) -> None:
    """Run a MODEL over IMAGES once and keep features and logits.

    Stopped at any instant, the same command continues where it was.
    """
    screen.when_stopped = "Finished shards are safe: the same command continues from there."
    with screen.waiting(f"loading {model}"):
        from dubito.cli._results import Extraction, files_in

        probes, augmentation = _probes(probe), _augmentation(augment, epochs)
        classifier = dubito.load(model, weights=options.parse_weights(weights), device=device)
    before, start = files_in(to), time.perf_counter()
    table = dubito.extract(
        classifier,
        images,
        to,
        labels=labels,
        label_space=label_space,
        targets=targets,
        epochs=epochs,
        augment=augmentation,
        probes=probes,
        batch_size=batch_size,
        workers=workers,
        progress=not screen.quiet,
    )
    screen.show(Extraction(model, epochs, table, to, _new_rows(to, before), time.perf_counter() - start))


def _probes(chosen: list[options.ProbeSettings]) -> list["Probe"]:
    """The probes of `--probe`, made from the registry."""
    from dubito.probes import PROBES, make_probe, probe_settings
    from dubito.validate import check_choice, settings_from_text

    probes = []
    for name, texts in chosen:
        with options.reading():
            check_choice(name, PROBES, by="--probe", what="the name")
            types = {key: setting.type for key, setting in probe_settings(name).items()}
            settings = settings_from_text(types, texts, by=f"--probe {name}")
        probes.append(make_probe(name, **settings))
    return probes


def _augmentation(texts: options.Assignments | None, epochs: int) -> "Augment | None":
    """None for one epoch of plain images: when no option asks for augmentation."""
    from dubito.data import Augment
    from dubito.validate import settings_from_text

    if epochs == 1 and texts is None:
        return None
    with options.reading():
        settings = settings_from_text(Augment, texts or {}, by="--augment")
    return Augment(**settings)


def _new_rows(cache: Path, before: dict[str, int]) -> int:
    """How many rows are in shards that were not there before, or were written again."""
    from dubito.cache.manifest import read_manifest
    from dubito.cli._results import files_in

    manifest, files = read_manifest(cache), files_in(cache)
    kinds: list[Any] = [manifest.rows, *manifest.probes.values()] if manifest else []
    counts: list[int] = [
        sum(shard["rows"] for shard in kind["shards"] if files.get(shard["name"]) != before.get(shard["name"]))
        for kind in kinds
    ]
    return max(counts)
