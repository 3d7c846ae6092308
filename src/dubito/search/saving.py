"""An index as a folder: a kill at any instant leaves the old index or the new one, and damage is detected.

    index.json                  what the index is, and which of the other files belong to it; replaced last
    vectors-HASH.safetensors    unit vectors (n, d) float32, the kept ones first; may be memory-mapped
    items-HASH.safetensors      uncertainties, classes and ids, row by row
    approximate-HASH.faiss      the approximation, if there is one
    score-HASH/                 the score of the index, if it has one

Vectors are written in blocks and never copied as a whole. Everything that is read is checked: names, sizes, shapes and
counts, and with `check` every byte against its checksum. An approximation is read by faiss, whose reader is not made
for hostile files.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import faiss
import numpy as np
import torch
from jaxtyping import Float32
from safetensors.torch import load_file, save

from dubito.cache.shard import pack_strings, unpack_strings
from dubito.errors import ArtefactError
from dubito.scores.artefact import load_score, save_score
from dubito.scores.registry import SCORES
from dubito.search.backend import Approximation, Origin
from dubito.search.memory import MemoryBackend
from dubito.search.radius import Radii
from dubito.search.rule import Rule
from dubito.storage import SavedFolder, writing
from dubito.types import Score

INDEX = SavedFolder("index", "index.json", 2, ("vectors", "items", "approximate", "score"), "SafeIndex.save")
_ROWS_AT_ONCE = 16_384


@final
@dataclass(frozen=True)
class Parts:
    """What an index in memory consists of.

    Attributes:
        backend: Its items.
        score: Scores queries, if there is one.
        radii: The radius of every uncertainty, if it has been measured.
    """

    backend: MemoryBackend
    score: Score | None
    radii: Radii | None


def check_place(folder: Path) -> None:
    """Raise ArtefactError where no index can be saved, such as in a folder of images."""
    with writing("the index", folder):
        INDEX.check_place(folder)


def write_index(folder: Path, parts: Parts) -> None:
    """Save an index in a folder, in place of the one that is there."""
    if parts.score is not None and type(parts.score) is not SCORES.get(parts.score.name):
        raise ArtefactError(
            f"SafeIndex.save: {parts.score.name} is not one of dubito's own scores, so it could not be loaded again. "
            f"Set index.score = None and save again; after load, give queries their uncertainties."
        )
    INDEX.save(folder, lambda place: _write(place, parts))


def read_index(folder: Path, *, mapped: bool, check: bool) -> Parts:
    """The index of a folder; where it is replaced while it is read, the new one."""
    return INDEX.load(folder, lambda saved: _read(folder, saved, mapped=mapped, check=check))


def _write(folder: Path, parts: Parts) -> Mapping[str, Any]:
    backend, score = parts.backend, parts.score
    rows = backend.state().rows
    files = {
        "vectors": INDEX.put_file(
            folder, "vectors", ".safetensors", lambda put: _write_vectors(put, backend.vectors, rows)
        ),
        "items": INDEX.put_file(folder, "items", ".safetensors", lambda put: put(save(_items(backend)))),
    }
    if backend.index is not None and backend.approximation is not None:
        files["approximate"] = INDEX.put_file(
            folder, "approximate", ".faiss", lambda put: _write_approximation(put, backend.index)
        )
    if score is not None:
        files["score"] = INDEX.put_folder(folder, "score", lambda place: save_score(score, place))
    return {
        "width": backend.width,
        "rows": rows,
        "rule": backend.rule.to_json(),
        "origin": backend.origin.to_json(),
        "approximation": backend.approximation and backend.approximation.to_json(),
        "radii": parts.radii and parts.radii.to_json(),
        "files": files,
    }


def _read(folder: Path, saved: Mapping[str, Any], *, mapped: bool, check: bool) -> Parts:
    paths = {kind: INDEX.part(folder, name, check=check) for kind, name in saved["files"].items()}
    backend = MemoryBackend(int(saved["width"]), Rule.from_json(saved["rule"]))
    vectors = _read_vectors(paths["vectors"], (int(saved["rows"]), backend.width), mapped)
    _restore(backend, vectors, paths["items"], Origin.from_json(saved["origin"], f"the index in '{folder}'"))
    state = backend.state()
    if "approximate" in paths:
        backend.index = _read_approximation(paths["approximate"], (state.kept, backend.width))
        backend.store_approximation(Approximation(**saved["approximation"]))
    return Parts(
        backend,
        score=load_score(paths["score"]) if "score" in paths else None,
        radii=saved["radii"] and Radii.from_json(saved["radii"], state.revision),
    )


def _items(backend: MemoryBackend) -> dict[str, torch.Tensor]:
    columns = {"u": torch.from_numpy(backend.u), **pack_strings(backend.ids)}
    return columns if backend.labels is None else columns | {"label": torch.from_numpy(backend.labels)}


def _write_vectors(put: Callable[[bytes], Any], vectors: Float32[np.ndarray, "c d"], rows: int) -> None:
    """A safetensors file of one tensor; its data begin at a multiple of 64 bytes."""
    size = rows * vectors.shape[1] * 4
    header = {"vectors": {"dtype": "F32", "shape": [rows, vectors.shape[1]], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    put(struct.pack("<Q", len(text)) + text)
    for start in range(0, rows, _ROWS_AT_ONCE):
        put(vectors[start : min(start + _ROWS_AT_ONCE, rows)].tobytes())


def _write_approximation(put: Callable[[bytes], Any], index: Any) -> None:
    """With our own `put`: faiss's writer does not report that the last bytes found no space."""
    faiss.write_index(index, faiss.PyCallbackIOWriter(put))  # type: ignore[attr-defined]


def _read_vectors(path: Path, shape: tuple[int, int], mapped: bool) -> Float32[np.ndarray, "n d"]:
    """The vectors of a file that has exactly the bytes they need: nothing larger is ever allocated."""
    room = path.stat().st_size - 8 - shape[0] * shape[1] * 4
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size != room or shape[0] < 0 or shape[1] < 1:
            raise ValueError(f"{path.name} does not have the size of {shape[0]} vectors of {shape[1]} numbers")
        header = json.loads(file.read(size))["vectors"]
        if header["dtype"] != "F32" or tuple(header["shape"]) != shape:
            raise ValueError(f"vectors are {header['dtype']} of shape {header['shape']}, not F32 of {shape}")
        if mapped and shape[0]:
            # Copy-on-write: rows may move in memory while the file stays as it is.
            return np.memmap(path, dtype=np.float32, mode="c", offset=8 + size, shape=shape)
        vectors = np.empty(shape, dtype=np.float32)
        if shape[0] and file.readinto(vectors.data.cast("B")) != vectors.nbytes:
            raise ValueError("vectors end early")
        return vectors


def _restore(backend: MemoryBackend, vectors: Float32[np.ndarray, "n d"], path: Path, origin: Origin) -> None:
    items = load_file(path)
    u, ids = items["u"].numpy().copy(), unpack_strings(items)
    labels = items["label"].numpy().copy() if "label" in items else None
    shape = (len(vectors),)
    if u.dtype != np.float64 or u.shape != shape or not np.isfinite(u).all():
        raise ValueError(f"there is not one finite uncertainty for each of {len(vectors)} vectors")
    if len(ids) != len(vectors) or len({*ids}) != len(ids):
        raise ValueError(f"there is not one unique id for each of {len(vectors)} vectors")
    if labels is not None and (labels.dtype != np.int64 or labels.shape != shape):
        raise ValueError(f"there is not one class for each of {len(vectors)} vectors")
    backend.restore(vectors, u, ids, labels, origin)


def _read_approximation(path: Path, shape: tuple[int, int]) -> Any:
    """Read, not mapped: faiss would save a mapped one as a reference to a file that is removed later."""
    try:
        # Without the flag, lists may be in any file that the index names.
        index = faiss.read_index(str(path), faiss.IO_FLAG_ONDISK_SAME_DIR)
    except MemoryError as error:
        raise ValueError(f"{path.name} needs more memory than there is") from error
    if (index.ntotal, index.d) != shape:
        raise ValueError(f"{path.name} holds {index.ntotal} vectors of {index.d} numbers, not {shape[0]} of {shape[1]}")
    return index
