"""What does a cache save? Training a head from cached features against training it through the network from JPEGs.

    ratio                     rows/s from the cache  /  rows/s through the network (>= 500; the paper: 180, on a GPU)
    kept_ratio                the same, but the network keeps its freed memory between batches (dubito.cache.runner)
    rows_per_second           dubito's training of the default head from a cache on disk, opened anew in every turn
    network_rows_per_second   the same steps of the same head, but every row is decoded, augmented and run through the
                              frozen network when it is needed: JPEGs by one worker a core, 16 photographs at once
    extract_seconds           what the cache cost, once

    python benchmarks/cache_speedup.py --data DIR [--images 256] [--turns 3] [--rows 200000]

DIR holds imagenet_val_dev2000/ (images256.zip and labels.csv). EfficientNet-Lite0 sees eight augmented epochs of the
photographs: of 256 that makes 2,048 rows of 1,280 features, one batch of the head on either way. In a turn the network
makes all of them anew. The cache gives --rows of them, many times the same ones, but from the files each time: they are
listed again and again until they do not fit into the training's buffer. Medians over the turns. The last line is one
JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from _measure import seconds_of
from rich.progress import track
from torch import Tensor

import dubito
from dubito.cache.runner import batches, kept_memory
from dubito.cache.shards import forget_shards
from dubito.data import Augmented, Subset
from dubito.heads.loop import make_optimizer, set_lr
from dubito.heads.losses import ranking_loss
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Plan
from dubito.models import WrappedClassifier
from dubito.threads import cores
from dubito.types import Images

EPOCHS = 8
FORWARD_BATCH = 16
LISTED = 131_072
"""Rows that the training is shown: more than its buffer holds."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="that a turn takes from the cache")
    args = parser.parse_args()
    folder = args.data / "imagenet_val_dev2000"
    images = dubito.open_images(folder / "images256.zip", folder / "labels.csv")
    photos = Subset(images, range(min(args.images, len(images))))
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measure(photos, Path(place) / "cache", args.turns, args.rows)))


def measure(photos: Images, cache: Path, turns: int, rows: int) -> dict[str, float | int]:
    """Both ways in turns, so that a slow minute slows both."""
    model = dubito.load("pypi:efficientnet_lite0")
    made = seconds_of(lambda: dubito.extract(model, photos, cache, epochs=EPOCHS))
    batch = EPOCHS * len(photos)
    recipe = dubito.heads.Recipe(batch=batch, rows=rows)
    plan = recipe.plan(batch)
    seconds: dict[str, list[float]] = {"cache": [], "network": [], "kept": []}
    for turn in track(range(turns), description="measure"):
        seconds["cache"].append(seconds_of(lambda: from_cache(cache, recipe)))
        seconds["network"].append(seconds_of(lambda turn=turn: through_network(model, photos, plan, turn)))
        with kept_memory():
            seconds["kept"].append(seconds_of(lambda turn=turn: through_network(model, photos, plan, turn)))
    rate = plan.steps * batch / statistics.median(seconds["cache"])
    network_rate, kept_rate = (batch / statistics.median(seconds[way]) for way in ("network", "kept"))
    return {
        "ratio": round(rate / network_rate, 1),
        "kept_ratio": round(rate / kept_rate, 1),
        "rows_per_second": round(rate),
        "network_rows_per_second": round(network_rate, 2),
        "extract_seconds": round(made, 1),
        "photographs": len(photos),
        "features": dubito.open(cache).shape("feature")[1],
        "batch": batch,
        "forward_batch": FORWARD_BATCH,
        "turns": turns,
        "cores": os.cpu_count() or 1,
    }


def from_cache(cache: Path, recipe: dubito.heads.Recipe) -> None:
    """The training as users run it, with files opened and verified again."""
    forget_shards()
    table = dubito.open(cache)
    dubito.UncertaintyHead(recipe=recipe).train(dubito.concat([table] * -(-LISTED // len(table))))


def through_network(model: WrappedClassifier, photos: Images, plan: Plan, turn: int) -> None:
    """One step of the head on rows that are all made for it."""
    images = Augmented(photos, EPOCHS, dubito.Augment(seed=turn), model.transform.size)
    module = HeadModule(model.head()[0].shape[1], seed=1)
    optimizer = make_optimizer(module, plan.recipe)
    rows, losses = features_and_losses(model, images, turn)
    set_lr(optimizer, plan.lr(0))
    loss = ranking_loss(module(rows), losses)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def features_and_losses(model: WrappedClassifier, images: Augmented, seed: int) -> tuple[Tensor, Tensor]:
    """All rows in random order: decoded in workers, run in small batches, put together."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    groups = [group.tolist() for group in order.split(FORWARD_BATCH)]
    rows, losses = [], []
    for batch in batches(images, model.transform, groups, cores()):
        columns = dubito.probes.Forward(feature_dtype="float32").run(
            model, model.transform.finish(batch.inputs), images.labels[batch.indices]
        )
        rows.append(columns["feature"])
        losses.append(columns["loss"])
    return torch.cat(rows), torch.cat(losses)


if __name__ == "__main__":
    main()
