"""Shards: columns of consecutive images in safetensors files that prove their own content, read when rows are needed.

    KIND-INDEX-CRC.safetensors        for instance rows-00012-9ae3f01c.safetensors

The kind is a probe's name, `rows` for what is known of the images themselves (ids, labels, hashes of their contents),
or `head` for a last layer that logits are rebuilt with.

A shard is written beside its place, flushed to disk and renamed, so a file under its final name is whole. The name
carries the CRC-32 of every byte, so truncation and flipped bits are seen without any other record. A column of a table
reads rows from memory-mapped shards: half precision becomes float32, and a shard's checksum is verified once, when its
rows are first touched.
"""

import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from jaxtyping import Shaped
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dubito.errors import DamagedShardError
from dubito.storage import UNFINISHED, checksum, encode, write_file
from dubito.table import Column, Exact
from dubito.table.views import Computed, Stacked

ROWS, HEAD = "rows", "head"
"""Kinds of shards that no probe writes."""
_NAME = re.compile(r"(?P<kind>[a-z_]+)-(?P<index>\d{5,})-(?P<crc>[0-9a-f]{8})\.safetensors")
_OPEN_AT_ONCE = 32


@final
@dataclass(frozen=True)
class Shard:
    """A shard's file: of which kind it is, which block of images it holds, and the checksum it must have."""

    path: Path
    kind: str
    index: int
    crc: str

    @property
    def name(self) -> str:
        """The file's name, for errors."""
        return self.path.name

    def damage(self) -> str | None:
        """What is wrong with the file, or None: reads every byte."""
        try:
            actual = checksum(self.path)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None if actual == self.crc else f"has checksum {actual}, its name says {self.crc}"

    def check(self, damage: str | None = None) -> None:
        """Raise DamagedShardError for this damage, or unless every byte is as it was written."""
        if damage := damage or self.damage():
            raise DamagedShardError(
                f"shard {self.name} in '{self.path.parent}' {damage}. "
                f"Run the same extraction again: it redoes this shard and nothing else."
            )

    def read(self) -> dict[str, Tensor]:
        """The columns, memory-mapped."""
        with safe_open(self.path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)

    def header(self) -> dict[str, Any]:
        """Names, types and shapes of the columns, and the notes, without reading the columns."""
        with self.path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            return cast("dict[str, Any]", json.loads(file.read(size)))

    def notes(self) -> Any:
        """The notes that `write_shard` stored."""
        return json.loads(self.header()["__metadata__"]["notes"])


def write_shard(folder: Path, kind: str, index: int, columns: Mapping[str, Tensor], notes: Any) -> Shard:
    """Write one shard so that a kill or a full disk at any instant leaves it whole or absent."""
    whole = {key: value.contiguous() for key, value in columns.items()}
    data = save(whole, {"notes": json.dumps(notes, sort_keys=True)})
    crc = f"{zlib.crc32(data):08x}"
    path = folder / f"{kind}-{index:05d}-{crc}.safetensors"
    write_file(path, data)
    return Shard(path, kind, index, crc)


def shard_at(path: Path) -> Shard | None:
    """The shard that a path names; None for the name of anything else."""
    match = _NAME.fullmatch(path.name)
    return match and Shard(path, match["kind"], int(match["index"]), match["crc"])


def list_shards(folder: Path) -> list[Shard]:
    """All shards under their final names, by kind and block."""
    return [shard for path in sorted(folder.iterdir()) if (shard := shard_at(path))]


def is_leftover(path: Path) -> bool:
    """Whether a file is one of ours that was never finished; nobody else's are touched."""
    name = path.name.removesuffix(UNFINISHED)
    return name != path.name and (name == "manifest.json" or _NAME.fullmatch(name) is not None)


def pack_strings(strings: Sequence[str]) -> dict[str, Tensor]:
    """Strings as two tensors: all bytes, and where each string ends."""
    encoded = [encode(string) for string in strings]
    ends = torch.tensor([len(e) for e in encoded], dtype=torch.int64).cumsum(0)
    blob = b"".join(encoded)
    data = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
    return {"id.bytes": data, "id.ends": ends}


def unpack_strings(columns: Mapping[str, Tensor]) -> list[str]:
    """The strings that `pack_strings` packed."""
    blob, ends = columns["id.bytes"].numpy().tobytes(), columns["id.ends"].tolist()
    return [blob[start:end].decode("utf-8", "surrogateescape") for start, end in zip([0, *ends], ends, strict=False)]


def sharded_column(shards: Sequence[tuple[Shard, int]], name: str, tail: tuple[int, ...] = ()) -> Column:
    """One column over all shards of one kind, rows of which are read when they are needed.

    Args:
        shards: In order, with the number of rows of each; at least one.
        name: The key in every shard; "id" for the names that `pack_strings` packed.
        tail: The shape of one row.
    """
    columns = [_InShard(shard, name, (rows, *tail)) for shard, rows in shards]
    stacked = columns[0] if len(columns) == 1 else Stacked(columns)
    return stacked if name == "id" else Computed(stacked.shape, partial(_widened, stacked))


@final
@dataclass(frozen=True)
class _InShard:
    """One column of one shard."""

    shard: Shard
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, rows: Exact) -> Any:
        if self.name == "id":
            return _names(self.shard)[rows if isinstance(rows, slice) else rows.numpy()].copy()
        return _opened(self.shard)[self.name][rows]


def _widened(column: Column, rows: Exact) -> Any:
    """Half precision as float32, converted once rows have been gathered: until then it takes half the memory."""
    values = column[rows]
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def forget_shards() -> None:
    """Drop what is remembered of open shards: files have changed."""
    for memory in (_opened, _names, _verify):
        memory.cache_clear()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _opened(shard: Shard) -> dict[str, Tensor]:
    _verify(shard)
    return shard.read()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _names(shard: Shard) -> Shaped[np.ndarray, "n"]:
    return np.asarray(unpack_strings(_opened(shard)), dtype=str)


@cache
def _verify(shard: Shard) -> None:
    shard.check()
