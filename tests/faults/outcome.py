"""What became of a fault, and what a part of the harness is."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

OK, LOST, SILENT, HUNG, UNNAMED = "ok", "lost", "silent", "hung", "unnamed"
"""Nothing is missing; work that was finished is gone; other values or bytes without a word; no end; and, nothing is
missing, but the error was none of dubito's own."""


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Attributes:
        part: What was struck.
        fault: The kind of fault.
        case: The number of its case: with the seed, all draws follow from it.
        result: `OK`, `LOST`, `SILENT`, `HUNG` or `UNNAMED`.
        note: What happened, where it is not ok.
    """

    part: str
    fault: str
    case: int
    result: str = OK
    note: str = ""


class Part(Protocol):
    """Work that is struck."""

    name: str
    faults: int
    """How many there are by default."""

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Strike at least so often, and say what became of each."""
        ...


def generator(seed: int, part: str, case: int) -> np.random.Generator:
    """The draws of one case."""
    return np.random.default_rng([seed, zlib.crc32(part.encode()), case])
