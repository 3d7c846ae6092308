"""Labelled sets of classes that the model was not trained for, as safe_retrieval.py and zero_shot.py open them."""

from collections.abc import Iterator
from pathlib import Path

import dubito
from dubito.data import Subset
from dubito.types import Images

CIFAR_IMAGES = 2000


def sets_of_own_classes(data: Path, more: Path | None) -> Iterator[tuple[str, Images]]:
    """By name: Tiny-ImageNet and textures, and CIFAR-10's first test images where its folder is given."""
    for name, folder in (("tiny_imagenet", "tiny_imagenet_val_dev2400"), ("dtd10", "dtd10_dev400")):
        yield name, dubito.open_images(data / folder / "images.zip", data / folder / "labels.csv")
    if more is not None:
        yield "cifar10", Subset(dubito.open_images(f"{more / 'cifar10.npz'}#test"), range(CIFAR_IMAGES))
