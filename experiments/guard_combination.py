"""Does a guard accept more by choosing and combining scores than by max-probability at the best temperature alone?

    python experiments/guard_combination.py --data DIR --more-data DIR [--cache DIR] [--draws 20] [--write]

DIR holds cifar10_resnets/ (resnet20.pt) and imagenetv2_10k/ (images224.zip, labels.csv), the other cifar10.npz. Columns
are kept in CACHE. Three populations: ResNet-20 on CIFAR-10's test images; the same with 3,000 of the 10,000 images
blurred, magnified, noisy, shuffled or with scrambled phases; EfficientNet-Lite0 on ImageNetV2.

Every draw fits two guards on the same 2,000 images at random, with a risk of 5 % and a confidence of 95 %, and runs
them on the others: "all" with all scores that the columns allow, as `Guard.fit` does by default, and "temperature" with
that score alone. With "learned", scores that learn do so from 5,000 training images, otherwise from the tenth of the
2,000 that also selects them.

    coverage    of the other images, on average over draws; draws without a threshold count as 0
    gain        mean difference of the coverages, with its standard error over draws
    chosen      how often the guard's uncertainty was which score, or which sum of scores
    exceeded    the share of draws in which more of the accepted images are wrong than the risk allows

The last line is one JSON object; --write puts it into expected/guard_combination.json, too.
"""

import argparse
import json
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _expected import write_expected
from _resnet_cifar import resnet
from guarantee import CONFIDENCE, table_of
from rich.progress import track

import dubito
from dubito.data import STAND_INS, CorruptedCopies, Subset
from dubito.errors import DubitoWarning, GuardError
from dubito.table import Table

EXPECTED = Path(__file__).parent / "expected" / "guard_combination.json"
RISK, FITTED, CORRUPTED, TRAIN = 0.05, 2_000, 3_000, 5_000


def main() -> None:
    """Extract, fit, run, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        cache = args.cache or Path(place)
        clean, mixed, train = cifar10(args.data, args.more_data, cache)
        photos = table_of("imagenetv2", args.data, args.more_data, cache)
        result: dict[str, Any] = {"draws": args.draws, "risk": RISK, "confidence": CONFIDENCE, "fitted_on": FITTED}
        result["populations"] = {
            "cifar10": study(clean, None, args.draws),
            "cifar10, learned": study(clean, train, args.draws),
            "cifar10, 30 % corrupted": study(mixed, None, args.draws),
            "cifar10, 30 % corrupted, learned": study(mixed, train, args.draws),
            "imagenetv2": study(photos, None, args.draws),
        }
    for name, one in result["populations"].items():
        print(name, one)
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def cifar10(data: Path, more: Path, cache: Path) -> tuple[Table, Table, Table]:
    """Test images as they are; the same with some corrupted; training images."""
    clean = table_of("cifar10", data, more, cache)
    usual = dubito.Preprocess(size=(32, 32), resize=(32, 32))
    model = dubito.wrap(resnet(20, data / "cifar10_resnets"), transform=usual, classes=10, name="resnet20")
    some = Subset(dubito.open_images(f"{more}/cifar10.npz#test"), range(CORRUPTED))
    copies = dubito.extract(model, CorruptedCopies(some, severity=3), cache / "copies", label_space="model")
    kind = np.random.default_rng(0).integers(len(STAND_INS), size=CORRUPTED)
    chosen = torch.from_numpy(kind * CORRUPTED + np.arange(CORRUPTED))
    images = Subset(dubito.open_images(f"{more}/cifar10.npz#train"), range(TRAIN))
    train = dubito.extract(model, images, cache / "train", label_space="model")
    mixed = {
        name: torch.cat([getattr(copies, name)[chosen], getattr(clean, name)[CORRUPTED:]])
        for name in ("feature", "logit", "label")
    }
    return clean, Table(name="cifar10, corrupted", **mixed), train


def study(table: Table, train: Table | None, draws: int) -> dict[str, Any]:
    """Both guards on all draws."""
    table = Table(name=table.name, feature=table.feature, logit=table.logit, label=table.label)
    if train is not None:
        train = Table(name=train.name, feature=train.feature, logit=train.logit, label=train.label)
    chosen: Counter[str] = Counter()
    rows = []
    for seed in track(range(draws), table.name):
        every, uncertainty = run(table, train, None, seed)
        alone, _ = run(table, train, ["temperature"], seed)
        chosen[uncertainty] += 1
        rows.append((*every, *alone))
    coverage, error, plain, _ = np.array(rows).T
    gain = coverage - plain
    return {
        "coverage": round(float(coverage.mean()), 4),
        "temperature_coverage": round(float(plain.mean()), 4),
        "gain": round(float(gain.mean()), 4),
        "standard_error": round(float(gain.std(ddof=1) / np.sqrt(draws)), 4),
        "exceeded": round(float((error > RISK).mean()), 4),
        "chosen": dict(chosen.most_common(5)),
    }


def run(table: Table, train: Table | None, scores: list[str] | None, seed: int) -> tuple[tuple[float, float], str]:
    """Coverage and error rate on images that the guard has not seen, and the scores of its uncertainty."""
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    rows, others = order[:FITTED].sort().values, order[FITTED:].sort().values
    unseen = table.rows(others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        try:
            guard = dubito.Guard.fit(
                None,
                table.rows(rows),
                risk=RISK,
                confidence=CONFIDENCE,
                scores=scores,
                train=train,
                sets=False,
                seed=seed,
            )
        except GuardError:
            return (0.0, 0.0), "none"
        accept = guard.decide(unseen).accept
    wrong = unseen.logit.argmax(1) != unseen.label
    error = float(wrong[accept].double().mean()) if accept.any() else 0.0
    return (float(accept.double().mean()), error), " + ".join(guard.selection.combination.weights)


if __name__ == "__main__":
    main()
