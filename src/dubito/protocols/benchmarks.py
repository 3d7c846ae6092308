"""The twelve data sets on which pretrained uncertainties are tried without training on them, by name.

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 4.1. CUB, CARS and SOP follow the class split of metric
learning: the second half of the classes is the test side. Which images of the other nine were used the paper does not
say (OPEN); here it is the official test split where there is one, and all images otherwise.

Nothing is downloaded. Each data set is found in the layout that its authors or torchvision give it, or as a plain
folder with one sub-folder a class: all classes of CUB and CARS, which are then halved; of the others `train` and `test`
folders of classes, or the wanted split itself. Images that are files keep their paths as ids. Labels are the data set's
own classes: extract with `label_space="own"`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import final

from dubito.data.files import open_folder
from dubito.data.image_set import some
from dubito.data.views import Subset
from dubito.errors import ImagesError
from dubito.protocols import _layouts as layouts
from dubito.types import Images

Opener = Callable[[Path, str], Images]
"""From a place and a split to images."""

_HALVES = {"test": "second", "train": "first"}


@final
@dataclass(frozen=True)
class Benchmark:
    """One data set: how it is called, how it lies on disk, which of its images count.

    Attributes:
        name: For `open_benchmark`.
        title: As the paper calls it.
        layout: What the root should hold, in words.
        splits: What `split` may be, the default first.
        by_class: The splits are halves of the classes, not of the images.
        places: What below the root marks a layout, and what opens it; the first that is there counts.
    """

    name: str
    title: str
    layout: str
    splits: tuple[str, ...]
    places: Mapping[str, Opener]
    by_class: bool = False


def open_benchmark(name: str, root: str | Path, *, split: str | None = None) -> Images:
    """One of the twelve data sets, with labels of its own classes.

    Args:
        name: One of `BENCHMARKS`.
        root: The folder that holds it; `BENCHMARKS[name].layout` says how.
        split: "test", "train" or "all", as far as the data set has them; its test side by default.

    Raises:
        ImagesError: No such data set, split or place, or another layout; the message says which is expected.
        MissingPackageError: A file of annotations is a .mat file, and scipy is not installed.
    """
    benchmark = _benchmark(name)
    folder = Path(root).expanduser()
    chosen = benchmark.splits[0] if split is None else split
    if chosen not in benchmark.splits:
        raise ImagesError(
            f"split of {name} must be {' or '.join(benchmark.splits)}; got '{chosen}'. Choose one of those."
        )
    if not folder.is_dir():
        raise ImagesError(f"{name}: '{folder}' must be a folder that is there. Expected in it: {benchmark.layout}.")
    images = _open(benchmark, folder, chosen, asked=split is not None)
    return class_split(images, half=_HALVES[chosen]) if benchmark.by_class and chosen in _HALVES else images


def class_split(images: Images, *, half: str = "second") -> Subset:
    """The images of the first or second half of the classes, in the order of the class numbers.

    Of k classes the first half is 0..k//2 - 1. So no class is on both sides: whoever learns from one side has
    never seen a class of the other.
    """
    if half not in ("first", "second"):
        raise ImagesError(f"half must be 'first' or 'second'; got '{half}'. Choose one of the two.")
    labels = images.labels
    if labels is None:
        raise ImagesError(
            f"class_split needs labels; '{images.name}' has none. Put its images into class folders, or give labels=."
        )
    count = int(labels.max()) + 1 if images.classes is None else len(images.classes)
    if count < 2:
        raise ImagesError(f"class_split needs at least two classes; '{images.name}' has {count}. Nothing can be split.")
    chosen = labels < count // 2 if half == "first" else labels >= count // 2
    return Subset(images, chosen.nonzero()[:, 0].tolist())


def _open(benchmark: Benchmark, root: Path, split: str, *, asked: bool) -> Images:
    """By the first layout whose mark is there, else as class folders."""
    for place, opener in benchmark.places.items():
        if (root / place).exists():
            try:
                return opener(root, split)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                raise ImagesError(
                    f"{benchmark.name}: '{root / place}' must be whole; reading it gave: {error}. "
                    f"Expected: {benchmark.layout}."
                ) from error
    whole = benchmark.by_class or split == "all"
    below = root if whole or not (root / split).is_dir() else root / split
    if asked and not whole and below == root:
        raise _another_layout(benchmark, root)
    try:
        images = open_folder(below)
    except ImagesError as error:
        raise _another_layout(benchmark, root) from error
    if images.labels is None:
        raise _another_layout(benchmark, root)
    return images


def _another_layout(benchmark: Benchmark, root: Path) -> ImagesError:
    there = sorted(entry.name for entry in root.iterdir())
    return ImagesError(
        f"{benchmark.name}: '{root}' must hold {benchmark.layout}; "
        f"it holds {some(there) if there else 'nothing'}. Give the folder that has one of those."
    )


def _benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        near = get_close_matches(name.lower(), BENCHMARKS, n=3, cutoff=0.4)
        raise ImagesError(
            f"name must be one of the benchmarks; got '{name}'. "
            + (f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(BENCHMARKS)}.")
        )
    return BENCHMARKS[name]


_SPLIT = ("test", "train", "all")
_FOLDERS = "one folder a class"


def _list(*benchmarks: Benchmark) -> Mapping[str, Benchmark]:
    return MappingProxyType({benchmark.name: benchmark for benchmark in benchmarks})


BENCHMARKS: Mapping[str, Benchmark] = _list(
    Benchmark(
        "cub200",
        "CUB 200",
        "CUB_200_2011/images/001.Black_footed_Albatross/*.jpg and so on, or " + _FOLDERS,
        _SPLIT,
        {place: partial(layouts.class_folders, place) for place in ("CUB_200_2011/images", "images")},
        by_class=True,
    ),
    Benchmark(
        "cars196",
        "CARS 196",
        "stanford_cars with cars_train, cars_test, devkit and cars_test_annos_withlabels.mat as torchvision has it, or "
        + _FOLDERS,
        _SPLIT,
        {"stanford_cars": layouts.cars},
        by_class=True,
    ),
    Benchmark(
        "sop",
        "Stanford Online Products",
        "Stanford_Online_Products with Ebay_train.txt, Ebay_test.txt and their images, or " + _FOLDERS,
        _SPLIT,
        {"Stanford_Online_Products/Ebay_test.txt": layouts.online_products, "Ebay_test.txt": layouts.online_products},
    ),
    Benchmark(
        "caltech101",
        "Caltech 101",
        "caltech101/101_ObjectCategories, or " + _FOLDERS,
        ("all",),
        {
            place: partial(layouts.class_folders, place, without="BACKGROUND_Google")
            for place in ("caltech101/101_ObjectCategories", "101_ObjectCategories")
        },
    ),
    Benchmark(
        "pets",
        "Oxford Pets",
        "oxford-iiit-pet with images and annotations as torchvision has it, or " + _FOLDERS,
        _SPLIT,
        {"oxford-iiit-pet": partial(layouts.torchvision_files, "OxfordIIITPet", {"test": "test", "train": "trainval"})},
    ),
    Benchmark(
        "cifar10",
        "CIFAR 10",
        "cifar-10-batches-py as torchvision has it, or " + _FOLDERS,
        _SPLIT,
        {"cifar-10-batches-py": partial(layouts.cifar, "CIFAR10")},
    ),
    Benchmark(
        "cifar100",
        "CIFAR 100",
        "cifar-100-python as torchvision has it, or " + _FOLDERS,
        _SPLIT,
        {"cifar-100-python": partial(layouts.cifar, "CIFAR100")},
    ),
    Benchmark(
        "sun397",
        "SUN",
        "SUN397 with ClassName.txt as torchvision has it, or " + _FOLDERS,
        ("all",),
        {"SUN397": layouts.sun},
    ),
    Benchmark(
        "flowers102",
        "Oxford Flowers",
        "flowers-102 with jpg, imagelabels.mat and setid.mat as torchvision has it, or " + _FOLDERS,
        _SPLIT,
        {"flowers-102": layouts.flowers},
    ),
    Benchmark(
        "dtd",
        "Describable Textures",
        "dtd/dtd with images and labels as torchvision has it (its first partition), or " + _FOLDERS,
        _SPLIT,
        {"dtd/dtd/labels": partial(layouts.torchvision_files, "DTD", {"test": "test", "train": "train", "val": "val"})},
    ),
    Benchmark("treeversity1", "Treeversity", _FOLDERS, ("all",), {}),
    Benchmark(
        "svhn",
        "SVHN",
        "test_32x32.mat and train_32x32.mat as torchvision has them, or " + _FOLDERS,
        _SPLIT,
        {"test_32x32.mat": layouts.house_numbers, "train_32x32.mat": layouts.house_numbers},
    ),
)
"""The twelve by name."""
