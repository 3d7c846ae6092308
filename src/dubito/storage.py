"""Every promise about files, once: a file is replaced in one step, and a kill leaves it whole or absent."""

import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dubito.errors import ArtefactError, DiskFullError

UNFINISHED = ".part"


def write_file(path: Path, data: bytes) -> None:
    """Replace a file as one step: write beside it, flush to the disk, rename."""
    part = path.with_name(path.name + UNFINISHED)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"no space left for {path.name} ({len(data) / 1e6:.1f} MB) in '{path.parent}'. What was finished is "
                f"safe: free some space and run the same call again, it goes on from there."
            ) from error
        raise
    _flush_folder(path.parent)


def write_csv(path: str | Path, lines: Iterable[Sequence[object]]) -> Path:
    """Replace a CSV in one step; its folder is made."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, text.getvalue().encode())
    except OSError as error:
        raise ArtefactError(f"'{place}' cannot be written ({error.strerror}). Give another place.") from error
    return place


def pack_strings(strings: list[str]) -> dict[str, Tensor]:
    """Strings as two tensors: all bytes, and where each string ends."""
    encoded = [string.encode() for string in strings]
    ends = torch.tensor([len(e) for e in encoded], dtype=torch.int64).cumsum(0)
    blob = b"".join(encoded)
    data = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)
    return {"id.bytes": data, "id.ends": ends}


def unpack_strings(columns: Mapping[str, Tensor]) -> list[str]:
    """The strings that `pack_strings` packed."""
    blob, ends = columns["id.bytes"].numpy().tobytes(), columns["id.ends"].tolist()
    return [blob[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def _flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows cannot open folders and does not need it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
