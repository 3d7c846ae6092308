"""Does `dubito.find_label_issues` find labels that were changed on purpose, and do its probabilities hold?

    python experiments/find_label_issues.py --data DIR --more-data DIR [--cache DIR] [--write]

--data has cifar10_45k/ (resnet56_45k.safetensors), cifar10_resnets/ (resnet20.pt and so on), cifar10h/
(cifar10h-counts-first5000.npy) and imagenet_val_dev2000/ (images256.zip, labels.csv), --more-data cifar10.npz
(test_images, test_labels). None of the models was trained on these labels; the ResNets of the real errors were chosen
by them. Of all labels, 5 % are changed to another class at random, or none. Three kinds of predictions: ResNet-56 of
CIFAR-10's test images, cross-validated linear classifiers on its features, and EfficientNet-Lite0 of ImageNet
photographs. Which labels are reported was chosen on the first 3,584 test images and on every second of 2,000
photographs; the others are measured. Means over five draws of which labels are changed. "right by estimate" is the
share of flagged labels that the result itself expects to be right. Wrong labels that the data sets have of their own
count as mistakes here. Where no label is shown to be wrong, the most suspicious hundredth is flagged. "cleanlab" is its
confident learning on the same predictions, with its defaults (pip install cleanlab); `benchmarks/label_issues.py`
compares the time.

Real errors: labels of the first 5,000 test images that most people contradict (CIFAR-10H), by ResNet-20, -32, -44 and
-56. Average precision of both rankings (cleanlab's by its default label quality score), their difference with the
95 % interval of a paired bootstrap over images, and both at their own number of flags and at cleanlab's. The last line
is one JSON object; --write puts it into expected/find_label_issues.json.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path

import numpy as np
from _expected import write_expected
from _resnet_cifar import resnet, resnet56_45k
from cleanlab.filter import find_label_issues as confident_learning
from cleanlab.rank import get_label_quality_scores
from sklearn.metrics import average_precision_score

import dubito

EXPECTED = Path(__file__).parent / "expected" / "find_label_issues.json"
SHARES, DRAWS = (0.0, 0.05), 5
DEPTHS, RESAMPLES = (20, 32, 44, 56), 1000
CHOSEN_ON = 3584


def main() -> None:
    """Extract, change labels, look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        cache = args.cache or Path(place)
        cifar10 = cifar10_table(args.data, args.more_data, cache / "cifar10").rows(slice(CHOSEN_ON, None))
        photographs = imagenet_table(args.data / "imagenet_val_dev2000", cache / "imagenet").rows(slice(1, None, 2))
        cases = {"ResNet-56, CIFAR-10": (cifar10, False), "linear, CIFAR-10": (cifar10, True)}
        cases["EfficientNet-Lite0, ImageNet"] = (photographs, False)
        actual = {
            name: {f"{share:.0%} changed": studied(table, share, cross_validate=linear) for share in SHARES}
            for name, (table, linear) in cases.items()
        }
        votes = np.load(args.data / "cifar10h" / "cifar10h-counts-first5000.npy")
        for depth in DEPTHS:
            table = people_table(args.data, args.more_data, cache / f"resnet{depth}", depth, len(votes))
            wrong = votes.argmax(axis=1) != table.label.numpy()
            actual[f"ResNet-{depth}, CIFAR-10"] = {"contradicted by people": real_errors(table, wrong)}
    for name, figures in actual.items():
        print(name, figures)
    if args.write:
        write_expected(EXPECTED, "--data DIR --more-data DIR", {"draws": DRAWS, "of": actual})
    print(json.dumps({"draws": DRAWS, "of": actual}))


def cifar10_table(data: Path, more: Path, cache: Path) -> dubito.Table:
    """The 10,000 test images."""
    scaled = dubito.Preprocess((32, 32), mean=(0, 0, 0), std=(1, 1, 1))
    model = dubito.wrap(resnet56_45k(data / "cifar10_45k"), transform=scaled, name="ResNet-56")
    with np.load(more / "cifar10.npz") as arrays:
        images, label = arrays["test_images"], arrays["test_labels"].astype(np.int64)
    return dubito.extract(model, images, cache, labels=label)


def people_table(data: Path, more: Path, cache: Path, depth: int, count: int) -> dubito.Table:
    """The first test images, by a ResNet that was trained on all training images."""
    scaled = dubito.Preprocess((32, 32), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    model = dubito.wrap(resnet(depth, data / "cifar10_resnets"), transform=scaled, name=f"ResNet-{depth}")
    with np.load(more / "cifar10.npz") as arrays:
        images, label = arrays["test_images"][:count], arrays["test_labels"][:count].astype(np.int64)
    return dubito.extract(model, images, cache, labels=label)


def imagenet_table(folder: Path, cache: Path) -> dubito.Table:
    """2,000 photographs."""
    with (folder / "labels.csv").open(newline="") as file:
        label = {f"{int(row['val_id']):08d}.jpg": int(row["label"]) for row in csv.DictReader(file)}
    photographs = dubito.open_images(folder / "images256.zip")
    labels = [label[Path(name).name] for name in photographs.ids]
    return dubito.extract(dubito.load("pypi:efficientnet_lite0"), photographs, cache, labels=labels, batch_size=32)


def studied(table: dubito.Table, share: float, *, cross_validate: bool) -> dict[str, float]:
    """Means over draws."""
    runs = [one_draw(table, share, seed, cross_validate=cross_validate) for seed in range(DRAWS if share else 1)]
    return {key: round(float(np.mean([run[key] for run in runs])), 3) for key in runs[0]}


def one_draw(table: dubito.Table, share: float, seed: int, *, cross_validate: bool) -> dict[str, float]:
    """One draw of which labels are changed."""
    label, classes = table.label.numpy(), table.shape("logit")[1]
    rng = np.random.default_rng(seed)
    wrong = np.isin(np.arange(len(label)), rng.permutation(len(label))[: round(share * len(label))])
    noisy = np.where(wrong, (label + rng.integers(1, classes, len(label))) % classes, label)
    issues = dubito.find_label_issues(table.extended(label=noisy), cross_validate=cross_validate)
    figures = {"accuracy": issues.accuracy.value, "wrong by estimate": issues.wrong_labels}
    figures |= counted(issues.rows, wrong)
    if not cross_validate:
        flags = confident_learning(noisy, table.logit.double().softmax(1).numpy(), n_jobs=1)
        figures |= {f"{key} by cleanlab": value for key, value in counted(flags.nonzero()[0], wrong).items()}
    if not share:
        return figures
    hit = wrong[issues.rows]
    suggested = (issues.suggested[hit] == label[issues.rows[hit]]).mean()
    return figures | {"right by estimate": issues.expected_right, "suggested class is the true one": suggested}


def real_errors(table: dubito.Table, wrong: np.ndarray) -> dict[str, float]:
    """Rankings and flags of both against labels that people contradict."""
    label, p = table.label.numpy(), table.logit.double().softmax(1).numpy()
    flags = confident_learning(label, p, n_jobs=1)
    issues, everything = dubito.find_label_issues(table), dubito.find_label_issues(table, least=0)
    ours = np.zeros(len(label))
    ours[everything.rows] = everything.probability
    theirs = -get_label_quality_scores(label, p)
    rng, gains = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        rows = rng.integers(len(label), size=len(label))
        gains.append(average(wrong[rows], ours[rows]) - average(wrong[rows], theirs[rows]))
    low, high = np.quantile(gains, (0.025, 0.975))
    figures = {"agree": issues.accuracy.value, "contradicted": int(wrong.sum()), **counted(issues.rows, wrong)}
    figures |= {f"{key} by cleanlab": value for key, value in counted(flags.nonzero()[0], wrong).items()}
    same = counted(everything.rows[: flags.sum()], wrong)
    figures |= {f"{key} with as many flags": same[key] for key in ("precision", "recall")}
    figures |= {"average precision": average(wrong, ours), "average precision by cleanlab": average(wrong, theirs)}
    figures |= {"gain": figures["average precision"] - figures["average precision by cleanlab"]}
    return {key: round(float(value), 3) for key, value in (figures | {"gain from": low, "gain to": high}).items()}


def average(wrong: np.ndarray, rank: np.ndarray) -> float:
    """Average precision."""
    return float(average_precision_score(wrong, rank))


def counted(rows: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """How many labels are flagged, and which of them were changed."""
    if not wrong.any():
        return {"flagged": len(rows)}
    return {"flagged": len(rows), "precision": wrong[rows].mean(), "recall": wrong[rows].sum() / wrong.sum()}


if __name__ == "__main__":
    main()
