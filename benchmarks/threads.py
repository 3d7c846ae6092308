"""One guard called from many threads, as by a server of requests: images per second, beside one thread.

    ratio                  images/s with 8 threads, each of which calls the guard on one JPEG file after the other  /
                           images/s with one thread, in the median of the rounds
    images_per_second      of either
    median_milliseconds    of one call, from its start to the verdict, waiting for other threads included
    cpu_milliseconds       of all cores, per image: what contention of threads costs, also on a machine that is busy

Passes through the model run one at a time, each on all cores; threads gain what is outside of passes: reading,
decoding and resizing files, scores and verdicts. Where the model takes nearly all of the time, the ratio is near 1. The
network has random weights, which cost the same as trained ones; the photographs are those inside scikit-image and
scikit-learn.

    python benchmarks/threads.py [--model tf_efficientnet_lite0] [--threads 8] [--images 96] [--rounds 5]

The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import timm
import torch
from _measure import seconds_of
from rich.progress import track

import dubito
from dubito.data.photos import photos

SIZE = 224
CALIBRATION, CLASSES = 300, 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tf_efficientnet_lite0", help="of timm")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--images", type=int, default=96, help="calls of a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    guard = fitted(args.model)
    with tempfile.TemporaryDirectory() as place:
        files = written(Path(place), args.images)
        for threads in (1, args.threads):
            called(guard, files[: 2 * args.threads], threads)
        rounds = [
            {threads: called(guard, files, threads) for threads in (1, args.threads)}
            for _ in track(range(args.rounds), "rounds")
        ]
    result: dict[str, object] = {
        "ratio": round(statistics.median(one[args.threads][0] / one[1][0] for one in rounds), 4),
    }
    for place, name in enumerate(("images_per_second", "median_milliseconds", "cpu_milliseconds")):
        result[name] = {
            f"{threads} threads": round(statistics.median(one[threads][place] for one in rounds), 2)
            for threads in (1, args.threads)
        }
    result |= {
        "model": args.model,
        "images": args.images,
        "cores": os.cpu_count() or 1,
    }
    print(json.dumps(result))


def fitted(name: str) -> dubito.Guard:
    """A guard of a network with random weights, with all defaults, whose labels are its own predictions."""
    torch.manual_seed(0)
    model = dubito.wrap(timm.create_model(name, num_classes=CLASSES).eval(), transform=dubito.Preprocess(SIZE, 256))
    x = torch.randn(CALIBRATION, 3, SIZE, SIZE)
    table = dubito.extract(model, x, progress=False)
    return dubito.Guard.fit(model, table.extended(label=table.logit.argmax(1)), risk=0.1)


def written(folder: Path, count: int) -> list[Path]:
    """Photographs as JPEG files."""
    files = [folder / f"{index}.jpg" for index in range(count)]
    for file, (_, image) in zip(files, cycle(photos()), strict=False):
        image.resize((500, 375)).save(file, quality=90)
    return files


def called(guard: dubito.Guard, files: list[Path], threads: int) -> tuple[float, float, float]:
    """Images per second, the median milliseconds of a call, and those of all cores per image."""
    start = threading.Barrier(threads + 1)

    def work(thread: int) -> list[float]:
        start.wait()
        return [seconds_of(lambda file=file: guard(file)) for file in files[thread::threads]]

    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(work, thread) for thread in range(threads)]
        start.wait()
        before = time.process_time()
        seconds = seconds_of(lambda: [one.result() for one in done])
        busy = time.process_time() - before
    waits = [wait for one in done for wait in one.result()]
    return len(files) / seconds, 1000 * statistics.median(waits), 1000 * busy / len(files)


if __name__ == "__main__":
    main()
