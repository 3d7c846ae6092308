"""Does a guard notice images unlike its calibration images, and only those? Real photographs, halves and other sets.

    python experiments/guard_shift.py --data DIR --more-data DIR [--cache DIR] [--splits 150] [--write]

The first DIR holds imagenet_val_dev2000/, tiny_imagenet_val_dev2400/ and dtd10_dev400/ (images and labels as zip and
CSV), the other cifar10.npz. Columns of EfficientNet-Lite0 are kept in CACHE.

`imagenet`: the 2,000 photographs of ImageNet are cut at random into two halves, a guard (risk 0.1) is fitted on one and
runs on a few or all of the other. `alarms` is the share of splits in which `dubito.guard.shift` calls them different:
at most 0.01, up to Monte Carlo error. The others: the same guards run on as many images of another set, where `alarms`
should be 1. `accepted` is the mean share of all images of a set that the guards accept. To fit each guard in less than
a second, max-probability at the best temperature is its only candidate, which is the first of the defaults, too; the
density decides what is novel, as always.

The last line is one JSON object; --write puts it into expected/guard_shift.json, too.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _expected import write_expected
from guarantee import table_of
from rich.progress import track

import dubito
from dubito.data import Subset
from dubito.table import Table

EXPECTED = Path(__file__).parent / "expected" / "guard_shift.json"
RISK = 0.1
OTHERS = {"tiny_imagenet": "tiny_imagenet_val_dev2400/images.zip", "textures": "dtd10_dev400/images.zip"}
SIZES = (10, 30, 100, 300, 1000)
IMAGES = 400
"""Images of each other set."""


def main() -> None:
    """Fit on halves, run on the others, count alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, or find them here")
    parser.add_argument("--splits", type=int, default=150)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        tables = extracted(args.data, args.more_data, args.cache or Path(place))
        result: dict[str, Any] = {"splits": args.splits, "risk": RISK} | study(tables, args.splits)
    print(json.dumps(result, indent=1))
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", result)
    print(json.dumps(result))


def extracted(data: Path, more_data: Path, cache: Path) -> dict[str, Table]:
    """ImageNet's photographs with their labels first, then images of the other sets without."""
    tables = {"imagenet": table_of("imagenet", data, more_data, cache)}
    model = dubito.load("pypi:efficientnet_lite0")
    cifar10 = np.load(more_data / "cifar10.npz")["test_images"][:IMAGES]
    for name, source in {**{name: data / place for name, place in OTHERS.items()}, "cifar10": cifar10}.items():
        images = dubito.open_images(source)
        rows = np.linspace(0, len(images) - 1, IMAGES).astype(int).tolist()
        tables[name] = dubito.extract(model, Subset(images, rows), to=cache / name, label_space="own")
    return tables


def study(tables: dict[str, Table], splits: int) -> dict[str, Any]:
    """The share of guards that raise an alarm, by set and number of images."""
    photographs = tables["imagenet"]
    alarms: dict[str, dict[int, list[bool]]] = {name: {n: [] for n in SIZES} for name in tables}
    accepted: dict[str, list[float]] = {name: [] for name in tables}
    for seed in track(range(splits), "splits"):
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(photographs), generator=draw)
        known, rest = (photographs.rows(part) for part in order.chunk(2))
        guard = dubito.Guard.fit(None, known, RISK, scores="temperature", sets=False, seed=seed)
        for name, table in (tables | {"imagenet": rest}).items():
            for n in SIZES:
                if n <= len(table):
                    decisions = guard.decide(table.rows(torch.randperm(len(table), generator=draw)[:n]))
                    alarms[name][n].append(decisions.shift.detected)
            accepted[name].append(guard.decide(table).coverage)
    return {
        name: {
            "alarms": {str(n): round(float(np.mean(one)), 4) for n, one in by_size.items() if one},
            "accepted": round(float(np.mean(accepted[name])), 4),
        }
        for name, by_size in alarms.items()
    }


if __name__ == "__main__":
    main()
