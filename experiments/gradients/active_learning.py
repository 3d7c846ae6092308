"""Do gradients choose better images to label? Pool-based active learning on MNIST and CIFAR-10 features, five seeds.

    python experiments/gradients/active_learning.py --more-data DIR [--cache DIR] [--figure FILE] [--write]

DIR holds MNIST/raw, FashionMNIST/raw and cifar10.npz. Features come from networks that have seen no label of the set:

    pixels     784 pixels of MNIST as they are, which a network that is trained on them tells apart well
    MNIST      128 features of a LeNet that was trained on 20,000 images of Fashion-MNIST for two epochs
    CIFAR-10   1,280 features of EfficientNet-Lite0, trained on ImageNet, from images resized to 96 pixels. ImageNet has
               animals and vehicles, too: the classes are known to it, their CIFAR-10 labels are not

A pool of 4,000 training images and 2,000 test images, features centred and scaled by the pool. An MLP (one hidden layer
of 64, dropout of one half in front of both layers) is trained anew each round: 40 labels at random, then the 40 highest
scores of the pool at a time, up to 400. Every acquisition begins with the same labels and the same first network:

    random     entropy of p     bald: mutual information of 10 dropout members     last_layer_gradient, in closed form
    regrad: fisher, beta = 4, the default, as nothing can be chosen on 40 labels     predicted_gradient, the same beta

Accuracy and NLL of the test images by number of labels, as means and standard errors over seeds; their mean over all
rounds ("area"), and its distance from that of random and of entropy seed by seed. The paper's summary has no numbers.
The last line is one JSON object; --write puts it into expected/gradients_active_learning.json, where sets that are not
asked for stay what they were.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from _figures import with_earlier, write
from torch import Tensor, nn

import dubito
from dubito.cache.runner import bar, kept_memory
from dubito.explain.pictures import COLOURS, new_figure
from dubito.metrics import accuracy, nll
from dubito.models import WrappedClassifier
from dubito.types import Probe

# One folder up, where other experiments use it, too.
sys.path.append(str(Path(__file__).parents[1]))
from _small_nets import Half, lenet, mean_and_error, read, trained

EXPECTED = Path(__file__).parents[1] / "expected" / "gradients_active_learning.json"
POOL, TEST, FASHION = 4000, 2000, 20_000
START, STEP, MOST = 40, 40, 400
HIDDEN, DROPOUT, RATE, DECAY, STEPS, BATCH = 64, 0.5, 2e-3, 1e-4, 200, 32
SIDE = 96
BASES = ("random", "entropy")
PUBLISHED = {"text": "significant gains in active learning, in accuracy and uncertainty estimates; no table at hand"}


class Features(NamedTuple):
    """Of the pool and of test images, and their labels."""

    pool: Tensor
    label: Tensor
    test: Tensor
    test_label: Tensor


def main() -> None:
    """Both sets, all acquisitions, all seeds; a table, a paragraph, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the features here")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most", type=int, default=MOST, help="labels in the end")
    parser.add_argument("--limit", type=int, help="at most so many images of every kind")
    parser.add_argument("--figure", type=Path, help="draw accuracies here (needs matplotlib)")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)  # batches are too small for more
    labels = list(range(START, args.most + 1, STEP))
    result: dict[str, Any] = {"published": PUBLISHED, "seeds": args.seeds, "labels": labels, "sets": {}}
    for name in args.sets:
        make = partial(SETS[name], args.more_data, args.limit)
        some = kept_features(args.cache, name, args.limit, make)
        result["sets"][name] = figures = over_seeds(name, some, labels, args.seeds)
        print(as_table(name, figures, labels), flush=True)
    if args.write:
        result["sets"] = with_earlier(EXPECTED, "sets", result["sets"])
    result["findings"] = findings(result["sets"])
    print("\n" + result["findings"])
    if args.figure:
        draw(args.figure, result["sets"], labels)
    if args.write:
        write(EXPECTED, "python experiments/gradients/active_learning.py --more-data DIR --write", result)
    print(json.dumps(result))


def over_seeds(name: str, some: Features, labels: list[int], seeds: int) -> dict:
    """Every acquisition: curves, areas and their paired differences."""
    curves: dict[str, list[dict]] = {how: [] for how in ACQUISITIONS}
    spent = dict.fromkeys(ACQUISITIONS, 0.0)
    with kept_memory(), bar(name, seeds * len(ACQUISITIONS) * len(labels), unit="rounds") as advance:
        for seed in range(seeds):
            for how in ACQUISITIONS:
                begun = time.process_time()
                curves[how].append(learned(some, how, labels, seed, advance))
                spent[how] += (time.process_time() - begun) / seeds
    figures = {}
    for how, runs in curves.items():
        figures[how] = {
            metric: [mean_and_error([run[metric][place] for run in runs]) for place in range(len(labels))]
            for metric in ("accuracy", "nll")
        }
        figures[how] |= {"area": {metric: area(runs, metric) for metric in ("accuracy", "nll")}}
        figures[how]["core-seconds a run"] = round(spent[how], 1)
        for base in BASES:
            figures[how][f"area - {base}"] = {
                metric: paired(runs, curves[base], metric) for metric in ("accuracy", "nll")
            }
    return figures


def learned(some: Features, how: str, labels: list[int], seed: int, advance: Callable[[int], None]) -> dict:
    """One run: accuracy and NLL of the test images after every round."""
    draw = torch.Generator().manual_seed(seed)
    labelled = torch.randperm(len(some.pool), generator=draw)[:START]
    result: dict[str, list[float]] = {"accuracy": [], "nll": []}
    for count in labels:
        model = dubito.wrap(mlp(some.pool[labelled], some.label[labelled], seed))
        with torch.no_grad():
            logits = model.module(some.test)
        result["accuracy"].append(accuracy(logits, some.test_label))
        result["nll"].append(nll(logits, some.test_label))
        if count < labels[-1]:
            u = ACQUISITIONS[how](model, some.pool, draw)
            u[labelled] = -torch.inf
            labelled = torch.cat([labelled, u.topk(STEP).indices])
        advance(1)
    return result


def mlp(x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
    """Trained from the same first weights every round, in eval mode."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Dropout(DROPOUT), nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, 10)
    )
    step = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(module(x[rows]), y[rows])
        step.zero_grad()
        loss.backward()
        step.step()
    return module.eval()


def columns(model: WrappedClassifier, x: Tensor, *probes: Probe) -> dubito.Table:
    """Of the pool, in memory."""
    parts = []
    for some in x.split(1000):
        feature = model.features(some)
        part = {"feature": feature, "logit": model.logits(feature)}
        for probe in probes:
            part |= probe.run(model, some, None)
        parts.append(part)
    return dubito.Table(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


ACQUISITIONS: dict[str, Callable[[WrappedClassifier, Tensor, torch.Generator], Tensor]] = {
    "random": lambda _, x, draw: torch.rand(len(x), generator=draw),
    "entropy": lambda model, x, _: dubito.Entropy().score(columns(model, x)),
    "bald": lambda model, x, _: dubito.MutualInformation(of="dropout").score(
        columns(model, x, dubito.probes.Dropout())
    ),
    "last_layer_gradient": lambda model, x, _: dubito.scores.LastLayerGradient().score(columns(model, x)),
    "regrad": lambda model, x, _: dubito.scores.REGrad().score(columns(model, x, dubito.probes.Gradient("exact"))),
    "predicted_gradient": lambda model, x, _: dubito.scores.PredictedGradient().score(
        columns(model, x, dubito.probes.Gradient("top", 1, 0))
    ),
}


def of_pixels(data: Path, limit: int | None) -> Features:
    """MNIST itself."""
    pool, test = (read(data, "MNIST", train=train, limit=limit) for train in (True, False))
    return scaled(*(chosen(x.flatten(1), label, count) for (x, label), count in ((pool, POOL), (test, TEST))))


def of_mnist(data: Path, limit: int | None) -> Features:
    """The last hidden layer of a LeNet that knows Fashion-MNIST."""
    fashion = read(data, "Fashion-MNIST", train=True, limit=min(FASHION, limit or FASHION))
    module = trained(lenet(128, 10), fashion, 2, seed=0, title="LeNet on Fashion-MNIST")
    pool, test = (read(data, "MNIST", train=train, limit=limit) for train in (True, False))
    return of_model(dubito.wrap(module), chosen(*pool, POOL), chosen(*test, TEST), "MNIST")


def of_cifar10(data: Path, limit: int | None) -> Features:
    """EfficientNet-Lite0 on small images."""
    model = dubito.load("pypi:efficientnet_lite0")
    arrays = np.load(data / "cifar10.npz")
    halves = []
    for half, count in (("train", POOL), ("test", TEST)):
        images, label = (torch.from_numpy(arrays[f"{half}_{what}"][:limit]) for what in ("images", "labels"))
        images, label = chosen(images, label.long(), count)
        larger = F.interpolate(images.movedim(3, 1).float(), size=(SIDE, SIDE), mode="bicubic", antialias=True)
        pixels = larger.clamp(0, 255).round().byte().movedim(1, 3).contiguous()
        halves.append((pixels, label))
    finish = dataclasses.replace(model.transform, size=(SIDE, SIDE)).finish
    return of_model(model, *halves, "CIFAR-10", finish)


def chosen(x: Tensor, label: Tensor, count: int) -> Half:
    """Some rows in a fixed random order."""
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:count]
    return x[rows], label[rows]


def of_model(
    model: WrappedClassifier, pool: Half, test: Half, name: str, finish: Callable[[Tensor], Tensor] = torch.Tensor.float
) -> Features:
    """What a model's last layer is given, block by block."""
    with kept_memory(), bar(f"features of {name}", len(pool[0]) + len(test[0])) as advance:
        halves = []
        for x, _ in (pool, test):
            parts = []
            for some in x.split(100):
                parts.append(model.features(finish(some)))
                advance(len(some))
            halves.append(torch.cat(parts))
    return scaled((halves[0], pool[1]), (halves[1], test[1]))


def scaled(pool: Half, test: Half) -> Features:
    """Centred, and divided by one number for all: alone, a feature that is seldom on would become huge when it is."""
    mean, deviation = pool[0].mean(0), pool[0].var(0).mean().sqrt()
    return Features((pool[0] - mean) / deviation, pool[1], (test[0] - mean) / deviation, test[1])


SETS = {"pixels": of_pixels, "MNIST": of_mnist, "CIFAR-10": of_cifar10}


def kept_features(cache: Path | None, name: str, limit: int | None, make: Callable[[], Features]) -> Features:
    """From a file if it is there, otherwise made and put there."""
    if cache is None:
        return make()
    path = cache / f"active_learning_{name}_{limit or 'all'}.npz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{key: value.numpy() for key, value in make()._asdict().items()})
    kept = np.load(path)
    return Features(**{key: torch.from_numpy(kept[key]) for key in kept.files})


def area(runs: list[dict], metric: str) -> dict[str, float]:
    """The mean over rounds, over seeds."""
    return mean_and_error([statistics.mean(run[metric]) for run in runs])


def paired(runs: list[dict], others: list[dict], metric: str) -> dict[str, float]:
    """The difference of areas, seed by seed."""
    return mean_and_error(
        [statistics.mean(run[metric]) - statistics.mean(other[metric]) for run, other in zip(runs, others, strict=True)]
    )


def findings(sets: dict[str, dict]) -> str:
    """What helps and what does not, in words, from the numbers; "clearly" is two standard errors."""
    sentences = []
    for name, figures in sets.items():
        parts = []
        for how, row in figures.items():
            if how != "random":
                words = []
                for base in BASES if how != "entropy" else BASES[:1]:
                    gain = row[f"area - {base}"]["accuracy"]
                    clear = abs(gain["mean"]) > 2 * gain["error"]
                    words.append(f"{plus_minus(gain, '+.1f')} to {base}{'' if clear else ' (not clear)'}")
                parts.append(f"{how} {', '.join(words)}")
        end = ", ".join(f"{how} {100 * row['accuracy'][-1]['mean']:.1f}" for how, row in figures.items())
        sentences.append(
            f"{name}: points of accuracy, mean over all rounds and seeds: {'; '.join(parts)}. With all labels: {end}."
        )
    return " ".join(sentences)


def as_table(name: str, figures: dict, labels: list[int]) -> str:
    """Accuracy and NLL at some numbers of labels, and areas."""
    shown = [place for place in range(len(labels)) if place in {0, 2, 4, 9, len(labels) - 1}]
    head = "".join(f"{labels[place]:>15}" for place in shown)
    lines = [f"\n{name + ': accuracy, NLL':30}{head}{'area':>18}{'- random':>14}{'- entropy':>14}{'seconds':>9}"]
    for how, row in figures.items():
        cells = "".join(
            f"{100 * row['accuracy'][place]['mean']:8.1f}{row['nll'][place]['mean']:7.3f}" for place in shown
        )
        cells += f"{plus_minus(row['area']['accuracy'], '.2f'):>18}"
        for base in BASES:
            cells += f"{plus_minus(row[f'area - {base}']['accuracy'], '+.2f'):>14}"
        lines.append(f"{how:30}{cells}{row['core-seconds a run']:9.1f}")
    return "\n".join(lines)


def plus_minus(result: dict[str, float], digits: str) -> str:
    """Mean and standard error, in per cent."""
    return f"{100 * result['mean']:{digits}} ± {100 * result['error']:{digits.lstrip('+')}}"


def draw(to: Path, sets: dict[str, dict], labels: list[int]) -> None:
    """Accuracy by number of labels, a panel a set."""
    figure, axes = new_figure(1, len(sets), width=4.4, height=3.4)
    for axis, (name, figures) in zip(axes[0], sets.items(), strict=True):
        for colour, (how, row) in zip(COLOURS, figures.items(), strict=False):
            value = [point["mean"] for point in row["accuracy"]]
            axis.errorbar(labels, value, [point["error"] for point in row["accuracy"]], color=colour, label=how)
        axis.set(title=name, xlabel="labels", ylabel="accuracy")
        axis.legend(frameon=False, fontsize="x-small", loc="lower right")
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    main()
