"""The manifest: what a cache is made of (its identity), and which shards hold it once it is finished.

    identity = weights + transform + ordered image ids + contents of the images + labels + probe settings
               (+ augmentation, if any) (+ targets of the task loss, if any)

A cache is used only where every part agrees; a part that differs is named. The hash of the contents is known once every
image has been read, so a cache that is not finished has it shard by shard (`extract.py`). The manifest holds no times
and no paths, so two extractions of the same images by the same model give the same bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.data.augment import Augmented
from dubito.data.digest import hash_array, hash_parts
from dubito.data.image_set import ImageSet
from dubito.errors import CacheError, StaleCacheError
from dubito.storage import encode, write_json
from dubito.table.provenance import CARRIED, Provenance
from dubito.types import Classifier, Images, Json

FORMAT = 2
FILE = "manifest.json"
_USUAL = "the usual"  # of a setting that is written down only where it is another
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
    label_names: list[str] | None = None
    task_loss: str | None = None
    rows: Json = field(default_factory=dict)
    probes: dict[str, Json] = field(default_factory=dict)
    skipped: list[list[str]] = field(default_factory=list)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Replace the manifest in one step."""
        write_json(folder / FILE, asdict(self))

    @property
    def begun(self) -> bool:
        """Something has had all its shards before."""
        return any("shards" in kind for kind in (self.rows, *self.probes.values()))

    @property
    def finished(self) -> bool:
        """Rows and all probes have all their shards."""
        return all("shards" in kind for kind in (self.rows, *self.probes.values()))


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
    behind = images.images if isinstance(images, Augmented) else images
    hashed = isinstance(images, ImageSet) and images.hashed_reads
    parts = {
        **model_identity(model).model_parts,
        "count": len(behind),
        "ids": hash_parts(*map(encode, behind.ids)).hex(),
        "images": None if hashed else behind.digest(),
        "labels": _hash_labels(None if labels is None else labels[: len(behind)], space),
    }
    if isinstance(images, Augmented):
        parts["augmentation"] = images.describe()
    if targets is not None:
        parts["targets"] = hash_array(targets.numpy()).hex()
    return parts


def model_identity(model: Classifier) -> Provenance:
    """The model's part of a provenance, as it looks after a round trip through JSON."""
    fingerprint = model.fingerprint()
    plain: Json = json.loads(json.dumps({part: fingerprint.get(part) for part in CARRIED}))
    return Provenance(model=model.name, **plain)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none."""
    path = folder / FILE
    try:
        entries: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise CacheError(
            f"cache '{folder}': {FILE} cannot be read ({error}). Delete the folder and extract again."
        ) from error
    written = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
    if written != FORMAT:
        raise CacheError(
            f"cache '{folder}' has format {written}; this version of dubito reads format {FORMAT}. "
            f"Extract again into another folder."
        )
    try:
        return Manifest(**entries)
    except TypeError as error:
        raise CacheError(
            f"cache '{folder}': {FILE} has other entries than this version of dubito writes ({error}). "
            f"Extract again into another folder."
        ) from error


def check_identity(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StaleCacheError that names every part in which a cache differs from what it is to be used for."""
    differing = differing_parts(_PARTS, was, now)
    if differing:
        raise StaleCacheError(
            f"cache '{folder}' was made from something else: {'; '.join(differing)}. "
            f"Extract into another folder, or delete this one."
        )


def check_probe(folder: Path, name: str, was: Json, now: Json) -> None:
    """Raise StaleCacheError when a probe was run with other settings."""
    differing = [
        f"{key}={was.get(key, _USUAL)!r} there, {now.get(key, _USUAL)!r} here"
        for key in {**was, **now}
        if was.get(key) != now.get(key)
    ]
    if differing:
        raise StaleCacheError(
            f"cache '{folder}' was made by the {name} probe with other settings: {'; '.join(differing)}. "
            f"Extract into another folder, or use the settings it has."
        )


def differing_parts(names: Mapping[str, str], was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The parts in which two identities differ, in words: of settings only those that differ, of a hash its beginning.

    >>> differing_parts({"recipe": "the recipe"}, {"recipe": {"lr": 0.1, "k": 2}}, {"recipe": {"lr": 0.2, "k": 2}})
    ['the recipe (lr=0.1 there, lr=0.2 here)']
    >>> differing_parts({"weights": "the model", "seed": "the seed"}, {"weights": "ab12cd34ef", "seed": 1}, {"seed": 1})
    ['the model (ab12cd34 there, none here)']
    """
    pairs = {name: (was.get(part), now.get(part)) for part, name in names.items()}
    return [
        f"{name} ({_describe(one, other)} there, {_describe(other, one)} here)"
        for name, (one, other) in pairs.items()
        if one != other
    ]


def _describe(part: Any, other: Any) -> str:
    if isinstance(part, dict):
        theirs = other if isinstance(other, dict) else {}
        return ", ".join(f"{key}={value}" for key, value in part.items() if theirs.get(key) != value) or "nothing"
    return part[:8] if isinstance(part, str) else "none" if part is None else str(part)


def _hash_labels(labels: Int[Tensor, "n"] | None, space: str | None) -> str:
    if labels is None:
        return "none"
    state = hashlib.blake2b(str(space).encode(), digest_size=16)
    state.update(labels.long().contiguous().numpy().tobytes())
    return state.hexdigest()
