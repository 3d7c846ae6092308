"""How close does extraction come to the bare model? Features and logits of EfficientNet-Lite0, everything in one run.

    ratio        images/s of extract from ready arrays (npz)  /  images/s of the bare model on the same batches
    kept_ratio   the same, but the bare model too keeps its freed memory between batches (dubito.cache.runner)
    jpeg_ratio   images/s of extract from JPEG files          /  1 / (seconds to decode + seconds in the model),
                 each with all cores: on a machine where decoding and model share the cores, that is the limit;
                 kept_jpeg_ratio with the model keeping its memory
    resume_seconds   calling extract again on the finished cache

    python benchmarks/extract.py [--data FOLDER] [--images 384] [--repeats 3]

FOLDER holds photographs, or a zip of them; without it, the photographs inside scikit-image and scikit-learn are used.
The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from _measure import seconds_of
from rich.progress import track

import dubito
from dubito.cache.runner import batches, kept_memory
from dubito.data import Subset
from dubito.data.photos import photos
from dubito.models import WrappedClassifier
from dubito.types import Images

BATCH = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of photographs or of a zip with them")
    parser.add_argument("--images", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = measure(Path(place), args.data, args.images, args.repeats)
    print(json.dumps(result))


def measure(place: Path, data: Path | None, count: int, repeats: int) -> dict[str, float | int]:
    """All figures: bare model, decoding and both extractions take turns, so that a slow minute slows them all."""
    model = dubito.load("pypi:efficientnet_lite0")
    jpegs = jpeg_folder(place / "jpegs", data, count)
    groups = [list(range(start, min(start + BATCH, count))) for start in range(0, count, BATCH)]
    pixels = torch.cat([b.inputs for b in batches(jpegs, model.transform, groups, 0) if b.inputs is not None])
    np.savez(place / "ready.npz", inputs=pixels.numpy())
    inputs = [model.transform.finish(pixels[group]) for group in groups]

    def extraction(source: Path, name: str) -> Callable[[int], object]:
        return lambda turn: dubito.extract(model, source, place / f"{name}-{turn}", batch_size=BATCH, progress=False)

    turns: dict[str, Callable[[int], object]] = {
        "bare": lambda _: bare(model, inputs),
        "kept": lambda _: kept(model, inputs),
        "ready": extraction(place / "ready.npz", "ready"),
        "decode": lambda _: decode(model, jpegs, groups),
        "jpeg": extraction(place / "jpegs", "jpeg"),
    }
    bare(model, inputs[:2])
    seconds = {name: [] for name in turns}
    for turn in track(range(repeats), description="measure"):
        for name, run in turns.items():
            seconds[name].append(seconds_of(lambda run=run, turn=turn: run(turn)))
    resume = seconds_of(lambda: extraction(place / "jpegs", "jpeg")(0))
    per = {name: statistics.median(values) / count for name, values in seconds.items()}
    return {
        "ratio": round(per["bare"] / per["ready"], 4),
        "kept_ratio": round(per["kept"] / per["ready"], 4),
        "jpeg_ratio": round((per["bare"] + per["decode"]) / per["jpeg"], 4),
        "kept_jpeg_ratio": round((per["kept"] + per["decode"]) / per["jpeg"], 4),
        "resume_seconds": round(resume, 3),
        "bare_images_per_second": round(1 / per["bare"], 2),
        "kept_images_per_second": round(1 / per["kept"], 2),
        "ready_images_per_second": round(1 / per["ready"], 2),
        "jpeg_images_per_second": round(1 / per["jpeg"], 2),
        "decode_images_per_second": round(1 / per["decode"], 2),
        "images": count,
        "batch": BATCH,
        "cores": os.cpu_count() or 1,
    }


def bare(model: WrappedClassifier, inputs: list[torch.Tensor]) -> None:
    """The module itself, on batches that are ready in memory."""
    with torch.inference_mode():
        for x in inputs:
            model.module(x)


def kept(model: WrappedClassifier, inputs: list[torch.Tensor]) -> None:
    """The module itself, with freed memory used again as extraction does."""
    with kept_memory():
        bare(model, inputs)


def decode(model: WrappedClassifier, images: Images, groups: list[list[int]]) -> None:
    """Decoding alone, with one process a core."""
    for _ in batches(images, model.transform, groups, os.cpu_count() or 1):
        pass


def jpeg_folder(place: Path, data: Path | None, count: int) -> Images:
    """The first `count` photographs as JPEG files in a folder."""
    place.mkdir()
    for index, image in zip(range(count), pictures(data), strict=False):
        image.save(place / f"{index:05d}.jpg", quality=90)
    images = dubito.open_images(place)
    if len(images) < count:
        raise SystemExit(f"{count} photographs are needed, {len(images)} were found in {data}")
    return images


def pictures(data: Path | None) -> Iterator:
    """Photographs of the folder or its first zip, or the packaged ones over and over."""
    if data is None:
        packaged = [image.resize((256, 256)) for _, image in photos()]
        while True:
            yield from packaged
    source = next(iter(sorted(data.rglob("*imagenet*/*.zip")) or sorted(data.glob("*.zip"))), data)
    images = dubito.open_images(source)
    for index in range(len(images)):
        yield Subset(images, [index]).read(0)


if __name__ == "__main__":
    main()
