"""Images in arrays: pixels that go through the model's transform, or inputs that are ready for the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from dubito.data.digest import hash_array, hash_images
from dubito.data.image_set import ImageSet
from dubito.data.labels import LabelValues, to_labels
from dubito.errors import ImagesError

Array = Shaped[np.ndarray, "..."]


@dataclass(frozen=True)
class Mapped:
    """An array that stays in its file: workers map the same bytes instead of receiving a copy."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    fortran: bool

    def open(self) -> Array:
        """The array, read-only, each page read when it is touched."""
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, "F" if self.fortran else "C")


@final
class ArrayImages(ImageSet):
    """Images in memory or mapped from a file. Give either `images` or `inputs`.

    Args:
        images: uint8 pixels (n,h,w,3) RGB or (n,h,w) grey; `read` gives RGB images for the model's transform.
        inputs: Ready for the model; `read` gives tensors as they are. Floats (n,...) skip the transform
            altogether, uint8 (n,h,w,3) of the model's input size are only scaled and normalised.
        labels: One class index or class name an image.
        ids: One name an image; positions such as "000042" without them.
        classes: The names of the classes, in the order of the indices.
        name: How errors call the set.

    >>> images = ArrayImages(images=np.zeros((2, 4, 4, 3), np.uint8), labels=["dog", "cat"])
    >>> images.ids, images.labels.tolist(), images.read(1).size
    (('000000', '000001'), [1, 0], (4, 4))
    """

    def __init__(
        self,
        *,
        images: Array | Tensor | Mapped | None = None,
        inputs: Array | Tensor | Mapped | None = None,
        labels: LabelValues | None = None,
        ids: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        name: str = "images in memory",
    ) -> None:
        if (images is None) == (inputs is None):
            raise ImagesError(
                f"{name} must be images (pixels for the transform) or inputs (ready for the model); "
                f"{'neither' if images is None else 'both'} came. Give one of the two."
            )
        given = inputs if images is None else images
        self._mapped = given if isinstance(given, Mapped) else None
        self._rows = _as_array(given, name)
        self.ready = images is None
        check = _check_inputs if self.ready else _check_images
        check(self._rows, name)
        numbers, names = (None, classes) if labels is None else to_labels(labels, f"labels of {name}", classes)
        ids = position_ids(len(self._rows)) if ids is None else ids
        super().__init__(name, ids, numbers, names)
        if len(self.ids) != len(self._rows):
            raise ImagesError(f"ids of {name} must be one an image; got {len(ids)} ids for {len(self._rows)} images.")

    def __getstate__(self) -> dict[str, Any]:
        # torch sends tensors to workers through shared memory, numpy arrays as copies.
        state = dict(self.__dict__)
        state["_rows"] = None if self._mapped else _shareable(self._rows)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = _as_array(self._mapped or state["_rows"], self.name)

    def read(self, index: int) -> Image.Image | Tensor:
        """One RGB image, or one input tensor."""
        row = self._rows[index]
        if self.ready:
            return torch.from_numpy(np.array(row))
        return Image.fromarray(np.ascontiguousarray(row)).convert("RGB")

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the ids, types, shapes and values of some rows, in this order."""
        # The same bytes as pixels and as inputs go two ways through the transform; floats are inputs anyway.
        mark = b"input" if self.ready and self._rows.dtype == np.uint8 else b""
        return hash_images(self.ids, rows, lambda row: mark + hash_array(self._rows[row]))


def position_ids(n: int) -> tuple[str, ...]:
    """Names for images that have none: positions, zero-padded to at least six digits so that they sort."""
    width = max(6, len(str(n - 1)))
    return tuple(f"{i:0{width}}" for i in range(n))


def _as_array(given: Array | Tensor | Mapped | None, name: str) -> Array:
    if isinstance(given, Mapped):
        return given.open()
    if isinstance(given, Tensor) and given.dtype == torch.bfloat16:
        raise ImagesError(
            f"inputs of {name} must have a type that numpy has too; got {given.dtype}. Give inputs.float()."
        )
    return given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)


def _shareable(rows: Array) -> Array | Tensor:
    return torch.from_numpy(rows) if rows.flags.writeable and rows.flags.c_contiguous else rows


def _check_images(rows: Array, name: str) -> None:
    grey, colour = rows.ndim == 3, rows.ndim == 4 and rows.shape[-1] == 3
    if rows.dtype == np.uint8 and (grey or colour):
        return
    repair = "Convert to uint8 0..255, or give model inputs as inputs=."
    if rows.dtype == np.uint8 and rows.ndim == 4:
        repair = {1: "Give images[..., 0].", 4: "Give images[..., :3]."}.get(rows.shape[-1], "Put channels last.")
        repair = "Give images.transpose(0, 2, 3, 1)." if rows.shape[1] == 3 else repair
    raise ImagesError(
        f"images of {name} must be uint8 pixels of shape (n,h,w,3) or (n,h,w); "
        f"{rows.dtype} of shape {rows.shape} came. {repair}"
    )


def _check_inputs(rows: Array, name: str) -> None:
    floats = rows.dtype.kind == "f" and rows.ndim >= 2
    pixels = rows.dtype == np.uint8 and rows.ndim == 4 and rows.shape[-1] == 3
    if not (floats or pixels):
        raise ImagesError(
            f"inputs of {name} must be floats of shape (n,...) or uint8 of shape (n,h,w,3); "
            f"{rows.dtype} of shape {rows.shape} came. Give pixels for the model's transform as images=."
        )
