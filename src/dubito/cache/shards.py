"""One shard of a cache: columns of consecutive images in a safetensors file that shows by itself whether it is whole.

    KIND-INDEX-CRC.safetensors        for instance rows-00012-9ae3f01c.safetensors

Its kind is a probe's name, `rows` for what is known of the images themselves (ids, labels, hashes of their contents),
or `head` for a last layer that logits are rebuilt with. Its name carries the CRC-32 of every byte, so truncation and
flipped bits are seen without any other record. Its header repeats kind and block, so that a renamed shard is seen, and
has a hash of what it was made from, so that a shard is seen which a forgotten worker of another extraction wrote. Rows
are read from memory-mapped shards when they are needed, half precision as float32, and a shard's checksum is verified
once, when its rows are first touched.
"""

import contextlib
import json
import re
import secrets
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

from dubito.data.image_set import in_threads
from dubito.errors import DamagedShardError
from dubito.probes import base_probe
from dubito.storage import (
    Place,
    checksum,
    encode,
    fetch_ahead,
    forget_copy,
    is_compared,
    local_copy,
    parse_json,
    reading,
    remove_file,
    sizes_in,
    write_file,
)
from dubito.table import Column, Exact
from dubito.table.table import take
from dubito.table.views import Computed, Stacked
from dubito.types import Json

ROWS, HEAD = "rows", "head"
"""Kinds of shards that no probe writes."""
FORGED = "It is not as it was extracted: extract again into another folder."
_NAME = re.compile(r"(?P<kind>[a-z_]+)-(?P<index>\d{5,})-(?P<crc>[0-9a-f]{8})\.safetensors")
_OPEN_AT_ONCE, _AHEAD = 32, 4
"""Shards that are open, and that are fetched ahead from a store."""
_HEADERS, _HEADER_BYTES = 1024, 1 << 14
"""Headers that are remembered, and bytes of a request for one."""
_MOST_BYTES = 100_000_000
"""Of a header, as safetensors has it."""


@final
@dataclass(frozen=True)
class Shard:
    """A shard's file: of which kind it is, which block of images it holds, and the checksum it must have."""

    path: Place
    kind: str
    index: int
    crc: str

    @property
    def name(self) -> str:
        """The file's name, for errors."""
        return self.path.name

    def damage(self, *, size: int | None = None) -> str | None:
        """What is wrong with the file, or None: reads every byte, of a remote shard those of a local copy.

        Args:
            size: The size of a remote file. With it, the header alone is read, and compared with the size.
        """
        try:
            path = local_copy(self.path) if size is None else self.path
            actual = checksum(path) if isinstance(path, Path) and not is_compared(path) else self.crc
            if actual != self.crc and forget_copy(self.path):
                actual = checksum(local_copy(self.path))
            if actual != self.crc:
                return f"has checksum {actual}, its name says {self.crc}"
            if size is not None and (expected := _expected_size(path)) != size:
                return f"has {size} bytes, its header says {expected}"
            kind, block = (_notes(path)[key] for key in ("kind", "block"))
        except (OSError, LookupError, TypeError, ValueError, struct.error) as error:
            return f"cannot be read ({getattr(error, 'strerror', None) or error})"
        if (kind, block) != (self.kind, self.index):
            return f"was written as {kind} of block {block}: it was renamed"
        return None

    def check(self, damage: str | None = None) -> None:
        """Raise DamagedShardError for this damage, or unless every byte is as it was written."""
        if damage := damage or self.damage():
            also = "" if self.kind in (ROWS, HEAD, base_probe().name) else f" with the probe {self.kind}"
            first = "Run" if isinstance(self.path, Path) else "Delete it, and run"  # resuming reads headers alone there
            raise DamagedShardError(
                f"shard {self.name} in '{self.path.parent}' {damage}. "
                f"{first} the same extraction again{also}: it redoes this shard and nothing else."
            )

    def read(self) -> dict[str, Tensor]:
        """The columns, memory-mapped; of a remote shard, those of a local copy."""
        try:
            path = local_copy(self.path)
        except (FileNotFoundError, ValueError) as error:
            self.check(f"cannot be read ({error})")
            raise
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)

    def header(self) -> dict[str, Any]:
        """Names, types and shapes of the columns, and the notes, without reading the columns."""
        return _header(self.path)

    def notes(self) -> Json:
        """The notes that `write_shard` stored, with the shard's kind and block."""
        return _notes(self.path)

    def rows(self) -> int:
        """How many images have a row."""
        hidden = ("__metadata__", "id.bytes", "content")
        return next((one["shape"][0] for key, one in self.header().items() if key not in hidden), 0)


@lru_cache(maxsize=_HEADERS)
def _header(path: Place) -> dict[str, Any]:
    start = _bytes_of(path, 0, _HEADER_BYTES)  # of most shards, all of the header
    (size,) = struct.unpack("<Q", start[:8])
    if size > _MOST_BYTES:
        raise ValueError(f"a header of {size} bytes")
    text = start[8 : 8 + size]
    text += _bytes_of(path, len(start), size - len(text)) if size > len(text) else b""
    return cast("dict[str, Any]", parse_json(text))


def _bytes_of(path: Place, start: int, size: int) -> bytes:
    if not isinstance(path, Path):
        return path.read_range(start, size)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _expected_size(path: Place) -> int:
    """The size that a shard must have by its header; safetensors fills headers up to multiples of eight bytes."""
    (size,) = struct.unpack("<Q", _bytes_of(path, 0, 8))
    ends = [one["data_offsets"][1] for key, one in _header(path).items() if key != "__metadata__"]
    return 8 + int(size) + max(ends, default=0)


def _notes(path: Place) -> Json:
    return cast("Json", parse_json(_header(path)["__metadata__"]["notes"]))


def write_shard(folder: Place, kind: str, index: int, columns: Mapping[str, Tensor], notes: Json) -> Shard:
    """Write one shard so that a kill or a full disk at any instant leaves it whole or absent."""
    whole = {key: value.contiguous() for key, value in columns.items()}
    data = save(whole, {"notes": json.dumps({**notes, "kind": kind, "block": index}, sort_keys=True)})
    crc = f"{zlib.crc32(data):08x}"
    path = folder / f"{kind}-{index:05d}-{crc}.safetensors"
    write_file(path, data, writer=secrets.token_hex(4))  # engines may run a block twice at the same time
    _header.cache_clear()
    return Shard(path, kind, index, crc)


def shard_at(path: Place) -> Shard | None:
    """The shard that a path names; None for the name of anything else."""
    match = _NAME.fullmatch(path.name)
    return match and Shard(path, match["kind"], int(match["index"]), match["crc"])


def list_shards(folder: Place) -> list[Shard]:
    """All shards under their final names, by kind and block."""
    return [shard for name in sorted(sizes_in(folder)) if (shard := shard_at(folder / name))]


each = partial(in_threads, at_once=4)
"""A function of every shard: in threads, because stores answer slowly."""


def remove_shard(shard: Shard) -> None:
    """Remove a shard, and what is remembered of its file."""
    remove_file(shard.path)
    _header.cache_clear()


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
    columns = []
    for number, (shard, rows) in enumerate(shards):
        # Whoever reads on from the second shard reads all of them; the first may have been all.
        ahead = tuple(one for one, _ in shards[number + 1 : number + 1 + (_AHEAD if number else 1)])
        columns.append(Computed((rows, *tail), partial(_read, shard, ahead, name, (rows, *tail))))
    stacked = columns[0] if len(columns) == 1 else Stacked(columns)
    return stacked if name == "id" else Computed(stacked.shape, partial(_widened, stacked))


def _read(shard: Shard, ahead: tuple[Shard, ...], name: str, shape: tuple[int, ...], rows: Exact) -> Any:
    """Some rows of one column of one shard; whoever reads forward needs those that follow next."""
    for following in ahead:
        fetch_ahead(following.path)
    column = _names(shard) if name == "id" else _opened(shard).get(name)
    if column is None or tuple(column.shape) != shape:
        got = "none" if column is None else f"one of shape {tuple(column.shape)}"
        raise DamagedShardError(
            f"shard {shard.name} in '{shard.path.parent}' must have a column '{name}' of shape {shape}, as the "
            f"manifest says; it has {got}. {FORGED}"
        )
    return take(column, rows).copy() if name == "id" else column[rows]


def _widened(column: Column, rows: Exact) -> Any:
    """Half precision as float32, converted once rows have been gathered: until then it takes half the memory."""
    values = column[rows]
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def forget_shards() -> None:
    """Drop what is remembered of open shards: files have changed."""
    for memory in (_opened, _names, _verify, _header):
        memory.cache_clear()


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _opened(shard: Shard) -> dict[str, Tensor]:
    return read_whole(shard)


@lru_cache(maxsize=_OPEN_AT_ONCE)
def _names(shard: Shard) -> Shaped[np.ndarray, "n"]:
    with _reading(shard):
        return np.asarray(unpack_strings(_opened(shard)), dtype=str)


@cache
def _verify(shard: Shard) -> None:
    shard.check()


def read_whole(shard: Shard) -> dict[str, Tensor]:
    """The columns of a shard, every byte of which was checked."""
    _verify(shard)
    with _reading(shard):
        return shard.read()


def _reading(shard: Shard) -> contextlib.AbstractContextManager[None]:
    """Of a shard whose checksum is right: what is in it may be anything all the same."""
    return reading(f"shard {shard.name} in '{shard.path.parent}'", FORGED, error=DamagedShardError)
