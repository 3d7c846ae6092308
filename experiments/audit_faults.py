"""Does the audit find what people do wrong, and keep quiet where nothing is? Faults planted on EfficientNet-Lite0.

    python experiments/audit_faults.py --data DIR [--more-data DIR] [--limit 500] [--only NAME ...] [--write]

DIR holds imagenet_val_dev2000/ (images256.zip and labels.csv). One half of the photographs is audited, the other stands
for the training set. Each set-up has one fault, the first one none. A second set-up without a fault is ResNet-20 on the
test images of CIFAR-10, against its training images: DIR holds cifar10_resnets/resnet20.pt, the other DIR cifar10.npz.
There the softmax is saturated in float32 by itself, so that it may be called suspicious, but not wrong.

Prints a table of what was planted and what was found; the last line is one JSON object; --write puts it into
expected/audit_faults.json, too. --only takes some of the set-ups, to try the script out.
"""

import argparse
import copy
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from _expected import write_expected
from _resnet_cifar import resnet
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dubito
from dubito.audit.audit import Audit, audit
from dubito.data import Labelled, Subset
from dubito.models import WrappedClassifier
from dubito.models.transform import IMAGENET_MEAN, IMAGENET_STD

EXPECTED = Path(__file__).parent / "expected" / "audit_faults.json"
SHARED = 30
"""Photographs that are put into both sets."""
DEAD = 400
"""Features that are set to zero, of 1,280."""
FACTOR = 50

CIFAR = "nothing (ResNet-20 on CIFAR-10)"
TRANSFORM, TRAIN = "wrong normalisation or channel order", "train mode"
PLANTED = {
    "nothing": None,
    "ImageNet mean and std": TRANSFORM,
    "blue before red": TRANSFORM,
    "train mode": TRAIN,
    "probabilities as logits": "probabilities in place of logits",
    f"logits x {FACTOR}": "saturated softmax",
    "labels + 1": "labels off by one",
    f"{SHARED} photographs in both sets": "duplicates across the sets",
    f"{DEAD} features set to zero": "dead features",
}

RIGHT = ("yes", "quiet", "nothing wrong")
"""Verdicts as they should be; "nothing wrong" is no alarm, but something suspicious or a note."""


def main() -> None:
    """Plant, audit, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--more-data", type=Path)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--only", nargs="+", choices=[*PLANTED, CIFAR], metavar="NAME", help=", ".join(PLANTED))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    result = study(args)
    if args.write:
        more = "" if args.more_data is None else " --more-data DIR"
        write_expected(EXPECTED, f"--data DIR{more} --limit {args.limit}", result)
    print(json.dumps(result))


def study(args: argparse.Namespace) -> dict:
    """Every set-up in turn."""
    asked_for = args.only or [*PLANTED, CIFAR]
    rows = photographs(args.data / "imagenet_val_dev2000", [name for name in PLANTED if name in asked_for], args.limit)
    if CIFAR in asked_for:
        if args.more_data is None:
            print(f"{CIFAR}: left out, as --more-data is not given")
        else:
            rows.append(cifar(args.data / "cifar10_resnets", args.more_data / "cifar10.npz", args.limit))
    table = Table("planted", "found", "what was seen", "seconds")
    for entry in rows:
        table.add_row(entry["planted"], entry["verdict"], "\n".join(entry["what"]), f"{entry['seconds']:.0f}")
    Console(width=160).print(table)
    right = sum(entry["verdict"] in RIGHT for entry in rows)
    return {"limit": args.limit, "right": right, "set_ups": len(rows), "rows": rows}


def photographs(photos: Path, names: list[str], limit: int) -> list[dict]:
    """EfficientNet-Lite0 with each of some faults."""
    if not names:
        return []
    images = dubito.open_images(photos / "images256.zip", labels=photos / "labels.csv")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    half = len(order) // 2
    test, train = Subset(images, order[:half]), Subset(images, order[half:])
    leaky = Subset(images, order[half:] + order[:SHARED])
    shifted = Labelled(test, test.labels + 1)
    model = dubito.load("pypi:efficientnet_lite0")
    rows = []
    for name in names:
        audited = shifted if name == "labels + 1" else test
        other = leaky if "both sets" in name else train
        start = time.perf_counter()
        result = audit(planted(model, name), audited, against=other, limit=limit)
        rows.append(row(name, PLANTED[name], result, time.perf_counter() - start))
    return rows


def cifar(weights: Path, pixels: Path, limit: int) -> dict:
    """ResNet-20 on CIFAR-10, as its makers trained it: nothing is wrong."""
    model = dubito.wrap(
        resnet(20, weights),
        transform=dubito.Preprocess(size=(32, 32), resize=(32, 32)),
        classes=10,
        name="resnet20",
    )
    test, train = (dubito.open_images(f"{pixels}#{half}") for half in ("test", "train"))
    start = time.perf_counter()
    result = audit(model, test, against=train, limit=limit)
    return row(CIFAR, None, result, time.perf_counter() - start)


def row(name: str, expected: str | None, result: Audit, seconds: float) -> dict:
    """Whether the planted fault was found, and what else was said."""
    checks = [finding.check for finding in result.issues]
    if expected is None:
        verdict = "quiet" if not checks else "nothing wrong" if result.ok else "false alarm"
    elif expected not in checks:
        verdict = "missed"
    else:
        verdict = "yes" if checks == [expected] else "yes, and more"
    return {
        "planted": name,
        "verdict": verdict,
        "findings": [[finding.severity, finding.check] for finding in result.issues],
        "what": [finding.what for finding in result.issues],
        "ok": result.ok,
        "accuracy": result.figures.get("accuracy"),
        "seconds": round(seconds, 1),
    }


def planted(model: WrappedClassifier, fault: str) -> WrappedClassifier:
    """The model with the fault, where it is one of the model."""
    transform, module = model.transform, model.module
    if fault == "ImageNet mean and std":
        transform = replace(transform, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    elif fault == "blue before red":
        transform = replace(transform, channels="BGR")
    elif fault == "train mode":
        module = copy.deepcopy(module).train()
    elif fault == "probabilities as logits":
        module = nn.Sequential(module, nn.Softmax(-1))
    elif fault.startswith("logits x"):
        module = copy.deepcopy(module)
        with torch.no_grad():
            module.classifier.weight *= FACTOR
            module.classifier.bias *= FACTOR
    elif fault.endswith("set to zero"):
        module = DeadFeatures(module, DEAD)
    return dubito.wrap(module, transform=transform, classes=model.classes, name=f"{model.name} with {fault}")


class DeadFeatures(nn.Module):
    """The network with its first features zeroed before the classifier."""

    def __init__(self, network: nn.Module, dead: int) -> None:
        super().__init__()
        self.network, self.dead = network, dead

    def forward(self, x: Tensor) -> Tensor:
        """Pool, zero, classify."""
        z = self.network.forward_head(self.network.forward_features(x), pre_logits=True)
        alive = torch.arange(z.shape[1], device=z.device) >= self.dead
        return self.network.classifier(z * alive)


if __name__ == "__main__":
    main()
