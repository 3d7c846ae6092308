"""An index as a folder: every file proves its own content, and a kill at any instant leaves the old one or the new one.

    index.json                      what the index is, and which of the other files are its own; replaced last
    vectors-CRC.safetensors         unit vectors (n, d) float32, the kept ones first; may be mapped
    items-CRC.safetensors           uncertainties, classes and ids, row by row
    approximate-CRC.faiss           the approximation, if there is one
    score-CRC/                      the score that judges queries, if the index has one

Names carry the CRC-32 of every byte, so new files never overwrite old ones; files that index.json does not name are
swept away after it. Nothing is pickled. Vectors go to the disk in blocks and are never copied as a whole.
"""

import errno
import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from dubito.apps.search.backend import Approximation
from dubito.apps.search.in_memory import InMemory
from dubito.apps.search.rule import Rule, Thresholds
from dubito.cache.shard import pack_strings, unpack_strings, write_file
from dubito.errors import ArtefactError, DiskFullError
from dubito.scores.artefact import save_score
from dubito.types import Json, Score

FORMAT = 1
HEAD = "index.json"
_OURS = re.compile(r"(vectors|items|approximate|score)(-[0-9a-f]{8}(\.safetensors|\.faiss)?|\.part)|index\.json\.part")
_ROWS = 16_384
_BYTES = 1 << 24


def write_index(folder: Path, backend: InMemory, about: Json) -> Json:
    """Write all data files, then the head that names them; returns the head."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state = backend.state()
        files = {
            "vectors": _write(folder, "vectors", ".safetensors", _vector_bytes(backend.vectors, state.rows)),
            "items": _write(folder, "items", ".safetensors", [save(_items(backend))]),
        }
        if backend.index is not None and backend.approximation is not None:
            files["approximate"] = _write_faiss(folder, backend.index)
        head = {
            "format": FORMAT,
            "width": backend.width,
            "rule": backend.rule.to_json(),
            "rows": state.rows,
            "kept": state.kept,
            "thresholds": state.thresholds and state.thresholds.to_json(),
            "source": backend.source,
            "approximation": backend.approximation and backend.approximation.to_json(),
            "files": files,
            **about,
        }
        write_file(folder / HEAD, (json.dumps(head, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise _told(error, folder) from error
    sweep(folder, head)
    return head


def write_score(folder: Path, score: Score) -> str:
    """A score in a folder of its own, named by its content."""
    part = folder / "score.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        save_score(score, part)
        crc = 0
        for path in sorted(part.iterdir()):
            for piece in _pieces(path):
                crc = zlib.crc32(piece, crc)
        name = f"score-{crc:08x}"
        if (folder / name).exists():
            shutil.rmtree(part)
        else:
            part.replace(folder / name)
    except OSError as error:
        raise _told(error, folder) from error
    return name


def sweep(folder: Path, head: Json) -> None:
    """Remove our own files that the head does not name: those before it, and those of writers that were killed."""
    named = {file["name"] for file in head["files"].values()} | {head.get("score")}
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in named:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def read_head(folder: Path) -> Json:
    """What an index is, without reading its vectors."""
    if not (folder / HEAD).is_file():
        raise ArtefactError(f"no index in '{folder}': {HEAD} is not there. Save one with SafeIndex.save.")
    try:
        head: Any = json.loads((folder / HEAD).read_text())
    except (ValueError, OSError) as error:
        raise ArtefactError(f"{HEAD} in '{folder}' cannot be read ({error}). Save the index again.") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        came = head.get("format") if isinstance(head, dict) else head
        raise ArtefactError(
            f"the index in '{folder}' has format {came}, this dubito reads {FORMAT}. Update dubito or build it again."
        )
    return head


def read_index(folder: Path, head: Json, *, mapped: bool, check: bool) -> InMemory:
    """The items of an index; `check` reads every byte once."""
    try:
        paths = {kind: _checked(folder, file, check) for kind, file in head["files"].items()}
        backend = InMemory(int(head["width"]), Rule.from_json(head["rule"]))
        rows = int(head["rows"])
        backend.vectors = _read_vectors(paths["vectors"], (rows, backend.width), mapped)
        items = load_file(paths["items"])
        backend.u, backend.ids = items["u"].numpy().copy(), unpack_strings(items)
        backend.labels = items["label"].numpy().copy() if "label" in items else None
        backend.source = head["source"]
        if not len(backend.u) == len(backend.ids) == rows:
            raise ValueError(f"{len(backend.ids)} items for {rows} vectors")
        backend.restore(int(head["kept"]), head["thresholds"] and Thresholds.from_json(head["thresholds"]), 1)
        if "approximate" in paths:
            backend.index = _read_faiss(paths["approximate"], mapped)
            backend.remember(Approximation(**head["approximation"]))
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise ArtefactError(f"the index in '{folder}' cannot be read ({error}). Build and save it again.") from error
    return backend


def _items(backend: InMemory) -> dict[str, torch.Tensor]:
    found = {"u": torch.from_numpy(backend.u), **pack_strings(backend.ids)}
    return found if backend.labels is None else found | {"label": torch.from_numpy(backend.labels)}


def _vector_bytes(vectors: Float32[np.ndarray, "c d"], rows: int) -> Iterator[bytes]:
    """A safetensors file of one tensor, in pieces; its data begin at a multiple of 64 bytes."""
    size = rows * vectors.shape[1] * 4
    described = {"vectors": {"dtype": "F32", "shape": [rows, vectors.shape[1]], "data_offsets": [0, size]}}
    text = json.dumps(described).encode()
    text += b" " * (-(len(text) + 8) % 64)
    yield struct.pack("<Q", len(text)) + text
    for start in range(0, rows, _ROWS):
        yield vectors[start : min(start + _ROWS, rows)].tobytes()


def _read_vectors(path: Path, shape: tuple[int, int], mapped: bool) -> Float32[np.ndarray, "n d"]:
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        found = json.loads(file.read(size))["vectors"]
        if found["dtype"] != "F32" or tuple(found["shape"]) != shape:
            raise ValueError(f"vectors are {found['dtype']} of shape {found['shape']}, not F32 of {shape}")
        if mapped and shape[0]:
            # Copy-on-write: rows may change places in memory and the file stays as it is.
            return np.memmap(path, dtype=np.float32, mode="c", offset=8 + size, shape=shape)
        vectors = np.empty(shape, dtype=np.float32)
        if shape[0] and file.readinto(vectors.data.cast("B")) != vectors.nbytes:
            raise ValueError("vectors end early")
        return vectors


def _write(folder: Path, kind: str, ending: str, pieces: Iterable[bytes]) -> Json:
    """One file, named by its own checksum, whole or absent."""
    part, crc, size = folder / f"{kind}.part", 0, 0
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                crc, size = zlib.crc32(piece, crc), size + len(piece)
            file.flush()
            os.fsync(file.fileno())
        name = f"{kind}-{crc:08x}{ending}"
        part.replace(folder / name)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return {"name": name, "bytes": size}


def _write_faiss(folder: Path, index: Any) -> Json:
    raw = folder / "approximate-00000000.faiss"
    try:
        faiss.write_index(index, str(raw))
        return _write(folder, "approximate", ".faiss", _pieces(raw))
    except RuntimeError as error:
        raise OSError(errno.EIO, f"faiss cannot write the approximation ({error})") from error
    finally:
        raw.unlink(missing_ok=True)


def _read_faiss(path: Path, mapped: bool) -> Any:
    """Inverted lists can stay on disk; other kinds are read."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP if mapped else 0)
    except RuntimeError:
        return faiss.read_index(str(path))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_BYTES):
            yield piece


def _checked(folder: Path, file: Json, check: bool) -> Path:
    """The path of a file whose size, and if asked whose checksum, is as it was written."""
    name = str(file["name"])
    if not _OURS.fullmatch(name):
        raise ValueError(f"'{name}' is no file of an index")
    path = folder / name
    size = path.stat().st_size
    if size != file["bytes"]:
        raise ValueError(f"{name} has {size} bytes, not {file['bytes']}")
    crc = 0
    for piece in _pieces(path) if check else ():
        crc = zlib.crc32(piece, crc)
    if check and f"{crc:08x}" not in name:
        raise ValueError(f"{name} has checksum {crc:08x}: it was altered")
    return path


def _told(error: OSError, folder: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"no space left for the index in '{folder}'. The index in memory is safe, and so is what was saved there "
            f"before: free some space and save again."
        )
    return ArtefactError(f"the index cannot be saved in '{folder}' ({error.strerror or error}). Give another place.")
