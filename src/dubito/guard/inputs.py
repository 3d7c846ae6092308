"""What a guard is called with, as images; and the probes that write the columns its scores read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from dubito.data import open_images
from dubito.data.files import FileImages
from dubito.data.tree import is_image
from dubito.errors import GuardError, ImagesError
from dubito.probes import Gradient, PreActivation, Tiles
from dubito.table import Provenance, writer_of
from dubito.types import Images, Probe

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


def probes_for(columns: Iterable[str], given: Sequence[Probe], provenance: Provenance | None) -> list[Probe]:
    """The probes that write these columns: those that were given, or made anew as the table tells they were asked."""
    missing = set(columns) - _FORWARD
    made: dict[str, Probe] = {}
    for column in sorted(missing):
        probe = next((one for one in given if column == one.name or column.startswith(f"{one.name}_")), None)
        probe = probe or _made(column, provenance.probes if provenance else {}, missing)
        made.setdefault(probe.name, probe)
    return list(made.values())


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
