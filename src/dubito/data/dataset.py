"""Any map-style torch Dataset, or sequence, as images: items are an image, or a tuple of one, its label and more."""

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset

from dubito.data.decode import decode, read_content, to_rgb
from dubito.data.image_set import (
    ImageSet,
    PositionIds,
    check_labels,
    check_unique,
    hash_array,
    hash_bytes,
    in_threads,
    is_null,
)
from dubito.errors import BrokenImageError, DubitoError, ImagesError
from dubito.storage.locations import to_place
from dubito.threads import kept_random_states

_UNREADABLE = hash_bytes(b"unreadable")


@final
class DatasetImages(ImageSet):
    """A torch Dataset, or anything with a length and items by position.

    An item's image is a PIL image, a uint8 array (h,w,3) or (h,w), the bytes, path or URL of an image file, or what
    Hugging Face makes of these, {"bytes": ..., "path": ...}. It goes through the model's transform; a float tensor is a
    model input as it is: give torchvision's data sets no `transform`, or all that the model needs. EXIF orientation is
    the data set's own business.

    Ids are paths where the data set lists its files as torchvision's ImageFolder does (`samples`), else positions.

    Labels come from `targets` or `labels` (through `target_transform`) or from the second tensor of a TensorDataset,
    also below a torch Subset. Otherwise items are read, when labels are first needed; an item without an integer in
    second place means a set without labels. An item that breaks in this reading has no label: it gets 0, and `read`
    calls it broken from then on, so that no table ever holds this 0.

    The digest reads every item, one after the other: a data set need not bear threads. A hash that was made while
    reading labels serves the next digest, once. Tensors of a TensorDataset are hashed as they lie in memory.
    """

    def __init__(self, dataset: Any, *, ids: Sequence[str] | None = None, name: str | None = None) -> None:
        self.dataset, self.name = dataset, name or f"data set {type(dataset).__name__}"
        self._below, self._items, self._plain = _below_subsets(dataset)
        self.draws = type(dataset) not in (list, tuple)
        self.ids = ids or _file_ids(self._below, self._items) or PositionIds(len(dataset))
        check_unique(self.ids, self.name)
        names: Any = getattr(self._below, "classes", None)
        named = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        self.classes = tuple(names) if named else None
        self._hashes: dict[int, bytes] = {}
        self._lost: dict[int, str] = {}
        known = _known_labels(self._below)
        self._labels = None if known is None else known[torch.tensor(self._items, dtype=torch.long)]
        self._labels_read = known is not None
        check_labels(self._labels, len(self), self.classes, self.name)

    @property
    def labels(self) -> Int[Tensor, "n"] | None:
        """One class index per image, or None."""
        if not self._labels_read:
            with kept_random_states() if self.draws else nullcontext():
                labels, lost = self._read_labels()
            check_labels(labels, len(self), self.classes, self.name)
            self.labels, self._lost = labels, lost
        return self._labels

    @labels.setter
    def labels(self, labels: Int[Tensor, "n"] | None) -> None:
        self._labels, self._labels_read, self._lost = labels, True, {}

    def read(self, index: int) -> Image.Image | Tensor:
        """The item's image as RGB, or its model input."""
        if index in self._lost:
            raise BrokenImageError(self._lost[index])
        return self._open(index, self._item(index))

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each item's image; labels do not count."""
        if self._plain and type(self._below) is TensorDataset and self._below.tensors[0].is_floating_point():
            inputs = self._below.tensors[0]
            return in_threads(lambda row: _hash(inputs[self._items[row]]), rows)
        # A hash from reading labels is used up: a later call hashes the item as it is by then.
        with kept_random_states() if self.draws else nullcontext():
            return [self._hashes.pop(row, b"") or self.read_hashed(row)[1] for row in rows]

    def read_hashed(self, index: int) -> tuple[Image.Image | Tensor | BrokenImageError, bytes]:
        """The item's image, or why it is broken, and its hash, from one reading of the item."""
        try:
            image = self.read(index)
        except BrokenImageError as broken:
            return broken, _UNREADABLE
        return image, _hash(image)

    def _read_labels(self) -> tuple[Int[Tensor, "n"] | None, dict[int, str]]:
        """Labels from the items, and why those that broke have none; hashes are kept, to read no item twice."""
        by_index: dict[int, int] = {}
        lost: dict[int, str] = {}
        for index in range(len(self)):
            try:
                item = self._item(index)
            except BrokenImageError as error:
                lost[index], self._hashes[index] = str(error), _UNREADABLE
                continue
            try:
                self._hashes[index] = _hash(self._open(index, item))
            except BrokenImageError:
                self._hashes[index] = _UNREADABLE
            label: Any = item[1:2] if isinstance(item, (tuple, list)) else ()
            try:
                by_index[index] = operator.index(label[0])
            except (TypeError, IndexError):
                return None, {}
        known = _integers(by_index.values())
        if known is None:
            return None, {}
        labels = torch.zeros(len(self), dtype=torch.long)
        labels[list(by_index)] = known
        return labels, lost

    def _open(self, index: int, item: Any) -> Image.Image | Tensor:
        image = _image_of(item)
        if isinstance(image, Tensor) and image.is_floating_point():
            return image
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] in ((), (3,)):
            return Image.fromarray(image).convert("RGB")
        if isinstance(image, (str, Path)):
            image = read_content(to_place(image))[0]
        if isinstance(image, (bytes, OSError)):
            return decode(image, f"{self.ids[index]} of {self.name}")
        if isinstance(image, Image.Image):
            try:
                return to_rgb(image, f"{self.ids[index]} of {self.name}")
            except OSError as error:
                raise self._broken(index, error) from error
        what = f"a {type(image).__name__}"
        if isinstance(image, (Tensor, np.ndarray)):
            what += f" of {image.dtype} and shape {tuple(image.shape)}"
        elif isinstance(image, Mapping):
            what += f" with keys {', '.join(map(str, image))}"
        raise ImagesError(
            f"items of {self.name} must begin with a PIL image, a uint8 array (h,w,3) or (h,w), a path, or a float "
            f"tensor that is a model input; item {index} has {what}. Change what the data set returns."
        )

    def _item(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except OSError as error:
            raise self._broken(index, error) from error
        except DubitoError:
            raise
        except Exception as error:  # a user's data set may raise anything
            raise ImagesError(
                f"item {index} of {self.name} must be readable; it raised {type(error).__name__}: {error}. "
                f"Fix the data set, or leave the item out with torch.utils.data.Subset."
            ) from error

    def _broken(self, index: int, error: OSError) -> BrokenImageError:
        return BrokenImageError(
            f"image '{self.ids[index]}' of {self.name} must be readable; its data set gave: {error}. "
            f"Repair its file, or leave it out with torch.utils.data.Subset."
        )


def _below_subsets(dataset: Any) -> tuple[Any, Sequence[int], bool]:
    """What lies below torch Subsets, its item of every row, and whether no class of the user's own may change items."""
    items: Sequence[int] = range(len(dataset))
    plain = True
    while isinstance(dataset, TorchSubset) and len(dataset.indices) == len(dataset):  # a user's own may repeat items
        plain &= type(dataset) is TorchSubset
        dataset, items = dataset.dataset, [dataset.indices[row] for row in items]
    return dataset, items, plain


def _image_of(item: Any) -> Any:
    """What an item has as its image: the bytes or path in what Hugging Face makes of them; an error if it is empty."""
    image = item[0] if isinstance(item, (tuple, list)) and item else item
    if isinstance(image, Mapping) and image.keys() <= {"bytes", "path"}:
        image = image.get("bytes") or image.get("path")
    return OSError("it has neither bytes nor a path") if is_null(image) else image


def _file_ids(dataset: Any, items: Sequence[int]) -> list[str] | None:
    """Paths below the root of a data set that lists its files with their labels; None for any other."""
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or len(samples) != len(dataset):
        return None
    if not all(isinstance(one, tuple) and one and isinstance(one[0], (str, Path)) for one in samples):
        return None
    root = getattr(dataset, "root", None)
    paths = [Path(samples[item][0]) for item in items]
    below = [path.relative_to(root) if root and path.is_relative_to(root) else path for path in paths]
    ids = [path.as_posix() for path in below]
    return ids if len(set(ids)) == len(ids) else None


def _hash(image: Image.Image | Tensor) -> bytes:
    if isinstance(image, Image.Image):
        return hash_array(np.asarray(image))
    values = image.detach().cpu()
    # numpy knows no bfloat16; int16 cannot be mistaken for an input of its own, which would be float.
    return hash_array((values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy())


def _known_labels(dataset: Any) -> Int[Tensor, "n"] | None:
    """Labels that the data set lists without reading its items."""
    if isinstance(dataset, TensorDataset):
        return _integers(dataset.tensors[1]) if len(dataset.tensors) > 1 else None
    raw = getattr(dataset, "targets", getattr(dataset, "labels", None))
    change = getattr(dataset, "target_transform", None)
    if not isinstance(raw, (Sequence, np.ndarray, Tensor)) or len(raw) != len(dataset):
        return None
    return _integers([change(label) for label in raw] if change else raw)


def _integers(values: Any) -> Int[Tensor, "n"] | None:
    """Class indices as a tensor, or None if the values are anything else: boxes, texts, -1 for unlabelled."""
    rows = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else values
    try:
        labels = torch.tensor([operator.index(row) for row in rows])
    except TypeError:
        return None
    return None if bool((labels < 0).all()) else labels
