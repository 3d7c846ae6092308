"""Does any change to an uncertainty head help? Table 3 of Kirchhof et al. (2024) on EfficientNet-Lite0, small.

    python experiments/head_ablations.py --data DIR [--seeds 1 2 3] [--epochs 4] [--photos 1000] [--rows 200000]
                                         [--only NAME ...] [--cache DIR] [--write]

DIR holds imagenet_val_dev2000/ (images256.zip, and labels.csv with a column real_labels), tiny_imagenet_val_dev2400/
and dtd10_dev400/ (images.zip and labels.csv each). Heads learn from half A of the ImageNet photographs, augmented in
four epochs; everything is measured on images that they have not seen:

    R-AUROC     zero-shot on Tiny-ImageNet (near) and ten classes of textures (far), and their mean
    ambiguity   AUROC for the photographs of half B that people gave no label or several (ReaL)
    range       highest less lowest u on half B: 0 is a head that has collapsed to a constant

each as the median over seeds and the distance to the farther extreme. The published column is R-AUROC on CUB, CARS and
SOP from 92 million rows of ImageNet-21k on a ViT-Base: compare its differences, not its values. The paper does not tell
the settings of its strong augmentations, of Lion, SGD and of the step schedule; ours are in dubito.data.augment and
dubito.heads.recipe. Rows without a published value are ours. That a head is constant is what some rows are there to
show, so its ConstantHeadWarning is silenced; the column `range` tells it. Findings name rows that lie farther from the
default than the seeds of both reach: with so many rows and so few seeds, some do by chance.

With --cache a second run is quick: features and heads are kept, about 1.3 GB. --write puts the result into
experiments/expected. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _expected import write_expected
from rich.progress import track

import dubito
from dubito.data import Subset
from dubito.data.labels import read_label_sets
from dubito.errors import ConstantHeadWarning
from dubito.metrics import MedianSpread, median_spread
from dubito.protocols.human_ambiguity import ambiguous_images
from dubito.result import aligned

EXPECTED = Path(__file__).parent / "expected" / "head_ablations.json"
COLLAPSED = 1e-6


@dataclass(frozen=True)
class Setting:
    """One row of the table: what differs from the default, and what the paper reports."""

    published: MedianSpread | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    head: dict[str, int] = field(default_factory=dict)
    strong: str | None = None


SETTINGS = {
    "default": Setting(MedianSpread(0.608, 0.004)),
    "leeway 0.001": Setting(MedianSpread(0.607, 0.006), {"leeway": 0.001}),
    "leeway 0.01": Setting(MedianSpread(0.607, 0.005), {"leeway": 0.01}),
    "leeway 0.1": Setting(MedianSpread(0.609, 0.005), {"leeway": 0.1}),
    "smaller, 1 x 256": Setting(MedianSpread(0.611, 0.002), head={"depth": 1, "width": 256}),
    "larger, 3 x 1024": Setting(MedianSpread(0.606, 0.004), head={"depth": 3, "width": 1024}),
    "zero init": Setting(MedianSpread(0.500, 0.000), {"init": "zero"}),
    "AugMix": Setting(MedianSpread(0.606, 0.005), strong="augmix"),
    "CutMix": Setting(MedianSpread(0.575, 0.002), strong="cutmix"),
    "MixUp": Setting(MedianSpread(0.552, 0.009), strong="mixup"),
    "blur": Setting(MedianSpread(0.609, 0.003), strong="blur"),
    "small crops": Setting(MedianSpread(0.610, 0.004), strong="crop"),
    "box": Setting(MedianSpread(0.606, 0.001), strong="box"),
    "Adam": Setting(MedianSpread(0.609, 0.002), {"optimizer": "adam"}),
    "Lion": Setting(MedianSpread(0.500, 0.000), {"optimizer": "lion"}),
    "Lion, lr / 10": Setting(None, {"optimizer": "lion", "lr": 1e-4, "warmup_lr": 1e-5}),
    "SGD": Setting(MedianSpread(0.614, 0.005), {"optimizer": "sgd"}),
    "SGD, lr x 10": Setting(None, {"optimizer": "sgd", "lr": 1e-2, "warmup_lr": 1e-3}),
    "step schedule": Setting(MedianSpread(0.607, 0.003), {"schedule": "step"}),
    "l2": Setting(None, {"loss": "l2"}),
    "l1": Setting(None, {"loss": "l1"}),
    "log_l2": Setting(None, {"loss": "log_l2"}),
    "variance_nll": Setting(None, {"loss": "variance_nll"}),
}


def main() -> None:
    """Extract, train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep features and heads here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--photos", type=int, default=1000, help="of half A")
    parser.add_argument("--rows", type=int, default=200_000, help="that each training sees")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        study = Study(args.data, args.cache or Path(place), args.photos, args.epochs, args.rows)
        actual = study.all(args.only, args.seeds)
    findings = verdicts(actual)
    print("\n".join([*aligned(lines(actual)), *findings]))
    settings = {key: getattr(args, key) for key in ("photos", "epochs", "rows", "seeds")}
    result = {"settings": settings, "findings": findings, "rows": actual}
    if args.write:
        write_expected(EXPECTED, "--data DIR", result, published="Table 3")
    print(json.dumps(result))


@dataclass
class Study:
    """The tables, from disk where they are there already."""

    data: Path
    cache: Path
    photos: int
    epochs: int
    rows: int

    def __post_init__(self) -> None:
        self.model = dubito.load("pypi:efficientnet_lite0")
        folder = self.data / "imagenet_val_dev2000"
        self.images = dubito.open_images(folder / "images256.zip", folder / "labels.csv")
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0)).tolist()
        half = len(order) // 2
        self.half_a, self.half_b = sorted(order[: min(half, self.photos)]), sorted(order[half:])
        self.unseen = {
            name: dubito.extract(
                self.model,
                self.data / place / "images.zip",
                self.cache / name,
                labels=self.data / place / "labels.csv",
                label_space="own",
            )
            for name, place in (("tiny_imagenet", "tiny_imagenet_val_dev2400"), ("dtd10", "dtd10_dev400"))
        }
        self.in_distribution = dubito.extract(self.model, Subset(self.images, self.half_b), self.cache / "half_b")
        self.ambiguous = ambiguous_images(read_label_sets(folder / "labels.csv"))

    def corpus(self, strong: str | None) -> dubito.Table:
        """The augmented epochs of half A."""
        to = self.cache / f"half_a-{len(self.half_a)}x{self.epochs}-{strong or 'plain'}"
        photos, augment = Subset(self.images, self.half_a), dubito.Augment(strong=strong)
        return dubito.extract(self.model, photos, to, epochs=self.epochs, augment=augment)

    def all(self, names: Iterable[str], seeds: list[int]) -> dict[str, dict[str, Any]]:
        """Every setting: first all corpora, then all trainings under one bar."""
        corpora = {strong: self.corpus(strong) for strong in {SETTINGS[name].strong: None for name in names}}
        result = {}
        for name in track(list(names), description="train"):
            result[name] = self.measured(name, corpora[SETTINGS[name].strong], seeds)
        return result

    def measured(self, name: str, corpus: dubito.Table, seeds: list[int]) -> dict[str, Any]:
        """One setting over all seeds."""
        setting = SETTINGS[name]
        recipe = dubito.heads.Recipe(rows=self.rows, **setting.recipe)
        to = self.cache / "heads" / f"{len(corpus)}-{self.rows}" / "".join(c if c.isalnum() else "-" for c in name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstantHeadWarning)
            training = dubito.train(corpus, to, seeds=seeds, recipe=recipe, progress=False, **setting.head)
        heads = {f"seed {head.seed}": head for head in training.heads}
        transfer = dubito.protocols.transfer(heads, self.unseen, resamples=100).over_seeds(list(heads))
        agreement = dubito.protocols.human_ambiguity(
            heads, self.in_distribution, ambiguous=self.ambiguous, resamples=100
        )
        ranges = [float(u.max() - u.min()) for u in (head.score(self.in_distribution) for head in heads.values())]
        return {
            "published": None if setting.published is None else setting.published._asdict(),
            "r_auroc": {where: rounded(value) for where, value in transfer.items()},
            "ambiguity": rounded(median_spread([agreement.auroc[seed].value for seed in heads])),
            "range": statistics.median(ranges),
            "collapsed_seeds": sum(one <= COLLAPSED for one in ranges),
            "seeds": len(seeds),
        }


def rounded(value: MedianSpread) -> dict[str, float]:
    """Four decimals."""
    return {"median": round(value.median, 4), "distance": round(value.distance, 4)}


def lines(result: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A header and one line a setting, as text cells."""
    header = ["setting", "published", "R-AUROC mean", "Tiny-ImageNet", "textures", "ambiguity", "range", "collapsed"]
    body = [
        [
            name,
            "-" if row["published"] is None else shown(row["published"]),
            *(shown(row["r_auroc"][where]) for where in ("mean", "tiny_imagenet", "dtd10")),
            shown(row["ambiguity"]),
            f"{row['range']:.3g}",
            f"{row['collapsed_seeds']}/{row['seeds']}",
        ]
        for name, row in result.items()
    ]
    return [header, *body]


def shown(value: dict[str, float]) -> str:
    """As the paper writes it."""
    return str(MedianSpread(**value))


def verdicts(result: dict[str, dict[str, Any]]) -> list[str]:
    """What the paper says of single rows against what came here, and every row that lies apart from the default."""
    figures = []
    for name in ("zero init", "Lion"):
        if name in result:
            row = result[name]
            collapsed, value = row["collapsed_seeds"], shown(row["r_auroc"]["mean"])
            verdict = {0: "contradicted", row["seeds"]: "reproduced"}.get(collapsed, "reproduced in part")
            figures.append(
                f"{name}: collapse {verdict}, {collapsed} of {row['seeds']} seeds constant; R-AUROC {value}."
            )
    if "default" not in result:
        return figures
    default = result["default"]["r_auroc"]["mean"]
    for name, row in result.items():
        own = row["r_auroc"]["mean"]
        apart = own["median"] - default["median"]
        beyond = abs(apart) > own["distance"] + default["distance"]
        if name != "default" and (beyond or name == "l2"):
            where = "beyond" if beyond else "within"
            figures.append(
                f"{name}: {apart:+.3f} against the default's {shown(default)}, {where} the seeds' distances."
            )
    return figures


if __name__ == "__main__":
    main()
