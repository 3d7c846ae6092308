"""Images in arrays: pixels that go through the model's transform, or inputs that are ready for the model.

An .npz file has the key `images` or `inputs`, and optionally `labels`, `ids` and `classes`. It can hold several parts,
with keys such as `train_images` and `train_labels`; "file.npz#train" opens one. Arrays stored without compression
(`numpy.savez`) are memory-mapped, so that any number of worker processes share one copy; compressed ones, and those of
files that are not on the disk, are read into memory once. Pickled objects are never loaded.
"""

import math
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from dubito.data.image_set import ImageSet, PositionIds, hash_array, hash_bytes, in_threads, some
from dubito.data.labels import LabelValues, to_labels
from dubito.errors import ImagesError
from dubito.storage import reading
from dubito.storage.locations import Place, to_readable

Array = Shaped[np.ndarray, "..."]
_PIXELS = ("images", "inputs")
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@final
class ArrayImages(ImageSet):
    """Images in memory or mapped from a file: pass either `images` or `inputs`.

    Args:
        images: uint8 pixels (n,h,w,3) RGB or (n,h,w) grey; `read` gives RGB images for the model's transform.
        inputs: Ready for the model; `read` gives tensors as they are. Floats (n,...) skip the transform
            altogether, uint8 (n,h,w,3) of the model's input size are only scaled and normalised.
        labels: One class index or class name per image.
        ids: One name per image; positions such as "000042" without them.
        classes: The names of the classes, in the order of the indices.
        name: What errors call the set.

    >>> images = ArrayImages(images=np.zeros((2, 4, 4, 3), np.uint8), labels=["dog", "cat"])
    >>> images.ids, images.labels.tolist(), images.read(1).size
    (('000000', '000001'), [1, 0], (4, 4))
    """

    def __init__(
        self,
        *,
        images: Array | Tensor | None = None,
        inputs: Array | Tensor | None = None,
        labels: LabelValues | None = None,
        ids: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        name: str = "images in memory",
    ) -> None:
        if (images is None) == (inputs is None):
            raise ImagesError(
                f"{name} must be images (pixels for the transform) or inputs (ready for the model); "
                f"got {'neither' if images is None else 'both'}. Pass one of the two."
            )
        self._rows = _as_array(inputs if images is None else images, name)
        self._mapped: tuple[Any, ...] | None = None
        self.ready = images is None
        _check_pixels(self._rows, name, ready=self.ready)
        numbers, names = (None, classes) if labels is None else to_labels(labels, f"labels of {name}", classes)
        ids = PositionIds(len(self._rows)) if ids is None else ids
        super().__init__(name, ids, numbers, names)
        if len(self.ids) != len(self._rows):
            raise ImagesError(
                f"ids of {name} must be one per image; got {len(ids)} ids for {len(self._rows)} images. "
                f"Pass them in the order of the images, or leave them out."
            )

    def __getstate__(self) -> dict[str, Any]:
        # torch sends tensors to workers through shared memory, numpy arrays as copies.
        rows = None if self._mapped else self._rows
        shareable = rows is not None and rows.flags.writeable and rows.flags.c_contiguous
        return {**self.__dict__, "_rows": torch.from_numpy(rows) if shareable else rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = np.memmap(*self._mapped) if self._mapped else _as_array(state["_rows"], self.name)

    def read(self, index: int) -> Image.Image | Tensor:
        """One RGB image, or one input tensor."""
        return self._image(np.array(self._rows[index]))

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of the type, shape and values of each row."""
        return in_threads(lambda row: self._hash(self._rows[row]), rows)

    def read_hashed(self, index: int) -> tuple[Image.Image | Tensor, bytes]:
        """The image or input and its hash, from one copy of the row: a mapped file may change at any time."""
        row = np.array(self._rows[index])
        return self._image(row), self._hash(row)

    def _image(self, row: Array) -> Image.Image | Tensor:
        return torch.from_numpy(row) if self.ready else Image.fromarray(np.ascontiguousarray(row)).convert("RGB")

    def _hash(self, row: Array) -> bytes:
        # The same bytes as pixels and as inputs go two ways through the transform; floats are inputs anyway.
        marked = self.ready and self._rows.dtype == np.uint8
        return hash_bytes(b"input", hash_array(row)) if marked else hash_array(row)


def open_npz(path: Place, part: str | None = None) -> ArrayImages:
    """The images of an .npz file, or of one part of it."""
    name = str(path) if part is None else f"{path}#{part}"
    repair = "Write plain arrays with numpy.savez(path, images=..., labels=...)."
    with (
        reading(f"'{name}'", repair, error=ImagesError),
        zipfile.ZipFile(to_readable(path)) as archive,
    ):
        infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        prefix, pixels = _choose(list(infos), part, name)
        others = {key: infos[prefix + key] for key in ("labels", "ids", "classes") if prefix + key in infos}
        small: dict[str, Any] = {key: _load(archive, info) for key, info in others.items()}
        mapped = _mapped(path, infos[prefix + pixels])
        small[pixels] = np.memmap(*mapped) if mapped else _load(archive, infos[prefix + pixels])
        small |= {key: tuple(small[key].astype(str).tolist()) for key in ("ids", "classes") if key in small}
        images = ArrayImages(**small, name=name)
    images._mapped = mapped  # workers map the same bytes instead of receiving a copy
    return images


def _as_array(values: Array | Tensor | None, name: str) -> Array:
    if isinstance(values, Tensor) and values.dtype == torch.bfloat16:
        raise ImagesError(f"inputs of {name} must have a type that numpy has; got {values.dtype}. Pass inputs.float().")
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values if isinstance(values, np.memmap) else np.asarray(values)


def _check_pixels(rows: Array, name: str, *, ready: bool) -> None:
    pixels = rows.dtype == np.uint8
    colour = pixels and rows.ndim == 4 and rows.shape[-1] == 3
    floats, grey = rows.dtype.kind == "f" and rows.ndim >= 2, pixels and rows.ndim == 3
    if colour or (floats if ready else grey):
        return
    expected = f"images of {name} must be uint8 pixels of shape (n,h,w,3) or (n,h,w)"
    repair = "Convert to uint8 0..255, or pass model inputs as inputs=."
    if ready:
        expected = f"inputs of {name} must be floats of shape (n,...) or uint8 of shape (n,h,w,3)"
        repair = "Pass pixels for the model's transform as images=."
    elif pixels and rows.ndim == 4:
        repair = {1: "Pass images[..., 0].", 4: "Pass images[..., :3]."}.get(rows.shape[-1], "Put channels last.")
        repair = "Pass images.transpose(0, 2, 3, 1)." if rows.shape[1] == 3 else repair
    raise ImagesError(f"{expected}; got {rows.dtype} of shape {rows.shape}. {repair}")


def _choose(keys: list[str], part: str | None, name: str) -> tuple[str, str]:
    """The prefix of the part's keys, and whether it has images or inputs."""
    pairs = [(key.removesuffix(end), end) for key in keys for end in _PIXELS if key == end or key.endswith(f"_{end}")]
    prefix = "" if part is None else f"{part}_"
    chosen = [pair for pair in pairs if pair[0] == prefix] or (pairs if part is None else [])
    if len(chosen) == 1:
        return chosen[0]
    parts = sorted({before.removesuffix("_") for before, _ in pairs if before})
    expected = f"{prefix}images or {prefix}inputs"
    choices = some([f"{name.partition('#')[0]}#{key}" for key in parts])
    repair = f"Say which part: {choices}." if parts else "Rename the arrays, or leave one out."
    raise ImagesError(f"'{name}' must have one key {expected}; it has the keys {some(keys, 8)}. {repair}")


def _load(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as file:
        shape, _, dtype, start = _header(file)
        size = start + math.prod(shape) * dtype.itemsize
        if size != info.file_size and not dtype.hasobject:  # before memory is allocated for what is not there
            raise ValueError(f"'{info.filename}' declares {size} bytes, shape {shape}, but has {info.file_size}")
    try:
        with archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except MemoryError as error:
        raise ValueError(f"'{info.filename}' of {size} bytes does not fit in memory") from error


def _mapped(path: Place, info: zipfile.ZipInfo) -> tuple[Any, ...] | None:
    """Arguments of numpy.memmap for an array in a file on the disk; None if it is compressed, empty or damaged."""
    if info.compress_type != zipfile.ZIP_STORED or not isinstance(path, Path):
        return None
    with path.open("rb") as file:
        # The local header repeats the name and may have other extra bytes than the archive's directory.
        file.seek(info.header_offset + 26)
        file.seek(sum(struct.unpack("<HH", file.read(4))), 1)
        shape, fortran, dtype, start = _header(file)
        if dtype.hasobject or 0 in shape or start + math.prod(shape) * dtype.itemsize != info.file_size:
            return None
        return path.absolute(), dtype.str, "r", file.tell(), shape, "F" if fortran else "C"


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether columns come first, type, and the bytes of the header of an array that begins here."""
    before = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"an array of numpy's format {version}, which no plain array has")
    shape, fortran, dtype = _HEADERS[version](file)
    return shape, fortran, dtype, file.tell() - before
