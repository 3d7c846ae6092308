"""Other views of a set of images: some of them, in any order, or all with other labels. Nothing is copied."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.data.digest import encode, hash_parts
from dubito.data.image_set import ImageSet
from dubito.errors import ImagesError
from dubito.types import Images


@final
class Subset(ImageSet):
    """Some images of a set, in the order of the indices: the first N, one side of a random split.

    Its digest depends on the chosen images only, not on the rest of the set.
    """

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        n = len(images)
        outside = [index for index in indices if not 0 <= index < n]
        if outside:
            raise ImagesError(
                f"indices of a subset of '{images.name}' must lie in 0..{n - 1}; got {outside[0]}. "
                f"Choose among its {n} images."
            )
        labels = None if images.labels is None else images.labels[torch.tensor(indices, dtype=torch.long)]
        super().__init__(images.name, [images.ids[index] for index in indices], labels, images.classes)
        self.images = images
        self.ready = isinstance(images, ImageSet) and images.ready
        self.indices = indices

    def read(self, index: int) -> Image.Image | Tensor:
        """The image, as the whole set gives it."""
        return self.images.read(self.indices[index])

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the ids and contents of some of the chosen images, in this order."""
        return _digest_rows(self.images, [self.indices[row] for row in rows])


@final
class Labelled(ImageSet):
    """The same images with other labels. The digest stays the same: labels do not count."""

    def __init__(self, images: Images, labels: Int[Tensor, "n"], classes: Sequence[str] | None = None) -> None:
        super().__init__(images.name, images.ids, labels, classes)
        self.images = images
        self.ready = isinstance(images, ImageSet) and images.ready

    def read(self, index: int) -> Image.Image | Tensor:
        """The image, as the set below gives it."""
        return self.images.read(index)

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the ids and contents of some images, in this order."""
        return _digest_rows(self.images, rows)


def _digest_rows(images: Images, rows: Sequence[int]) -> str:
    """Of a user's own `Images`, whose parts have no hash, the hash of the whole and of the choice."""
    if isinstance(images, ImageSet):
        return images.digest_rows(rows)
    return hash_parts(encode(images.digest()), *(encode(f"{row} {images.ids[row]}") for row in rows)).hex()
