"""Writes an index into a folder (see `_folder`): data files first, the head that names them last, then the sweep.

Vectors go to the disk in blocks and are never copied as a whole. One writer at a time; what a failed one has written
is taken away at once, so that a full disk has its space again.
"""

import contextlib
import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float32
from safetensors.torch import save

from dubito.errors import ArtefactError, DiskFullError, DubitoError
from dubito.scores.artefact import save_score
from dubito.scores.registry import SCORES
from dubito.search._folder import FORMAT, HEAD, Parts, crc_of, is_ours
from dubito.search._load import read_head
from dubito.search.in_memory import InMemory
from dubito.storage import pack_strings, write_file
from dubito.types import Json, Score

_LOCK = ".lock"
_ROWS = 16_384


def write_index(folder: Path, parts: Parts) -> None:
    """Replace the index in a folder, or put the first one there."""
    if parts.score is not None and type(parts.score) is not SCORES.get(parts.score.name):
        raise ArtefactError(
            f"SafeIndex.save: the score {parts.score.name} is none of dubito's own, so that it could not be read back. "
            f"Set index.score = None and save again; after load, give queries their uncertainties."
        )
    check_place(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / _LOCK, timeout=0):
            try:
                head = _write_all(folder, parts)
            except (OSError, DubitoError):
                with contextlib.suppress(OSError, DubitoError):
                    _sweep(folder, read_head(folder) if (folder / HEAD).exists() else {})
                raise
            _sweep(folder, head)
    except Timeout as error:
        raise ArtefactError(
            f"SafeIndex.save: somebody else is saving into '{folder}'. Wait until they have, or give another folder."
        ) from error
    except (OSError, DiskFullError) as error:
        raise _told(error, folder) from error


def check_place(folder: Path) -> None:
    """Raise for a folder of other things, such as photographs: an index there would lie among them."""
    try:
        with contextlib.suppress(ArtefactError):
            read_head(folder)
            return
        names = {path.name for path in folder.iterdir()} - {_LOCK} if folder.is_dir() else set()
    except OSError as error:
        raise _told(error, folder) from error
    ours = {name for name in names if is_ours(name)}
    strangers = sorted(names - ours - ({HEAD} if ours else set()))  # a head beside our files is ours, if damaged
    if strangers:
        raise ArtefactError(
            f"the index cannot be saved in '{folder}': it holds other things ({', '.join(strangers[:3])}) and no "
            f"index. Give a new or empty folder, or that of an index to replace."
        )


def _write_all(folder: Path, parts: Parts) -> Json:
    backend = parts.backend
    rows = backend.state().rows
    files = {
        "vectors": _write(folder, "vectors", ".safetensors", lambda put: _vectors(put, backend.vectors, rows)),
        "items": _write(folder, "items", ".safetensors", lambda put: put(save(_items(backend)))),
    }
    if backend.index is not None and backend.approximation is not None:
        files["approximate"] = _write(folder, "approximate", ".faiss", lambda put: _approximate(put, backend.index))
    head = {
        "format": FORMAT,
        "width": backend.width,
        "rule": backend.rule.to_json(),
        "rows": rows,
        **backend.origin.to_json(),
        "approximation": backend.approximation and backend.approximation.to_json(),
        "provenance": None if parts.provenance is None else parts.provenance.to_json(),
        "radii": parts.radii and parts.radii.to_json(),
        "score": None if parts.score is None else _write_score(folder, parts.score),
        "files": files,
    }
    write_file(folder / HEAD, (json.dumps(head, indent=1, sort_keys=True) + "\n").encode())
    return head


def _write(folder: Path, kind: str, ending: str, fill: Callable[[Callable[[bytes], Any]], Any]) -> Json:
    """One file, named by its own checksum, whole or absent; `fill` puts its bytes, piece by piece."""
    part, crc, size = folder / f"{kind}.part", 0, 0
    with part.open("wb") as file:

        def put(piece: bytes) -> None:
            nonlocal crc, size
            file.write(piece)
            crc, size = zlib.crc32(piece, crc), size + len(piece)

        fill(put)
        file.flush()
        os.fsync(file.fileno())
    name = f"{kind}-{crc:08x}{ending}"
    part.replace(folder / name)
    return {"name": name, "bytes": size}


def _write_score(folder: Path, score: Score) -> str:
    """A score in a folder of its own, named by its content."""
    part = folder / "score.part"
    shutil.rmtree(part, ignore_errors=True)
    save_score(score, part)
    crc = crc_of(part)
    place = folder / f"score-{crc}"
    if place.exists() and crc_of(place) == crc:
        shutil.rmtree(part)
    else:
        shutil.rmtree(place, ignore_errors=True)  # damaged: it was no use to anybody
        part.replace(place)
    return place.name


def _sweep(folder: Path, head: Json) -> None:
    """Remove our own files that the head does not name: those before it, and those of writers that were killed."""
    named = {file["name"] for file in head.get("files", {}).values()} | {head.get("score")}
    for path in folder.iterdir():
        if is_ours(path.name) and path.name not in named:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _items(backend: InMemory) -> dict[str, torch.Tensor]:
    found = {"u": torch.from_numpy(backend.u), **pack_strings(backend.ids)}
    return found if backend.labels is None else found | {"label": torch.from_numpy(backend.labels)}


def _vectors(put: Callable[[bytes], Any], vectors: Float32[np.ndarray, "c d"], rows: int) -> None:
    """A safetensors file of one tensor; its data begin at a multiple of 64 bytes."""
    size = rows * vectors.shape[1] * 4
    described = {"vectors": {"dtype": "F32", "shape": [rows, vectors.shape[1]], "data_offsets": [0, size]}}
    text = json.dumps(described).encode()
    text += b" " * (-(len(text) + 8) % 64)
    put(struct.pack("<Q", len(text)) + text)
    for start in range(0, rows, _ROWS):
        put(vectors[start : min(start + _ROWS, rows)].tobytes())


def _approximate(put: Callable[[bytes], Any], index: Any) -> None:
    """By our own `put`: faiss's own writer does not tell when the last bytes find no space."""
    faiss.write_index(index, faiss.PyCallbackIOWriter(put))  # type: ignore[attr-defined]


def _told(error: OSError | DiskFullError, folder: Path) -> DubitoError:
    if isinstance(error, DiskFullError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"no space left for the index in '{folder}'. The index in memory is safe, and so is what was saved there "
            f"before: free some space and save again."
        )
    return ArtefactError(f"the index cannot be saved in '{folder}' ({error.strerror or error}). Give another place.")
