"""Arrays in an .npz file: `images` or `inputs`, and optionally `labels`, `ids` and `classes`.

One file can hold several parts, with keys such as `train_images` and `train_labels`; "file.npz#train" opens
one. Arrays that are stored without compression (`numpy.savez`) stay in the file and are memory-mapped, so
that any number of worker processes share one copy. Compressed ones (`numpy.savez_compressed`) are unpacked
into memory once, when the file is opened. Pickled objects are never loaded.
"""

import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dubito.data.arrays import Array, ArrayImages, Mapped
from dubito.data.image_set import some
from dubito.errors import ImagesError

_PIXELS = ("images", "inputs")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_npz(path: Path, part: str | None = None) -> ArrayImages:
    """The images of an .npz file, or of one part of it."""
    name = str(path) if part is None else f"{path}#{part}"
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            prefix, pixels = _choose(list(infos), part, name)
            found = {key: infos[prefix + key] for key in ("labels", "ids", "classes") if prefix + key in infos}
            small = {key: _load(archive, info) for key, info in found.items()}
            rows = _mapped(path, infos[prefix + pixels]) or _load(archive, infos[prefix + pixels])
    except (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ImagesError(
            f"'{name}' must be an .npz file of plain arrays; opening it gave: {error}. "
            f"Write it with numpy.savez(path, images=..., labels=...)."
        ) from error
    return _build(rows, pixels, small, name)


def _build(rows: Array | Mapped, pixels: str, small: dict[str, Array], name: str) -> ArrayImages:
    given: dict[str, Any] = {pixels: rows}
    ids, classes = _texts(small.get("ids")), _texts(small.get("classes"))
    return ArrayImages(**given, labels=small.get("labels"), ids=ids, classes=classes, name=name)


def _choose(keys: list[str], part: str | None, name: str) -> tuple[str, str]:
    """The prefix of the part's keys, and whether it has images or inputs."""
    found = [(key.removesuffix(end), end) for key in keys for end in _PIXELS if key == end or key.endswith(f"_{end}")]
    prefix = None if part is None else f"{part}_"
    chosen = [pair for pair in found if prefix is None or pair[0] == prefix]
    plain = [pair for pair in chosen if pair[0] == ""]
    chosen = plain or chosen
    if len(chosen) == 1:
        return chosen[0]
    parts = sorted({before.removesuffix("_") for before, _ in found if before})
    wanted = "images or inputs" if prefix is None else f"{prefix}images or {prefix}inputs"
    choices = some([f"{name.partition('#')[0]}#{key}" for key in parts])
    repair = f"Say which part: {choices}." if parts else "Rename the arrays, or leave one out."
    raise ImagesError(f"'{name}' must have one key {wanted}; it has the keys {some(keys, 8)}. {repair}")


def _texts(values: Array | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values.astype(str).tolist())


def _load(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


def _mapped(path: Path, info: zipfile.ZipInfo) -> Mapped | None:
    """Where an array lies in the file, or None if it is compressed, empty or has an unusual header."""
    if info.compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        # The local header repeats the name and may have other extra bytes than the archive's directory.
        file.seek(info.header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        start = file.tell()
        header = _HEADERS.get(np.lib.format.read_magic(file))
        if header is None:
            return None
        shape, fortran, dtype = header(file)
        size = file.tell() - start + math.prod(shape) * dtype.itemsize
        if dtype.hasobject or 0 in shape or size != info.file_size:
            return None
        return Mapped(path.absolute(), file.tell(), shape, dtype.str, fortran)
