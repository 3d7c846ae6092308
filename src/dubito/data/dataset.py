"""Any map-style torch Dataset as images: items are an image, or a tuple of an image, its label and more."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset

from dubito.data.arrays import position_ids
from dubito.data.decode import to_rgb
from dubito.data.digest import encode, hash_array, hash_parts
from dubito.data.image_set import ImageSet, check_labels, check_unique
from dubito.errors import BrokenImageError, ImagesError

_SAMPLE = 64


@runtime_checkable
class MapStyle(Protocol):
    """What is asked of a data set: a length and items by position."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@final
class DatasetImages(ImageSet):
    """A torch Dataset, or any sequence of images. Ids are positions.

    An item's image is a PIL image or a uint8 array (h,w,3) or (h,w), which goes through the model's
    transform, or a float tensor, which is a model input as it is: give torchvision's data sets no
    `transform`, or all that the model needs. EXIF orientation is the data set's own business.

    Labels come from `targets` or `labels` (through `target_transform`), from the second tensor of a
    TensorDataset, or through a torch Subset from the set below it. Otherwise all items are read once, when
    labels are first asked for; items without an integer in second place mean a set without labels.

    The digest is of a sample: the class, the length, the labels that are known without reading items, and the
    contents of at most 64 evenly spaced items.
    """

    def __init__(self, dataset: MapStyle) -> None:
        self.dataset = dataset
        self.name = f"data set {type(dataset).__name__}"
        self.ids = position_ids(len(dataset))
        self.classes = _class_names(dataset)
        check_unique(self.ids, self.name)
        self._known = _known_labels(dataset)
        self._labels = self._known
        self._asked = self._known is not None
        check_labels(self._known, len(self), self.classes, self.name)

    @property
    def labels(self) -> Int[Tensor, "n"] | None:
        """One class index an image, or None."""
        if not self._asked:
            found = _integers(_label(self._item(index)) for index in range(len(self)))
            check_labels(found, len(self), self.classes, self.name)
            self.labels = found
        return self._labels

    @labels.setter
    def labels(self, labels: Int[Tensor, "n"] | None) -> None:
        self._labels = labels
        self._asked = True

    def read(self, index: int) -> Image.Image | Tensor:
        """The item's image as RGB, or its model input."""
        image = _image(self._item(index))
        if isinstance(image, Tensor) and image.is_floating_point():
            return image
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.shape[2:] in ((), (3,)):
            return Image.fromarray(image).convert("RGB")
        if isinstance(image, Image.Image):
            try:
                return to_rgb(image, f"{self.ids[index]} of {self.name}")
            except OSError as error:
                raise self._broken(index, error) from error
        raise ImagesError(
            f"items of {self.name} must begin with a PIL image, a uint8 array (h,w,3) or (h,w), or a float "
            f"tensor that is a model input; item {index} has {_describe(image)}. "
            f"Change what the data set returns."
        )

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of some rows: their ids and known labels, and the contents of at most 64 of them."""
        spaced = np.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows))).round().astype(int)
        labels = b"" if self._known is None else hash_array(self._known[torch.tensor(rows)].numpy())
        return hash_parts(
            encode(f"{type(self.dataset).__name__} {len(rows)}"),
            labels,
            *(encode(self.ids[row]) for row in rows),
            *(self._content(rows[i]) for i in spaced),
        ).hex()

    def _content(self, index: int) -> bytes:
        try:
            image = self.read(index)
        except BrokenImageError:
            return b"unreadable"
        return hash_array(image.numpy() if isinstance(image, Tensor) else np.asarray(image))

    def _item(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except OSError as error:
            raise self._broken(index, error) from error

    def _broken(self, index: int, error: OSError) -> BrokenImageError:
        return BrokenImageError(
            f"image '{self.ids[index]}' of {self.name} must be readable; its data set gave: {error}. "
            f"Repair its file, or leave it out with torch.utils.data.Subset."
        )


def _image(item: Any) -> Any:
    return item[0] if isinstance(item, (tuple, list)) and item else item


def _label(item: Any) -> Any:
    return item[1] if isinstance(item, (tuple, list)) and len(item) > 1 else None


def _describe(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of {value.dtype} and shape {tuple(value.shape)}"
    keys = f" with keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
    return f"a {type(value).__name__}{keys}"


def _class_names(dataset: Any) -> tuple[str, ...] | None:
    if isinstance(dataset, TorchSubset):
        return _class_names(dataset.dataset)
    names = getattr(dataset, "classes", None)
    return tuple(names) if isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names) else None


def _known_labels(dataset: Any) -> Int[Tensor, "n"] | None:
    """Labels that the data set tells without reading its items."""
    if isinstance(dataset, TorchSubset):
        whole = _known_labels(dataset.dataset)
        return None if whole is None else whole[torch.tensor(dataset.indices, dtype=torch.long)]
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
