"""Ten members by masks from the MLP 784-4096-2048-10, against training that MLP once; both in the same process.

    ratio            seconds of extract_members with its default recipe  /  seconds of training (<= 2)
    accuracy         on 10,000 images unknown to both: of the model, of members (mean, lowest), of their ensemble
    mean_mi          mutual information of the members on those images: not bought by members that have not learned
    diversity, kept  I[mask; M] a unit in units of log 2; share of weights that a member keeps, by layer
    dense_ratio      seconds of one member's pass over those images  /  seconds of the whole model's

    python benchmarks/masks.py --data DIR            # DIR holds MNIST/raw, as torchvision lays it
    python benchmarks/masks.py                       # synthetic digits of the same shape and number
    python benchmarks/masks.py --rows 6000 --epochs 1 --threads 1

Training is that of Kirsch (2024), A.1, in fewer epochs: SGD with batches of 128, dropout of 0.1, momentum 0.9, and a
rate that travels the same way (experiments/implicit_ensembles/_mlps.py). Products of matrices are in the same precision
on both sides. The fewer the epochs of training, the harder the race: the paper trains for 100. Seconds are those of the
processor, all threads together, so that other programs on the machine do not count. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from dubito.cache.runner import bar, kept_memory
from dubito.ensembles import ImplicitEnsemble, extract_members
from dubito.metrics import decompose

BATCH, MOMENTUM, DROPOUT, WAY = 128, 0.9, 0.1, 0.01 * 100
TEST = 10_000
Result = TypeVar("Result")


def main() -> None:
    """Parse the command line, race, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="MNIST; synthetic images without it")
    parser.add_argument("--rows", type=int, default=60_000, help="training images")
    parser.add_argument("--epochs", type=int, default=4, help="of training")
    parser.add_argument("--width", type=int, default=64, help="factor: 64 w and 32 w hidden units")
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16", help="of products")
    parser.add_argument("--threads", type=int, help="all by default")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    (x, y), test = mnist(options.data) if options.data else synthetic()
    x, y = x[: options.rows], y[: options.rows]
    halved = options.precision == "bfloat16"
    model, training = seconds(lambda: trained(mlp(options.width), x, y, options.epochs, halved=halved))
    print(f"training: {training:.1f} s", flush=True)
    with precision(halved=halved):
        actual, extraction = seconds(lambda: extract_members(model, x, y, members=options.members))
    print(f"extraction: {extraction:.1f} s", flush=True)
    result = {
        "ratio": round(extraction / training, 3),
        "training_seconds": round(training, 1),
        "extraction_seconds": round(extraction, 1),
        **quality(model, actual, *test),
    }
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    settings["data"] = "MNIST" if options.data else "synthetic"
    print(json.dumps({**settings, "threads": torch.get_num_threads(), **result}))


@torch.no_grad()
def quality(model: nn.Module, result: ImplicitEnsemble, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What was learned, on images that neither has seen."""
    members = list(result)
    output, whole = seconds(lambda: logits_of(model, x))
    logits, all_members = seconds(lambda: torch.stack([logits_of(member, x) for member in members]))
    probs = logits.softmax(-1)
    right = [float((z.argmax(1) == y).double().mean()) for z in (output, *logits, probs.mean(0))]
    return {
        "accuracy": {
            "model": right[0],
            "members": round(sum(right[1:-1]) / len(members), 4),
            "lowest_member": min(right[1:-1]),
            "ensemble": right[-1],
        },
        "mean_mi": round(float(decompose(probs).epistemic.mean()), 5),
        "diversity": round(result.diversity, 3),
        "kept": {name: round(share, 3) for name, share in result.kept().items()},
        "dense_ratio": round(all_members / len(members) / whole, 3),
    }


def mlp(width: int) -> nn.Sequential:
    """Untrained."""
    torch.manual_seed(0)
    first, second = 64 * width, 32 * width
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, first), nn.ReLU(), nn.Dropout(DROPOUT)),
        *(nn.Linear(first, second), nn.ReLU(), nn.Dropout(DROPOUT)),
        nn.Linear(second, 10),
    )


def trained(module: nn.Sequential, x: Tensor, y: Tensor, epochs: int, *, halved: bool) -> nn.Sequential:
    """After so many epochs, in eval mode."""
    step = torch.optim.SGD(module.parameters(), lr=WAY / epochs * (1 - MOMENTUM), momentum=MOMENTUM, fused=True)
    module.train()
    with kept_memory(), bar("training", epochs * len(x)) as advance:
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for rows in order.split(BATCH):
                with precision(halved=halved):
                    logits = module(x[rows])
                loss = F.cross_entropy(logits.float(), y[rows])
                step.zero_grad()
                loss.backward()
                step.step()
                advance(len(rows))
    return module.eval()


def logits_of(module: nn.Module, x: Tensor) -> Tensor:
    """In blocks of rows."""
    return torch.cat([module(part) for part in x.split(1000)])


def precision(*, halved: bool) -> contextlib.AbstractContextManager[Any]:
    """Of products of matrices, on both sides."""
    return torch.autocast("cpu", torch.bfloat16) if halved else contextlib.nullcontext()


def seconds(run: Callable[[], Result]) -> tuple[Result, float]:
    """What a call gives, and what the processor took for it."""
    start = time.process_time()
    return run(), time.process_time() - start


def mnist(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images between 0 and 1, and their classes."""
    from torchvision.datasets import MNIST  # noqa: PLC0415 (only where its files are)

    halves = [MNIST(str(folder), train=train) for train in (True, False)]
    train, test = ((half.data[:, None].float() / 255, half.targets) for half in halves)
    return train, test


def synthetic() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Ten smooth patterns, shifted, weakened and covered with noise: as large as MNIST, and not quite as easy."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(10, 1, 7, 7, generator=generator)
    patterns = F.interpolate(coarse, size=28, mode="bilinear").sigmoid()
    label = torch.randint(10, (60_000 + TEST,), generator=generator)
    strength = 0.2 + 0.8 * torch.rand(len(label), 1, 1, 1, generator=generator)
    x = strength * patterns[label] + 0.4 * torch.randn(len(label), 1, 28, 28, generator=generator)
    x = x.clamp(0, 1)
    return (x[:-TEST], label[:-TEST]), (x[-TEST:], label[-TEST:])


if __name__ == "__main__":
    main()
