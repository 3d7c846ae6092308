"""How close does training a head from a cache come to the bare arithmetic? One million rows on disk, in one run.

    ratio                  rows/s of training from the cache  /  rows/s of the same steps on one resident batch (>= 0.8)
    rows_per_second        dubito's training: reading the losses, checksums, shuffling, 1.25 passes, every shard
    bare_rows_per_second   the same network, ranking loss, optimiser and learning rates on 2,048 rows in memory
    memory_gb              the highest resident memory of the process that trains (< 1.5)
    hours_for_paper        what the paper's 92 million rows would take at this speed; its GPU took 2:26 hours
    distributed_ratio      rows/s of two processes that share the threads  /  rows/s of one process, starting included
    distributed_start      seconds until two processes are there and have made one step
    cache_gb, build_seconds    the cache on disk, and how long its extraction took

    python benchmarks/head_training.py [--rows 1000000] [--features 768] [--turns 3] [--folder DIR]

The cache is what dubito.extract makes of a small network and random inputs: float16 features, float32 logits and
losses, 512 rows a shard; a million rows of 768 take 1.6 GB. It is removed in the end unless DIR says where to keep it.
Every turn is a new process, so that no shard has been opened or verified before; whether the system still holds the
files in memory is left to the system. The training by two processes follows in another one. Half of the bare steps run
before the training and half after it, so that a slow minute slows both; figures are medians over the turns. The last
line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from _measure import seconds_of, timed, watched_memory
from rich.progress import track
from torch import Tensor, nn

import dubito
from dubito.heads.loop import make_optimizer, set_lr
from dubito.heads.losses import ranking_loss
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Plan

PAPER_ROWS = 460 * 200_000
BATCH = 2048
PASSES = 1.25
BARE_SHARE = 0.4
"""Of the steps that the training takes: enough to time them."""


def main() -> None:
    """Make the cache, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the cache here, or use the one that is here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place) / "cache"
        built = seconds_of(lambda: made(folder, args.rows, args.features))
        turns = [
            in_new_process(turn, folder) | in_new_process(distributed_turn, folder)
            for _ in track(range(args.turns), description="train")
        ]
        size = sum(file.stat().st_size for file in folder.iterdir())
    print(json.dumps(summary(turns) | {"build_seconds": round(built, 1), "cache_gb": round(size / 1e9, 3)}))


def made(folder: Path, rows: int, features: int) -> None:
    """A cache as any extraction writes it; its network is small, so that the disk is all that takes time."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = dubito.wrap(nn.Sequential(nn.Linear(16, features), nn.ReLU(), nn.Linear(features, 10)))
    inputs, labels = rng.standard_normal((rows, 16), dtype=np.float32), rng.integers(10, size=rows)
    dubito.extract(model, inputs, folder, labels=labels, batch_size=512)


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    """The medians over the turns, and the highest memory of any."""
    rate = statistics.median(turn["rows"] / turn["seconds"] for turn in turns)
    bare_rate = statistics.median(turn["bare_rows"] / turn["bare_seconds"] for turn in turns)
    ratios = [turn["rows"] / turn["seconds"] * turn["bare_seconds"] / turn["bare_rows"] for turn in turns]
    distributed = [turn["seconds"] / turn["distributed_seconds"] for turn in turns]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "lowest_ratio": round(min(ratios), 4),
        "rows_per_second": round(rate),
        "bare_rows_per_second": round(bare_rate),
        "memory_gb": round(max(turn["memory"] for turn in turns) / 1e9, 3),
        "hours_for_paper": round(PAPER_ROWS / rate / 3600, 3),
        "distributed_ratio": round(statistics.median(distributed), 4),
        "distributed_start": round(statistics.median(turn["distributed_start"] for turn in turns), 2),
        "rows": int(turns[0]["table_rows"]),
        "features": int(turns[0]["features"]),
        "batch": BATCH,
        "turns": len(turns),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 1,
    }


def in_new_process(measured: Callable[[Path], dict[str, float]], folder: Path) -> dict[str, float]:
    """One turn, where neither memory nor open shards are left from before."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, folder).result()


def turn(folder: Path) -> dict[str, float]:
    """Bare steps, the training, bare steps; and the memory meanwhile."""
    table = dubito.open(folder)
    recipe = recipe_for(table)
    plan = recipe.plan(len(table))
    steps = max(1, round(BARE_SHARE * plan.steps / 2))
    features = table.shape("feature")[1]
    generator = torch.Generator().manual_seed(0)
    rows, losses = torch.rand(BATCH, features, generator=generator), torch.rand(BATCH, generator=generator)
    bare(rows, losses, plan, max(1, steps // 10))
    peak: list[int] = []
    with watched_memory(peak):
        before = bare(rows, losses, plan, steps)
        trained, seconds = timed(lambda: dubito.UncertaintyHead(recipe=recipe).train(table))
        after = bare(rows, losses, plan, steps)
    return {
        "rows": trained.head.trained_["rows_seen"],
        "seconds": seconds,
        "bare_rows": 2 * steps * BATCH,
        "bare_seconds": before + after,
        "memory": max(peak),
        "table_rows": len(table),
        "features": features,
    }


def distributed_turn(folder: Path) -> dict[str, float]:
    """The same training by two processes."""
    table = dubito.open(folder)
    one_step = dubito.heads.Recipe(batch=BATCH, rows=BATCH)
    start = seconds_of(lambda: dubito.train(table.rows(slice(BATCH)), recipe=one_step, processes=2, progress=False))
    seconds = seconds_of(lambda: dubito.train(table, recipe=recipe_for(table), processes=2, progress=False))
    return {"distributed_seconds": seconds, "distributed_start": start}


def recipe_for(table: dubito.Table) -> dubito.heads.Recipe:
    """A little more than one pass, in batches of the paper's size."""
    return dubito.heads.Recipe(batch=BATCH, rows=round(PASSES * len(table)))


def bare(rows: Tensor, losses: Tensor, plan: Plan, steps: int) -> float:
    """Seconds of so many steps of the same training on one batch."""
    module = HeadModule(rows.shape[1], seed=1)
    optimizer = make_optimizer(module, plan.recipe)
    started = time.perf_counter()
    for step in range(steps):
        set_lr(optimizer, plan.lr(step))
        loss = ranking_loss(module(rows), losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
