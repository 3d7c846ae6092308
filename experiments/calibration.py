"""Which calibration helps a real model? Methods fitted on one half of the images, all numbers from the other.

    python experiments/calibration.py --data DIR --more-data DIR [--cache DIR] [--write]

The first DIR holds cifar10_45k/ (resnet56_45k.safetensors), imagenet_val_dev2000/ (images256.zip, labels.csv) and
imagenetv2_10k/ (images224.zip, labels.csv), the other cifar10.npz. Columns are kept in CACHE/cifar10 (ResNet-56 on
CIFAR-10's 10,000 test images), CACHE/lite1 and CACHE/lite2 (EfficientNet-Lite1 and Lite2 on 2,000 photographs of
ImageNet's validation set) and CACHE/lite1_v2 (Lite1 on the 10,000 of ImageNetV2); what is there already is taken as it
is. Halves are drawn at random, five times, those of ImageNetV2 once; numbers are means. Dirichlet and matrix scaling
are for tens of classes and run on CIFAR-10 alone.

    nll, brier, accuracy       of the other half
    ece, smooth_ece            calibration error of the top probability, in 15 bins and without bins
    class_wise_ece             mean over classes, of probabilities of at least 0.01
    chosen                     how often `calibrate`, which sees the first half alone, recommends the method

The last line is one JSON object; --write puts it into expected/calibration.json, too.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _expected import write_expected
from _resnet_cifar import resnet56_45k

import dubito
from dubito import metrics
from dubito.calibration import METHODS, calibrate, make_calibration
from dubito.table import Table

EXPECTED = Path(__file__).parent / "expected" / "calibration.json"
DRAWS = {"cifar10": 5, "lite1": 5, "lite2": 5, "lite1_v2": 1}
CHOICES = 1
"""Draws in which `calibrate` chooses, too: it fits every method once for each fold."""


def main() -> None:
    """Fit on one half, measure on the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, draws in DRAWS.items():
            table = table_of(name, args.data, args.more_data, args.cache or Path(place))
            result[name] = study(table, draws)
            print(name, *(f"\n    {method:20} {numbers}" for method, numbers in result[name]["methods"].items()))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def table_of(name: str, data: Path, more: Path, cache: Path) -> Table:
    """Logits and labels of one model on one set of images."""
    if (cache / name).exists():
        return dubito.open(cache / name)
    if name == "cifar10":
        scaled = dubito.Preprocess((32, 32), mean=(0, 0, 0), std=(1, 1, 1))
        model = dubito.wrap(resnet56_45k(data / "cifar10_45k"), transform=scaled, name="ResNet-56")
        with np.load(more / "cifar10.npz") as arrays:
            return dubito.extract(
                model, arrays["test_images"], cache / name, labels=arrays["test_labels"].astype(np.int64)
            )
    folder, images = (
        ("imagenetv2_10k", "images224.zip") if name == "lite1_v2" else ("imagenet_val_dev2000", "images256.zip")
    )
    model = dubito.load(f"pypi:efficientnet_{name.removesuffix('_v2')}")
    return dubito.extract(model, data / folder / images, cache / name, labels=data / folder / "labels.csv")


def study(table: Table, draws: int) -> dict[str, Any]:
    """Means over draws of halves, by method."""
    by_method: dict[str, list[dict[str, float]]] = {}
    chosen: Counter[str] = Counter()
    few_classes = table.shape("logit")[1] <= 128
    names = [name for name in METHODS if few_classes or name not in ("dirichlet", "matrix")]
    for draw in range(draws):
        order = torch.randperm(len(table), generator=torch.Generator().manual_seed(draw))
        first, second = (table.rows(half.sort().values) for half in order.chunk(2))
        by_method.setdefault("none", []).append(measured(second))
        for name in names:
            by_method.setdefault(name, []).append(measured(make_calibration(name).fit(first).apply(second)))
        if draw < min(CHOICES, draws):
            chosen[calibrate(first, seed=draw, resamples=200).chosen] += 1
    methods = {
        name: {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
        for name, runs in by_method.items()
    }
    return {"images": len(table), "draws": draws, "chosen": dict(chosen), "methods": methods}


def measured(table: Table) -> dict[str, float]:
    """All numbers of one table."""
    logits, label = table.logit, table.label
    confidence, correct = metrics.confidence(logits), metrics.correct(logits, label)
    return {
        "nll": metrics.nll(logits, label),
        "brier": metrics.brier(logits, label),
        "accuracy": metrics.accuracy(logits, label),
        "ece": metrics.ece(confidence, correct),
        "smooth_ece": metrics.smooth_ece(confidence, correct),
        "class_wise_ece": metrics.class_wise_ece(logits, label, threshold=0.01),
    }


if __name__ == "__main__":
    main()
