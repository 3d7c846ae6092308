"""A print of every image, to compare images by: a hash of its pixels (BLAKE2b), and a thumbnail of 16 x 16."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from dubito.cache.runner import in_batches, open_stream
from dubito.data.digest import hash_array
from dubito.data.image_set import ImageSet
from dubito.models.transform import NoTransform
from dubito.types import Images

SIDE, _HASH = 16, 16
_GROUP = 64


@final
@dataclass(frozen=True)
class Prints:
    """One print an image: a hash of its pixels, and a thumbnail; of `drawn` images of a set that has `of`."""

    ids: list[str]
    labels: Int[Tensor, "n"] | None
    hashes: list[bytes]
    thumbnails: UInt8[Tensor, "n p"]
    drawn: int
    of: int

    @property
    def part(self) -> float:
        """Of the set that was drawn."""
        return self.drawn / self.of if self.of else 1.0


def take_prints(images: Images, *, workers: int, progress: bool, of: int | None = None) -> Prints:
    """Read all images, drawn from a set that has `of`; those that cannot be read are left out."""
    groups, title = in_batches(range(len(images)), _GROUP), f"prints of {images.name}"
    rows: list[int] = []
    parts: list[Tensor] = []
    with open_stream(
        _Printed(images), NoTransform(), groups, workers=workers, title=title, progress=progress
    ) as stream:
        for batch in stream:
            if batch.inputs is not None:
                rows += batch.indices
                parts.append(batch.inputs)
    prints = torch.cat(parts) if parts else torch.empty(0, _HASH + 3 * SIDE**2, dtype=torch.uint8)
    labels = None if images.labels is None else images.labels[torch.tensor(rows, dtype=torch.long)]
    hashes = [row.numpy().tobytes() for row in prints[:, :_HASH]]
    of = len(images) if of is None else of
    return Prints([images.ids[row] for row in rows], labels, hashes, prints[:, _HASH:], len(images), of)


@final
class _Printed(ImageSet):
    """The prints of images, made in the workers that read them."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.name, self.ids, self.labels, self.classes = images.name, images.ids, images.labels, images.classes

    def read(self, index: int) -> Tensor:
        """Hash and thumbnail as one row of bytes."""
        image = self.images.read(index)
        pixels = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
        values = pixels.float() if pixels.is_floating_point() else pixels
        key = np.frombuffer(hash_array(values.numpy()), np.uint8).copy()
        return torch.cat([torch.from_numpy(key), _thumbnail(image)])

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """Nobody caches prints."""
        raise NotImplementedError


def _thumbnail(image: Image.Image | Tensor) -> UInt8[Tensor, "p"]:
    """16 x 16 pixels in three colours; zeros for an input that is no picture."""
    if isinstance(image, Image.Image):
        return torch.from_numpy(np.array(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX))).flatten()
    if image.dim() != 3:
        return torch.zeros(3 * SIDE**2, dtype=torch.uint8)
    picture = image.detach().cpu().float()
    picture = picture if picture.shape[0] <= 4 else picture.permute(2, 0, 1)
    picture = picture if len(picture) == 3 else picture.mean(0).expand(3, -1, -1)
    small = F.adaptive_avg_pool2d(picture, SIDE)
    low, high = small.min(), small.max()
    return ((small - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8).permute(1, 2, 0).flatten()
