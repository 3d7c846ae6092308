"""The manifest: what a cache is made of (its identity), and which shards hold it once it is finished.

    identity = weights + transform + ordered image ids and contents + labels + probe settings
               (+ augmentation, if any) (+ targets of the task loss, if any)

A cache is used only where every part agrees; a part that differs is named. The manifest holds no times and no paths, so
two extractions of the same images by the same model give the same bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dubito.errors import CacheError, StaleCacheError
from dubito.storage import write_file
from dubito.types import Json

FORMAT = 1
FILE = "manifest.json"
_USUAL = "the usual"  # of a setting that is written down only where it is another
_PARTS = {
    "weights": "the model's weights",
    "head": "the layer taken as classifying",
    "transform": "the transform",
    "count": "the number of images",
    "images": "the images (their names, order or contents)",
    "labels": "the labels",
    "augmentation": "the augmentation",
    "targets": "the targets of the task loss",
}


@dataclass
class Manifest:
    """Everything that stands in manifest.json.

    Attributes:
        identity: Hashes and settings that must agree: weights, transform, count, images, labels.
        model: The model's name, for people.
        classes: Names of the logits' classes, if known.
        label_space: "model" or "own"; None without labels.
        batch_size: Rows that went through the model at once: kept on resuming, as it changes the last bits.
        shard_size: Images a shard.
        label_names: Names of the labels where they are not `classes`, if known.
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
    probes: dict[str, Json] = field(default_factory=dict)
    skipped: list[list[str]] = field(default_factory=list)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Replace the manifest in one step."""
        write_file(folder / FILE, (json.dumps(asdict(self), sort_keys=True, indent=1) + "\n").encode())

    @property
    def begun(self) -> bool:
        """Some probe has had all its shards before."""
        return any("shards" in probe for probe in self.probes.values())

    @property
    def finished(self) -> bool:
        """All probes have all their shards."""
        return bool(self.probes) and all("shards" in probe for probe in self.probes.values())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none."""
    path = folder / FILE
    try:
        found: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise CacheError(
            f"cache '{folder}': {FILE} cannot be read ({error}). Delete the folder and extract again."
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        came = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise CacheError(
            f"cache '{folder}' has format {came}; this dubito reads {FORMAT}. Extract again into another folder."
        )
    try:
        return Manifest(**found)
    except TypeError as error:
        raise CacheError(
            f"cache '{folder}': {FILE} has other entries than this dubito writes ({error}). Extract again elsewhere."
        ) from error


def check_identity(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise StaleCacheError that names every part in which a cache differs from what is asked for."""
    differing = [
        f"{told} ({told_part(was.get(part), now.get(part))} there, {told_part(now.get(part), was.get(part))} here)"
        for part, told in _PARTS.items()
        if was.get(part) != now.get(part)
    ]
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


def told_part(part: Any, other: Any) -> str:
    """One part of an identity for people: of settings only those that differ from the other's, of a hash its beginning.

    >>> told_part({"lr": 0.1, "k": 2}, {"lr": 0.2, "k": 2}), told_part("ab12cd34ef", "00"), told_part(None, 1)
    ('lr=0.1', 'ab12cd34', 'none')
    """
    if isinstance(part, dict):
        known = other if isinstance(other, dict) else {}
        return ", ".join(f"{key}={value}" for key, value in part.items() if known.get(key) != value) or "nothing"
    return part[:8] if isinstance(part, str) else "none" if part is None else str(part)
