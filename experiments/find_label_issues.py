"""Does `dubito.find_label_issues` find labels that were turned on purpose? CIFAR-10, five draws of which ones.

    python experiments/find_label_issues.py --data DIR [--cache DIR] [--write]

DIR holds cifar10.npz (train_images, train_labels). Features and entropy are those of EfficientNet-Lite0, which was
trained on ImageNet and has seen no label of CIFAR-10, of its first 4,000 training images, enlarged to 224 pixels. Of
their labels, 5 % are turned to another class at random. Told are the labels that are found, how many of them were
turned, how many of the turned ones are found, and the same of the fifty surest; for the clearer half of the images (the
default), and for all of them. CIFAR-10 has wrong labels of its own, which count as mistakes here. Mean over draws, with
the smallest and the largest. The last line is one JSON object; --write puts it into expected/find_label_issues.json.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from _expected import write_expected

import dubito

EXPECTED = Path(__file__).parent / "expected" / "find_label_issues.json"
IMAGES, TURNED, DRAWS, SUREST = 4000, 0.05, 5, 50
SHARES = {"clearer half": 0.5, "all images": 1.0}


def main() -> None:
    """Extract, turn, look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here; those of active_learning_loop.py")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, np.load(args.data / "cifar10.npz") as arrays:
        images, label = (arrays[f"train_{kind}"][:IMAGES] for kind in ("images", "labels"))
        cache = (args.cache or Path(place)) / f"cifar10_train_{IMAGES}"
        table = dubito.extract(dubito.load("pypi:efficientnet_lite0"), dubito.open_images(images), cache, batch_size=32)
        actual = {name: studied(table, label.astype(np.int64), share) for name, share in SHARES.items()}
    for name, by_draw in actual.items():
        print(name, by_draw)
    result = {"images": IMAGES, "turned": TURNED, "draws": DRAWS, "of": actual}
    if args.write:
        write_expected(EXPECTED, "--data DIR", result)
    print(json.dumps(result))


def studied(table: dubito.Table, label: np.ndarray, share: float) -> dict[str, list[float]]:
    """Mean, least and most over draws."""
    by_draw = [one_draw(table, label, share, seed) for seed in range(DRAWS)]
    columns = {key: np.array([one[key] for one in by_draw]) for key in by_draw[0]}
    return {
        key: [round(float(one), 3) for one in (some.mean(), some.min(), some.max())] for key, some in columns.items()
    }


def one_draw(table: dubito.Table, label: np.ndarray, share: float, seed: int) -> dict[str, float]:
    """One draw."""
    rng = np.random.default_rng(seed)
    turned = rng.permutation(len(label))[: round(TURNED * len(label))]
    noisy = label.copy()
    noisy[turned] = (noisy[turned] + rng.integers(1, 10, len(turned))) % 10
    result = dubito.find_label_issues(table.extended(label=noisy), share=share)
    right = np.isin(result.rows, turned)
    restored = result.suggested[right] == label[result.rows[right]]
    return {
        "found": len(right),
        "precision": right.mean(),
        "recall": right.sum() / len(turned),
        "precision of the surest": right[:SUREST].mean(),
        "suggested class is the true one": restored.mean(),
    }


if __name__ == "__main__":
    main()
