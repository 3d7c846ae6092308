"""Items in the memory of this process, searched by faiss, and saved as a folder.

All vectors are rows of one float32 matrix, and **those that are kept come first**. So an exact search is faiss's flat
search of the first rows, as fast as without any rule: it needs no mask and no second copy. When items are added or
removed, the threshold moves, and the rows that changed sides are swapped. An approximation (any factory string of
faiss) holds codes of the kept rows. Its candidates are compared again by their vectors, so similarities are exact.

Threads may search concurrently, because a search moves nothing. No other call may run while one adds or removes items.

    index.json                  what the index is, and which of the other files belong to it; replaced last
    vectors-HASH.safetensors    unit vectors (n, d) float32, the kept ones first; may be memory-mapped
    items-HASH.safetensors      uncertainties, classes and ids, row by row
    approximate-HASH.safetensors   what an approximation has learned, if there is one (`approximate.py`)
    score-HASH/                 the score of the index, if it has one

Everything that is read is checked: names, sizes, shapes and counts, and with `check` every byte against its checksum.
faiss reads no file.
"""

import heapq
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import md5
from pathlib import Path
from typing import Any, final

import faiss
import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from safetensors import numpy as safetensors_numpy
from safetensors.torch import load_file, save

from dubito.cache.shards import pack_strings, unpack_strings
from dubito.errors import ValueRangeError
from dubito.search import approximate
from dubito.search.backend import Approximation, Block, Hits, Origin, State
from dubito.search.inputs import stored_id
from dubito.search.rule import Rule, Thresholds
from dubito.storage import SavedFolder, parse_json

FOLDER = SavedFolder("index", "index.json", 3, ("vectors", "items", "approximate", "score"), "SafeIndex.save")
_SWAP = 16_384
"""Rows that are moved, or written, together."""
_CANDIDATES = 4
"""Candidates taken from an approximation for each neighbour that is returned."""
_most_similar: Callable[..., tuple[Any, Any]] = partial(faiss.knn, metric=faiss.METRIC_INNER_PRODUCT)


@final
class MemoryBackend:
    """The backend that needs no server."""

    def __init__(self, width: int, rule: Rule) -> None:
        self.width, self.rule = width, rule
        self.vectors: Float32[np.ndarray, "c d"] = np.empty((0, width), dtype=np.float32)
        self.u: Float64[np.ndarray, "n"] = np.empty(0, dtype=np.float64)
        self.labels: Int64[np.ndarray, "n"] | None = None
        self.ids: Shaped[np.ndarray, "n"] = np.empty(0, dtype=object)
        self.origin = Origin()
        self.index: Any = None
        self.approximation: Approximation | None = None
        self._places: dict[str, int] | None = {}
        self._thresholds: Thresholds | None = None
        self._kept = self._revision = 0

    def state(self) -> State:
        """A summary of all items."""
        labelled = self.labels is not None if len(self.ids) else None
        return State(len(self.ids), self._kept, self._thresholds, labelled, self._revision, self.origin)

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:
        """Write the blocks behind the last item; they count once all are there."""
        start = first = len(self.ids)
        self._reserve(first + rows)
        ids: list[str] = []
        u, labels = [self.u], [] if self.labels is None else [self.labels]
        for more, vectors, more_u, more_labels in blocks:
            self.vectors[start : start + len(more)] = vectors
            start += len(more)
            ids += more
            u.append(more_u)
            labels += [] if more_labels is None else [more_labels]
        all_u, all_labels = np.concatenate(u), np.concatenate(labels) if labels else None
        # Nothing fails from here on.
        self.origin = self.origin if first else origin
        self.u, self.labels = all_u, all_labels
        self.ids.resize(start, refcheck=False)  # no view of it outlives a call; a copy would count a million references
        self.ids[first:] = ids
        if self._places is not None:
            self._places.update(zip(ids, range(first, start), strict=True))
        self._changed()

    def remove(self, ids: Sequence[str]) -> None:
        """Remove items; the last rows fill the gaps."""
        places = self._row_by_id()
        gone = np.sort(np.array([places.pop(name) for name in ids], dtype=np.int64))
        left = len(self.ids) - len(gone)
        gaps = gone[gone < left]
        movers = np.setdiff1d(np.arange(left, len(self.ids)), gone)
        for start in range(0, len(gaps), _SWAP):
            self.vectors[gaps[start : start + _SWAP]] = self.vectors[movers[start : start + _SWAP]]
        places.update(zip(self.ids[movers], gaps.tolist(), strict=True))
        for column in (self.u, self.ids, self.labels):
            if column is not None:
                column[gaps] = column[movers]
        self.u, self.ids = self.u[:left].copy(), self.ids[:left].copy()
        self.labels = None if self.labels is None or not left else self.labels[:left].copy()
        self.origin = self.origin if left else Origin()
        self._changed()

    def existing(self, ids: Sequence[str]) -> set[str]:
        """The ids among these that are in the index."""
        places = self._row_by_id()
        return {name for name in ids if name in places}

    def left_out(self) -> list[str]:
        """The ids of the rows behind the kept ones, sorted."""
        return sorted(self.ids[self._kept :])

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """The k most similar kept rows of each query."""
        if exact or self.index is None:
            similarities, rows = _most_similar(queries, self.vectors[: self._kept], k)
        else:
            similarities, rows = self._candidates(queries, k)
        labels = None if self.labels is None else self.labels[rows]
        return Hits(self.ids[rows], similarities, labels, exact or self.index is None)

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """The kept items with the lowest MD5 of their id."""

        def order(row: int) -> bytes:
            return md5(stored_id(self.ids[row]).encode(), usedforsecurity=False).digest()

        rows = heapq.nsmallest(count, range(self._kept), key=order)
        return self.ids[rows].tolist(), self.vectors[rows]

    def uncertainty_quantiles(self, levels: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all uncertainties."""
        return np.asarray(np.quantile(self.u, levels))

    def build_approximation(self, kind: str | None, effort: int | None) -> str:
        """Codes of the kept rows; by default an IVF with eight bits per number."""
        kind = kind or approximate.default_kind(self._kept)
        try:
            self.index = approximate.build(self.vectors[: self._kept], kind, effort)
        except (RuntimeError, ValueError) as error:
            reason = str(error).rpartition("Error: ")[2].strip()
            raise ValueRangeError(
                f"SafeIndex.approximate: faiss cannot build '{kind}' of {self._kept} vectors of {self.width} numbers "
                f"({reason}). Use '{approximate.default_kind(self._kept)}', 'HNSW32' or another kind of index."
            ) from error
        return kind

    def close(self) -> None:
        """Nothing to release."""

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the items into a folder, and return what describes them."""
        put = partial(FOLDER.put_file, folder)
        items = {"u": torch.from_numpy(self.u), **pack_strings(self.ids.tolist())}
        items |= {} if self.labels is None else {"label": torch.from_numpy(self.labels)}
        files = {
            "vectors": put("vectors", ".safetensors", lambda to: _write_vectors(to, self.vectors, len(self.ids))),
            "items": put("items", ".safetensors", lambda to: to(save(items))),
        }
        if self.index is not None and self.approximation is not None:
            learned = approximate.to_arrays(self.index)
            files["approximate"] = put("approximate", ".safetensors", lambda to: to(safetensors_numpy.save(learned)))
        return {
            "width": self.width,
            "rows": len(self.ids),
            "rule": asdict(self.rule),
            "origin": self.origin.to_json(),
            "approximation": self.approximation and asdict(self.approximation),
            "files": files,
        }

    @classmethod
    def read(cls, paths: Mapping[str, Path], saved: Mapping[str, Any], where: str, *, mapped: bool) -> "MemoryBackend":
        """Read back what `write` wrote; no row moves, because the kept ones were saved first."""
        backend = cls(int(saved["width"]), Rule(**saved["rule"]))
        n = int(saved["rows"])
        backend.vectors = _read_vectors(paths["vectors"], (n, backend.width), mapped)
        items = load_file(paths["items"])
        backend.u, backend.ids = items["u"].numpy().copy(), np.array(unpack_strings(items), dtype=object)
        if backend.u.dtype != np.float64 or backend.u.shape != (n,) or not np.isfinite(backend.u).all():
            raise ValueError(f"there is not one finite uncertainty for each of {n} vectors")
        if len(backend.ids) != n or len({*backend.ids}) != n:
            raise ValueError(f"there is not one unique id for each of {n} vectors")
        if "label" in items:
            backend.labels = items["label"].numpy().copy()
            if backend.labels.dtype != np.int64 or backend.labels.shape != (n,):
                raise ValueError(f"there is not one class for each of {n} vectors")
        backend.origin, backend._places = Origin.from_json(saved["origin"], where), None
        backend._changed()
        if "approximate" in paths:
            about = Approximation(**saved["approximation"])
            learned = safetensors_numpy.load_file(paths["approximate"])
            backend.index = approximate.from_arrays(backend.vectors[: backend._kept], about.kind, learned)
            backend.approximation = about
        return backend

    def _changed(self) -> None:
        """Compute the thresholds and move the kept rows to the front."""
        self.index = self.approximation = self._thresholds = None
        self._revision, self._kept = self._revision + 1, 0
        if not len(self.ids):
            return
        thresholds = self.rule.thresholds(self.u, self.labels)
        keep = self.rule.keeps(self.u, self.labels, thresholds)
        kept = int(keep.sum())
        front, back = np.flatnonzero(~keep[:kept]), kept + np.flatnonzero(keep[kept:])
        for start in range(0, len(front), _SWAP):
            here, there = front[start : start + _SWAP], back[start : start + _SWAP]
            for column in (self.vectors, self.u, self.ids, self.labels):
                if column is not None:
                    column[here], column[there] = column[there], column[here]
            if self._places is not None:
                moved = np.append(here, there)
                self._places.update(zip(self.ids[moved], moved.tolist(), strict=True))
        self._thresholds, self._kept = thresholds, kept

    def _row_by_id(self) -> dict[str, int]:
        if self._places is None:
            self._places = dict(zip(self.ids, range(len(self.ids)), strict=True))
        return self._places

    def _reserve(self, rows: int) -> None:
        have = len(self.vectors)
        if rows <= have:
            return
        # The first addition takes what it needs; later ones leave room, so that adding item by item does not copy all.
        size = rows if not len(self.ids) else max(rows, have + have // 4 + 64)
        try:
            self.vectors.resize((size, self.width))
        except ValueError:  # mapped from a file, or referenced elsewhere: it must not move
            grown = np.empty((size, self.width), dtype=np.float32)
            grown[: len(self.ids)] = self.vectors[: len(self.ids)]
            self.vectors = grown

    def _candidates(
        self, queries: Float32[np.ndarray, "n d"], k: int
    ) -> tuple[Float32[np.ndarray, "n k"], Int64[np.ndarray, "n k"]]:
        """The best of the approximation's candidates, compared by their vectors."""
        _, rows = self.index.search(queries, min(self._kept, _CANDIDATES * k))
        similarities = np.full(rows.shape, -np.inf, dtype=np.float32)
        for query, candidates in enumerate(rows):
            valid = candidates >= 0
            similarities[query, valid] = self.vectors[candidates[valid]] @ queries[query]
        best = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
        similarities, rows = np.take_along_axis(similarities, best, 1), np.take_along_axis(rows, best, 1)
        missing = (rows < 0).any(1)
        if missing.any():  # an IVF that searched too few lists: compare such a query with all items
            similarities[missing], rows[missing] = _most_similar(queries[missing], self.vectors[: self._kept], k)
        return similarities, rows


def _write_vectors(put: Callable[[bytes], Any], vectors: Float32[np.ndarray, "c d"], rows: int) -> None:
    """A safetensors file of one tensor; its data begin at a multiple of 64 bytes."""
    size = rows * vectors.shape[1] * 4
    header = {"vectors": {"dtype": "F32", "shape": [rows, vectors.shape[1]], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    put(struct.pack("<Q", len(text)) + text)
    for start in range(0, rows, _SWAP):
        put(vectors[start : min(start + _SWAP, rows)].tobytes())


def _read_vectors(path: Path, shape: tuple[int, int], mapped: bool) -> Float32[np.ndarray, "n d"]:
    """The vectors of a file that has exactly the bytes they need: nothing larger is ever allocated."""
    room = path.stat().st_size - 8 - shape[0] * shape[1] * 4
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size != room or shape[0] < 0 or shape[1] < 1:
            raise ValueError(f"{path.name} does not have the size of {shape[0]} vectors of {shape[1]} numbers")
        header = parse_json(file.read(size))["vectors"]
    if header["dtype"] != "F32" or tuple(header["shape"]) != shape:
        raise ValueError(f"vectors are {header['dtype']} of shape {header['shape']}, not F32 of {shape}")
    if mapped and shape[0]:
        # Copy-on-write: rows may move in memory while the file stays as it is.
        return np.memmap(path, dtype=np.float32, mode="c", offset=8 + size, shape=shape)
    return np.fromfile(path, dtype=np.float32, offset=8 + size).reshape(shape)
