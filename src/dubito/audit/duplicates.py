"""Duplicate images: within a set, or between the set and the one that the model was trained on.

Exact: the pixels have the same hash (BLAKE2b), whatever the file is called and however it is compressed without loss.
Near: thumbnails of 16 x 16 pixels correlate by more than 0.995, as an image does with itself after resizing and JPEG
compression.

Of a large set only a part is compared. A duplicate is then found only if it was drawn too, so the share of images that
have one is  (duplicates found / images compared) / (share of the other set that was drawn),  which is an estimate.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from dubito.audit.finding import Finding, Outcome, Severity, counted, percent
from dubito.cache.runner import in_batches, open_stream
from dubito.data.image_set import ImageSet, hash_array
from dubito.models.transform import NoTransform
from dubito.types import Images, Json

WITHIN, ACROSS = "duplicates within the set", "duplicates across the sets"
_NEAR, _FLAT, _MANY = 0.995, 2.0, 0.01
_BLOCK, _GROUP, _SHOWN = 1024, 64, 20
_FEWEST = 3
"""Duplicates from which an estimate may call a set-up wrong."""
_SIDE, _HASH = 16, 16


class Fingerprints(NamedTuple):
    """By image a hash of its pixels and a thumbnail; of `drawn` images of a set that has `of`."""

    ids: list[str]
    labels: Int[Tensor, "n"] | None
    hashes: list[bytes]
    thumbnails: UInt8[Tensor, "n p"]
    drawn: int
    of: int

    @property
    def part(self) -> float:
        """The share of the set that was drawn."""
        return self.drawn / self.of if self.of else 1.0


def take_fingerprints(images: Images, *, workers: int, progress: bool, of: int | None = None) -> Fingerprints:
    """Read all images, drawn from a set that has `of`; those that cannot be read are left out."""
    groups, title = in_batches(range(len(images)), _GROUP), f"fingerprints of {images.name}"
    rows: list[int] = []
    parts: list[Tensor] = []
    printed = _Printed(images)
    with open_stream(printed, NoTransform(), groups, workers=workers, title=title, progress=progress) as stream:
        for batch in stream:
            if batch.inputs is not None:
                rows += batch.indices
                parts.append(batch.inputs)
    prints = torch.cat(parts) if parts else torch.empty(0, _HASH + 3 * _SIDE**2, dtype=torch.uint8)
    labels = None if images.labels is None else images.labels[torch.tensor(rows, dtype=torch.long)]
    hashes = [row.numpy().tobytes() for row in prints[:, :_HASH]]
    drawn, ids = len(images), [images.ids[row] for row in rows]
    return Fingerprints(ids, labels, hashes, prints[:, _HASH:], drawn, drawn if of is None else of)


class Pairs(NamedTuple):
    """How many images of a set have a duplicate, exact or near; and some pairs as (exact, row, row)."""

    exact: int
    near: int
    some: list[tuple[bool, int, int]]


def check_duplicates(prints: Fingerprints, others: Fingerprints | None = None) -> Outcome:
    """Images that occur more than once in a set or, with a second set, in both."""
    pairs = find_pairs(prints, others)
    if not pairs.some:
        return []
    there, both, n, labels = others or prints, pairs.exact + pairs.near, len(prints.ids), prints.labels
    by_kind: dict[str, list[list[str]]] = {}
    for exact, one, other in pairs.some:
        by_kind.setdefault("exact" if exact else "near", []).append([prints.ids[one], there.ids[other]])
    example = " and ".join(next(iter(by_kind.values()))[0])
    share = min(1.0, both / n / there.part)  # among all of the others; exact if all of them were compared
    evidence: Json = {"exact": pairs.exact, "near": pairs.near, "images": n, "compared_with": len(there.ids)}
    evidence |= {"of": there.of, "pairs": by_kind, "share": share}
    counts = f"{both} ({pairs.exact} exact, {pairs.near} near) of {n} images"
    severity: Severity
    if others is None:
        clash = 0 if labels is None else sum(int(labels[one]) != int(labels[other]) for _, one, other in pairs.some)
        extra = f" {counted(clash, 'pair')} of those shown have different labels." if clash else ""
        what, of_all = f"{counts} have a duplicate in the same set, such as {example}.{extra}", "have one"
        repair = "Keep one of each, so that no image counts twice; where labels differ, correct them."
        severity = "suspicious" if clash or share >= _MANY else "note"
        evidence["different_labels"] = clash
    else:
        what, of_all = f"{counts} ({percent(both / n)}) are in the other set too, such as {example}", "are in both"
        what += ": what was learned there looks too good here."
        repair = "Remove them from one of the two sets; if they were trained on, from this one."
        certain = others.part == 1 or both >= _FEWEST
        severity = "wrong" if share >= _MANY and certain else "suspicious"
    if part := compared(prints, others):
        what += f" {part}; among all of them, an estimated {percent(share)} {of_all}."
    return [Finding(WITHIN if others is None else ACROSS, severity, what, repair, evidence)]


def compared(prints: Fingerprints, others: Fingerprints | None = None) -> str:
    """Which part of the sets was compared, as half a sentence; empty if all was."""
    sets = [(prints, "this set")] if others is None else [(prints, "this set"), (others, "the other set")]
    parts = [f"{some.drawn:,} of {some.of:,} images of {name}" for some, name in sets if some.drawn < some.of]
    return f"{' and '.join(parts)} were compared" if parts else ""


def find_pairs(prints: Fingerprints, others: Fingerprints | None = None) -> Pairs:
    """Duplicates within a set, or between two; an exact duplicate is not counted as a near one."""
    within = others is None
    others = prints if others is None else others
    first: dict[bytes, int] = {}
    for row, key in enumerate(others.hashes):
        first.setdefault(key, row)
    same = [(row, first[key]) for row, key in enumerate(prints.hashes) if key in first]
    same = [(earlier, row) for row, earlier in same if earlier != row] if within else same
    some = [(True, one, other) for one, other in same[:_SHOWN]]
    exact, near = (torch.zeros(len(prints.ids), dtype=torch.bool) for _ in range(2))
    exact[[pair[within] for pair in same]] = True  # within a set, the first of each is not counted
    for start, rows in _blocks(prints.thumbnails):
        here = slice(start, start + len(rows))
        for begin, columns in _blocks(others.thumbnails):
            there = slice(begin, begin + len(columns))
            if within and there.stop <= start:
                continue
            alike = (rows @ columns.T > _NEAR) & ~exact[here, None]
            if within:
                alike &= torch.arange(there.start, there.stop) > torch.arange(here.start, here.stop)[:, None]
                alike &= ~exact[there]
            near[here] |= alike.any(1)
            pairs = alike.nonzero()[: max(0, _SHOWN - len(some))].tolist()
            some += [(False, start + i, begin + j) for i, j in pairs]
    return Pairs(int(exact.sum()), int(near.sum()), some)


def _blocks(thumbnails: UInt8[Tensor, "n p"]) -> Iterator[tuple[int, Float[Tensor, "b p"]]]:
    """Thumbnails less their mean colour and of length one, block by block; flat images become zero, like no other."""
    for start in range(0, len(thumbnails), _BLOCK):
        pixels = thumbnails[start : start + _BLOCK].float().view(-1, _SIDE**2, 3)
        rows = (pixels - pixels.mean(1, keepdim=True)).flatten(1)  # of each colour, or one hue would be one image
        flat = rows.std(1, keepdim=True) < _FLAT
        yield start, F.normalize(rows, dim=1).masked_fill(flat, 0)


@final
class _Printed(ImageSet):
    """The fingerprints of images, made in the workers that read them."""

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

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """Fingerprints are not cached."""
        raise NotImplementedError


def _thumbnail(image: Image.Image | Tensor) -> UInt8[Tensor, "p"]:
    """16 x 16 pixels in three colours; zeros for an input that is not an image."""
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
