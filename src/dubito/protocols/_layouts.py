"""How the benchmarks lie on disk: one function a layout, from a root and a split to images.

torchvision's classes read their own annotations; the images themselves are opened by us, as files or arrays. CIFAR's
files are pickles: torchvision opens them only when they are, by their hash, the ones that CIFAR's authors published.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dubito.data.arrays import ArrayImages
from dubito.data.files import FileImages, open_folder
from dubito.data.tree import class_folders as folders_to_classes
from dubito.errors import ImagesError, MissingPackageError

_LISTS = {"test": "Ebay_test.txt", "train": "Ebay_train.txt"}
_LIST_HEADER = ["image_id", "class_id", "super_class_id", "path"]


def class_folders(place: str, root: Path, split: str, *, without: str = "") -> FileImages:  # noqa: ARG001 (one signature)
    """One folder a class, all images; `without` names a folder that is no class."""
    images = open_folder(root / place)
    kept = [path for path in images.ids if path.split("/")[0] != without]
    return FileImages(root / place, kept, *folders_to_classes(kept, f"folder '{root / place}'"))


def online_products(root: Path, split: str) -> FileImages:
    """Stanford Online Products: lists of image_id, class_id, super_class_id and path, split by class already."""
    below = root / "Stanford_Online_Products"
    folder = below if below.is_dir() else root
    rows = [row for name in (_LISTS if split == "all" else (split,)) for row in _product_list(folder / _LISTS[name])]
    numbers = sorted({number for number, _ in rows})
    label_of = {number: label for label, number in enumerate(numbers)}
    labels = torch.tensor([label_of[number] for number, _ in rows])
    return FileImages(folder, [path for _, path in rows], labels, [str(number) for number in numbers])


def torchvision_files(kind: str, names: Mapping[str, str], root: Path, split: str) -> FileImages:
    """A torchvision data set of image files; `names` has its own word for each split."""
    chosen = list(names.values()) if split == "all" else [names[split]]
    return _files(root, [_torchvision(kind, root, split=name) for name in chosen])


def flowers(root: Path, split: str) -> FileImages:
    """Oxford Flowers 102, whose annotations are .mat files."""
    _need_scipy("flowers102")
    return torchvision_files("Flowers102", {"test": "test", "train": "train", "val": "val"}, root, split)


def cars(root: Path, split: str) -> FileImages:  # noqa: ARG001 (one signature)
    """CARS 196, all images: the official splits share their classes, and the class split takes from both."""
    _need_scipy("cars196")
    return _files(root, [_torchvision("StanfordCars", root, split=name) for name in ("train", "test")])


def sun(root: Path, split: str) -> FileImages:  # noqa: ARG001 (one signature)
    """SUN 397, whose classes may lie in folders of folders."""
    return _files(root, [_torchvision("SUN397", root)])


def cifar(kind: str, root: Path, split: str) -> ArrayImages:
    """CIFAR 10 or 100, as arrays."""
    chosen = {"test": (False,), "train": (True,), "all": (True, False)}[split]
    sets = [_torchvision(kind, root, train=train) for train in chosen]
    pixels = np.concatenate([one.data for one in sets])
    labels = [label for one in sets for label in one.targets]
    return ArrayImages(images=pixels, labels=labels, classes=sets[0].classes, name=f"{kind} {split} of {root}")


def house_numbers(root: Path, split: str) -> ArrayImages:
    """SVHN, cropped digits, as arrays."""
    _need_scipy("svhn")
    sets = [_torchvision("SVHN", root, split=name) for name in (("train", "test") if split == "all" else (split,))]
    pixels = np.concatenate([one.data.transpose(0, 2, 3, 1) for one in sets])
    labels = np.concatenate([one.labels for one in sets])
    digits = [str(digit) for digit in range(10)]
    return ArrayImages(images=pixels, labels=labels, classes=digits, name=f"SVHN {split} of {root}")


def _product_list(path: Path) -> list[tuple[int, str]]:
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines or lines[0] != _LIST_HEADER or any(len(line) != 4 or not line[1].isdecimal() for line in lines[1:]):
        raise ImagesError(
            f"sop: '{path}' must begin with the line '{' '.join(_LIST_HEADER)}' and have these four in every line. "
            f"Take it as it comes with Stanford Online Products."
        )
    return [(int(number), image) for _, number, _, image in lines[1:]]


def _torchvision(kind: str, root: Path, **options: Any) -> Any:
    from torchvision import datasets  # noqa: PLC0415 (slow to import, and few need it)

    return getattr(datasets, kind)(root, download=False, **options)


def _files(root: Path, sets: list[Any]) -> FileImages:
    """The files and labels that torchvision found, by path; the order of a folder's listing must not count."""
    # torchvision numbers the classes of each split by itself; names are what splits share.
    classes = list(dict.fromkeys(name for one in sets for name in getattr(one, "classes", ()))) or None
    found = sorted(
        (Path(path).relative_to(root).as_posix(), classes.index(one.classes[label]) if classes else int(label))
        for one in sets
        for path, label in _samples(one)
    )
    return FileImages(root, [path for path, _ in found], torch.tensor([label for _, label in found]), classes)


def _samples(dataset: Any) -> list[tuple[Any, int]]:
    """Paths with labels; torchvision's classes keep them under one of these names."""
    if hasattr(dataset, "_samples"):
        return list(dataset._samples)
    paths = dataset._image_files if hasattr(dataset, "_image_files") else dataset._images
    return list(zip(paths, dataset._labels, strict=True))


def _need_scipy(name: str) -> None:
    if find_spec("scipy") is None:
        raise MissingPackageError(f"{name} has annotations in .mat files, which scipy reads. pip install scipy")
