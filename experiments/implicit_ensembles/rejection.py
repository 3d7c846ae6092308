"""Do tiles of one model reject better than its entropy? Fig. 5 and Tables 3 to 6 of Kirsch (2024), with small models.

    python experiments/implicit_ensembles/rejection.py --data DIR [--cache DIR] [--limit N] [--figure FILE] [--write]

DIR holds imagenet_val_dev2000/ (images256.zip, labels.csv) and squeezenet/ (squeezenet1_0_deepcompressed.pt). The paper
has ResNet-152, Wide-ResNet-101-2, ResNeXt-101 and MaxViT on ImageNet-v2; here are EfficientNet-Lite0 and SqueezeNet 1.0
on photographs of ImageNet's validation set, so its numbers stand beside ours for their signs and sizes only.

Photographs are cut into two halves by a fixed seed. Temperature and pooled weights are fitted on the first; everything
that is told is measured on the second. For every grid of 2 x 2 to 7 x 7 tiles, by mutual information and by all four
readings of its weights, as the model is and at the optimal temperature, against the model's own entropy:

    own        an ensemble is judged by its own predictions, as in the paper
    original   all are judged by the model's predictions: only the order of photographs differs

Beside EfficientNet-Lite0 stands the explicit ensemble of Lite0, Lite1 and Lite2 ("members"), divided by the same
temperature, Lite0's. `checks` says which of the paper's statements hold here, `readings` how large the covariances of
its tables are in three readings of the word. The last line is one JSON object;
--write puts it into expected/implicit_ensembles_rejection.json, too.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

import torch

import dubito
from dubito.data import Subset
from dubito.evaluate.rejection import rejection_study
from dubito.evaluate.rejection_result import PAPER, RejectionStudy
from dubito.metrics import Interval
from dubito.probes.tiles import Tiles
from dubito.report.rejection import rejection_figure
from dubito.table.views import chosen_rows, ensemble
from dubito.types import Classifier

PHOTOS = "imagenet_val_dev2000"
LITES = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
GRIDS = range(2, 8)
READINGS = ("weighted_logsumexp", "weighted_sum", "pooled_logsumexp", "pooled_sum")
UNCERTAINTIES = ("mutual_information", *READINGS, "predictive_entropy")
COVARIANCES = (*PAPER, "neg_bucket_covariance_accuracy", "neg_bucket_covariance_nll")
RANKING = ("auroc", "aurc")
TILES = [f"tiles_{k}" for k in GRIDS]
SIZES = ("original", *(f"{k}x{k}" for k in GRIDS))
TABLE_3 = {
    "ResNet-152": "-.030 .046 -.144  -.016 .050 -.179  -.030 .044 -.150  -.033 .053 -.189  -.035 .054 -.192  "
    "-.037 .053 -.185  -.031 .054 -.203",
    "Wide-ResNet-101-2": "-.030 .044 -.141  -.019 .049 -.174  -.031 .039 -.139  -.038 .051 -.187  -.038 .052 -.188  "
    "-.039 .052 -.191  -.036 .050 -.194",
    "ResNeXt-101-64x4d": "-.018 .046 -.147  -.011 .049 -.162  -.019 .042 -.145  -.022 .042 -.156  -.021 .043 -.156  "
    "-.024 .044 -.159  -.021 .043 -.156",
}
TABLE_4 = {
    "ResNet-152": "-.030 .046 -.144  -.032 .036 -.134  -.039 .038 -.151  -.037 .038 -.144  -.042 .047 -.178  "
    "-.038 .044 -.159  -.035 .020 -.062",
    "Wide-ResNet-101-2": "-.030 .044 -.141  -.039 .040 -.138  -.039 .039 -.148  -.044 .043 -.159  -.047 .042 -.163  "
    "-.043 .049 -.180  -.037 .016 -.073",
    "ResNeXt-101-64x4d": "-.018 .046 -.147  -.043 .036 -.131  -.042 .045 -.160  -.039 .043 -.150  -.042 .045 -.157  "
    "-.040 .049 -.171  -.023 .009 -.034",
}
TABLE_5 = {
    "MaxViT": "-.124 .043 -.228  -.083 .040 -.217  -.103 .034 -.200  -.084 .020 -.130  -.100 .029 -.176  "
    "-.094 .025 -.155  -.100 .031 -.184"
}
TABLE_6 = {
    "MaxViT": "-.124 .043 -.228  -.093 .039 -.213  -.115 .042 -.237  -.101 .041 -.236  -.100 .041 -.236  "
    "-.095 .040 -.234  -.094 .040 -.234"
}
"""Calibration error by bucket, accuracy and NLL by acceptance: the original, then 2x2 to 7x7."""


def main() -> None:
    """Extract, study, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here, about 1.2 GB")
    parser.add_argument("--limit", type=int, help="only the first N photographs")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--figure", type=Path, help="draw the curves of EfficientNet-Lite0 (needs matplotlib)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    result = {"photographs": args.limit, "published": published(), "models": {}}
    with tempfile.TemporaryDirectory() as place:
        for name, table in extracted(args.data, args.cache or Path(place), args.limit).items():
            order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
            fitted, reported = (chosen_rows(table, half) for half in order.chunk(2))
            result["photographs"] = len(table)
            studies = {kind: studied(name, reported, fitted, kind, args.resamples) for kind in ("own", "original")}
            result["models"][name] = {
                "checks": checks(studies["own"]),
                "readings": readings(reported),
                **{kind: summary(study) for kind, study in studies.items()},
            }
            if args.figure and name == LITES[0]:
                rejection_figure(studies["own"], "mutual_information").savefig(args.figure, dpi=110)
    if args.write:
        target = Path(__file__).parents[1] / "expected" / "implicit_ensembles_rejection.json"
        command = "python experiments/implicit_ensembles/rejection.py --data DIR --write"
        target.write_text(in_lines({"command": command, **result}) + "\n")
    print(json.dumps(result))


def extracted(data: Path, cache: Path, limit: int | None) -> dict[str, dubito.Table]:
    """By model, with the logits of all tiles, and for Lite0 those of its sisters."""
    photos = dubito.open_images(data / PHOTOS / "images256.zip", labels=data / PHOTOS / "labels.csv")
    if limit:
        photos = Subset(photos, list(range(limit)))
    tiles = [dubito.probes.Forward(), Tiles(keep="logits")]
    lites = [
        dubito.extract(
            dubito.load(f"pypi:{name}"),
            photos,
            cache / name,
            probes=tiles if number == 0 else [dubito.probes.Forward()],
        )
        for number, name in enumerate(LITES)
    ]
    small = squeezenet(data / "squeezenet" / "squeezenet1_0_deepcompressed.pt")
    return {
        # The original is Lite0; its two sisters only stand in the explicit ensemble.
        LITES[0]: lites[0].extended(members_logit=ensemble(lites).column("members_logit")),
        "squeezenet1_0": dubito.extract(small, photos, cache / "squeezenet", probes=tiles),
    }


def studied(name: str, reported: dubito.Table, fitted: dubito.Table, kind: str, resamples: int) -> RejectionStudy:
    """Everything on one half, with temperature and pooled weights of the other."""
    study = rejection_study(
        reported, calibration=fitted, uncertainties=UNCERTAINTIES, predictions=kind, resamples=resamples
    )
    print(f"\n{name}, predictions: {kind}\n{study}", flush=True)
    return study


def squeezenet(weights: Path) -> Classifier:
    """SqueezeNet 1.0: 227 pixels, BGR, minus the mean of each channel, without scaling."""
    model = dubito.load("torchvision:squeezenet1_0", weights=weights)
    pixels = dubito.Preprocess(
        (227, 227), 256, "bilinear", mean=(104 / 255, 117 / 255, 123 / 255), std=(1 / 255,) * 3, channels="BGR"
    )
    return dubito.wrap(model.module, transform=pixels, classes=model.classes, name="squeezenet1_0")


def summary(study: RejectionStudy) -> dict:
    """A study in short: one line per order. AUROC, AURC and their differences to the entropy have intervals."""
    rows = []
    for result in study.results:
        order = result.order
        row = {"ensemble": order.ensemble, "uncertainty": order.uncertainty, "temperature": round(order.temperature, 4)}
        row |= {key: round(getattr(result, key), 4) for key in ("accuracy", "nll", "calibration_error")}
        row |= {key: round(result.figures[key].value, 4) for key in COVARIANCES}
        row |= {key: interval(result.figures[key]) for key in RANKING}
        if result.differences is not None:
            row |= {f"{key}_difference": interval(result.differences[key]) for key in RANKING}
        rows.append(row)
    return {"temperature": round(study.temperatures[-1], 4), "findings": study.findings(), "rows": rows}


def interval(value: Interval | None) -> list[float] | None:
    """Value, low and high."""
    return None if value is None else [round(number, 4) for number in value[:3]]


def readings(table: dubito.Table) -> dict:
    """Three ways to read "covariance" at T = 1, by MI: the paper's sizes may tell which one it means."""
    level, by_uncertainty = (
        rejection_study(table, TILES, uncertainties=["mutual_information"], against=against, resamples=1)
        for against in ("level", "uncertainty")
    )
    ways = {
        "level, acceptance": (level, "acceptance"),
        "level, bucket": (level, "bucket"),
        "uncertainty, acceptance": (by_uncertainty, "acceptance"),
    }
    return {
        way: {
            metric: {
                result.order.size: round(result.figures[f"neg_{kind}_covariance_{metric}"].value, 4)
                for result in study.results
            }
            for metric in ("accuracy", "nll")
        }
        for way, (study, kind) in ways.items()
    }


def checks(study: RejectionStudy) -> dict:
    """What the paper says of its ResNets and MaxViT, asked of ours: whether it holds, and the numbers.

    The best grid is that of the photographs reported, which flatters it.
    """
    raw, scaled = study.temperatures
    accuracy, nll = "neg_acceptance_covariance_accuracy", "neg_acceptance_covariance_nll"

    def value(key: str, grid: int | None = None, uncertainty: str = "mutual_information", at: float = raw) -> float:
        result = study.of("original", temperature=at) if grid is None else study.of(f"tiles_{grid}", uncertainty, at)
        return round(result.calibration_error if key == "calibration" else result.figures[key].value, 4)

    def best(uncertainty: str, at: float) -> float:
        return min(value("aurc", grid, uncertainty, at) for grid in GRIDS)

    larger = {
        "7x7 responds more than the original, accuracy": (value(accuracy, 7), value(accuracy)),
        "7x7 responds more than the original, NLL": (-value(nll, 7), -value(nll)),
        "7x7 responds more than 2x2, accuracy": (value(accuracy, 7), value(accuracy, 2)),
        "7x7 responds more than 2x2, NLL": (-value(nll, 7), -value(nll, 2)),
        "calibration error: 7x7 is worse than the original": (value("calibration", 7), value("calibration")),
        "AURC: the original's entropy is worse than MI of the best grid": (
            value("aurc"),
            best("mutual_information", raw),
        ),
        "the same at the optimal temperature": (value("aurc", at=scaled), best("mutual_information", scaled)),
        "AURC: MI is worse than weighted MI (log-sum-exp), best grids": (
            best("mutual_information", raw),
            best("weighted_logsumexp", raw),
        ),
    }
    return {statement: {"holds": a > b, "numbers": [a, b]} for statement, (a, b) in larger.items()}


def published() -> dict:
    """Tables 3 to 6, grids 2 to 7. At which temperature they are is not told."""
    tables = {3: ("mutual information", TABLE_3), 4: ("weighted MI", TABLE_4)}
    tables |= {5: ("mutual information", TABLE_5), 6: ("weighted MI", TABLE_6)}
    return {
        f"table {number}, {uncertainty}": {
            model: {
                size: dict(zip(PAPER, map(float, three.split()), strict=True))
                for size, three in zip(SIZES, text.split("  "), strict=True)
            }
            for model, text in models.items()
        }
        for number, (uncertainty, models) in tables.items()
    }


def in_lines(result: dict) -> str:
    """JSON with one row a line: indented, but for lists of numbers and for dictionaries without another inside."""
    text = json.dumps(result, indent=1)
    for innermost in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(innermost, lambda part: " ".join(part[0].split()), text)
    return text


if __name__ == "__main__":
    main()
