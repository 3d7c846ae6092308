"""The table of targets: every reader of files that others may have written, with valid inputs and what to do with them.

An input is bytes. Of a file they are its content; of a folder they are a script (`edits.Script`) that says how a valid
one is damaged, because libFuzzer could not keep the hashes of several files in agreement. Where a format guards its
content by sums, there are two targets: one that leaves them as they are, and one (`sealed`) that makes them again.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import dubito
from dubito.active.labels import add_labels, read_labels
from dubito.cache.labels import to_targets
from dubito.cache.shards import forget_shards
from dubito.calibration import load_calibration
from dubito.data.decode import decode
from dubito.data.labels import labels_by_image, read_label_sets, read_votes, with_labels
from dubito.ensembles.head_masks import HeadMasks
from dubito.errors import DubitoError
from dubito.explore.notes import Notes
from dubito.guard.watch import Watch
from dubito.heads.checkpoint import read_head
from dubito.models.classes import read_classes
from dubito.models.weights import put_weights, read_weights
from dubito.scores.registry import load_score
from dubito.storage import tensors_digest
from dubito.table import Table
from tests.fuzz import commands, seeds
from tests.fuzz.edits import Script, edit_bytes
from tests.fuzz.world import Artefact, World
from tests.guard.world import blobs

MEGABYTE = 1 << 20


class SilentCorruptionError(AssertionError):
    """Damage that a checksum should have shown was loaded, and what was loaded is not what was saved."""


@dataclass(frozen=True)
class Target:
    """A reader.

    Attributes:
        name: Its name, also of its folder of regressions.
        seeds: Valid inputs, and others to begin with.
        example: An input from a script.
        run: Reads an input and uses what it holds; anything but a DubitoError is a fault.
        examples: How many examples the short slice takes.
        memory: Bytes that an input may take.
        seconds: How long an input may take.
        share: Of the time of a long run, compared with other targets.
        runs_code: Whether a user may ask for code to be run, and for packages that keep pickles of their own.
    """

    name: str
    seeds: Callable[[World], list[bytes]]
    example: Callable[[World, bytes], bytes]
    run: Callable[[World, bytes], None]
    examples: int = 60
    memory: int = 256 * MEGABYTE
    seconds: float = 10.0
    share: int = 1
    runs_code: bool = False


def of_file(
    name: str,
    ending: str,
    made: Callable[[World], list[bytes]],
    read: Callable[[World, Path], Any],
    *,
    seal: Callable[[bytes], bytes] = bytes,
    **limits: Any,
) -> Target:
    """A target whose input is a file, with `seal` a file that is made of the input."""

    def example(world: World, script: bytes) -> bytes:
        choices = Script(script)
        data = choices.one_of(made(world))
        while not choices.ended:
            data = edit_bytes(choices, data)
        return data

    def run(world: World, data: bytes) -> None:
        path = world.fresh() / f"input{ending}"
        path.write_bytes(seal(data))
        read(world, path)

    return Target(name, made, example, run, **limits)


def of_folder(
    name: str, made: Callable[[World], list[Artefact]], read: Callable[[World, Path], Any], **limits: Any
) -> Target:
    """A target whose input says how to damage one of several folders; damage must not change what `read` returns."""
    whole: dict[int, Any] = {}

    def run(world: World, data: bytes) -> None:
        choices = Script(data)
        number = choices.number(len(made(world)))
        artefact = made(world)[number]
        if number not in whole:
            artefact.put(place := world.fresh(), Script(b""))
            whole[number] = read(world, place)
        sealed = artefact.put(place := world.fresh(), choices)
        content = read(world, place)
        if not sealed and content != whole[number]:
            raise SilentCorruptionError(f"{name}: {content} instead of {whole[number]}")

    def scripts(_: World) -> list[bytes]:
        draw = Random(name)  # noqa: S311 (seeds, not secrets)
        return [b"", *(draw.randbytes(draw.randrange(4, 40)) for _ in range(60))]

    return Target(name, scripts, lambda _, script: script, run, **limits)


@contextlib.contextmanager
def attempt() -> Iterator[None]:
    """One of several calls on the same input, which may be refused."""
    with contextlib.suppress(DubitoError):
        yield


def read_image(_: World, path: Path) -> None:
    decode(path.read_bytes(), "input")


def read_set(_: World, path: Path) -> None:
    """Open a set of images, and read some."""
    images = dubito.open_images(str(path))
    for row in range(min(len(images), 4)):
        with attempt():
            images.read(row)
        with attempt():
            images.read_hashed(row)
    images.contents(range(min(len(images), 4)))


def read_zip(world: World, path: Path) -> None:
    """As any set; and what a member's sum has verified is as it was."""
    read_set(world, path)
    images = dubito.open_images(str(path))
    for row, name in enumerate(images.ids):
        with attempt():
            if name in seeds.MEMBERS and images.read(row) != decode(seeds.MEMBERS[name], name):
                raise SilentCorruptionError(f"{name} is another image")


def read_csv_file(world: World, path: Path) -> None:
    """A list of images, labels, sets of labels, votes and picks: whatever a CSV file may be."""
    (path.parent / "a").mkdir()
    (path.parent / "a/0.png").write_bytes(seeds.picture("PNG"))
    images = dubito.open_images(world.images)
    table = Table(logit=torch.zeros(6, 2), id=images.ids, classes=["a", "b"])
    for call in (
        lambda: read_set(world, path),
        lambda: labels_by_image(path),
        lambda: with_labels(images, path),
        lambda: read_label_sets(path),
        lambda: read_votes(path),
        lambda: read_labels(path),
        lambda: add_labels(table, path),
    ):
        with attempt():
            call()


def read_weights_file(_: World, path: Path) -> None:
    """Every tensor is read, and put into a module."""
    for strict in (True, False):
        with attempt():
            weights = read_weights(path, stand_ins=not strict)
            tensors_digest(weights)
            put_weights(nn.Linear(3, 2), weights, path.name)


def read_class_names(_: World, path: Path) -> None:
    read_classes(path)


def read_targets(world: World, path: Path) -> None:
    to_targets(path, dubito.open_images(world.images))


def read_graph(_: World, path: Path) -> None:
    """An exported guard, as a model."""
    model = dubito.load(f"onnx:{path}")
    model.logits(model.features(torch.zeros(1, 3, 2, 2)))


def read_notes(_: World, path: Path) -> None:
    path.rename(path.parent / "notes.json")
    notes = Notes(path.parent)
    notes.change(["a"], {"note": "b"})


def read_cache(_: World, folder: Path) -> Any:
    """Every row of every column."""
    forget_shards()
    table = dubito.open(folder)
    columns = {name: table.whole(name) for name in table.columns if name != "id"}
    digest = tensors_digest({name: value for name, value in columns.items() if isinstance(value, torch.Tensor)})
    known = None if table.provenance is None else table.provenance.to_json()
    return digest, table.row_ids(range(len(table))), known, table.classes, table.label_names, table.skipped


def read_guard(_: World, folder: Path) -> Any:
    """Decide on rows, and compare everything that it says."""
    guard = dubito.Guard.load(folder)
    decisions = guard.decide(blobs(20, seed=5))
    str(guard)
    return guard.fingerprint, guard.to_dict(), decisions.to_dict()


def read_watch(world: World, folder: Path) -> Any:
    """Go on watching."""
    watch = Watch.open(world.guard, folder)
    before = watch.report().to_dict()
    watch.update(world.decisions)
    watch.request_labels(2)
    return before


def read_index(world: World, folder: Path) -> Any:
    """Search it, add to it."""
    index = dubito.SafeIndex.load(folder)
    queries = blobs(6, seed=9)
    result = index.search(queries, k=3, refuse_above=1e9).to_dict()
    with attempt():
        index.search(queries.feature, [0.0] * 6, k=300, sets=True)
    with attempt():
        index.add(blobs(3, seed=11).feature, [0.1, 0.2, 0.3], ids=["x", "y", "z"], labels=[0, 1, 2])
    return result, sorted(index.left_out()), str(index.provenance), index.width


def read_head_folder(_: World, folder: Path) -> Any:
    head = read_head(folder)
    u = head.module(torch.ones(2, head.config.features))
    return head.config.to_json(), u.tolist()


def read_score(world: World, folder: Path) -> Any:
    score = load_score(folder)
    known = None if score.provenance_ is None else score.provenance_.to_json()
    return repr(score), score.score(world.table.rows(slice(0, 20))).tolist(), known


def read_calibration(world: World, folder: Path) -> Any:
    method = load_calibration(folder)
    known = None if method.provenance_ is None else method.provenance_.to_json()
    return repr(method), method.probability(world.table.rows(slice(0, 20))).tolist(), known


def read_masks_file(world: World, folder: Path) -> Any:
    masks = HeadMasks.load(folder / "masks.safetensors")
    extended = masks.extend(world.table.rows(slice(0, 8)))
    return [extended.whole(name).tolist() for name in ("masks", "masks_logit")], masks.seed, str(masks.recipe)


def read_training(world: World, folder: Path) -> Any:
    run = world.train(folder)
    return tensors_digest(run.module.state_dict()), run.history


def read_acquisition(world: World, folder: Path) -> Any:
    acquisition = world.acquire(folder)
    str(acquisition)
    return acquisition.to_dict()


def _bytes_of(*files: bytes) -> Callable[[World], list[bytes]]:
    return lambda _: list(files)


def _made(function: Callable[[], list[bytes]]) -> Callable[[World], list[bytes]]:
    """Seeds that are made once."""
    kept: list[list[bytes]] = []

    def once(_: World) -> list[bytes]:
        if not kept:
            kept.append(function())
        return kept[0]

    return once


def _tensors(world: World) -> list[bytes]:
    return seeds.tensor_files([*world.heads, *world.scores])


_NAMES = _bytes_of(b"ant\nbee\ncat\n", b'{"0": "ant", "1": "bee"}', b'["ant", "bee"]', b'{"ant": 0, "bee": 1}')
_NOTES = _bytes_of(b'{"a/0.png": {"marked": true, "label": "a", "note": "x"}}', b"{}")
_CSV = _bytes_of(*seeds.LABELS, seeds.VOTES, seeds.PICKS)
_IMAGES = {"memory": 2048 * MEGABYTE, "seconds": 30.0}
"""Of one image: 179 million pixels may be read."""
_CLI = {"memory": 1024 * MEGABYTE, "seconds": 60.0, "share": 4, "runs_code": True}
_ALL: Sequence[tuple[Target, str | None]] = (
    (of_file("image", ".png", _made(seeds.pictures), read_image, **_IMAGES), None),
    (of_file("image-sealed", ".png", _made(seeds.pictures), read_image, seal=seeds.with_png_sums, **_IMAGES), None),
    (of_file("csv", ".csv", _CSV, read_csv_file), None),
    (of_file("classes", ".txt", _NAMES, read_class_names), None),
    (of_file("npz", ".npz", _made(seeds.arrays), read_set), None),
    (of_file("npz-sealed", ".npz", _made(seeds.arrays), read_set, seal=seeds.with_zip_sums), None),
    (of_file("targets", ".npy", _made(seeds.target_arrays), read_targets), None),
    (of_file("zip", ".zip", _made(seeds.zips), read_zip, **_IMAGES), None),
    (of_file("zip-sealed", ".zip", _made(seeds.zips), read_set, seal=seeds.with_zip_sums, **_IMAGES), None),
    (of_file("tar", ".tar", _made(seeds.tars), read_set, **_IMAGES), None),
    (of_file("tar-sealed", ".tar", _made(seeds.tars), read_set, seal=seeds.with_tar_sums, **_IMAGES), None),
    (of_file("parquet", ".parquet", _made(seeds.parquets), read_set, **_IMAGES), "pyarrow"),
    (of_file("weights", ".pth", _made(seeds.checkpoints), read_weights_file), None),
    (of_file("pickle", ".pth", _made(seeds.pickles), read_weights_file, seal=seeds.in_checkpoint), None),
    (of_file("safetensors", ".safetensors", _tensors, read_weights_file), None),
    (of_file("onnx", ".onnx", _made(seeds.graphs), read_graph), "onnxruntime"),
    (of_file("notes", ".json", _NOTES, read_notes), None),
    (of_folder("cache", lambda world: world.caches, read_cache), None),
    (of_folder("guard", lambda world: world.guards, read_guard), None),
    (of_folder("watch", lambda world: world.watches, read_watch), None),
    (of_folder("index", lambda world: world.indexes, read_index), None),
    (of_folder("head", lambda world: world.heads, read_head_folder), None),
    (of_folder("score", lambda world: world.scores, read_score), None),
    (of_folder("calibration", lambda world: world.calibrations, read_calibration), None),
    (of_folder("training", lambda world: world.trainings, read_training), None),
    (of_folder("acquisition", lambda world: world.acquisitions, read_acquisition), None),
    (of_folder("masks", lambda world: world.masks, read_masks_file), None),
    (Target("cli", commands.scripts, lambda _, script: script, commands.run, examples=30, **_CLI), None),
)
TARGETS = {one.name: one for one, package in _ALL if package is None or importlib.util.find_spec(package)}
