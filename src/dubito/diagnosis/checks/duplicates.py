"""The same picture twice: within a set, or in the set and in the one that the model was trained on.

Exact: the pixels have the same hash (BLAKE2b), whatever the file is called and however it is compressed without loss.
Near: thumbnails of 16 x 16 pixels correlate by more than 0.995, as a picture does with itself after resizing and JPEG
compression; among 5,000 test images of MNIST, and as many of CIFAR-10, no two different ones do.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from dubito.cache.loader import batches
from dubito.cache.progress import bar
from dubito.data.digest import hash_array
from dubito.data.image_set import ImageSet
from dubito.diagnosis.checks.finding import Finding, Outcome, Severity, counted, percent
from dubito.models.transform import NoTransform
from dubito.types import Images, Json

WITHIN, ACROSS = "duplicates within the set", "duplicates across the sets"
_SIDE, _HASH = 16, 16
_NEAR = 0.995
_FLAT = 2.0
_BLOCK = 1024
_GROUP = 64
_SHOWN = 20
_MANY = 0.01


@final
@dataclass(frozen=True)
class Prints:
    """One print an image: a hash of its pixels, and a thumbnail."""

    ids: list[str]
    labels: Int[Tensor, "n"] | None
    hashes: list[bytes]
    thumbnails: UInt8[Tensor, "n p"]


@final
@dataclass(frozen=True)
class Pairs:
    """How many images of a set have a twin, exact or near; and some pairs as (exact, row, row)."""

    exact: int
    near: int
    some: list[tuple[bool, int, int]]


def check_within(prints: Prints) -> Outcome:
    """Images that come more than once in a set."""
    pairs = find_pairs(prints, None)
    if not pairs.some:
        return []
    clash = _clashes(prints, pairs)
    extra = f" {counted(clash, 'pair')} of those shown bear two different labels." if clash else ""
    example = _example(prints, prints, pairs)
    what = f"{_said(pairs)} of {len(prints.ids)} images have a twin in the same set, such as {example}.{extra}"
    repair = "Keep one of each, so that no image counts twice; where labels differ, correct them."
    severity: Severity = "suspicious" if clash or pairs.exact + pairs.near >= _MANY * len(prints.ids) else "note"
    evidence = _evidence(prints, prints, pairs) | {"different_labels": clash}
    return [Finding(WITHIN, severity, what, repair, evidence)]


def check_across(prints: Prints, others: Prints) -> Outcome:
    """Images that are in both sets."""
    pairs = find_pairs(prints, others)
    if not pairs.some:
        return []
    share = (pairs.exact + pairs.near) / len(prints.ids)
    what = (
        f"{_said(pairs)} of {len(prints.ids)} images ({percent(share)}) are in the other set too, such as "
        f"{_example(prints, others, pairs)}: what was learned there looks too good here."
    )
    repair = "Take them out of one of the two sets; if they were trained on, take them out of this one."
    severity: Severity = "wrong" if share >= _MANY else "suspicious"
    return [Finding(ACROSS, severity, what, repair, _evidence(prints, others, pairs))]


def take_prints(images: Images, *, workers: int, progress: bool) -> Prints:
    """Read all images of a set; those that cannot be read are left out."""
    groups = [list(range(start, min(start + _GROUP, len(images)))) for start in range(0, len(images), _GROUP)]
    rows: list[int] = []
    parts: list[Tensor] = []
    with bar(f"prints of {images.name}", len(images), show=progress) as advance:
        for batch in batches(_Printed(images), NoTransform(), groups, workers):
            if batch.inputs is not None:
                rows += batch.indices
                parts.append(batch.inputs)
            advance(len(batch.indices) + len(batch.broken))
    prints = torch.cat(parts) if parts else torch.empty(0, _HASH + 3 * _SIDE**2, dtype=torch.uint8)
    labels = None if images.labels is None else images.labels[torch.tensor(rows, dtype=torch.long)]
    hashes = [row.numpy().tobytes() for row in prints[:, :_HASH]]
    return Prints([images.ids[row] for row in rows], labels, hashes, prints[:, _HASH:])


def find_pairs(prints: Prints, others: Prints | None) -> Pairs:
    """Twins within a set, or between two; an exact twin is not counted as a near one."""
    exact, some = _exact(prints, others)
    found = torch.zeros(len(prints.ids), dtype=torch.bool)
    for start, rows in _blocks(prints.thumbnails):
        for begin, columns in _blocks((others or prints).thumbnails):
            if others is None and begin + len(columns) <= start:
                continue
            alike = rows @ columns.T > _NEAR
            if others is None:
                later = torch.arange(begin, begin + len(columns)) > torch.arange(start, start + len(rows))[:, None]
                alike &= later
            alike &= ~exact[start : start + len(rows), None]
            if others is None:
                alike &= ~exact[begin : begin + len(columns)]
            found[start : start + len(rows)] |= alike.any(1)
            pairs = alike.nonzero()[: max(0, _SHOWN - len(some))].tolist()
            some += [(False, start + i, begin + j) for i, j in pairs]
    return Pairs(int(exact.sum()), int(found.sum()), some)


def _exact(prints: Prints, others: Prints | None) -> tuple[Bool[Tensor, "n"], list[tuple[bool, int, int]]]:
    """Which images have a twin with the same hash (within a set: all but the first of each), and some pairs."""
    first: dict[bytes, int] = {}
    for row, key in enumerate(others.hashes if others is not None else ()):
        first.setdefault(key, row)
    twin = torch.zeros(len(prints.ids), dtype=torch.bool)
    some: list[tuple[bool, int, int]] = []
    for row, key in enumerate(prints.hashes):
        if key in first:
            twin[row] = True
            pair = (True, row, first[key]) if others is not None else (True, first[key], row)
            if len(some) < _SHOWN:
                some.append(pair)
        elif others is None:
            first[key] = row
    return twin, some


def _blocks(thumbnails: UInt8[Tensor, "n p"]) -> Iterator[tuple[int, Float[Tensor, "b p"]]]:
    """Thumbnails less their mean colour and of length one, block by block; flat pictures become zero, like no other."""
    for start in range(0, len(thumbnails), _BLOCK):
        pixels = thumbnails[start : start + _BLOCK].float().view(-1, _SIDE**2, 3)
        rows = (pixels - pixels.mean(1, keepdim=True)).flatten(1)  # of each colour, or one hue would be one picture
        flat = rows.std(1, keepdim=True) < _FLAT
        yield start, F.normalize(rows, dim=1).masked_fill(flat, 0)


@final
class _Printed(ImageSet):
    """The prints of images, made in the workers that read them."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.name, self.ids, self.labels, self.classes = images.name, images.ids, images.labels, images.classes

    def read(self, index: int) -> Tensor:
        """Hash and thumbnail as one row of bytes."""
        image = self.images.read(index)
        pixels = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
        values = pixels.float() if pixels.is_floating_point() else pixels
        key = np.frombuffer(hash_array(values.numpy()), np.uint8).copy()
        return torch.cat([torch.from_numpy(key), _thumbnail(image)])

    def digest_rows(self, rows: Sequence[int]) -> str:
        """Nobody caches prints."""
        raise NotImplementedError


def _thumbnail(image: Image.Image | Tensor) -> UInt8[Tensor, "p"]:
    """16 x 16 pixels in three colours; zeros for an input that is no picture."""
    if isinstance(image, Image.Image):
        return torch.from_numpy(np.array(image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX))).flatten()
    if image.dim() != 3:
        return torch.zeros(3 * _SIDE**2, dtype=torch.uint8)
    picture = image.detach().cpu().float()
    picture = picture if picture.shape[0] <= 4 else picture.permute(2, 0, 1)
    picture = picture if len(picture) == 3 else picture.mean(0).expand(3, -1, -1)
    small = F.adaptive_avg_pool2d(picture, _SIDE)
    low, high = small.min(), small.max()
    return ((small - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8).permute(1, 2, 0).flatten()


def _said(pairs: Pairs) -> str:
    parts = [f"{count} {kind}" for count, kind in ((pairs.exact, "exact"), (pairs.near, "near")) if count]
    return f"{pairs.exact + pairs.near} ({', '.join(parts)})"


def _example(prints: Prints, others: Prints, pairs: Pairs) -> str:
    _, one, other = pairs.some[0]
    return f"{prints.ids[one]} and {others.ids[other]}"


def _clashes(prints: Prints, pairs: Pairs) -> int:
    if prints.labels is None:
        return 0
    return sum(int(prints.labels[one]) != int(prints.labels[other]) for _, one, other in pairs.some)


def _evidence(prints: Prints, others: Prints, pairs: Pairs) -> Json:
    by_kind: dict[str, list[list[str]]] = defaultdict(list)
    for exact, one, other in pairs.some:
        by_kind["exact" if exact else "near"].append([prints.ids[one], others.ids[other]])
    return {
        "exact": pairs.exact,
        "near": pairs.near,
        "images": len(prints.ids),
        "compared_with": len(others.ids),
        "pairs": dict(by_kind),
    }
