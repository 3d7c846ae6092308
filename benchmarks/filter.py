"""How close does the literal filter come to the network alone? Noise made on the fly, in one run.

    ratio                   inputs/s of literal_filter  /  inputs/s of the network on one resident batch (>= 0.8)
    inputs_per_second       making the noise, the network, log-odds, histogram, the top patterns of ten classes
    bare_inputs_per_second  module(x) alone, on the same number of inputs at a time
    minutes_for_paper       what the paper's 2^27 inputs take at this speed
    memory_mb               by the number of draws, what the filter adds to resident memory, each in a new process

    python benchmarks/filter.py [--draws 262144] [--batch 2048] [--turns 5]

The network is that of the paper (C.4.2: 9 x 9 pixels, three convolutions), with random weights, which cost the same.
Half of the bare passes run before the filter and half after it, so that a slow minute slows both; both keep freed
memory between batches. Figures are medians over the turns. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import psutil
import torch
from _measure import seconds_of, watched_memory
from rich.progress import track
from torch import nn

from dubito.cache.runner import kept_memory
from dubito.explain.literal_filter import binary_inputs, literal_filter
from dubito.models.frozen import frozen

PAPER_DRAWS = 2**27
LONGER = 8
"""How many times longer the second memory run is."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2**18)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    module = network()
    turn(module, args.draws // 8, args.batch)
    turns = [turn(module, args.draws, args.batch) for _ in track(range(args.turns), description="filter")]
    lengths = (args.draws // LONGER, args.draws)
    memory = {n: in_new_process(n, args.batch) for n in track(lengths, description="memory")}
    ratios = [bare / filtered for filtered, bare in turns]
    rate, bare_rate = (args.draws / statistics.median(side) for side in zip(*turns, strict=True))
    print(
        json.dumps(
            {
                "ratio": round(statistics.median(ratios), 4),
                "lowest_ratio": round(min(ratios), 4),
                "inputs_per_second": round(rate),
                "bare_inputs_per_second": round(bare_rate),
                "minutes_for_paper": round(PAPER_DRAWS / rate / 60, 1),
                "memory_mb": {str(n): round(value / 1e6, 1) for n, value in memory.items()},
                "draws": args.draws,
                "batch": args.batch,
                "turns": args.turns,
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count() or 1,
            }
        )
    )


def network() -> nn.Sequential:
    """C.4.2."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 2), nn.ReLU(), nn.Flatten()),
        nn.Linear(64, 10),
    )


def turn(module: nn.Module, draws: int, batch: int) -> tuple[float, float]:
    """Seconds of the filter, and of the network alone for as many inputs."""
    passes = max(1, draws // batch // 2)
    before = bare(module, batch, passes)
    filtered = seconds_of(lambda: literal_filter(module, draws=draws, batch=batch, progress=False))
    return filtered, (before + bare(module, batch, passes)) * draws / (2 * passes * batch)


def bare(module: nn.Module, batch: int, passes: int) -> float:
    """Seconds of so many passes over one batch in memory."""
    x = binary_inputs((1, 9, 9), batch).float()

    def run() -> None:
        for _ in range(passes):
            module(x)

    with frozen(module), kept_memory():
        module(x)
        return seconds_of(run)


def in_new_process(draws: int, batch: int) -> float:
    """Bytes of resident memory that the filter adds, where nothing is left from before."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(added_memory, draws, batch).result()


def added_memory(draws: int, batch: int) -> float:
    """The peak while it runs, less what was there after one pass of the network."""
    module = network()
    bare(module, 2, 1)
    before = psutil.Process().memory_info().rss
    peak: list[int] = []
    with watched_memory(peak):
        literal_filter(module, draws=draws, batch=batch, progress=False)
    return float(max(peak) - before)


if __name__ == "__main__":
    main()
