"""Why does softmax confidence fail? Table 1 of Pearce et al. (2021): A, B, C, D and the three causes, with intervals.

    python experiments/softmax_causes.py --data DIR --more-data DIR [--cache DIR] [--pages DIR] [--write]

DIR holds cifar10_resnets/ (resnet20.pt, resnet56.pt), svhn_test_dev5000/ (images.png, the pixels of all digits one
after the other), tiny_imagenet_val_dev2400/ and dtd10_dev400/ (images.zip) and notmnist_10k/ (gzipped idx files). The
other DIR holds cifar10.npz, MNIST/raw and FashionMNIST/raw.

    CIFAR-10   ResNet-20 and ResNet-56 against SVHN, Tiny-ImageNet and textures, all resized to 32 pixels. The density
               is fitted on the 50,000 training images. Accuracies are checked first: 91.7 and 93.4 %.
    MNIST      MNIST, Fashion-MNIST and notMNIST in all pairings, for a LeNet (appendix C.1, ten classes) trained on one
               of them here for two epochs, as the paper's LeNets are, for each seed anew. Of the 10,000 notMNIST
               letters, 8,000 are for training and 2,000 in-distribution test images; as OOD images all 10,000 serve.

The density is that of the paper for networks trained from scratch: K = 10 Gaussians with full covariances on the
features after the non-linearity, 1e-5 on the variances. For the ResNets, D is also given for two others with their
default settings, as all rests on it: the paper's for pre-trained networks (log z, 1e-3), and the distance to
neighbours. The paper's networks are ResNet-18, its OOD images other data sets, so that its values beside ours show
an order of magnitude. Intervals are bootstrap intervals of images; those of the LeNets are followed by means and
deviations over seeds. --limit N takes the first N images of every set, to try the script out. The last line is one JSON
object; --write puts it into experiments/expected.
"""

import argparse
import gzip
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from _expected import write_expected
from _resnet_cifar import resnet
from _small_nets import Half, lenet, read, trained
from PIL import Image
from rich.progress import track

import dubito
from dubito.data import Subset
from dubito.explain.diagnosis import diagnose
from dubito.metrics import accuracy
from dubito.models import WrappedClassifier
from dubito.scores.density import Density
from dubito.types import Images

EXPECTED = Path(__file__).parent / "expected" / "softmax_causes.json"
ACCURACY = {20: 91.73, 56: 93.39}
OTHERS = {"log z": Density(space="log", regularisation=1e-3), "neighbours": dubito.Neighbours()}
HALVES = ("train", "test")
TRAINED_LETTERS = 8000
COLUMNS = ("max_probability", "entropy", "scaled_entropy", "density", "saturation", "extrapolation", "overlap")
PUBLISHED = {
    "CIFAR-10": (93.5, 85.4, 85.7, 85.7, 89.3, 0.0, 3.6, 10.7),
    "MNIST": (99.6, 96.3, 96.3, 96.3, 99.5, 0.0, 3.2, 0.5),
    "Fashion-MNIST": (94.5, 87.4, 88.7, 88.7, 98.5, 0.0, 9.7, 1.5),
}
"""Accuracy, then COLUMNS, of ResNet-18 against four other data sets; printed 0.7 for the last of CIFAR-10."""


def main() -> None:
    """Both parts, a table, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--pages", type=Path, help="write a page for every ResNet here")
    parser.add_argument("--hidden", type=int, default=64, help="features of the LeNets")
    parser.add_argument("--epochs", type=int, default=2, help="of the LeNets")
    parser.add_argument("--seeds", type=int, default=3, help="of the LeNets")
    parser.add_argument("--limit", type=int, help="at most so many images of every set")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = {"settings": {key: getattr(args, key) for key in ("hidden", "epochs", "seeds", "limit")}}
        result["resnets"] = resnets(args, args.cache or Path(place))
    result["lenets"] = lenets(args)
    result["published"] = {name: dict(zip(("accuracy", *COLUMNS), row, strict=True)) for name, row in PUBLISHED.items()}
    print(as_table(result))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def resnets(args: argparse.Namespace, cache: Path) -> dict[str, dict]:
    """Two networks against three data sets."""
    images = {f"cifar10_{half}": dubito.open_images(f"{args.more_data / 'cifar10.npz'}#{half}") for half in HALVES}
    images |= {"SVHN": digits(args.data), "Tiny-ImageNet": photos(args.data, "tiny_imagenet_val_dev2400")}
    images |= {"textures": photos(args.data, "dtd10_dev400")}
    result = {}
    for depth, published in ACCURACY.items():
        model = dubito.wrap(
            resnet(depth, args.data / "cifar10_resnets"),
            transform=dubito.Preprocess(size=(32, 32), resize=(32, 32)),
            classes=10,
            name=f"resnet{depth}",
        )
        tables = {
            name: extracted(model, first(some, args.limit), cache / f"resnet{depth}" / name)
            for name, some in images.items()
        }
        train, in_distribution = (tables.pop(f"cifar10_{half}") for half in HALVES)
        check_accuracy(in_distribution, published, limited=args.limit is not None)
        causes = diagnose(in_distribution, tables, train=train, density=density(), classifier=model)
        print(f"\nResNet-{depth}\n{causes}")
        if args.pages:
            causes.to_html(args.pages / f"resnet{depth}.html")
        others = {
            name: diagnose(in_distribution, tables, train=train, density=other).to_dict()["sets"]
            for name, other in track(OTHERS.items(), description=f"other densities, ResNet-{depth}")
        }
        result[f"ResNet-{depth}"] = causes.to_dict() | {"other_densities": others}
    return result


def lenets(args: argparse.Namespace) -> dict[str, dict]:
    """By data set that was trained on: every seed, and a summary of the means over OOD sets."""
    sets = {
        name: tuple(read(args.more_data, name, train=train, limit=args.limit) for train in (True, False))
        for name in ("MNIST", "Fashion-MNIST")
    }
    sets["notMNIST"] = letters(args.data / "notmnist_10k", args.limit)
    everything = {name: half[1] for name, half in sets.items()}
    everything["notMNIST"] = tuple(map(torch.cat, zip(*sets["notMNIST"], strict=True)))
    result: dict[str, dict] = {}
    for name, (train, test) in sets.items():
        runs = []
        for seed in track(range(args.seeds), description=f"LeNets of {name}"):
            start = lenet(args.hidden, 10, seed=seed)
            model = dubito.wrap(trained(start, train, args.epochs, seed=seed, title=f"{name}, seed {seed}"))
            ood = {other: columns(model, half, other) for other, half in everything.items() if other != name}
            in_distribution = columns(model, test, name)
            causes = diagnose(in_distribution, ood, train=columns(model, train, f"{name} train"), density=density())
            print(f"\nLeNet of {name}, seed {seed}\n{causes}")
            runs.append(causes.to_dict())
        result[name] = {"over_seeds": over_seeds(runs), "runs": runs}
    return result


def density() -> Density:
    """The paper's, for networks trained from scratch."""
    return Density(covariance="full", space="z", regularisation=1e-5)


def check_accuracy(in_distribution: dubito.Table, published: float, *, limited: bool) -> None:
    """A wrong architecture or normalisation would make all else worthless."""
    result = 100 * accuracy(in_distribution.logit, in_distribution.label)
    if abs(result - published) > (5.0 if limited else 0.1):
        raise SystemExit(f"accuracy {result:.2f} % instead of {published} %: is the normalisation right?")


def over_seeds(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Mean and deviation over seeds of the mean over OOD sets, in per cent."""
    means = [run["sets"]["mean"] for run in runs]
    rows = [{name: (mean["auroc"] | mean["causes"])[name]["value"] for name in COLUMNS} for mean in means]
    for row, run in zip(rows, runs, strict=True):
        row["accuracy"] = run["accuracy"]
    return {
        name: {
            "mean": round(100 * statistics.mean(row[name] for row in rows), 2),
            "deviation": round(100 * statistics.stdev(row[name] for row in rows), 2) if len(rows) > 1 else 0.0,
        }
        for name in ("accuracy", *COLUMNS)
    }


def as_table(result: dict) -> str:
    """Means over OOD sets, ours and the published ones, as in Table 1."""
    header = ("accuracy", "A max p", "B entropy", "C scaled", "D density", "C - B", "D - C", "1 - D")
    lines = ["", f"{'in per cent':28}" + "".join(f"{name:>11}" for name in header)]
    for name, actual in result["resnets"].items():
        mean = actual["sets"]["mean"]
        values = [actual["accuracy"], *((mean["auroc"] | mean["causes"])[key]["value"] for key in COLUMNS)]
        lines.append(f"{'CIFAR-10, ' + name:28}" + "".join(f"{100 * value:11.1f}" for value in values))
        for other, sets in actual["other_densities"].items():
            d, c = (sets["mean"]["auroc"][key]["value"] for key in ("density", "scaled_entropy"))
            cells = [
                f"{100 * value:.1f}" if value is not None else "" for value in (*[None] * 4, d, None, d - c, 1 - d)
            ]
            lines.append(f"{'  with ' + other:28}" + "".join(f"{cell:>11}" for cell in cells))
    for name, actual in result["lenets"].items():
        values = [actual["over_seeds"][key]["mean"] for key in ("accuracy", *COLUMNS)]
        lines.append(f"{name + ', LeNet':28}" + "".join(f"{value:11.1f}" for value in values))
    for name, row in PUBLISHED.items():
        lines.append(f"{name + ', published':28}" + "".join(f"{value:11.1f}" for value in row))
    return "\n".join(lines)


def digits(data: Path) -> Images:
    """SVHN: one tall picture of all digits."""
    return dubito.open_images(np.asarray(Image.open(data / "svhn_test_dev5000" / "images.png")).reshape(-1, 32, 32, 3))


def photos(data: Path, name: str) -> Images:
    """Of an archive."""
    return dubito.open_images(data / name / "images.zip")


def letters(folder: Path, limit: int | None) -> tuple[Half, Half]:
    """NotMNIST, for training and for testing, in a fixed random order."""
    pixels = idx(folder / "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28)
    label = idx(folder / "t10k-labels-idx1-ubyte.gz", 8)
    order = np.random.default_rng(0).permutation(len(label))[:limit]
    x, y = torch.from_numpy(pixels[order]).float() / 255, torch.from_numpy(label[order]).long()
    cut = TRAINED_LETTERS * len(order) // len(label)
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def idx(path: Path, header: int) -> np.ndarray:
    """The bytes of a gzipped idx file."""
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), dtype=np.uint8, offset=header)


def columns(model: WrappedClassifier, half: Half, name: str) -> dubito.Table:
    """Features, logits and labels of images in memory."""
    feature = torch.cat([model.features(x) for x in half[0].split(500)])
    return dubito.Table(feature=feature, logit=model.logits(feature), label=half[1], name=name)


def first(images: Images, count: int | None) -> Images:
    """The first images of a set, or all."""
    return images if count is None or count >= len(images) else Subset(images, range(count))


def extracted(model: WrappedClassifier, images: Images, to: Path) -> dubito.Table:
    """Their columns, with a bar while they are made; labels of CIFAR-10 are the model's."""
    space = None if images.labels is None else "model" if to.name.startswith("cifar10") else "own"
    return dubito.extract(model, images, to, label_space=space)


if __name__ == "__main__":
    main()
