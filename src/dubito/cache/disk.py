"""What a cache's folder holds: a manifest, shards (`shards.py`), and the table that they open as.

    manifest.json                     what the cache is made of (its identity), and which shards hold it
    KIND-INDEX-CRC.safetensors        a shard

    identity = weights + transform + ordered image ids + contents of the images + labels + probe settings
               (+ augmentation, if any) (+ targets of the task loss, if any)

A cache is used only where every part agrees; a part that differs is named. The hash of the contents is known once every
image has been read, so a cache that is not finished has it shard by shard (`extract.py`). The manifest holds no times
and no path but that of a weights file, so two extractions of the same images by the same model give the same bytes.

The manifest is sealed by its own hash. Opening a cache reads the manifest alone, and rows when they are needed.
"""

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.cache.arrays import is_npz, open_npz_table
from dubito.cache.labels import label_table
from dubito.cache.shards import FORGED, HEAD, ROWS, Shard, list_shards, remove_shard, shard_at, sharded_column
from dubito.choices import LabelSpace
from dubito.data.augment import Augmented
from dubito.data.files import is_image
from dubito.data.image_set import ImageSet, hash_array, hash_bytes, hash_series
from dubito.data.labels import Labels
from dubito.errors import CacheError, DamagedShardError, StaleCacheError
from dubito.models.load import as_classifier
from dubito.storage import (
    COUNT,
    LOCK,
    UNFINISHED,
    Place,
    check_empty,
    check_layout,
    encode,
    not_there,
    read_sealed,
    reading,
    sizes_in,
    to_place,
    write_sealed,
)
from dubito.table import Column, Provenance, Table
from dubito.table.provenance import CARRIED, describe_difference
from dubito.table.views import Computed
from dubito.types import Classifier, Images, Json

FORMAT = 3
FILE = "manifest.json"
_PARTS = {
    "weights": "the model's weights",
    "head": "the layer taken as classifying",
    "transform": "the transform",
    "count": "the number of images",
    "ids": "the names or the order of the images",
    "images": "the contents of the images",
    "labels": "the labels",
    "augmentation": "the augmentation",
    "targets": "the targets of the task loss",
}
_WRITER = re.compile(rf"(\.[0-9a-f]{{8}})?{re.escape(UNFINISHED)}$")
_UNLABELLED = "none"
_SHARDS = [{"name": str, "bytes": COUNT, "rows": COUNT}, ...]
_KIND = {"columns?": {str: {"shape": [COUNT, ...]}}, "shards?": _SHARDS, "head?": str, "settings?": {str: Any}}
_NAMES = (None, [str, ...])
_LAYOUT = {
    "identity": {"operations?": (None, [str, ...], {str: Any}), str: Any},
    "model": str,
    "classes": _NAMES,
    "label_space": str | None,
    "batch_size": COUNT,
    "shard_size": COUNT,
    "threads?": (None, COUNT),
    "label_names?": _NAMES,
    "task_loss?": str | None,
    "rows?": _KIND,
    "probes?": {str: _KIND},
    "skipped?": [[str, str], ...],
}
"""Of the manifest."""


@dataclass
class Manifest:
    """The content of manifest.json.

    Attributes:
        identity: Hashes and settings that must agree: weights, transform, count, ids, images, labels.
        model: The model's name, for people.
        classes: Names of the logits' classes, if known.
        label_space: "model" or "own"; None without labels.
        batch_size: Rows that went through the model at once: kept on resuming, as it changes the last bits.
        shard_size: Images per shard.
        threads: Threads of torch that the model computed with: kept on resuming, for the same reason.
        label_names: Names of the labels where they are not `classes`, if known.
        task_loss: Name of the loss that losses are of; None if there are none.
        rows: When finished, columns and shards of what is known of the images themselves.
        probes: By probe: its settings, and when finished its columns and shards.
        skipped: Images that could not be decoded, with the reason.
    """

    identity: Json
    model: str
    classes: list[str] | None
    label_space: str | None
    batch_size: int
    shard_size: int
    threads: int | None = None
    label_names: list[str] | None = None
    task_loss: str | None = None
    rows: Json = field(default_factory=dict)
    probes: dict[str, Json] = field(default_factory=dict)
    skipped: list[list[str]] = field(default_factory=list)
    format: int = FORMAT

    def write(self, folder: Place) -> None:
        """Replace the manifest in one step."""
        write_sealed(folder / FILE, asdict(self))

    @property
    def kinds(self) -> list[Json]:
        """What is recorded of each kind of shards: of the rows, and of every probe."""
        return [self.rows, *self.probes.values()]

    @property
    def finished(self) -> bool:
        """Whether rows and all probes have all their shards."""
        return all("shards" in kind for kind in self.kinds)

    def shard_names(self) -> list[str]:
        """The shards that the cache is made of, as far as it is finished."""
        heads = [kind[HEAD] for kind in self.kinds if HEAD in kind]
        return [entry["name"] for kind in self.kinds for entry in kind.get("shards", ())] + heads


def origin_of(manifest: Manifest, kind: str) -> str:
    """A hash of everything that the shards of a kind were made from, except for the contents of the images."""
    probe = manifest.probes.get(kind, {"uses_labels": kind == ROWS})
    labelled = kind == ROWS or (manifest.label_space == "model" and "targets" not in manifest.identity)
    left_out = {"images"} if probe["uses_labels"] and labelled else {"images", "labels"}
    identity = {part: manifest.identity.get(part) for part in _PARTS.keys() - left_out}
    sizes = (manifest.batch_size, manifest.shard_size, manifest.threads)
    return hash_bytes(json.dumps([identity, sizes, probe.get("settings")], sort_keys=True).encode()).hex()


def read_manifest(folder: Place) -> Manifest | None:
    """The manifest of a folder, or None where there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    repair = "Extract again into another folder, or delete this one."
    with reading(f"cache '{folder}'", repair, error=CacheError):
        entries = read_sealed(path, format=FORMAT)
        check_layout(entries, _LAYOUT)
        return Manifest(**entries)


def remove_replaced(folder: Place, manifest: Manifest) -> None:
    """Remove shards of images of which the manifest names another one: leftovers of a process that was killed."""
    named = [named_shard(folder, name) for name in manifest.shard_names()]
    places = {(shard.kind, shard.index): shard.name for shard in named}
    for shard in list_shards(folder):
        if places.get((shard.kind, shard.index), shard.name) != shard.name:
            remove_shard(shard)


def is_leftover(path: Place) -> bool:
    """Whether a file is one of ours that was never finished; nobody else's are touched."""
    name = _WRITER.sub("", path.name)
    return name != path.name and (name == FILE or shard_at(path.parent / name) is not None)


def remove_leftovers(folder: Place) -> None:
    """Remove files that were never finished; in a store there are none."""
    for path in folder.iterdir() if isinstance(folder, Path) else ():
        if is_leftover(path):
            with contextlib.suppress(OSError):  # a read-only disk keeps them, and they do no harm
                path.unlink()


def check_place(folder: Place) -> None:
    """Raise CacheError for a place where no cache can be written; a folder that holds one is for `extract` to judge."""
    if (folder / FILE).exists():
        return
    if isinstance(folder, Path):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            reason = "cannot be written" if there.is_dir() else "is a file"
            raise CacheError(f"the cache cannot be saved in '{folder}': '{there}' {reason}. Choose another folder.")
    others = sorted(name for name in sizes_in(folder) if name != LOCK and not is_leftover(folder / name))
    check_empty(folder, others, "cache", f"that of a cache, which has a {FILE}", error=CacheError)


def identity(
    model: Classifier,
    images: Images,
    labels: Int[Tensor, "n"] | None,
    space: str | None,
    targets: Shaped[Tensor, "rows ..."] | None = None,
) -> Json:
    """weights, transform, count, ids, images, labels: equal if and only if an extraction would give the same columns.

    Augmented images add the augmentation, targets of the task loss add theirs. The images behind augmented rows and
    their labels are counted and hashed by themselves, so that another seed does not appear as other images. `images`,
    the hash of the contents, is None where it comes from the same reading as the pixels (`ImageSet.hashed_reads`).
    """
    originals = images.images if isinstance(images, Augmented) else images
    hashed = isinstance(images, ImageSet) and images.hashed_reads
    parts = {
        **model_identity(model).model_parts,
        "count": len(originals),
        "ids": hash_series(map(encode, originals.ids)).hex(),
        "images": None if hashed else originals.digest(),
        "labels": _UNLABELLED,
    }
    if labels is not None:
        parts["labels"] = hash_labels(labels[: len(originals)], space)
    if isinstance(images, Augmented):
        parts["augmentation"] = images.describe()
    if targets is not None:
        parts["targets"] = hash_array(targets.numpy()).hex()
    return parts


def hash_labels(labels: Int[Tensor, "n"], space: str | None) -> str:
    """One hash of the labels of all images, also of those that cannot be decoded, and of their space."""
    return hash_bytes(str(space).encode(), labels.long().contiguous().numpy().tobytes()).hex()


def model_identity(model: Classifier) -> Provenance:
    """The model's part of a provenance, as it looks after a round trip through JSON."""
    fingerprint = {**model.fingerprint(), "checkpoint": getattr(model, "checkpoint", None)}
    plain: Json = json.loads(json.dumps({part: fingerprint.get(part) for part in CARRIED}))
    return Provenance(model=model.name, **plain)


def check_identity(
    folder: Place, was: Json, now: Json, names: Mapping[str, str] = _PARTS, repair: str = "delete this one"
) -> None:
    """Raise StaleCacheError that names every part in which a cache differs from what it is to be used for."""
    if differing := differing_parts(names, was, now):
        if differing[0].startswith(_PARTS["labels"]) and len(differing) == 1 and now["labels"] != _UNLABELLED:
            repair = f"store these labels without running the model: dubito.cache.label_cache('{folder}', labels)"
        message = f"cache '{folder}' does not match: {'; '.join(differing)}. Extract into another folder, or {repair}."
        raise StaleCacheError(message)


def differing_parts(names: Mapping[str, str], was: Json, now: Json) -> list[str]:
    """The parts in which two identities differ, in words: of settings only those that differ, of a hash its beginning.

    >>> differing_parts({"recipe": "the recipe"}, {"recipe": {"lr": 0.1, "k": 2}}, {"recipe": {"lr": 0.2, "k": 2}})
    ['the recipe (lr=0.1 there, 0.2 here)']
    """
    differences = {name: describe_difference(was.get(part), now.get(part)) for part, name in names.items()}
    return [f"{name} ({difference})" for name, difference in differences.items() if difference]


def _no_cache(folder: Place) -> str:
    """Why a place is not a cache, and how to make one."""
    inside = islice(folder.rglob("*"), 99) if isinstance(folder, Path) and folder.is_dir() else ()
    if any(is_image(path.name) for path in (folder, *inside)):
        make = f"Run a model over them first: dubito.extract(model, '{folder}', to='cache')."
        return f"'{folder}' must be a cache; it holds images. {make}"
    make = f"dubito.extract(model, images, to='{folder}')"
    return f"no cache in '{folder}': {not_there(folder / FILE)}. Make one with {make}."


def finished_manifest(folder: Place) -> Manifest:
    """The manifest of a finished cache; CacheError where there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise CacheError(_no_cache(folder))
    if not manifest.finished:
        resume = "Run the same extraction again: it continues where it stopped."
        raise CacheError(f"cache '{folder}' is not finished. {resume}")
    return manifest


def open_cache(
    folder: str | Place,
    *,
    model: Classifier | Provenance | str | None = None,
    labels: Labels | None = None,
    label_space: LabelSpace | None = None,
) -> Table:
    """The table of a finished cache, or of an .npz file with the arrays `logit`, `feature`, `label`, `id` or `classes`.

    Args:
        folder: The folder or address that was passed to extract as `to`, or an .npz file.
        model: The model that must have made it, its name, or its `model_identity`, which fills in what the cache has
            not recorded, or recorded in another form; None takes any cache.
        labels: Labels to use in place of the cache's own, for this table alone: a CSV file, a frame, a mapping from
            image to label, or one label per row. `dubito.cache.label_cache` stores them.
        label_space: "model" if these labels are the model's classes, "own" if they are another set's; by default
            decided from class names, integers being the model's.

    Raises:
        StaleCacheError: The cache's weights or transform are not this model's.
    """
    folder = to_place(folder)
    if is_npz(folder):
        if model is not None:
            raise CacheError(f"open: the arrays of '{folder}' do not record their model. Leave model out.")
        table = open_npz_table(folder)
        return table if labels is None else label_table(table, labels, label_space)
    manifest = finished_manifest(folder)
    if model is not None and not isinstance(model, Provenance):
        model = model_identity(as_classifier(model, by="open"))
    if labels is not None and "augmentation" in manifest.identity:
        store = f"Store them: dubito.cache.label_cache('{folder}', labels)."
        raise CacheError(f"open: labels cannot be added to the augmented images of '{folder}' for one table. {store}")
    if model is not None:
        check_identity(folder, manifest.identity, manifest.identity | model.model_parts)
    with reading(f"cache '{folder}'", FORGED, error=CacheError):
        table = _table(folder, manifest, model)
    return (
        table if labels is None else label_table(table, labels, label_space, of_targets="targets" in manifest.identity)
    )


def _table(folder: Place, manifest: Manifest, model: Provenance | None) -> Table:
    """The columns of all shards, with what the manifest says about them."""
    sizes = sizes_in(folder)
    columns: dict[str, Any] = {"id": sharded_column(_shards(folder, sizes, manifest.rows, manifest.rows), "id")}
    for kind in manifest.kinds:
        shards = _shards(folder, sizes, kind, manifest.rows)
        columns |= {key: sharded_column(shards, key, tuple(one["shape"])) for key, one in kind["columns"].items()}
        if HEAD in kind:
            columns["logit"] = _rebuilt(columns["feature"], named_shard(folder, kind[HEAD]))
    parts: Json = {part: manifest.identity.get(part) for part in CARRIED}
    recorded = Provenance(
        model=manifest.model,
        **parts,
        task_loss=manifest.task_loss,
        probes={
            name: {key: probe[key] for key in ("settings", "notes") if key in probe}
            for name, probe in manifest.probes.items()
        },
    )
    return Table(
        name=str(folder),
        classes=manifest.classes,
        label_space=manifest.label_space or "model",
        label_names=manifest.label_names,
        skipped=[(name, why) for name, why in manifest.skipped],
        provenance=recorded if model is None else recorded.with_model(model),
        **dict(sorted(columns.items(), key=lambda column: (column[0] != "id", column[0]))),
    )


def _rebuilt(feature: Column, shard: Shard) -> Computed:
    """Logits from stored features and the head: W z + b."""
    shard.check()
    head = shard.read()
    weight, bias = head["weight"], head.get("bias")
    if weight.ndim != 2 or weight.shape[1:] != feature.shape[1:] or (bias is not None and len(bias) != len(weight)):
        shapes = ", ".join(f"{key} {tuple(one.shape)}" for key, one in head.items())
        raise ValueError(f"its last layer, {shapes}, does not fit features of shape {tuple(feature.shape)}")
    return Computed((feature.shape[0], len(weight)), lambda rows: F.linear(feature[rows], weight, bias))


def named_shard(folder: Place, name: str) -> Shard:
    """The shard that the manifest names."""
    shard = shard_at(folder / name)
    if shard is None:
        message = f"manifest of '{folder}' names '{name}', which is not a shard. Run the same extraction again."
        raise DamagedShardError(message)
    return shard


def _shards(folder: Place, sizes: Mapping[str, int], kind: Json, images: Json) -> list[tuple[Shard, int]]:
    """The shards with their rows; each must be there in its full size, and have the rows of its images."""
    shards = [(named_shard(folder, entry["name"]), entry) for entry in kind["shards"]]
    for (shard, entry), of_images in zip(shards, images["shards"], strict=True):
        if (size := sizes.get(shard.name)) is None:
            shard.check("is missing")
        if size != entry["bytes"]:
            shard.check(f"has {size} bytes, {entry['bytes']} were written")
        if entry["rows"] != of_images["rows"]:
            shard.check(f"has {entry['rows']} rows for {of_images['rows']} images")
    return [(shard, entry["rows"]) for shard, entry in shards if entry["rows"]]
