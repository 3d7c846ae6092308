"""Images put to a model: its transform, its forward pass and the probes that a guard's scores read, without a cache."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor

from dubito.cache.loader import batches
from dubito.data import open_images
from dubito.data.files import FileImages
from dubito.data.tree import is_image
from dubito.errors import BrokenImageError, GuardError, ImagesError, SkippedImagesWarning
from dubito.probes import Forward, Gradient, PreActivation, Tiles
from dubito.table import Provenance, Table, writer_of
from dubito.types import Classifier, Images, NotingProbe, Probe

_BATCH = 16
_HALF = torch.finfo(torch.float16).max
_FORWARD = {"feature", "logit", "id"}
_TILES = re.compile(r"tiles_(\d+)(_logit)?")


def as_images(source: Any) -> tuple[Images, bool]:
    """What was given as a set of images, and whether it is a single one."""
    if isinstance(source, (str, Path)):
        return open_images(source), is_image(Path(source).name) and not Path(source).is_dir()
    if isinstance(source, Image.Image):
        return open_images([source]), True
    if isinstance(source, (np.ndarray, Tensor)):
        single = _is_single(source)
        return open_images(source[None] if single else source), single
    if isinstance(source, Sequence) and len(source) and all(isinstance(one, (str, Path)) for one in source):
        return FileImages(Path(), [str(one) for one in source], name="a list of files"), False
    return open_images(source), False


def _is_single(array: Shaped[np.ndarray, "..."] | Tensor) -> bool:
    """Inputs have channels first, pictures last: (3, h, w) or (h, w, 3), or a grey (h, w)."""
    if array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f":
        return array.ndim == 3
    if array.ndim == 3 and array.shape[0] == 3 != array.shape[-1]:
        raise ImagesError(
            f"pixels of shape {tuple(array.shape)} may be one picture with channels first, or three grey ones. Give "
            f"the one as (h, w, 3), channels last; the three as a list."
        )
    # One or four channels are no stack of narrow grey pictures; `open_images` says what to do with them.
    return array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))


def ask(model: Classifier, images: Images, probes: Sequence[Probe], *, provenance: Provenance | None = None) -> Table:
    """One table of what the model says of images; those that cannot be decoded are left out and listed.

    `provenance` is what the table says of its model: one that is known to be the guard's own.
    """
    groups = [list(range(start, min(start + _BATCH, len(images)))) for start in range(0, len(images), _BATCH)]
    parts: dict[str, list[Tensor]] = {}
    kept: list[int] = []
    broken: list[tuple[str, str]] = []
    for batch in batches(images, model.transform, groups, 0):
        kept += batch.indices
        broken += [(images.ids[index], why) for index, why in batch.broken]
        if batch.inputs is None:
            continue
        x = model.transform.finish(batch.inputs.to(model.device))
        for name, column in _columns(model, x, probes).items():
            parts.setdefault(name, []).append(column.detach().cpu())
    if not kept:
        raise BrokenImageError(broken[0][1] if broken else f"{images.name} holds no images.")
    if broken:
        warnings.warn(
            f"{len(broken)} of {len(images)} images could not be decoded and have no verdict: {_some(broken)}",
            SkippedImagesWarning,
            stacklevel=3,
        )
    columns: dict[str, Any] = {name: torch.cat(rows) for name, rows in parts.items()}
    notes = {
        probe.name: {"settings": probe.settings(), "notes": probe.notes()}
        for probe in probes
        if isinstance(probe, NotingProbe)
    }
    return Table(
        name=images.name,
        classes=model.classes,
        skipped=broken,
        provenance=None if provenance is None else replace(provenance, probes={**provenance.probes, **notes}),
        id=[images.ids[index] for index in kept],
        **columns,
    )


def as_kept(z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Features as caches keep them, in half precision: scores have learned from those."""
    return torch.where(z.abs() <= _HALF, z.half().float(), z)


def probes_for(columns: Iterable[str], given: Sequence[Probe], provenance: Provenance | None) -> list[Probe]:
    """The probes that write these columns: those that were given, or made anew as the table tells they were asked."""
    missing = set(columns) - _FORWARD
    made: dict[str, Probe] = {}
    for column in sorted(missing):
        probe = next((one for one in given if column == one.name or column.startswith(f"{one.name}_")), None)
        probe = probe or _made(column, provenance.probes if provenance else {}, missing)
        made.setdefault(probe.name, probe)
    return list(made.values())


def _columns(model: Classifier, x: Tensor, probes: Sequence[Probe]) -> dict[str, Tensor]:
    found = dict(Forward(feature_dtype="float32").run(model, x, None))
    found["feature"] = as_kept(found["feature"])
    for probe in probes:
        found |= probe.run(model, x, None)
    return found


def _made(column: str, probes: Mapping[str, Mapping[str, Any]], wanted: set[str]) -> Probe:
    tiles = _TILES.fullmatch(column)
    if tiles:
        grids = sorted({int(found[1]) for one in wanted if (found := _TILES.fullmatch(one))})
        kept = any(one.endswith("_logit") for one in wanted if _TILES.fullmatch(one))
        asked = probes.get("tiles", {}).get("settings", {})
        return Tiles(grids, keep="logits" if kept else "summary", temperature=asked.get("temperature", 1.0))
    if column == "pre_activation":
        return PreActivation()
    for name, probe in probes.items():
        if "notes" in probe and (column == name or column.startswith(f"{name}_")):
            return Gradient(name=name, **probe["settings"])
    raise GuardError(
        f"the guard's scores read column '{column}', written by {writer_of(column) or 'a probe of yours'}, which "
        f"cannot be made anew from its name. Give the probe to Guard.fit or Guard.load: probes=[...]."
    )


def _some(broken: Sequence[tuple[str, str]]) -> str:
    """The first reason, and the names of a few others."""
    others = [name for name, _ in broken[1:4]]
    left = len(broken) - 1 - len(others)
    more = f" Likewise {', '.join(others)}" + (f" and {left} more." if left else ".") if others else ""
    return broken[0][1] + more
