"""How soon does a watch notice a change, and how rarely does it cry wolf? Real images, beside crepes and MAPIE.

    python experiments/watch.py --data DIR --more-data DIR [--cache DIR] [--streams 1000] [--write]

Data and caches are those of guarantee.py (`cifar10`: ResNet-20 on CIFAR-10's test images; `imagenet`:
EfficientNet-Lite0 on 2,000 photographs); corrupted images are extracted beside them, and photographs that others took
and labelled by the same rules (ImageNetV2: a new camera), new classes (house numbers for CIFAR-10, textures for
ImageNet; all of the images or a share), and fewer classes (label shift).

The images of a table are the population: guards are fitted on 1,000 images, and streams drawn from it, with
replacement, so that streams without a change are exchangeable with the calibration images. Twenty guards share the
streams.

    false alarms   the share of streams of 1,000 unchanged images with an alarm; at most alpha = 0.01. "labels" is that
                   of the guarantee, with a label for every third accepted image of 600; of accepted images, wrong ones
                   are drawn as often as the risk allows
    delay          300 unchanged images (once 10,000), then changed ones: how many of these until the alarm, the median
                   of 20 streams; null where most streams have none within 700
    labels         how many labels until the alarm of the guarantee, the median of 60 streams, where wrong images are
                   1.5 or 2 times as frequent as the risk allows: as the watch requests them ("requested"), and of
                   images that are drawn with equal probabilities ("equal")

Beside "watch", all of its tests together, are martingales of other packages on the same uncertainties, each with all of
alpha: crepes' SimpleJumper, SleeperStayer and their CompositeMartingale on its semi-online p-values, and MAPIE's jumper
on the same p-values (its plug-in martingale estimates a density from all p-values at every step, which takes hours
here). They are optional: pip install crepes mapie.

The last line is one JSON object; --write puts it into expected/watch.json, too.
"""

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _expected import write_expected
from _resnet_cifar import resnet
from guarantee import table_of
from PIL import Image
from rich.progress import track

import dubito
from dubito.data import Corrupted, Subset
from dubito.errors import DubitoWarning
from dubito.guard import Decisions, Guard
from dubito.table import Table, concat

EXPECTED = Path(__file__).parent / "expected" / "watch.json"
ALPHA = 0.01
KNOWN, BEFORE, LATE, AFTER, GUARDS, REPEATS, LABEL_REPEATS = 1000, 300, 10_000, 700, 20, 20, 60
RISK, BROKEN, LONGEST = 0.1, (1.5, 2.0), 6000
"""Error rates of a broken guarantee as multiples of the risk, and images of such a stream."""
MOST = 400
LEVELS = [("blur", 1), ("blur", 3), ("noise", 1), ("noise", 3), ("zoom", 2), ("zoom", 4)]
NEW_CLASSES = (0.1, 0.3, 1.0)
FEWER_CLASSES = (2, 10)
"""One class in so many is left."""

Detector = Callable[[np.ndarray, np.ndarray, int], int | None]


class Change(NamedTuple):
    """Other images, which share of a stream they are, and how many unchanged ones come before."""

    table: Table
    share: float = 1.0
    before: int = BEFORE

    def draw(self, unchanged: int, n: int, rng: np.random.Generator) -> np.ndarray:
        """Rows of the unchanged images and, behind them, these."""
        changed = unchanged + rng.integers(len(self.table), size=n)
        return np.where(rng.random(n) < self.share, changed, rng.integers(unchanged, size=n))


def main() -> None:
    """Extract, stream, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore", DubitoWarning)  # of images that are drawn twice
    result: dict[str, Any] = {"alpha": ALPHA, "streams": args.streams}
    with tempfile.TemporaryDirectory() as place:
        for name in ("cifar10", "imagenet"):
            population, changed = extracted(name, args.data, args.more_data, args.cache or Path(place))
            result[name] = study(population, changed, args.streams, name)
    print(json.dumps(result, indent=1))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def extracted(name: str, data: Path, more_data: Path, cache: Path) -> tuple[Table, dict[str, Change]]:
    """The population, and changed images by kind of the change."""
    # Without ids: what is drawn twice is no duplicate here.
    population = table_of(name, data, more_data, cache).select("logit", "feature", "label")
    if name == "cifar10":
        small = dubito.Preprocess(size=(32, 32), resize=(32, 32))
        model: Any = dubito.wrap(resnet(20, data / "cifar10_resnets"), transform=small, classes=10, name="resnet20")
        images = dubito.open_images(f"{more_data / 'cifar10.npz'}#test")
        digits = np.asarray(Image.open(data / "svhn_test_dev5000" / "images.png")).reshape(-1, 32, 32, 3)
        others = {"new classes": dubito.open_images(digits)}
    else:
        model = dubito.load("pypi:efficientnet_lite0")
        images = dubito.open_images(data / "imagenet_val_dev2000" / "images256.zip")
        others = {
            "new classes": dubito.open_images(data / "dtd10_dev400" / "images.zip"),
            "new camera": dubito.open_images(data / "imagenetv2_10k" / "images224.zip"),
        }
    corrupted = {f"{kind} {level}": Corrupted(_some(images), kind, level) for kind, level in LEVELS}
    sets = {**corrupted, **{kind: _some(one) for kind, one in others.items()}}
    tables = {
        kind: dubito.extract(model, one, to=cache / f"{name}_{kind.replace(' ', '_')}", label_space="own")
        for kind, one in sets.items()
    }
    new = tables.pop("new classes")
    changes = {kind: Change(table) for kind, table in tables.items()}
    changes[f"noise 3 after {LATE:,} images"] = Change(tables["noise 3"], before=LATE)
    changes |= {f"new classes, {share:.0%}": Change(new, share) for share in NEW_CLASSES}
    for left in FEWER_CLASSES:
        rows = (population.label % left == 0).nonzero()[:, 0]
        changes[f"one class in {left} left"] = Change(population.rows(rows))
    return population, changes


def _some(images: Any) -> Subset:
    """At most `MOST` of them, evenly spaced."""
    return Subset(images, np.linspace(0, len(images) - 1, min(MOST, len(images))).astype(int).tolist())


def study(population: Table, changes: dict[str, Change], streams: int, name: str) -> dict[str, Any]:
    """False alarms and delays of every detector."""
    detectors: dict[str, Detector] = peers()
    alarms: dict[str, list[bool]] = {key: [] for key in ("watch", "labels", *detectors)}
    delays: dict[str, dict[str, list[float]]] = {kind: {key: [] for key in ("watch", *detectors)} for kind in changes}
    labels: dict[str, dict[str, list[float]]] = {f"{ratio:g}": {"requested": [], "equal": []} for ratio in BROKEN}
    for seed in track(range(GUARDS), name):
        rng = np.random.default_rng(seed)
        known = population.rows(torch.from_numpy(rng.integers(len(population), size=KNOWN)))
        guard = Guard.fit(None, known, RISK, scores="temperature", sets=False, seed=seed)
        usual = guard.decide(population.select("logit", "feature"))
        wrong = (usual.predicted[:, 0] != population.label).numpy()
        for _ in range(streams // GUARDS):
            stream = rows(usual, rng.integers(len(population), size=1000))
            for key, alarm in detected(guard, [stream], detectors, seed).items():
                alarms[key].append(alarm is not None)
            chosen = with_errors(usual, wrong, RISK, 600, rng)
            alarms["labels"].append(labels_until_alarm(guard, rows(usual, chosen), wrong[chosen], None) is not None)
        for ratio, by in labels.items():
            for key, _ in product(by, range(LABEL_REPEATS // GUARDS)):
                chosen = with_errors(usual, wrong, float(ratio) * RISK, LONGEST, rng)
                equal = rng if key == "equal" else None
                by[key].append(labels_until_alarm(guard, rows(usual, chosen), wrong[chosen], equal) or math.inf)
        for kind, change in changes.items():
            both = concat([population.select("logit", "feature"), change.table.select("logit", "feature")])
            new = guard.decide(both)
            for _ in range(REPEATS // GUARDS):
                before = rows(usual, rng.integers(len(population), size=change.before))
                after = rows(new, change.draw(len(population), AFTER, rng))
                for key, alarm in detected(guard, [before, after], detectors, seed).items():
                    delay = math.inf if alarm is None or alarm < change.before else alarm - change.before + 1
                    delays[kind][key].append(delay)
    return {
        "images": len(population),
        "false_alarms": {key: round(float(np.mean(one)), 4) for key, one in alarms.items()},
        "delay": medians(delays),
        "labels": medians(labels),
    }


def medians(values: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float | None]]:
    """The median of every list; None where it is infinite."""
    return {
        kind: {key: None if math.isinf(middle := float(np.median(one))) else middle for key, one in by.items()}
        for kind, by in values.items()
    }


def with_errors(decisions: Decisions, wrong: np.ndarray, rate: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of n images; of the accepted ones, as many are wrong as this rate says."""
    accepted = decisions.accept.numpy()
    errors, right = accepted & wrong, accepted & ~wrong
    weights = np.ones(len(wrong))
    weights[errors] = rate * accepted.sum() / errors.sum()
    weights[right] = (1 - rate) * accepted.sum() / right.sum()
    return rng.choice(len(wrong), size=n, p=weights / weights.sum())


def labels_until_alarm(
    guard: Guard, decisions: Decisions, wrong: np.ndarray, equal: np.random.Generator | None
) -> int | None:
    """Labels until the alarm of the guarantee, five at a time, for a third of the accepted images of every 300."""
    watch = guard.watch(alpha=2 * ALPHA)
    predicted, accepted = decisions.predicted[:, 0].tolist(), decisions.accept.numpy()
    for start in range(0, len(wrong), 300):
        part = np.arange(start, min(start + 300, len(wrong)))
        watch.update(replace(rows(decisions, part), ids=[str(row) for row in part]))
        count = int(accepted[part].sum()) // 3
        if equal is None:
            names = watch.request_labels(count)
        else:
            names = [str(row) for row in equal.permutation(part[accepted[part]])[:count]]
        for first in range(0, count, 5):
            truth = {name: predicted[int(name)] ^ int(wrong[int(name)]) for name in names[first : first + 5]}
            report = watch.label(truth, drawn=equal is not None)
            if any(alarm["kind"] == "guarantee" for alarm in report.alarms):
                return report.outcomes
    return None


def rows(decisions: Decisions, chosen: np.ndarray) -> Decisions:
    """Some decisions, in this order."""
    index = torch.from_numpy(chosen)
    columns = ("predicted", "probability", "uncertainty", "rank", "accept", "novel", "density_rank")
    picked = {key: getattr(decisions, key)[index] for key in columns}
    return replace(decisions, ids=[str(n) for n in range(len(chosen))], **picked)


def detected(guard: Guard, parts: list[Decisions], detectors: dict[str, Detector], seed: int) -> dict[str, int | None]:
    """After how many images each detector raises its alarm, from 0; None where it does not."""
    watch = guard.watch(alpha=2 * ALPHA, seed=seed)  # half of it is for labels, of which there are none
    for part in parts:
        report = watch.update(part)
    first = {"watch": report.alarms[0]["images"] - 1 if report.alarms else None}
    calibration = guard.calibration.uncertainty
    calibration = np.where(np.isinf(calibration), 1e9, calibration)
    new = np.concatenate([torch.where(part.novel, 1e9, part.uncertainty).numpy() for part in parts])
    return {**first, **{key: detector(calibration, new, seed) for key, detector in detectors.items()}}


def peers() -> dict[str, Detector]:
    """Martingales of other packages, as far as they are installed."""
    detectors: dict[str, Detector] = {}
    try:
        from crepes.martingales import (  # noqa: PLC0415 (optional)
            CompositeMartingale,
            SimpleJumper,
            SleeperStayer,
            semi_online_p_values,
        )
    except ImportError:
        return detectors

    def p_values(calibration: np.ndarray, new: np.ndarray, seed: int) -> np.ndarray:
        return np.asarray(semi_online_p_values(np.concatenate([calibration, new]), seed=seed))[len(calibration) :]

    def by_crepes(make: Callable[[], Any]) -> Detector:
        def detect(calibration: np.ndarray, new: np.ndarray, seed: int) -> int | None:
            index = int(make().apply(p_values(calibration, new, seed), c=1 / ALPHA))
            return index if index < len(new) else None

        return detect

    detectors["crepes jumper"] = by_crepes(SimpleJumper)
    detectors["crepes sleeper"] = by_crepes(SleeperStayer)
    detectors["crepes composite"] = by_crepes(lambda: CompositeMartingale([SimpleJumper(), SleeperStayer()]))
    try:
        from mapie.exchangeability_testing import OnlineMartingaleTest  # noqa: PLC0415 (optional)
    except ImportError:
        return detectors

    def by_mapie(calibration: np.ndarray, new: np.ndarray, seed: int) -> int | None:
        test = OnlineMartingaleTest(test_level=ALPHA, warn=False)
        for number, p in enumerate(p_values(calibration, new, seed)):
            if test.update_simple_jumper_martingale(float(p)) >= 1 / ALPHA:
                return number
        return None

    detectors["mapie jumper"] = by_mapie
    return detectors


if __name__ == "__main__":
    main()
