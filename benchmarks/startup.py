"""What starting up costs: `dubito score` of 90 images, against `import torch`, which nothing that reads tensors avoids.

    ratio          CPU seconds of `dubito score CACHE`  /  CPU seconds of `import torch` (<= 1.3)
    entropy_ratio  CPU seconds of `import dubito; dubito.Entropy`  /  the same

    python benchmarks/startup.py --turns 7

Every command runs in a process of its own, in turn; seconds are user and system time of that process, which other
programs on the machine hardly change, and the values are medians over turns. The last line is one JSON object.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from torch import nn

import dubito

IMAGES, CLASSES = 90, 1000


def main() -> None:
    """Parse the command line, race, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        write_cache(cache)
        commands = {
            "torch": ("-c", "import torch"),
            "entropy": ("-c", "import dubito; dubito.Entropy"),
            "score": ("-m", "dubito", "score", str(cache)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(turns + 1):
            for name, arguments in commands.items():
                spent = cpu_seconds(arguments)
                if turn:  # the first one reads files from the disk, and may compile them
                    seconds[name].append(spent)
    spent = {name: median(values) for name, values in seconds.items()}
    print(
        json.dumps(
            {
                "ratio": round(spent["score"] / spent["torch"], 3),
                "entropy_ratio": round(spent["entropy"] / spent["torch"], 3),
                **{f"{name}_seconds": round(value, 2) for name, value in spent.items()},
                "turns": turns,
            }
        )
    )


def write_cache(folder: Path) -> None:
    """A cache of random inputs by a tiny network, with as many classes as ImageNet has."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    dubito.extract(dubito.wrap(module), torch.randn(IMAGES, 3, 8, 8), to=folder, progress=False)


def cpu_seconds(arguments: tuple[str, ...]) -> float:
    """User and system time of Python with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 (our own)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
