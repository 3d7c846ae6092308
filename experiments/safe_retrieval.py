"""Does a search err less when it may refuse, and when unclear items are gone? Table 1 of Kirchhof et al. (2024).

    python experiments/safe_retrieval.py --data DIR [--more-data DIR] [--cache DIR] [--write]

DIR holds tiny_imagenet_val_dev2400/ and dtd10_dev400/ (images.zip and labels.csv each); the other DIR holds
cifar10.npz (test_images, test_labels), of which the first 2,000 are used. Features are EfficientNet-Lite0's,
uncertainties those of the head that ships for it and, beside it, the classifier's own entropy.

    full                every image is a query, all others are the items: 1-NN error by cosine
    clean queries       without the 10 % most uncertain queries
    clean database      without the 10 % most uncertain items
    clean both          without either

The quantile is taken over all images, without labels (ours by default, and how the paper describes it), or in each
true class (the paper's code). The control removes as many at random, by `SafeIndex` with random numbers for
uncertainties; the mean and the range over five seeds. A difference to the full set has a 95 % bootstrap interval over
queries (of clean queries, over the queries that are left). The paper has ViT features on whole data sets, none of
which are here, so its figures stand beside ours and are not a target.

All three sets are new to the head, and only the first has classes of the model's own training. ImageNet photographs
would be the paper's second column, but those at hand are two a class, so that leaving one out leaves no right answer,
and the head has learned from them. --write puts the result into experiments/expected. The last line is one JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _expected import write_expected
from _own_classes import sets_of_own_classes

import dubito
from dubito.search import SafeIndex

EXPECTED = Path(__file__).parent / "expected" / "safe_retrieval.json"
SETTINGS = {"full": "none", "clean queries": "queries", "clean database": "items", "clean both": "both"}
PAPER = {
    "oxford_pets": {"full": 0.228, "clean queries": 0.196, "clean both": 0.163},
    "imagenet": {"full": 0.382, "clean queries": 0.343, "clean both": 0.307},
}
"""Table 1: each line adds to the one before, so the last is both."""
SEEDS, RESAMPLES = 5, 1000


def main() -> None:
    """Extract, score, search, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, help="the folder of cifar10.npz; without it, CIFAR-10 is left out")
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    model = dubito.load("pypi:efficientnet_lite0")
    head = dubito.UncertaintyHead.for_model(model)
    actual: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        cache = args.cache or Path(place)
        for name, images in sets_of_own_classes(args.data, args.more_data):
            table = dubito.extract(model, images, cache / name, label_space="own")
            actual[name] = measured(table, head, args.quantile)
            show(name, actual[name])
    result = {"quantile": args.quantile, "published": PAPER, "sets": actual}
    if args.write:
        write_expected(EXPECTED, f"--data DIR{' --more-data DIR' if args.more_data else ''}", result)
    print(json.dumps(result))


def measured(table: dubito.Table, head: dubito.UncertaintyHead, quantile: float) -> dict[str, Any]:
    """Errors of one data set, by uncertainty and by rule."""
    scores = {"head": head.score(table).numpy(), "entropy": dubito.Entropy().score(table).numpy()}
    rows: dict[str, Any] = {}
    for per_class in (False, True):
        rule = "per class" if per_class else "label-free"
        for name, u in scores.items():
            wrong = {setting: errors(table, u, quantile, setting, per_class) for setting in SETTINGS}
            rows[f"{name}, {rule}"] = {
                setting: {"error": float(np.nanmean(one)), "less_than_full": fall(wrong["full"], one)}
                for setting, one in wrong.items()
            }
        drawn = [np.random.default_rng(seed).random(len(table)) for seed in range(SEEDS)]
        rows[f"at random, {rule}"] = {
            setting: at_random(table, drawn, quantile, setting, per_class) for setting in SETTINGS
        }
    return {"images": len(table), "classes": len(set(table.label.tolist())), "errors": rows}


def errors(table: dubito.Table, u: np.ndarray, quantile: float, setting: str, per_class: bool) -> np.ndarray:
    """For every query whether its nearest item has another class; NaN where it was refused."""
    index = SafeIndex.build(table, u, quantile=quantile, clean=SETTINGS[setting], per_class=per_class)
    result = index.search(table, u, k=1, exclude=table.id)
    wrong = (result.labels[:, 0] != table.label.numpy()).astype(float)
    wrong[result.refused] = np.nan
    return wrong


def at_random(
    table: dubito.Table, drawn: list[np.ndarray], quantile: float, setting: str, per_class: bool
) -> dict[str, float]:
    """Mean and range of the error over seeds."""
    means = [float(np.nanmean(errors(table, u, quantile, setting, per_class))) for u in drawn]
    return {"error": float(np.mean(means)), "low": min(means), "high": max(means)}


def fall(full: np.ndarray, other: np.ndarray) -> list[float]:
    """By how much the error is lower, with its 95 % interval over resampled queries."""
    draw = np.random.default_rng(0)
    falls = [
        np.mean(full[rows]) - np.nanmean(other[rows]) for rows in draw.integers(0, len(full), (RESAMPLES, len(full)))
    ]
    low, high = np.quantile(falls, [0.025, 0.975])
    return [round(float(one), 4) for one in (np.mean(full) - np.nanmean(other), low, high)]


def show(name: str, result: dict[str, Any]) -> None:
    """One data set as a table of errors."""
    print(f"\n{name}: {result['images']} images, {result['classes']} classes; 1-NN error")
    print(f"{'':24}" + "".join(f"{setting:>16}" for setting in SETTINGS))
    for row, errors_of in result["errors"].items():
        print(f"{row:24}" + "".join(f"{errors_of[setting]['error']:16.3f}" for setting in SETTINGS))


if __name__ == "__main__":
    main()
