"""One shard: some columns of some consecutive images in one safetensors file that proves its own content.

    KIND-INDEX-CRC.safetensors        for instance rows-00012-9ae3f01c.safetensors

The kind is a probe's name, `rows` for what is known of the images themselves (ids, labels, hashes of their contents),
or `head` for a last layer that logits are rebuilt with.

A shard is written beside its place, flushed to disk and renamed, so a file under its final name is whole. The name
carries the CRC-32 of every byte, so truncation and flipped bits are seen without any other record.
"""

import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dubito.errors import CacheError, DamagedShardError
from dubito.storage import UNFINISHED, encode, write_file

ROWS, HEAD = "rows", "head"
"""Kinds of shards that no probe writes."""
_NAME = re.compile(r"(?P<kind>[a-z_]+)-(?P<index>\d{5,})-(?P<crc>[0-9a-f]{8})\.safetensors")


@dataclass(frozen=True)
class Shard:
    """A shard's file: of which kind it is, which block of images it holds, and the checksum it must have."""

    path: Path
    kind: str
    index: int
    crc: int

    @property
    def name(self) -> str:
        """The file's name, for errors."""
        return self.path.name

    def damage(self) -> str | None:
        """What is wrong with the file, or None: reads every byte."""
        try:
            actual = _crc_of(self.path)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None if actual == self.crc else f"has checksum {actual:08x}, its name says {self.crc:08x}"

    def check(self) -> None:
        """Raise DamagedShardError unless every byte is as it was written."""
        damage = self.damage()
        if damage:
            raise DamagedShardError(
                f"shard {self.name} in '{self.path.parent}' {damage}. "
                f"Run the same extract again: it redoes this shard and nothing else."
            )

    def read(self) -> dict[str, Tensor]:
        """The columns, memory-mapped."""
        with safe_open(self.path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)

    def header(self) -> dict[str, Any]:
        """Names, types and shapes of the columns, and the notes, without reading the columns."""
        with self.path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(size))
        return header

    def notes(self) -> Any:
        """The notes that `write_shard` stored."""
        return json.loads(self.header()["__metadata__"]["notes"])


def write_shard(folder: Path, kind: str, index: int, columns: Mapping[str, Tensor], notes: Any) -> Shard:
    """Write one shard so that a kill or a full disk at any instant leaves it whole or absent."""
    data = save(
        {key: value.contiguous() for key, value in columns.items()},
        {"notes": json.dumps(notes, sort_keys=True)},
    )
    crc = zlib.crc32(data)
    path = folder / f"{kind}-{index:05d}-{crc:08x}.safetensors"
    write_file(path, data)
    return Shard(path, kind, index, crc)


def check_name(probe: str) -> str:
    """A probe's name, which begins its shards' names."""
    if not re.fullmatch(r"[a-z_]+", probe) or probe in (ROWS, HEAD):
        raise CacheError(
            f"a probe's name must be lower-case letters and underscores, and neither '{ROWS}' nor '{HEAD}'; got "
            f"'{probe}'. Rename the probe."
        )
    return probe


def list_shards(folder: Path) -> list[Shard]:
    """All shards under their final names, by kind and block."""
    shards = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match:
            shards.append(Shard(path, match["kind"], int(match["index"]), int(match["crc"], 16)))
    return shards


def shard_named(folder: Path, name: str) -> Shard:
    """The shard that a manifest names."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise DamagedShardError(
            f"manifest of '{folder}' names '{name}', which is no shard. Run the same extract again."
        )
    return Shard(folder / name, match["kind"], int(match["index"]), int(match["crc"], 16))


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind."""
    for path in folder.iterdir():
        if is_leftover(path):
            path.unlink()


def is_leftover(path: Path) -> bool:
    """Whether a file is one of ours that was never finished; nobody else's are touched."""
    name = path.name.removesuffix(UNFINISHED)
    return name != path.name and (name == "manifest.json" or _NAME.fullmatch(name) is not None)


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


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
