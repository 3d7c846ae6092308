"""Are the loaded models the real ones? Top-1 on ImageNet validation photographs, and how well their doubts are placed.

    python experiments/imagenet_accuracy.py --data DIR [--models efficientnet_lite0 ...] [--cache DIR]

DIR holds imagenet_val_dev2000/ (images256.zip and labels.csv) and, for the OOD images, dtd10_dev400/ (images.zip).
Prints the evaluation of every model, and last one JSON object with the accuracy beside the published value.
"""

import argparse
import json
import tempfile
from pathlib import Path

import dubito

PUBLISHED = {"efficientnet_lite0": 0.751, "efficientnet_lite1": 0.767, "efficientnet_lite2": 0.776}
"""Top-1 on all 50,000 photographs, by the models' authors (float32 checkpoints)."""


def main() -> None:
    """Extract, score, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0"], choices=PUBLISHED)
    parser.add_argument("--cache", type=Path, help="keep the extracted columns here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps({name: evaluated(name, args.data, args.cache or Path(place)) for name in args.models}))


def evaluated(name: str, data: Path, cache: Path) -> dict[str, float]:
    """One model: its accuracy with an interval, and its scores against errors and against textures."""
    model = dubito.load(f"pypi:{name}")
    photos = data / "imagenet_val_dev2000"
    in_distribution = dubito.extract(
        model, photos / "images256.zip", cache / name / "known", labels=photos / "labels.csv"
    )
    ood_table = dubito.extract(model, data / "dtd10_dev400" / "images.zip", cache / name / "foreign")
    scores = [
        dubito.MaxProbability(),
        dubito.Entropy(),
        dubito.scores.ScaledEntropy(),
        dubito.Margin(),
        dubito.scores.MaxLogit(),
        dubito.Energy(),
    ]
    result = dubito.evaluate({score.name: score for score in scores}, in_distribution, ood=ood_table)
    print(f"\n{name}\n{result}")
    top1 = result.model["accuracy"]
    return {
        "top1": top1.value,
        "low": top1.low,
        "high": top1.high,
        "published": PUBLISHED[name],
        "images": len(in_distribution),
    }


if __name__ == "__main__":
    main()
