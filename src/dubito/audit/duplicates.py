"""The same picture twice: within a set, or in the set and in the one that the model was trained on.

Exact: the pixels have the same hash (BLAKE2b), whatever the file is called and however it is compressed without loss.
Near: thumbnails of 16 x 16 pixels correlate by more than 0.995, as a picture does with itself after resizing and JPEG
compression.

Of a large set only a part is compared. A twin is then met only if it was drawn, too, so the share of images that have
one is  (twins found / images compared) / (part of the other set that was drawn),  which is an estimate.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from dubito.audit.finding import Finding, Outcome, Severity, counted, percent
from dubito.audit.prints import SIDE, Prints
from dubito.types import Json

WITHIN, ACROSS = "duplicates within the set", "duplicates across the sets"
_NEAR = 0.995
_FLAT = 2.0
_BLOCK = 1024
_SHOWN = 20
_MANY = 0.01
_FEWEST_FOUND = 3
"""Twins from which an estimate may call a set-up wrong."""


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
    share = _share(pairs, prints, prints)
    what = f"{_said(pairs)} of {len(prints.ids)} images have a twin in the same set, such as {example}.{extra}"
    if part := compared(prints, None):
        what += f" {part}; with all of them, an estimated {percent(share)} have one."
    repair = "Keep one of each, so that no image counts twice; where labels differ, correct them."
    severity: Severity = "suspicious" if clash or share >= _MANY else "note"
    evidence = _evidence(prints, prints, pairs) | {"share": share, "different_labels": clash}
    return [Finding(WITHIN, severity, what, repair, evidence)]


def check_across(prints: Prints, others: Prints) -> Outcome:
    """Images that are in both sets."""
    pairs = find_pairs(prints, others)
    if not pairs.some:
        return []
    found, share = pairs.exact + pairs.near, _share(pairs, prints, others)
    what = (
        f"{_said(pairs)} of {len(prints.ids)} images ({percent(found / len(prints.ids))}) are in the other set too, "
        f"such as {_example(prints, others, pairs)}: what was learned there looks too good here."
    )
    if part := compared(prints, others):
        what += f" {part}; with all of them, an estimated {percent(share)} are in both."
    repair = "Take them out of one of the two sets; if they were trained on, take them out of this one."
    sure = others.part == 1 or found >= _FEWEST_FOUND
    severity: Severity = "wrong" if share >= _MANY and sure else "suspicious"
    return [Finding(ACROSS, severity, what, repair, _evidence(prints, others, pairs) | {"share": share})]


def compared(prints: Prints, others: Prints | None) -> str:
    """Which part of the sets was compared, as half a sentence; empty if it is all."""
    sets = [(prints, "this set")] if others is None else [(prints, "this set"), (others, "the other set")]
    parts = [f"{some.drawn:,} of {some.of:,} images of {name}" for some, name in sets if some.drawn < some.of]
    return f"{' and '.join(parts)} were compared" if parts else ""


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
        pixels = thumbnails[start : start + _BLOCK].float().view(-1, SIDE**2, 3)
        rows = (pixels - pixels.mean(1, keepdim=True)).flatten(1)  # of each colour, or one hue would be one picture
        flat = rows.std(1, keepdim=True) < _FLAT
        yield start, F.normalize(rows, dim=1).masked_fill(flat, 0)


def _share(pairs: Pairs, prints: Prints, others: Prints) -> float:
    """Of images that have a twin, as it would be with all of the others; exact if all of them were compared."""
    return min(1.0, (pairs.exact + pairs.near) / len(prints.ids) / others.part)


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
        "of": others.of,
        "pairs": dict(by_kind),
    }
