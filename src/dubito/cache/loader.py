"""Decoding in worker processes: batches of prepared images, in order, with those that cannot be decoded set apart."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.data.image_set import ImageSet
from dubito.errors import BrokenImageError, DubitoError, ImagesError
from dubito.types import Images, Transform

_AHEAD = 4


@dataclass
class Batch:
    """Consecutive images of one shard: those that were read, stacked, and those that were not, with the reason.

    Attributes:
        indices: Of the images that were read.
        inputs: These images, stacked; None if there are none.
        broken: Indices of the other images, with the reason.
        contents: By index, the hash of every image's content, if `hashed`.
    """

    indices: list[int]
    inputs: Tensor | None
    broken: list[tuple[int, str]]
    contents: dict[int, bytes]


def batches(
    images: Images, transform: Transform, groups: list[list[int]], workers: int, *, hashed: bool = False
) -> Iterator[Batch]:
    """Prepared batches, one per group of indices, in the order of the groups; the workers start at once.

    With `hashed`, `images` is an ImageSet, and batches have the hash of every image's content.
    """
    loader: DataLoader[Any] = DataLoader(
        _Reader(images, transform, groups, hashed=hashed),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
    )
    try:
        return _raised(iter(loader))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ImagesError(
            f"the images or the transform cannot be sent to worker processes ({error}). "
            f"Define them at the top of a module, or pass workers=0."
        ) from error


def _raised(items: Iterator[Batch | DubitoError]) -> Iterator[Batch]:
    try:
        for batch in items:
            if isinstance(batch, DubitoError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ImagesError(
            f"a process that decodes images ended by itself ({str(error).splitlines()[0]}), as when memory runs out. "
            f"Finished shards are safe: run the same call again, with fewer workers or workers=0."
        ) from error


class _Reader(Dataset[Any]):
    """One item is one batch: read and stacked in the worker, so that one tensor crosses to the main process."""

    def __init__(self, images: Images, transform: Transform, groups: list[list[int]], *, hashed: bool) -> None:
        self.images, self.transform, self.groups, self.hashed = images, transform, groups, hashed

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> Batch | DubitoError:
        try:
            return self._read(self.groups[number])
        except DubitoError as error:
            return error  # raised in the main process, where its one sentence is not buried in a worker's traceback

    def _read(self, group: list[int]) -> Batch:
        tensors: list[Tensor] = []
        batch = Batch([], None, [], {})
        for index in group:
            try:
                tensors.append(self._prepare(index, batch.contents))
                batch.indices.append(index)
            except BrokenImageError as error:  # noqa: PERF203 (decoding costs a thousand times more)
                batch.broken.append((index, str(error)))
        batch.inputs = self._stack(tensors, batch.indices) if tensors else None
        return batch

    def _prepare(self, index: int, contents: dict[int, bytes]) -> Tensor:
        try:
            if self.hashed and isinstance(self.images, ImageSet):
                image, contents[index] = self.images.read_hashed(index)
                if isinstance(image, BrokenImageError):
                    raise image
            else:
                image = self.images.read(index)
            return image if isinstance(image, Tensor) else self.transform.prepare(image)
        except DubitoError:
            raise
        except Exception as error:  # a user's data set or transform may raise anything
            raise ImagesError(
                f"image '{self.images.ids[index]}' could not be prepared: {type(error).__name__}: {error}. "
                f"The data set or the transform raised this; mend it and run the same call again."
            ) from error

    def _stack(self, tensors: list[Tensor], kept: list[int]) -> Tensor:
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            odd = next(i for i, tensor in enumerate(tensors) if tensor.shape != tensors[0].shape)
            raise ImagesError(
                f"inputs must have one shape; got {tuple(tensors[0].shape)} for '{self.images.ids[kept[0]]}' and "
                f"{tuple(tensors[odd].shape)} for '{self.images.ids[kept[odd]]}'. Resize and crop in the transform."
            )
        return torch.stack(tensors)
