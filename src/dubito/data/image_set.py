"""What all sets of images share: checked ids and labels, views of a part, and hashes of contents.

Hashes are BLAKE2b with 16 bytes; that of a set is over its ordered ids and the hash of each image's content.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, final, overload

import numpy as np
import torch
from jaxtyping import Int, Shaped
from PIL import Image
from torch import Tensor

from dubito.errors import BrokenImageError, ImagesError
from dubito.storage import encode
from dubito.types import Images

SIZE = 16
"""Bytes of a hash."""
_CHUNK, _THREADS = 128, 8
_HASHED = 65_536
"""Hashes of images that a digest has in memory at a time."""
_Argument = TypeVar("_Argument")
_Value = TypeVar("_Value")


class ImageSet(ABC):
    """An ordered set of images with unique ids: the `Images` contract, plus a content hash of every image.

    Attributes:
        name: What errors call it: usually its path.
        ids: One name per image.
        labels: One class index per image, or None.
        classes: The names of the classes, or None.
        ready: Images are inputs in memory: there is nothing to decode, so no worker processes are needed.
        hashed_reads: The digest is made of the hashes of `read_hashed`; False for views of a user's own `Images`.
        draws: Reading runs code of the user, which may draw random numbers.
        forward_only: Every process reads from front to back, so that one process should read all images.
    """

    name: str
    ids: Sequence[str]
    labels: Int[Tensor, "n"] | None
    classes: Sequence[str] | None
    ready: bool = False
    hashed_reads: bool = True
    draws: bool = False
    forward_only: bool = False

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: Int[Tensor, "n"] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.name, self.ids, self.labels, self.classes = name, ids, labels, classes
        check_unique(ids, name)
        check_labels(labels, len(ids), classes, name)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {len(self)} images)"

    @abstractmethod
    def read(self, index: int) -> Image.Image | Tensor:
        """The image as RGB, or a tensor that is a model input already."""

    @abstractmethod
    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of the content of each of some images; one that cannot be read has a hash too."""

    def read_hashed(self, index: int) -> tuple[Image.Image | Tensor | BrokenImageError, bytes]:
        """The image, or why it is broken, and the hash of its content. Files are read once for both."""
        try:
            image: Image.Image | Tensor | BrokenImageError = self.read(index)
        except BrokenImageError as error:
            image = error
        return image, self.contents([index])[0]

    def digest(self) -> str:
        """A hash of the ordered ids and of every image's content; neither the place nor labels count."""
        n = len(self)
        step = _HASHED if self.hashed_reads else n  # each part of a user's own images would cost a digest of the whole
        parts = (self.contents(range(start, min(start + step, n))) for start in range(0, n, step))
        return hash_images(self.ids, (content for part in parts for content in part))


class View(ImageSet):
    """The images of another set, nothing copied: `row_of` says which is behind a row, `change` what becomes of it."""

    def __init__(
        self, images: Images, ids: Sequence[str], labels: Int[Tensor, "n"] | None, classes: Sequence[str] | None
    ) -> None:
        super().__init__(images.name, ids, labels, classes)
        self._look_at(images)

    def _look_at(self, images: Images) -> None:
        self.images = images
        self._below = images if isinstance(images, ImageSet) else _UserImages(images)
        self.ready, self.hashed_reads, self.draws = self._below.ready, self._below.hashed_reads, self._below.draws
        self.forward_only = self._below.forward_only

    def row_of(self, index: int) -> int:
        """The position in `images` of the image behind a row."""
        return index

    def change(self, index: int, image: Image.Image | Tensor) -> Image.Image | Tensor:  # noqa: ARG002 (for subclasses)
        """What a row makes of the image behind it."""
        return image

    def read(self, index: int) -> Image.Image | Tensor:
        """The image behind the row, changed."""
        return self.change(index, self.images.read(self.row_of(index)))

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """As the set below has them."""
        return self._below.contents([self.row_of(row) for row in rows])

    def read_hashed(self, index: int) -> tuple[Image.Image | Tensor | BrokenImageError, bytes]:
        """The changed image, or why it is broken, and the hash of the image behind it."""
        image, content = self._below.read_hashed(self.row_of(index))
        try:
            return image if isinstance(image, BrokenImageError) else self.change(index, image), content
        except BrokenImageError as broken:
            return broken, content

    def pixels_of(self, index: int, image: Image.Image | Tensor, what: str) -> Image.Image:
        """The image; ImagesError where it is a model input, of which no picture can be made."""
        if isinstance(image, Tensor):
            raise ImagesError(
                f"{what} needs images; '{self.images.ids[index]}' of {self.images.name} is a model input already. "
                f"Pass files or uint8 pixels as images, or a data set without a transform, or leave out the {what}."
            )
        return image


@final
class _UserImages(ImageSet):
    """A user's own `Images`, whose parts have no hash: that of the whole and of the choice stands for it."""

    hashed_reads, draws = False, True

    def __init__(self, images: Images) -> None:
        self.images, self.name, self.ids = images, images.name, images.ids

    def read(self, index: int) -> Image.Image | Tensor:
        return self.images.read(index)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        whole = encode(self.images.digest())
        return [hash_parts(whole, encode(f"{row} {self.ids[row]}")) for row in rows]


@final
class Subset(View):
    """Some images of a set, in the order of the indices: the first N, one side of a random split.

    Its digest depends on the chosen images only, not on the rest of the set.
    """

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        if outside := [index for index in indices if not 0 <= index < len(images)]:
            raise ImagesError(
                f"indices of a subset of '{images.name}' must lie in 0..{len(images) - 1}; got {outside[0]}. "
                f"Choose among its {len(images)} images."
            )
        labels = None if images.labels is None else images.labels[torch.tensor(indices, dtype=torch.long)]
        super().__init__(images, [images.ids[index] for index in indices], labels, images.classes)
        self.indices = indices

    def row_of(self, index: int) -> int:
        """The index of a row's image."""
        return self.indices[index]


@final
class Labelled(View):
    """The same images with other labels. The digest stays the same: labels do not count."""

    def __init__(self, images: Images, labels: Int[Tensor, "n"], classes: Sequence[str] | None = None) -> None:
        super().__init__(images, images.ids, labels, classes)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """As the set below has them."""
        return self._below.contents(rows)


@final
class Hashes(Sequence[bytes]):
    """Hashes of many images in one buffer, where each takes no more than its own bytes.

    >>> Hashes(b"a" * 16 + b"b" * 16)[1]
    b'bbbbbbbbbbbbbbbb'
    """

    def __init__(self, data: bytes = b"") -> None:
        self._data = bytearray(data)

    def __len__(self) -> int:
        return len(self._data) // SIZE

    @overload
    def __getitem__(self, index: int, /) -> bytes: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[bytes]: ...
    def __getitem__(self, index: int | slice, /) -> bytes | list[bytes]:
        chosen = range(len(self))[index]
        if not isinstance(chosen, int):
            return [self[row] for row in chosen]
        return bytes(self._data[chosen * SIZE : (chosen + 1) * SIZE])

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(self._data[start : start + SIZE]) for start in range(0, len(self._data), SIZE))

    def append(self, hashes: bytes) -> None:
        """Add the hash of one more image, or of several."""
        self._data += hashes


@final
class PositionIds(Sequence[str]):
    """Names for images that have none: positions, zero-padded to at least six digits so that they sort.

    Each is written when it is read: ten million texts take 0.6 GB.

    >>> PositionIds(1_000_001)[-1], PositionIds(2)
    ('1000000', ('000000', '000001'))
    """

    def __init__(self, n: int) -> None:
        self._range, self._width = range(n), max(6, len(str(n - 1)))

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int, /) -> str: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice, /) -> str | tuple[str, ...]:
        chosen = self._range[index]
        return f"{chosen:0{self._width}}" if isinstance(chosen, int) else tuple(map(self.__getitem__, chosen))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:]) if len(self) <= _HASHED else f"({self[0]!r}, ..., {self[-1]!r})"


def check_unique(ids: Sequence[str], name: str) -> None:
    """Raise ImagesError when there are no images or two have the same id."""
    if not len(ids):
        raise ImagesError(f"{name} must hold at least one image; got none. Add images or give another source.")
    if not isinstance(ids, PositionIds) and len(set(ids)) < len(ids):
        twice = [key for key, count in Counter(ids).items() if count > 1]
        raise ImagesError(
            f"{name} must give every image an id of its own; {len(twice)} of {len(set(ids))} ids occur more "
            f"than once: {some(twice)}. Remove or rename the repeated ones."
        )


def check_labels(labels: Tensor | None, n: int, classes: Sequence[str] | None, name: str) -> None:
    """Raise ImagesError unless there is one label per image, 0 or more, and named if classes have names."""
    if labels is None:
        return
    if len(labels) != n:
        raise ImagesError(
            f"labels of {name} must be one per image; got {len(labels)} labels for {n} images. "
            f"Pass them in the order of the images."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (classes is not None and high >= len(classes)):
        last = "" if classes is None else f" to {len(classes) - 1}, the last that has a name"
        repair = "Leave out images without a label, or pass no labels." if low < 0 else "Name every class, or none."
        raise ImagesError(f"labels of {name} must count classes from 0{last}; got {low if low < 0 else high}. {repair}")


def hash_bytes(*blocks: bytes) -> bytes:
    """One hash of a content that comes in blocks; where they are cut does not matter."""
    total = hashlib.blake2b(digest_size=SIZE)
    for block in blocks:
        total.update(block)
    return total.digest()


def hash_parts(*parts: bytes) -> bytes:
    """One hash of several byte strings, each with its length, so that moving a border changes it."""
    return hash_series(parts)


def hash_series(parts: Iterable[bytes]) -> bytes:
    """The same hash of byte strings that need not be in memory together."""
    total = hashlib.blake2b(digest_size=SIZE)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def hash_array(values: Shaped[np.ndarray, "..."]) -> bytes:
    """One hash of an array's type, shape and values."""
    head = f"{values.dtype.str} {values.shape}".encode()
    return hash_parts(head, np.ascontiguousarray(values).tobytes())


def hash_images(ids: Iterable[str], contents: Iterable[bytes]) -> str:
    """One hash, in hexadecimal, of ids and of the content hash of each image, in order."""
    total = hashlib.blake2b(digest_size=SIZE)
    for name, content in zip(ids, contents, strict=True):
        total.update(hash_parts(encode(name), content))
    return total.hexdigest()


def in_threads(
    function: Callable[[_Argument], _Value], arguments: Sequence[_Argument], *, at_once: int = _CHUNK
) -> list[_Value]:
    """A function of every argument, in order; reading files, BLAKE2b and CRC-32 let other threads run.

    Args:
        function: What to compute.
        arguments: Of each call.
        at_once: Calls that a thread makes at a time: many where each is short.
    """

    def chunk(start: int) -> list[_Value]:
        return [function(argument) for argument in arguments[start : start + at_once]]

    if len(arguments) <= at_once:
        return chunk(0)
    with ThreadPoolExecutor(_THREADS) as pool:
        return [part for parts in pool.map(chunk, range(0, len(arguments), at_once)) for part in parts]


def is_null(cell: object) -> bool:
    """Whether a cell of a table is empty: None, or what pandas has in its place."""
    return cell is None or type(cell).__name__ == "NAType" or (isinstance(cell, float) and math.isnan(cell))


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names for an error message: 'a', 'b', 'c' and 4 more."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
