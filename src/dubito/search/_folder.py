"""An index as a folder: every file proves its own content, and a kill at any instant leaves the old one or the new one.

    index.json                      what the index is, and which of the other files are its own; replaced last
    vectors-CRC.safetensors         unit vectors (n, d) float32, the kept ones first; may be mapped
    items-CRC.safetensors           uncertainties, classes and ids, row by row
    approximate-CRC.faiss           the approximation, if there is one
    score-CRC/                      the score that judges queries, if the index has one

Names carry the CRC-32 of every byte, so new files never overwrite old ones; files that index.json does not name are
swept away after it. Nothing is pickled. `_save` writes it, `_load` reads it.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from dubito.search.in_memory import InMemory
from dubito.search.radius import Radii
from dubito.table import Provenance
from dubito.types import Score

FORMAT = 1
HEAD = "index.json"
_OURS = re.compile(r"(vectors|items|approximate|score)(-[0-9a-f]{8}(\.safetensors|\.faiss)?|\.part)|index\.json\.part")
_BYTES = 1 << 24


@final
@dataclass(frozen=True)
class Parts:
    """What an index in memory is made of.

    Attributes:
        backend: Its items.
        score: Judges queries, if there is one.
        provenance: The model that made the features, part by part, if known.
        radii: How far uncertainties reach, if that has been measured.
    """

    backend: InMemory
    score: Score | None
    provenance: Provenance | None
    radii: Radii | None


def is_ours(name: str) -> bool:
    """Whether a name may be that of a file of an index: never a path to elsewhere."""
    return _OURS.fullmatch(name) is not None


def pieces(path: Path) -> Iterator[bytes]:
    """All bytes of a file; of a folder, those of its files in turn."""
    for one in sorted(path.iterdir()) if path.is_dir() else [path]:
        with one.open("rb") as file:
            while piece := file.read(_BYTES):
                yield piece


def crc_of(path: Path) -> str:
    """The checksum of a file or folder, as names carry it."""
    crc = 0
    for piece in pieces(path):
        crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"
