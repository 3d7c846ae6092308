"""The twelve data sets on which pretrained uncertainties are tested without training on them, by name.

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.1. CUB, CARS and SOP follow the class split of metric
learning: the second half of the classes is the test side. The paper does not say which images of the other nine were
used (OPEN); here it is the official test split where there is one, and all images otherwise.

Nothing is downloaded. Each data set is read in the layout of its authors or of torchvision, or as a plain folder with
one sub-folder per class: for CUB and CARS all classes, which are then halved; for the others `train` and `test` folders
of classes, or the split itself. Labels are the data set's own classes: extract with `label_space="own"`. torchvision
reads annotations only, and CIFAR's files, which are pickles, if their hash is that of what CIFAR's authors published.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from dubito.data.arrays import ArrayImages
from dubito.data.files import FileImages, class_folders, open_folder
from dubito.data.image_set import Subset, some
from dubito.errors import ImagesError
from dubito.types import Images
from dubito.validate import check_choice

Opener = Callable[[Path, str], Images]  # opens one split of the data set below a root
_Splits = Mapping[str, Mapping[str, Any]]  # by split, the options with which torchvision opens it

_HALVES = {"test": "second", "train": "first"}
_LISTS = {"test": "Ebay_test.txt", "train": "Ebay_train.txt"}
_LIST_HEADER = ["image_id", "class_id", "super_class_id", "path"]


class Benchmark(NamedTuple):
    """One data set: its layout on disk and its splits. Every one may also be a folder with one folder per class.

    Attributes:
        layout: What else the root may hold, in words.
        places: What marks that layout below the root, and what opens it; the first that exists counts.
        splits: Values of `split`, the default first.
        by_class: Whether splits are halves of the classes, not of the images.
    """

    layout: str
    places: Mapping[str, Opener]
    splits: tuple[str, ...] = ("test", "train", "all")
    by_class: bool = False


def open_benchmark(name: str, root: str | Path, *, split: str | None = None) -> Images:
    """One of the twelve data sets, with labels of its own classes.

    Args:
        name: One of `BENCHMARKS`.
        root: The folder that holds it: one folder per class, or as `BENCHMARKS[name].layout` says.
        split: "test", "train" or "all", if the data set has them. Default: its test side.

    Raises:
        ValueRangeError: There is no such data set or split.
        ImagesError: There is no such folder, or its layout is another; the message says which one is expected.
    """
    check_choice(name, BENCHMARKS, by="open_benchmark", what="name")
    benchmark, folder = BENCHMARKS[name], Path(root).expanduser()
    chosen = benchmark.splits[0] if split is None else split
    check_choice(chosen, benchmark.splits, by="open_benchmark", what=f"split of {name}")
    if not folder.is_dir():
        raise ImagesError(f"{name}: '{folder}' must be an existing folder. Expected in it: {_expected(name)}.")
    images = _open(name, folder, chosen, explicit=split is not None)
    return class_split(images, half=_HALVES[chosen]) if benchmark.by_class and chosen in _HALVES else images


def class_split(images: Images, *, half: str = "second") -> Subset:
    """The images of the first or second half of the classes, in the order of the class numbers.

    Of k classes the first half is 0..k//2 - 1. No class is on both sides, so whatever learns from one side has never
    seen a class of the other.
    """
    check_choice(half, ("first", "second"), by="class_split", what="half")
    labels = images.labels
    count = 0 if labels is None else int(labels.max()) + 1 if images.classes is None else len(images.classes)
    if labels is None or count < 2:
        raise ImagesError(
            f"class_split needs labels of at least two classes; '{images.name}' has {count or 'none'}. Put its images "
            f"into class folders, or pass labels=."
        )
    chosen = labels < count // 2 if half == "first" else labels >= count // 2
    return Subset(images, chosen.nonzero()[:, 0].tolist())


def _expected(name: str) -> str:
    return f"{BENCHMARKS[name].layout}, or one folder per class".removeprefix(", or ")


def _open(name: str, root: Path, split: str, *, explicit: bool) -> Images:
    """Open the first layout that exists, else class folders."""
    benchmark = BENCHMARKS[name]
    for place, opener in benchmark.places.items():
        if (root / place).exists():
            try:
                return opener(root, split)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                raise ImagesError(
                    f"{name}: '{root / place}' must be complete; reading it failed: {error}. "
                    f"Expected: {_expected(name)}."
                ) from error
    whole = benchmark.by_class or split == "all"
    below = root if whole or not (root / split).is_dir() else root / split
    cause = None
    if whole or below != root or not explicit:
        try:
            images = open_folder(below)
            if images.labels is not None:
                return images
        except ImagesError as error:
            cause = error
    there = sorted(entry.name for entry in root.iterdir())
    raise ImagesError(
        f"{name}: '{root}' must hold {_expected(name)}; "
        f"it holds {some(there) if there else 'nothing'}. Pass the folder that has one of those."
    ) from cause


def _class_folders(place: str, root: Path, split: str, *, without: str = "") -> FileImages:  # noqa: ARG001 (one signature)
    """One folder per class, all images; `without` names a folder that is not a class."""
    images = open_folder(root / place)
    kept = [path for path in images.ids if path.split("/")[0] != without]
    return FileImages(root / place, kept, *class_folders(kept, f"folder '{root / place}'"))


def _online_products(root: Path, split: str) -> FileImages:
    """Stanford Online Products: lists of image_id, class_id, super_class_id and path, split by class already."""
    below = root / "Stanford_Online_Products"
    folder = below if below.is_dir() else root
    rows: list[list[str]] = []
    for name in _LISTS if split == "all" else (split,):
        path = folder / _LISTS[name]
        every = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        header, *lines = every or [[]]
        if header != _LIST_HEADER or any(len(line) != 4 or not line[1].isdecimal() for line in lines):
            raise ImagesError(
                f"sop: '{path}' must begin with the line '{' '.join(_LIST_HEADER)}' and have these four in every line. "
                f"Use the file that comes with Stanford Online Products."
            )
        rows += lines
    numbers, labels = np.unique([int(row[1]) for row in rows], return_inverse=True)
    return FileImages(folder, [row[3] for row in rows], torch.from_numpy(labels), list(map(str, numbers.tolist())))


def _torchvision(kind: str, splits: _Splits, root: Path, split: str) -> list[Any]:
    """The torchvision data sets of one split, or of all; `splits` has the options that open each."""
    from torchvision import datasets  # noqa: PLC0415 (slow to import, and few need it)

    chosen = splits.values() if split == "all" else [splits[split]]
    return [getattr(datasets, kind)(root, download=False, **options) for options in chosen]


def _arrays(kind: str, splits: _Splits, root: Path, split: str) -> ArrayImages:
    """CIFAR, or the cropped digits of SVHN, which has its channels first and no names of classes."""
    sets, digits = _torchvision(kind, splits, root, split), kind == "SVHN"
    return ArrayImages(
        images=np.concatenate([one.data.transpose(0, 2, 3, 1) if digits else one.data for one in sets]),
        labels=np.concatenate([one.labels if digits else one.targets for one in sets]),
        classes=list(map(str, range(10))) if digits else sets[0].classes,
        name=f"{kind} {split} of {root}",
    )


def _files(kind: str, splits: _Splits, root: Path, split: str) -> FileImages:
    """Files and labels that torchvision lists, sorted by path: the order of a folder's listing must not matter."""
    sets = _torchvision(kind, splits, root, split)
    # torchvision numbers the classes of each split by itself; names are what splits share.
    classes = list(dict.fromkeys(name for one in sets for name in getattr(one, "classes", ()))) or None
    samples = sorted(
        (Path(path).relative_to(root).as_posix(), classes.index(one.classes[label]) if classes else int(label))
        for one in sets
        # torchvision's classes keep paths and labels under one of these names.
        for path, label in (
            one._samples
            if hasattr(one, "_samples")
            else zip(one._image_files if hasattr(one, "_image_files") else one._images, one._labels, strict=True)
        )
    )
    return FileImages(root, [path for path, _ in samples], torch.tensor([label for _, label in samples]), classes)


_TWO_SPLITS: _Splits = {name: {"split": name} for name in ("train", "test")}
_THREE_SPLITS: _Splits = {name: {"split": name} for name in ("test", "train", "val")}
_PET_SPLITS: _Splits = {"test": {"split": "test"}, "train": {"split": "trainval"}}
_CIFAR_SPLITS: _Splits = {"train": {"train": True}, "test": {"train": False}}
_OBJECTS = ("caltech101/101_ObjectCategories", "101_ObjectCategories")
_BENCHMARKS = {
    "cub200": Benchmark(
        "CUB_200_2011/images/001.Black_footed_Albatross/*.jpg and so on",
        {place: partial(_class_folders, place) for place in ("CUB_200_2011/images", "images")},
        by_class=True,
    ),
    "cars196": Benchmark(
        "stanford_cars with cars_train, cars_test, devkit and cars_test_annos_withlabels.mat as torchvision has it",
        # All images: the official splits share their classes, and the class split takes from both.
        {"stanford_cars": lambda root, _: _files("StanfordCars", _TWO_SPLITS, root, "all")},
        by_class=True,
    ),
    "sop": Benchmark(
        "Stanford_Online_Products with Ebay_train.txt, Ebay_test.txt and their images",
        dict.fromkeys(("Stanford_Online_Products/Ebay_test.txt", "Ebay_test.txt"), _online_products),
    ),
    "caltech101": Benchmark(
        "caltech101/101_ObjectCategories",
        {place: partial(_class_folders, place, without="BACKGROUND_Google") for place in _OBJECTS},
        ("all",),
    ),
    "pets": Benchmark(
        "oxford-iiit-pet with images and annotations as torchvision has it",
        {"oxford-iiit-pet": partial(_files, "OxfordIIITPet", _PET_SPLITS)},
    ),
    "cifar10": Benchmark(
        "cifar-10-batches-py as torchvision has it", {"cifar-10-batches-py": partial(_arrays, "CIFAR10", _CIFAR_SPLITS)}
    ),
    "cifar100": Benchmark(
        "cifar-100-python as torchvision has it", {"cifar-100-python": partial(_arrays, "CIFAR100", _CIFAR_SPLITS)}
    ),
    "sun397": Benchmark(
        "SUN397 with ClassName.txt as torchvision has it",
        {"SUN397": partial(_files, "SUN397", {"all": {}})},  # classes in folders of folders
        ("all",),
    ),
    "flowers102": Benchmark(
        "flowers-102 with jpg, imagelabels.mat and setid.mat as torchvision has it",
        {"flowers-102": partial(_files, "Flowers102", _THREE_SPLITS)},
    ),
    "dtd": Benchmark(
        "dtd/dtd with images and labels as torchvision has it (its first partition)",
        {"dtd/dtd/labels": partial(_files, "DTD", _THREE_SPLITS)},
    ),
    "treeversity1": Benchmark("", {}, ("all",)),
    "svhn": Benchmark(
        "test_32x32.mat and train_32x32.mat as torchvision has them",
        dict.fromkeys(("test_32x32.mat", "train_32x32.mat"), partial(_arrays, "SVHN", _TWO_SPLITS)),
    ),
}
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(_BENCHMARKS)
"""The twelve by name."""
