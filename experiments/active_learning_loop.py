"""Which strategy of `dubito.Acquire` needs the fewest labels? Learning curves over five seeds, with intervals.

    python experiments/active_learning_loop.py --data DIR [--cache DIR] [--limit N] [--only mnist] [--figure FILE]
        [--write]

DIR holds MNIST/raw (the four idx files) and cifar10.npz (train_images, train_labels, test_images, test_labels). A
linear classifier is trained on frozen features, from 20 labels at random to 220 by steps of 20:

    MNIST       64 principal components of the pixels of the pool, 4,000 images; all 10,000 test images, as the first
                of them are harder than the last
    CIFAR-10    features of EfficientNet-Lite0, trained on ImageNet, of images enlarged to 224 pixels; 4,000 and 2,000

All strategies of one seed begin with the same labels and share pool and test images, so that what is told of a strategy
is its difference to random picks, paired by seed: the mean over seeds with a 95 % t interval, of the accuracy after the
last round and of the mean accuracy over all rounds. All is at its defaults, with twenty members for bald and
batch_bald. The last line is one JSON object; --write puts it into expected/active_learning_loop.json,
where a set that was not asked for stays.
"""

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from _expected import write_expected
from scipy.stats import t as student

import dubito
from dubito.choices import Strategy
from dubito.explain.pictures import COLOURS, new_figure

STRATEGIES = ("random", *(one for one in get_args(Strategy) if one != "random"))
SEEDS = range(5)
START, COUNT, ROUNDS = 20, 20, 10
DRAWN = ("random", "top", "bald", "batch_bald", "power", "core_set")


def main() -> None:
    """Features, loops, differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted features of CIFAR-10 here")
    parser.add_argument("--limit", type=int, help="at most N images in each pool and each test set")
    parser.add_argument("--only", choices=("mnist", "cifar10"))
    parser.add_argument("--figure", type=Path, help="draw the curves here (needs matplotlib)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    result: dict = {"start": START, "count": COUNT, "rounds": ROUNDS, "seeds": len(SEEDS), "sets": {}}
    with tempfile.TemporaryDirectory() as place:
        sets = {
            "mnist": lambda: mnist(args.data / "MNIST" / "raw", args.limit),
            "cifar10": lambda: cifar10(args.data / "cifar10.npz", args.cache or Path(place), args.limit),
        }
        for name, opened in sets.items():
            if args.only in (None, name):
                result["sets"][name] = studied(name, *opened())
    if args.write:
        target = Path(__file__).parent / "expected" / "active_learning_loop.json"
        earlier = json.loads(target.read_text())["sets"] if target.exists() else {}
        write_expected(target, "--data DIR", result | {"sets": earlier | result["sets"]})
    if args.figure:
        draw(args.figure, result["sets"])
    print(json.dumps(result))


def draw(to: Path, sets: dict[str, dict]) -> None:
    """Accuracy by labels, a panel a set; bars are 95 % intervals over seeds."""
    figure, axes = new_figure(1, len(sets), width=4.6, height=3.6)
    for axis, (name, figures) in zip(axes[0], sets.items(), strict=True):
        for place, strategy in enumerate(DRAWN):
            value, low, high = np.array(figures["strategies"][strategy]["accuracy"]).T
            axis.errorbar(
                np.array(figures["labels"]) + place - len(DRAWN) / 2,
                value,
                yerr=[value - low, high - value],
                color=COLOURS[place],
                label=strategy,
                linewidth=1.4,
                elinewidth=0.6,
            )
        axis.set(title=name, xlabel="labels", ylabel="accuracy")
    axes[0][0].legend(frameon=False, fontsize="small", loc="lower right")
    figure.savefig(to, dpi=110)


def studied(name: str, pool: dubito.Table, test: dubito.Table) -> dict:
    """All strategies and seeds on one set."""
    curves = {}
    for strategy in STRATEGIES:
        curves[strategy] = np.array([learning_curve(strategy, seed, pool, test) for seed in SEEDS])
        figures = difference(curves[strategy], curves["random"])
        print(name, strategy, np.round(curves[strategy].mean(0), 3).tolist(), figures, flush=True)
    return {
        "pool": len(pool),
        "test": len(test),
        "labels": [START + COUNT * done for done in range(ROUNDS + 1)],
        "strategies": {
            strategy: {
                "accuracy": [mean_and_interval(column) for column in curve.T],
                **difference(curve, curves["random"]),
            }
            for strategy, curve in curves.items()
        },
    }


def learning_curve(strategy: Strategy, seed: int, pool: dubito.Table, test: dubito.Table) -> list[float]:
    """The accuracy at the beginning and after every round."""
    acquire = dubito.Acquire(strategy, seed=seed)
    return [accuracy for _, accuracy in acquire.run(pool, rounds=ROUNDS, count=COUNT, start=START, test=test).curve]


def difference(curve: np.ndarray, random: np.ndarray) -> dict:
    """To random picks, paired by seed: at the end, and on average over the rounds."""
    return {
        "last_minus_random": mean_and_interval(curve[:, -1] - random[:, -1]),
        "mean_minus_random": mean_and_interval((curve - random)[:, 1:].mean(1)),
    }


def mean_and_interval(values: np.ndarray) -> list[float]:
    """Mean, low and high of a 95 % t interval over seeds."""
    reach = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return [round(float(one), 4) for one in (values.mean(), values.mean() - reach, values.mean() + reach)]


def mnist(folder: Path, limit: int | None) -> tuple[dubito.Table, dubito.Table]:
    """Principal components of pixels; they are the pool's, and see no labels."""
    pool, test = (
        (idx(folder / f"{part}-images-idx3-ubyte")[: limit or most], idx(folder / f"{part}-labels-idx1-ubyte"))
        for part, most in (("train", 4_000), ("t10k", 10_000))
    )
    pixels = [torch.from_numpy(images.reshape(len(images), -1)).double() / 255 for images, _ in (pool, test)]
    mean = pixels[0].mean(0)
    basis = torch.linalg.svd(pixels[0] - mean, full_matrices=False).Vh[:64]
    return tuple(
        dubito.Table(feature=((x - mean) @ basis.T).float(), label=labels[: len(x)].astype(np.int64), name=name)
        for x, (_, labels), name in zip(pixels, (pool, test), ("MNIST train", "MNIST test"), strict=True)
    )


def idx(path: Path) -> np.ndarray:
    """An idx file, zipped or not."""
    data = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())
    axes = data[3]
    shape = [int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def cifar10(file: Path, cache: Path, limit: int | None) -> tuple[dubito.Table, dubito.Table]:
    """Features of a network that has never seen CIFAR-10."""
    model = dubito.load("pypi:efficientnet_lite0")
    result = []
    with np.load(file) as arrays:
        for part, most in (("train", 4_000), ("test", 2_000)):
            images, labels = (arrays[f"{part}_{kind}"][: limit or most] for kind in ("images", "labels"))
            table = dubito.extract(
                model, dubito.open_images(images), cache / f"cifar10_{part}_{len(images)}", batch_size=32
            )
            result.append(dubito.Table(feature=table.feature, label=labels.astype(np.int64), name=f"CIFAR-10 {part}"))
    return result[0], result[1]


if __name__ == "__main__":
    main()
