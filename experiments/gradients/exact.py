"""The Fisher trace of every layer from all 1,000 classes, for some photographs: what estimates are held against.

    python experiments/gradients/exact.py --data DIR --cache DIR [--photos 40] [--write]

DIR holds imagenet_val_dev2000/ (images256.zip). One backward pass a class on EfficientNet-Lite0, about 70 core-seconds
a photograph; a kill costs at most eight of them. `--write` keeps expected/gradients_exact.json: one row a photograph,
one number a layer, which benchmarks/gradient.py reads. The last line is one JSON object.
"""

import argparse
import json
from pathlib import Path

import dubito
from dubito.data import Subset, open_images

EXPECTED = Path(__file__).parent.parent / "expected" / "gradients_exact.json"
MODEL = "pypi:efficientnet_lite0"
BLOCK = 8
STEP = 47
"""Every so manieth photograph: they are sorted by class."""


def main() -> None:
    """Extract, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--write", action="store_true", help=f"write {EXPECTED.name}")
    args = parser.parse_args()
    photos = open_images(args.data / "imagenet_val_dev2000" / "images256.zip")
    chosen = Subset(photos, range(0, STEP * args.photos, STEP))
    table = dubito.extract(
        dubito.load(MODEL),
        chosen,
        to=args.cache,
        probes=[dubito.probes.Gradient("exact")],
        batch_size=BLOCK,
        shard_size=BLOCK,
    )
    exact = table.whole("gradient")
    notes = table.provenance.probes["gradient"]["notes"]
    rows = {
        str(name): [float(f"{value:.6g}") for value in row.tolist()] for name, row in zip(table.id, exact, strict=True)
    }
    if args.write:
        command = f"python experiments/gradients/exact.py --data DIR --cache DIR --photos {args.photos} --write"
        result = {"command": command, "model": MODEL, "layers": notes["layers"], "photographs": rows}
        EXPECTED.write_text(json.dumps(result, indent=0).replace(",\n", ", ").replace("], ", "],\n") + "\n")
    print(json.dumps({"photographs": len(rows), "layers": exact.shape[1], "mean": float(exact.sum(1).mean())}))


if __name__ == "__main__":
    main()
