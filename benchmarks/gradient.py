"""What do gradients cost, and how close does the default come? EfficientNet-Lite0 (1,000 classes), ResNet-20 (10).

    speedup     seconds an image of the naive loop (a backward pass a class, images one by one) / of the probe (>= 100)
    passes      seconds of the probe / of a plain forward and backward pass of the same batch (<= 6); also as `ratio`
    spearman    of the estimate with the exact value, all 1,000 classes, summed over layers (>= 0.98)
    memory      what the probe adds to resident memory at most / what the plain pass adds (<= 2)
    resnet20    the exact probe, all 10 classes, in plain passes of the same batch (<= 12), and its memory

    python benchmarks/gradient.py --data DIR [--batch 16] [--turns 5] [--threads N]

DIR holds imagenet_val_dev2000/ (images256.zip); exact values are those of experiments/expected/gradients_exact.json,
made by experiments/gradients/exact.py. A plain pass is what a step of training costs: forward, cross-entropy, backward
to every parameter. The naive loop is measured on some classes of one image and scaled to all: forward, one backward a
class, and the sum of squares of all gradients. Whatever else a machine does can only add to a time, so ratios are of
the fastest turns. Memory is measured in new processes. ResNet-20 has random weights and an image of noise, which cost
the same as others. The last line is one JSON object.
"""

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from _measure import growth_of, seconds_of
from rich.progress import track
from torch import Tensor, nn

import dubito
from dubito.cache.runner import kept_memory
from dubito.data import Subset, open_images
from dubito.metrics import spearman
from dubito.models import WrappedClassifier

EXACT = Path(__file__).parent.parent / "experiments" / "expected" / "gradients_exact.json"
SAMPLE = 20
"""Classes of the naive loop."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = costs("lite0", args.batch, args.turns)
    result |= against_loop("lite0", result["probe_ms"], args.turns)
    result["memory"] = memory("lite0", args.batch, args.threads)
    print(json.dumps(result))
    small = costs("resnet20", 8 * args.batch, args.turns)
    small = {"passes": small["passes"], "memory": memory("resnet20", 8 * args.batch, args.threads)}
    print(json.dumps(small))
    close = agreement(args.data)
    settings = {"batch": args.batch, "turns": args.turns, "threads": args.threads, "cores": os.cpu_count() or 1}
    print(json.dumps({"ratio": result["passes"], **result, **close, "resnet20": small, **settings}))


def build(name: str) -> tuple[WrappedClassifier, dubito.probes.Gradient, tuple[int, ...]]:
    """The classifier, its probe, and the shape of an input."""
    if name == "lite0":
        return dubito.load("pypi:efficientnet_lite0"), dubito.probes.Gradient(), (3, 224, 224)
    torch.manual_seed(0)
    return dubito.wrap(resnet20().eval(), name=name), dubito.probes.Gradient("exact"), (3, 32, 32)


def costs(name: str, batch: int, turns: int) -> dict[str, float]:
    """Milliseconds an image, and how many plain passes the probe costs."""
    model, probe, shape = build(name)
    x = torch.randn(batch, *shape)
    plain, probed = plain_pass(model.module, x), lambda: probe.run(model, x, None)
    with kept_memory():
        plain()
        probed()
        rows = [(seconds_of(plain), seconds_of(probed)) for _ in track(range(turns), name)]
    once, ours = (min(column) for column in zip(*rows, strict=True))
    return {
        "passes": round(ours / once, 3),
        "plain_ms": round(1000 * once / batch, 2),
        "probe_ms": round(1000 * ours / batch, 2),
    }


def against_loop(name: str, probe_ms: float, turns: int) -> dict[str, float]:
    """How much faster an image is than by one backward pass a class."""
    model, _, shape = build(name)
    module, x = model.module.eval().requires_grad_(True), torch.randn(1, *shape)
    with kept_memory():
        naive_ms = 1000 * min(naive(module, x) for _ in track(range(turns), "naive"))
    return {"speedup": round(naive_ms / probe_ms, 1), "naive_ms": round(naive_ms, 1)}


def plain_pass(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward, and backward to every parameter."""
    module = module.eval().requires_grad_(True)

    def run() -> None:
        logits = module(x)
        F.cross_entropy(logits, logits.argmax(1)).backward()
        module.zero_grad()

    return run


def naive(module: nn.Module, x: Tensor) -> float:
    """Seconds of all classes of one image, from some of them."""
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [module(x).log_softmax(1)[0]]

    def some_classes() -> None:
        for y in range(SAMPLE):
            kept[0][y].backward(retain_graph=True)
            sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
            module.zero_grad()

    return seconds_of(forward) + seconds_of(some_classes) * len(kept[0]) / SAMPLE


def memory(name: str, batch: int, threads: int) -> float:
    """What the probe adds to resident memory over what the plain pass adds."""
    added = []
    for probed in (False, True):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            added.append(pool.submit(growth, name, batch, threads, probed=probed).result())
    return round(added[1] / added[0], 3)


def growth(name: str, batch: int, threads: int, *, probed: bool) -> float:
    """Bytes, after a small pass."""
    torch.set_num_threads(threads)
    model, probe, shape = build(name)
    x = torch.randn(batch, *shape)
    probe.run(model, x[:2], None)
    plain_pass(model.module, x[:2])()
    return growth_of((lambda: probe.run(model, x, None)) if probed else plain_pass(model.module, x))


def agreement(data: Path) -> dict[str, float]:
    """Of the default with exact values, over photographs: summed over layers, and with weights that grow by depth."""
    kept = json.loads(EXACT.read_text())["photographs"]
    images = open_images(data / "imagenet_val_dev2000" / "images256.zip")
    place = {str(name): number for number, name in enumerate(images.ids)}
    photos = Subset(images, [place[name] for name in kept])
    model = dubito.load("pypi:efficientnet_lite0")
    x = model.transform.finish(torch.stack([model.transform.prepare(photos.read(row)) for row in range(len(photos))]))
    exact = torch.tensor(list(kept.values()), dtype=torch.float64)
    probe = dubito.probes.Gradient()
    result = torch.cat([probe.run(model, part, None)["gradient"] for part in x.split(8)]).double()
    weight = torch.exp(4 * (torch.arange(exact.shape[1], dtype=torch.float64) + 1) / exact.shape[1])
    return {
        "spearman": round(spearman(result.sum(1), exact.sum(1)), 4),
        "spearman_by_depth": round(spearman(result @ weight, exact @ weight), 4),
        "relative_error": round(float(((result.sum(1) - exact.sum(1)).abs() / exact.sum(1)).median()), 4),
        "photographs": len(photos),
    }


def resnet20() -> nn.Module:
    """Twenty layers of 16, 32 and 64 channels for images of 32 x 32 pixels (He et al. 2016)."""

    class Block(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            stride = 1 if before == after else 2
            self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
            self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            half = (out.shape[1] - x.shape[1]) // 2
            return F.relu(out + (F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half)) if half else x))

    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(before, after) for before, after in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


if __name__ == "__main__":
    main()
