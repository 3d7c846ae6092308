"""Three classifiers, images that they know and do not know, and their columns: what ood.py and rejection.py share.

    resnet20, resnet56   CIFAR-10 test images against SVHN, Tiny-ImageNet and textures (DTD), resized to 32 pixels;
                         gradients exact, all ten classes, in all three weightings
    efficientnet_lite0   ImageNet validation photographs against textures, notMNIST and Gaussian noise; gradients by the
                         default estimator: the two most likely of 1,000 classes, and two random mixtures of the others;
                         and, as norms have no such estimate, the ten most likely classes alone in all three weightings

In-distribution images are in a fixed random order: the first are reported on (`in_distribution`), as many again choose
settings (`validation`). `train` are rows for density and neighbours: training images of CIFAR-10; of ImageNet we have
none, so there it is the rest of the validation photographs.
"""

import gzip
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import dubito
from dubito.data import Subset
from dubito.models import WrappedClassifier
from dubito.types import Images, Probe

# One folder up, where other experiments use it, too.
sys.path.append(str(Path(__file__).parents[1]))
from _resnet_cifar import resnet

MODELS = ("resnet20", "resnet56", "efficientnet_lite0")
SIZES = {"resnet20": (1000, 500), "resnet56": (1000, 500), "efficientnet_lite0": (200, 200)}
"""Images of `in_distribution` and of `validation`, and of every OOD set."""
TRAIN = 10_000
IN_DISTRIBUTION = ("train", "validation", "in_distribution")
WEIGHTINGS = ("fisher", "root", "expected_l1")
LIKELY = 10
"""Classes of a thousand, where norms are wanted."""


@dataclass(frozen=True)
class Case:
    """A classifier, its sets by name, and the gradient probe for it; one more where that has not all weightings."""

    name: str
    model: WrappedClassifier
    sets: Mapping[str, Images]
    gradient: dubito.probes.Gradient
    likely: dubito.probes.Gradient | None = None

    @property
    def gradients(self) -> list[dubito.probes.Gradient]:
        """The probes of gradients."""
        return [self.gradient] if self.likely is None else [self.gradient, self.likely]

    @property
    def ood(self) -> list[str]:
        """The sets that are not its own."""
        return [name for name in self.sets if name not in IN_DISTRIBUTION]

    def columns(self, which: str, cache: Path) -> dubito.Table:
        """Of one set: feature, logit, gradients and noisy copies; of training images no gradients."""
        probes = [] if which == "train" else [*self.gradients, dubito.probes.Noise()]
        return self.extract(which, cache / self.name, probes)

    def extract(self, which: str, cache: Path, probes: Sequence[Probe], count: int | None = None) -> dubito.Table:
        """Of the first images of one set; their number is in the folder's name, as a cache is of fixed images."""
        images = first(self.sets[which], count)
        space = "model" if which in IN_DISTRIBUTION else "own" if images.labels is not None else None
        to = cache / f"{which}_{len(images)}"
        return dubito.extract(self.model, images, to, probes=probes, label_space=space, workers=0)


def cases(requested: list[str], data: Path, more_data: Path, limit: int | None) -> list[Case]:
    """Those of MODELS that are asked for."""
    make = {"resnet20": cifar10, "resnet56": cifar10, "efficientnet_lite0": imagenet}
    return [
        make[name](name, data, more_data, *(min(limit or size, size) for size in SIZES[name])) for name in requested
    ]


def cifar10(name: str, data: Path, more_data: Path, size: int, ood_size: int) -> Case:
    """A ResNet; its accuracy is checked elsewhere, in softmax_causes.py."""
    model = dubito.wrap(
        resnet(int(name.removeprefix("resnet")), data / "cifar10_resnets"),
        transform=dubito.Preprocess(size=(32, 32), resize=(32, 32)),
        classes=10,
        name=name,
    )
    train, test = (dubito.open_images(f"{more_data / 'cifar10.npz'}#{half}") for half in ("train", "test"))
    digits = np.asarray(Image.open(data / "svhn_test_dev5000" / "images.png")).reshape(-1, 32, 32, 3)
    sets = {
        "train": part(train, 0, min(TRAIN, 20 * size)),
        "validation": part(test, size, size),
        "in_distribution": part(test, 0, size),
        "SVHN": part(dubito.open_images(digits), 0, ood_size),
        "Tiny-ImageNet": part(dubito.open_images(data / "tiny_imagenet_val_dev2400" / "images.zip"), 0, ood_size),
        "textures": part(dubito.open_images(data / "dtd10_dev400" / "images.zip"), 0, ood_size),
    }
    return Case(name, model, sets, dubito.probes.Gradient("exact", weightings=WEIGHTINGS, uniform=True))


def imagenet(name: str, data: Path, _: Path, size: int, ood_size: int) -> Case:
    """EfficientNet-Lite0."""
    folder = data / "imagenet_val_dev2000"
    photos = dubito.open_images(folder / "images256.zip", labels=folder / "labels.csv")
    rest = min(len(photos) - 2 * size, 20 * size)
    sets = {
        "train": part(photos, 2 * size, rest),
        "validation": part(photos, size, size),
        "in_distribution": part(photos, 0, size),
        "textures": part(dubito.open_images(data / "dtd10_dev400" / "images.zip"), 0, ood_size),
        "notMNIST": part(dubito.open_images(letters(data / "notmnist_10k")), 0, ood_size),
        "noise": dubito.open_images(noise(ood_size)),
    }
    likely = dubito.probes.Gradient("top", LIKELY, 0, weightings=WEIGHTINGS, name="likely")
    return Case(name, dubito.load(f"pypi:{name}"), sets, dubito.probes.Gradient(uniform=True), likely)


def part(images: Images, start: int, count: int) -> Images:
    """Some images in a fixed random order: many sets are sorted by class."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    return Subset(images, order[start : start + count])


def first(images: Images, count: int | None) -> Images:
    """The first images of a set, or all."""
    return images if count is None or count >= len(images) else Subset(images, range(count))


def letters(folder: Path) -> np.ndarray:
    """NotMNIST as colour images (n, 28, 28, 3)."""
    with gzip.open(folder / "t10k-images-idx3-ubyte.gz") as file:
        grey = np.frombuffer(file.read(), dtype=np.uint8, offset=16).reshape(-1, 28, 28)
    return np.repeat(grey[..., None], 3, axis=-1)


def noise(count: int) -> np.ndarray:
    """Independent pixels, N(127, 64), cut off at 0 and 255."""
    drawn = np.random.default_rng(0).normal(127, 64, (count, 224, 224, 3))
    return drawn.clip(0, 255).astype(np.uint8)
