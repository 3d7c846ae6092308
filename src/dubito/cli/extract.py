"""`dubito extract`: run a model over images once and keep what the scores need. `dubito label`: label them later."""

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, BadParameter, Option

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Assignments, CommandResult, Screen, command, option, read_settings
from dubito.errors import SkippedImagesWarning, ValueRangeError
from dubito.storage import Place, sizes_in

if TYPE_CHECKING:
    from dubito.engines import ExtractionEngine
    from dubito.types import Probe

_SKIPPED_SHOWN = 10
Model = Annotated[
    str, Argument(metavar="MODEL", help="A source:name of `dubito list models`, or python:FILE.py:FUNCTION.")
]
Images = Annotated[
    str,
    Argument(
        metavar="IMAGES",
        help="A folder, with or without class folders; an image; .csv, .tsv, .zip, .tar, .parquet or .npz; several, "
        "such as 'train-{00..99}.tar'; or an address of these, such as s3://bucket/photos.",
    ),
]
LabelSpace = Annotated[
    choices.LabelSpace | None,
    option("Whether labels are the model's classes or another set's; by default, decided from the class names."),
]


@dataclass
class Reading:
    """Options of commands that run a model over images, as the library's functions take them."""

    labels: Annotated[Place | None, option("A CSV of image names and labels.", "FILE")] = None
    label_space: LabelSpace = None
    batch_size: Annotated[int | None, option("Images per forward pass.", min=1)] = None
    workers: Annotated[int | None, option("Processes that decode images.", min=0)] = None


@dataclass
class EngineOptions:
    """Where the model runs, as `dubito.extract` and `RayEngine` take it."""

    engine: Annotated[choices.EngineName, option("Where the model runs: in this process, or on a Ray cluster.")] = (
        "local"
    )
    address: Annotated[
        str | None, option("Ray cluster, such as ray://head:10001; by default one that runs here, or a new one.")
    ] = None
    replicas: Annotated[int | None, option("Copies of the model on Ray; by default all that fit.", "N", min=1)] = None
    cpus: Annotated[float | None, option("CPUs of each copy on Ray; by default its threads.", "N")] = None
    gpus: Annotated[float | None, option("GPUs of each copy on Ray, such as 1 or 0.5.", "N", min=0)] = None
    retries: Annotated[int | None, option("How often a block on Ray is run again; by default 3.", "N", min=0)] = None
    failures: Annotated[int | None, option("Blocks that may fail on Ray; their images are left out.", "N", min=0)] = (
        None
    )
    threads: Annotated[int | None, option("Threads of torch of each copy of the model.", "N", min=1)] = None

    def make(self) -> "ExtractionEngine":
        """The engine that these options describe."""
        from dubito.engines import LocalEngine, RayEngine

        names = ("address", "replicas", "cpus", "gpus", "retries", "failures")
        settings = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.engine == "ray":
            return RayEngine(**settings)
        for name in settings:
            raise BadParameter(f"--{name} is for Ray: add --engine ray, or leave it out.")
        return LocalEngine()


class ProbeSettings(NamedTuple):
    """NAME[:KEY=VALUE,...]: a probe and its settings."""

    name: str
    settings: Assignments

    @classmethod
    def parse(cls, text: str) -> "ProbeSettings":
        """Read the text of an option.

        >>> ProbeSettings.parse("tiles:grids=2,7")
        ProbeSettings(name='tiles', settings={'grids': '2,7'})
        """
        name, colon, settings = text.partition(":")
        return cls(name, Assignments.parse(settings) if colon else Assignments())


@command
def extract(
    screen: Screen,
    model: Model,
    images: Images,
    *,
    to: Annotated[Place, option("The cache: a new folder, or the same as before.", "DIR")],
    probe: Annotated[
        list[ProbeSettings],
        Option(
            "--probe",
            "-p",
            metavar="NAME[:KEY=VALUE,...]",
            parser=ProbeSettings.parse,
            help="Also run a probe, such as tiles:grids=2,7 or dropout:passes=10; repeat it for several. "
            "forward:... sets features, logits and the task loss. Names and keys: `dubito list probes`.",
        ),
    ] = [],
    reading: Reading,
    shard_size: Annotated[int, option("Images per shard: what a kill can cost at most.", "N", min=1)] = 512,
    placement: EngineOptions,
    targets: Annotated[Path | None, option("Targets of the task loss, if not labels: .npy or .npz.", "FILE")] = None,
    epochs: Annotated[int, option("Use every image N times, each time with new augmentation.", "N", min=1)] = 1,
    augment: Annotated[
        Assignments | None,
        option(
            "How images are augmented, such as strong=mixup,seed=1; see `dubito list augment`.",
            "KEY=VALUE,...",
            parser=Assignments.parse,
        ),
    ] = None,
    corrupted: Annotated[
        bool, Option("--corrupted", help="Corrupted copies instead, five of each image: for `dubito compare`.")
    ] = False,
    load: options.ModelOptions,
) -> None:
    """Run a MODEL over IMAGES once and keep features and logits.

    If it is interrupted, run the same command again: it continues where it stopped.
    """
    options.check_model_first(model, images)
    screen.when_stopped = "Finished shards are safe: the same command continues from there."
    with screen.waiting("opening the images"):  # what is cheap is checked before the model is fetched
        from dubito.cache.disk import check_place
        from dubito.cache.labels import to_targets

        engine, probes, augmentation = placement.make(), _probes(probe), None
        if epochs > 1 or augment is not None:
            augmentation = dubito.Augment(**read_settings(dubito.Augment, augment or {}, "--augment"))
        opened = dubito.open_images(images, reading.labels)
        if corrupted:
            opened = dubito.data.CorruptedCopies(opened)
        compared = None if targets is None else to_targets(targets, opened)
        check_place(to)
    with screen.waiting(f"loading {model}"):
        classifier = load.load(model)
    before, start = _files(to), time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedImagesWarning)  # the summary lists them
        table = dubito.extract(
            classifier,
            opened,
            to,
            targets=compared,
            epochs=epochs,
            augment=augmentation,
            probes=probes,
            **{**vars(reading), "labels": None},
            shard_size=shard_size,
            threads=placement.threads,
            engine=engine,
            progress=not screen.quiet,
        )
    screen.show(_summary(model, epochs, table, to, _new_rows(to, before), time.perf_counter() - start))


@command
def label(
    screen: Screen,
    cache: options.Cache,
    labels: Annotated[Place, Argument(metavar="LABELS", help="A CSV of image names and labels.")],
    *,
    label_space: LabelSpace = None,
) -> None:
    """Store LABELS in a finished CACHE, without running the model again.

    Images are named by id, file name, stem or number. Labels that the cache has are replaced.
    """
    with screen.waiting("labelling"):
        table = dubito.cache.label_cache(cache, labels, label_space=label_space)
    accuracy, by_order = dubito.metrics.table_accuracy(table), named_by_order(table)
    values = {
        "cache": str(cache),
        "rows": len(table),
        "classes": len(table.whole("label").unique()),
        "label_space": table.label_space,
        "labels_by_order": by_order,
        "accuracy": accuracy,
    }
    facts = {"images": str(len(table)), "labels": f"{values['classes']} classes"} | _label_facts(table)
    screen.show(CommandResult(str(cache), values, facts))


def _probes(chosen: list[ProbeSettings]) -> list["Probe"]:
    """The probes of `--probe`, made from the registry."""
    from dubito.validate import check_choice

    probes = []
    for name, texts in chosen:
        try:
            check_choice(name, dubito.probes.PROBES, by="--probe", what="the name")
        except ValueRangeError as error:
            raise BadParameter(str(error)) from error
        types = {key: setting.annotation for key, setting in dubito.probes.probe_settings(name).items()}
        probes.append(dubito.probes.make_probe(name, **read_settings(types, texts, f"--probe {name}")))
    return probes


def _summary(
    model: str, epochs: int, table: "dubito.Table", cache: Place, new_rows: int, seconds: float
) -> CommandResult:
    """What is in the cache, and how fast it went."""
    images, skipped = len(table) + len(table.skipped), table.skipped
    inputs = options.describe_inputs(table.provenance)
    accuracy, by_order = dubito.metrics.table_accuracy(table), named_by_order(table)
    size = sum(sizes_in(cache).values())
    often = f" ({images // epochs} in {epochs} augmented epochs)" if epochs > 1 else ""
    facts = {
        "model": model,
        **({"inputs": inputs} if inputs else {}),
        "images": f"{images}{often}" + (f", {len(skipped)} skipped" if skipped else ""),
        "columns": ", ".join(f"{one} ({' x '.join(map(str, table.shape(one)))})" for one in table.columns),
    }
    facts |= _label_facts(table)
    speed = f"{new_rows} images at {new_rows / seconds:.1f} per second"
    facts["time"] = f"{seconds:.1f} s, {speed if new_rows else 'everything was there already'}"
    facts["size"] = f"{size / 1e6:.1f} MB"
    values = {
        "model": model,
        "inputs": inputs,
        "epochs": epochs,
        "cache": str(cache),
        "images": images,
        "rows": len(table),
        "skipped": [{"id": name, "reason": reason} for name, reason in skipped],
        "columns": {column: list(table.shape(column)) for column in table.columns},
        "label_space": table.label_space if "label" in table else None,
        "labels_by_order": by_order,
        "accuracy": accuracy,
        "new_rows": new_rows,
        "seconds": round(seconds, 3),
        "images_per_second": round(new_rows / seconds, 2) if new_rows else None,
        "bytes": size,
    }
    shown = [reason if name in reason else f"{name}: {reason}" for name, reason in skipped[:_SKIPPED_SHOWN]]
    if len(skipped) > _SKIPPED_SHOWN:
        shown.append(f"and {len(skipped) - _SKIPPED_SHOWN} more, all listed in '{cache}/manifest.json'")
    return CommandResult(str(cache), values, facts | ({"skipped": "\n".join(shown)} if shown else {}))


def _label_facts(table: "dubito.Table") -> dict[str, str]:
    """How often the model is right, or why that is not known."""
    accuracy = dubito.metrics.table_accuracy(table)
    if accuracy is not None:
        order = ", class names taken in sorted order: the model does not name its own" if named_by_order(table) else ""
        return {"accuracy": f"{accuracy:.4f}{order}"}
    own = "label" in table and table.label_space == "own"
    return {"labels": "classes of another set, not the model's: no accuracy"} if own else {}


def _files(cache: Place) -> dict[str, int]:
    """The files of a cache, and on the disk, when they were written."""
    if isinstance(cache, Path):
        return {path.name: path.stat().st_mtime_ns for path in cache.glob("*") if path.is_file()}
    return sizes_in(cache)


def _new_rows(cache: Place, before: dict[str, int]) -> int:
    """How many rows are in shards that were not there before, or were written again."""
    from dubito.cache.disk import read_manifest

    manifest, files = read_manifest(cache), _files(cache)
    kinds = manifest.kinds if manifest else []
    new = {name for name, when in files.items() if before.get(name) != when}
    return int(max(sum(shard["rows"] for shard in kind["shards"] if shard["name"] in new) for kind in kinds))


def named_by_order(table: "dubito.Table") -> bool:
    """Whether class names were taken for the model's classes in sorted order, since it does not name them."""
    named = table.classes is None and table.label_names is not None
    return named and "label" in table and table.label_space == "model"
