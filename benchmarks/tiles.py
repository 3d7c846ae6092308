"""What do tiles cost? All grids from 2 x 2 to 7 x 7 at once, beside one plain forward pass, at 1,000 classes.

    ratio          seconds of the tiles probe / seconds of module(x), ResNet-152, the paper's first (<= 1.05)
    memory_ratio   what the probe adds to resident memory at most / what module(x) adds, ResNet-152 (<= 1.5)
    models         the same for every network: ms an image, ratio, and the median of the turns' ratios; `both` is the
                   ratio of tiles and forward probe together, which is what an extraction of both pays; memory in MB

    python benchmarks/tiles.py [--batch 16] [--turns 7] [--threads N] [--models resnet50 ...]

The head runs on 49 tiles instead of one, whatever the network before it costs: the smaller it is, the larger the ratio.
Weights are random, which cost the same as trained ones; residuals begin at zero, so that deep networks do not overflow.
In every turn the plain pass runs before and after the probe. What else a machine does can only add to a time, so ratios
are of the fastest passes; of the plain pass there are twice as many. All keep freed memory between batches, as
extraction does. Memory is measured in new processes without that, each the largest growth during three passes after a
small one. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import timm
import torch
import torchvision
from _measure import growth_of, seconds_of
from rich.progress import track
from torch import Tensor, nn

import dubito
from dubito.cache.runner import kept_memory
from dubito.models import WrappedClassifier
from dubito.models.frozen import frozen
from dubito.probes.forward import Forward
from dubito.probes.tiles import Tiles

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet152": partial(torchvision.models.resnet152, zero_init_residual=True),
    "wide_resnet101_2": partial(torchvision.models.wide_resnet101_2, zero_init_residual=True),
    "resnext101_64x4d": partial(torchvision.models.resnext101_64x4d, zero_init_residual=True),
    "resnet50": partial(torchvision.models.resnet50, zero_init_residual=True),
    "squeezenet1_1": torchvision.models.squeezenet1_1,
    "tf_efficientnet_lite0": lambda: timm.create_model("tf_efficientnet_lite0"),
    "convnext_tiny": lambda: timm.create_model("convnext_tiny"),
    "maxvit_tiny_rw_224": lambda: timm.create_model("maxvit_tiny_rw_224"),
    "vit_small_patch16_224": lambda: timm.create_model("vit_small_patch16_224"),
}
PAPER = "resnet152"
PASSES = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {}
    for name in track(args.models, description="tiles"):
        result[name] = costs(name, args.batch, args.turns) | memory(name, args.batch, args.threads)
        print(name, json.dumps(result[name]))
    first = result[PAPER if PAPER in result else args.models[0]]
    print(
        json.dumps(
            {
                "ratio": first["ratio"],
                "memory_ratio": first["memory_ratio"],
                "models": result,
                "batch": args.batch,
                "turns": args.turns,
                "threads": args.threads,
                "cores": os.cpu_count() or 1,
            }
        )
    )


def build(name: str, batch: int) -> tuple[WrappedClassifier, Tensor, Tensor]:
    """The classifier, a batch and labels."""
    torch.manual_seed(0)
    model = dubito.wrap(MODELS[name]().eval(), name=name)
    return model, torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))


def costs(name: str, batch: int, turns: int) -> dict[str, object]:
    """Times in milliseconds an image, and their ratios."""
    model, x, label = build(name, batch)

    def both() -> None:
        _, feature = Tiles().run_and_share(model, x, label)
        Forward().run(model, x, label, feature=feature)

    with frozen(model.module), kept_memory():
        grid = model.tiled(x[:2]).grid
        both()
        rows = []
        for _ in range(turns):
            seconds = [seconds_of(run) for run in (plain(model, x), tiles(model, x, label), plain(model, x), both)]
            before, tiled, after, all_columns = seconds
            rows.append((tiled / (before + after) * 2, min(before, after), tiled, all_columns))
    ratios, alone, tiled, together = zip(*rows, strict=True)
    return {
        "ratio": round(min(tiled) / min(alone), 4),
        "median": round(statistics.median(ratios), 4),
        "both": round(min(together) / min(alone), 4),
        "plain_ms": round(1000 * min(alone) / batch, 2),
        "tiles_ms": round(1000 * min(tiled) / batch, 2),
        "map": f"{grid[0]}x{grid[1]}",
    }


def plain(model: WrappedClassifier, x: Tensor) -> Callable[[], object]:
    """The network alone."""
    return lambda: model.module(x)


def tiles(model: WrappedClassifier, x: Tensor, label: Tensor) -> Callable[[], object]:
    """All grids at once."""
    return lambda: Tiles().run(model, x, label)


def memory(name: str, batch: int, threads: int) -> dict[str, float]:
    """What either adds to resident memory, and the ratio."""
    added = {}
    for with_tiles in (False, True):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            added[with_tiles] = pool.submit(growth, name, batch, threads, with_tiles=with_tiles).result()
    return {
        "memory_ratio": round(added[True] / added[False], 4),
        "plain_mb": round(added[False] / 1e6, 1),
        "tiles_mb": round(added[True] / 1e6, 1),
    }


def growth(name: str, batch: int, threads: int, *, with_tiles: bool) -> float:
    """The peak during some passes, less what was there after one pass of two images."""
    torch.set_num_threads(threads)
    model, x, label = build(name, batch)
    with frozen(model.module):
        Tiles().run(model, x[:2], label[:2])
        return growth_of(tiles(model, x, label) if with_tiles else plain(model, x), PASSES)


if __name__ == "__main__":
    main()
