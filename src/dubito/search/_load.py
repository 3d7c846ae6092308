"""Reads an index from a folder (see `_folder`), and believes nothing of it: names, sizes, shapes, counts are checked.

With `check`, every byte is read and compared with the checksums. They tell of damage, not of malice: whoever can write
the folder can write them, too. An approximation is read by faiss, whose reader is not made for hostile files.
"""

import json
import struct
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.torch import load_file

from dubito.errors import ArtefactError, DubitoError
from dubito.scores.artefact import load_score
from dubito.search._folder import FORMAT, HEAD, Parts, crc_of, is_ours
from dubito.search.backend import Approximation, Origin
from dubito.search.in_memory import InMemory
from dubito.search.radius import Radii
from dubito.search.rule import Rule
from dubito.storage import unpack_strings
from dubito.table import Provenance
from dubito.types import Json, Score

_WRONG = (
    AttributeError,
    KeyError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    struct.error,
    DubitoError,
)
"""What files that are not as they were written may raise."""


def read_head(folder: Path) -> Json:
    """What an index is, without reading its vectors."""
    if not (folder / HEAD).is_file():
        raise ArtefactError(f"no index in '{folder}': {HEAD} is not there. Save one with SafeIndex.save.")
    try:
        head: Any = json.loads((folder / HEAD).read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ArtefactError(f"{HEAD} in '{folder}' cannot be read ({error}). Save the index again.") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        came = head.get("format") if isinstance(head, dict) else type(head).__name__
        raise ArtefactError(
            f"the index in '{folder}' has format {came}, this dubito reads {FORMAT}. Update dubito or build it again."
        )
    return head


def read_index(folder: Path, *, mapped: bool, check: bool) -> Parts:
    """The whole index; where it is replaced meanwhile, the new one."""
    while True:
        head = read_head(folder)
        try:
            return _read(folder, head, mapped=mapped, check=check)
        except _WRONG as error:
            if read_head(folder) != head:
                continue
            raise ArtefactError(
                f"the index in '{folder}' cannot be read ({_said(error)}). Build and save it again."
            ) from error


def _read(folder: Path, head: Json, *, mapped: bool, check: bool) -> Parts:
    paths = {kind: _checked(folder, file, check) for kind, file in head["files"].items()}
    backend = InMemory(int(head["width"]), Rule.from_json(head["rule"]))
    vectors = _vectors(paths["vectors"], (int(head["rows"]), backend.width), mapped)
    _fill(backend, vectors, paths["items"], Origin.from_json(head))
    state = backend.state()
    if "approximate" in paths:
        backend.index = _approximate(paths["approximate"], (state.kept, backend.width))
        backend.remember(Approximation(**head["approximation"]))
    return Parts(
        backend,
        score=None if head["score"] is None else _score(folder, str(head["score"]), check),
        provenance=Provenance.from_json(head["provenance"], f"the index in '{folder}'"),
        radii=head["radii"] and Radii.from_json(head["radii"], state.revision),
    )


def _checked(folder: Path, file: Json, check: bool) -> Path:
    """The path of a file whose size, and if asked whose checksum, is as it was written."""
    name = str(file["name"])
    if not is_ours(name):
        raise ValueError(f"'{name}' is no file of an index")
    path = folder / name
    size = path.stat().st_size
    if size != file["bytes"]:
        raise ValueError(f"{name} has {size} bytes, not {file['bytes']}")
    return _unaltered(path) if check else path


def _unaltered(path: Path) -> Path:
    crc = crc_of(path)
    if crc not in path.name:
        raise ValueError(f"{path.name} has checksum {crc}: it was altered")
    return path


def _vectors(path: Path, shape: tuple[int, int], mapped: bool) -> Float32[np.ndarray, "n d"]:
    """Of a file that has exactly the bytes that such vectors need: nothing larger is ever allocated."""
    room = path.stat().st_size - 8 - shape[0] * shape[1] * 4
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size != room or shape[0] < 0 or shape[1] < 1:
            raise ValueError(f"{path.name} has not the size of {shape[0]} vectors of {shape[1]} numbers")
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


def _fill(backend: InMemory, vectors: Float32[np.ndarray, "n d"], path: Path, origin: Origin) -> None:
    items = load_file(path)
    u, ids = items["u"].numpy().copy(), unpack_strings(items)
    labels = items["label"].numpy().copy() if "label" in items else None
    shape = (len(vectors),)
    if u.dtype != np.float64 or u.shape != shape or not np.isfinite(u).all():
        raise ValueError(f"there is not one finite uncertainty for each of {len(vectors)} vectors")
    if len(ids) != len(vectors) or len({*ids}) != len(ids):
        raise ValueError(f"there is not one name of its own for each of {len(vectors)} vectors")
    if labels is not None and (labels.dtype != np.int64 or labels.shape != shape):
        raise ValueError(f"there is not one class for each of {len(vectors)} vectors")
    backend.refill(vectors, u, ids, labels, origin)


def _approximate(path: Path, shape: tuple[int, int]) -> Any:
    """Read, not mapped: faiss would save one that is mapped as a reference to a file that is swept away."""
    try:
        # Without the flag, lists may lie in any file that the index names.
        index = faiss.read_index(str(path), faiss.IO_FLAG_ONDISK_SAME_DIR)
    except MemoryError as error:
        raise ValueError(f"{path.name} asks for more memory than there is") from error
    if (index.ntotal, index.d) != shape:
        raise ValueError(f"{path.name} holds {index.ntotal} vectors of {index.d} numbers, not {shape[0]} of {shape[1]}")
    return index


def _score(folder: Path, name: str, check: bool) -> Score:
    if not is_ours(name):
        raise ValueError(f"'{name}' is no file of an index")
    return load_score(_unaltered(folder / name) if check else folder / name)


def _said(error: BaseException) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
