"""Approximate indexes of faiss: built from vectors, and stored as tensors that are checked before faiss gets them.

faiss's own files are never read. Its reader trusts what it reads, so a hostile file can crash the process, and a
checksum does not help: whoever changes a file can change that, too. What took long to compute is stored as tensors,
the rest is made again from the vectors:

    IVFn,Flat  IVFn,SQ8 (4, 6, fp16, bf16)   centres, the list of each row, ranges of the quantiser; codes are encoded
    HNSWm                                    levels and neighbours of each row
    any other kind                           nothing: it is built again

A kind is checked before faiss parses it, and its numbers are bounded, so that no kind takes unbounded memory.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped

_AT_ONCE = 16_384
"""Vectors that are added together."""
_TRAINING = 64
"""Vectors per centre that the centres of an IVF are learned from."""
_PART = re.compile(
    r"(?:OPQ|PCA|PCAR)(?P<width>\d{1,5})|OPQ\d{1,3}_(?P<reduced>\d{1,5})|IVF(?P<lists>\d{1,7})(?:_HNSW(?P<graph>\d{1,3}))?"
    r"|HNSW(?P<degree>\d{1,3})|PQ(?P<pieces>\d{1,4})(?:x(?P<bits>\d{1,2}))?(?:fs)?|SQ(?:4|6|8|fp16|bf16)|R?Flat",
    re.ASCII,
)
_LIMITS = {"graph": 256, "degree": 256, "bits": 12}

Arrays = dict[str, Shaped[np.ndarray, "..."]]


def default_kind(rows: int) -> str:
    """An IVF with eight bits per number."""
    return f"IVF{_centres(rows)},SQ8"


def check_kind(kind: str, rows: int, width: int) -> None:
    """Raise ValueError for a kind that is unknown, or too large for so many vectors."""
    limits = {**_LIMITS, "lists": rows, "width": width, "reduced": width, "pieces": width}
    for part in kind.split(","):
        known = _PART.fullmatch(part)
        if known is None:
            raise ValueError(f"'{part}' is not one of OPQ, PCA, PCAR, IVF, HNSW, PQ, SQ, Flat and RFlat with a number")
        for name, text in known.groupdict().items():
            if text is not None and not 1 <= int(text) <= limits[name]:
                raise ValueError(f"the number in '{part}' must be from 1 to {limits[name]}; got {int(text)}")


def build(vectors: Float32[np.ndarray, "n d"], kind: str, effort: int | None) -> Any:
    """An index of all vectors; RuntimeError of faiss or ValueError where there is none of this kind."""
    index = _new(vectors, kind)
    if not index.is_trained:
        count = max(_TRAINING * _centres(len(vectors)), _AT_ONCE)
        subset = np.random.default_rng(0).permutation(len(vectors))[:count]
        index.train(vectors[np.sort(subset)])
    for start in range(0, len(vectors), _AT_ONCE):
        index.add(vectors[start : start + _AT_ONCE])
    _set_effort(index, effort)
    return index


def to_arrays(index: Any) -> Arrays:
    """What `from_arrays` needs beside the vectors."""
    arrays: Arrays = {"effort": np.array([_effort(index)], dtype=np.int64)}
    if _is_ivf(index):
        arrays["centres"] = index.quantizer.reconstruct_n(0, index.nlist)
        arrays["lists"] = _lists(index)
        if isinstance(index, faiss.IndexIVFScalarQuantizer):
            arrays["ranges"] = faiss.vector_to_array(index.sq.trained)
    elif _is_hnsw(index):
        graph = index.hnsw
        arrays["levels"] = faiss.vector_to_array(graph.levels)
        arrays["neighbours"] = faiss.vector_to_array(graph.neighbors)
        arrays["entry"] = np.array([graph.entry_point], dtype=np.int64)
    return arrays


def from_arrays(vectors: Float32[np.ndarray, "n d"], kind: str, arrays: Mapping[str, Any]) -> Any:
    """The index that `to_arrays` described; ValueError where the arrays do not fit the vectors and the kind."""
    effort = _checked(arrays, "effort", np.int64, (1,), 0, 2**31)
    index = _new(vectors, kind)
    if _is_ivf(index):
        _restore_lists(index, vectors, arrays)
    elif _is_hnsw(index):
        _restore_graph(index, vectors, arrays)
    else:
        return build(vectors, kind, int(effort[0]) or None)
    _set_effort(index, int(effort[0]) or None)
    return index


def _new(vectors: Float32[np.ndarray, "n d"], kind: str) -> Any:
    check_kind(kind, *vectors.shape)
    return faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)


def _centres(rows: int) -> int:
    return int(2 ** int(math.log2(max(1, min(2 * math.sqrt(rows), rows / _TRAINING)))))


def _is_ivf(index: Any) -> bool:
    """An IVF whose centres are compared one by one and whose codes need nothing but ranges."""
    kinds = faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer
    return type(index) in kinds and isinstance(faiss.downcast_index(index.quantizer), faiss.IndexFlat)


def _is_hnsw(index: Any) -> bool:
    return type(index) is faiss.IndexHNSWFlat


def _effort(index: Any) -> int:
    """How much of an index is searched: lists of an IVF, candidates of an HNSW; 0 for others."""
    if (lists := faiss.try_extract_index_ivf(index)) is not None:
        return int(lists.nprobe)
    graph = faiss.downcast_index(index)
    return int(graph.hnsw.efSearch) if isinstance(graph, faiss.IndexHNSW) else 0


def _set_effort(index: Any, effort: int | None) -> None:
    """Never more than there is: faiss reserves memory for it."""
    if (lists := faiss.try_extract_index_ivf(index)) is not None:
        lists.nprobe = min(effort or max(8, lists.nlist // 16), lists.nlist)
    elif isinstance(graph := faiss.downcast_index(index), faiss.IndexHNSW):
        graph.hnsw.efSearch = min(effort or 128, max(128, index.ntotal))


def _lists(index: Any) -> Int64[np.ndarray, "n"]:
    """The list of each row."""
    lists = np.empty(index.ntotal, dtype=np.int64)
    for number in range(index.nlist):
        size = index.invlists.list_size(number)
        if size:
            lists[faiss.rev_swig_ptr(index.invlists.get_ids(number), size)] = number
    return lists


def _restore_lists(index: Any, vectors: Float32[np.ndarray, "n d"], arrays: Mapping[str, Any]) -> None:
    """Put every row into its list, encoded again."""
    n, width = vectors.shape
    centres = _checked(arrays, "centres", np.float32, (index.nlist, width))
    lists = _checked(arrays, "lists", np.int64, (n,), 0, index.nlist)
    if isinstance(index, faiss.IndexIVFScalarQuantizer):
        unscaled = index.sq.qtype in (faiss.ScalarQuantizer.QT_fp16, faiss.ScalarQuantizer.QT_bf16)
        ranges = _checked(arrays, "ranges", np.float32, (0 if unscaled else 2 * width,))
        faiss.copy_array_to_vector(ranges, index.sq.trained)
    index.quantizer.add(centres)
    index.is_trained = True
    for start in range(0, n, _AT_ONCE):
        block, numbers = np.ascontiguousarray(vectors[start : start + _AT_ONCE]), lists[start : start + _AT_ONCE]
        index.add_core(len(block), faiss.swig_ptr(block), None, faiss.swig_ptr(np.ascontiguousarray(numbers)))


def _restore_graph(index: Any, vectors: Float32[np.ndarray, "n d"], arrays: Mapping[str, Any]) -> None:
    """Link the rows as they were."""
    n, graph = len(vectors), index.hnsw
    ends = faiss.vector_to_array(graph.cum_nneighbor_per_level).astype(np.int64)
    levels = _checked(arrays, "levels", np.int32, (n,), 1, len(ends))
    offsets = np.concatenate([[0], ends[levels].cumsum()])
    neighbours = _checked(arrays, "neighbours", np.int32, (int(offsets[-1]),), -1, n)
    (entry,) = _checked(arrays, "entry", np.int64, (1,), 0, n)
    if levels[entry] != levels.max() or not _on_their_levels(levels, neighbours, offsets, ends):
        raise ValueError("the graph links rows on levels that they do not have")
    faiss.copy_array_to_vector(levels, graph.levels)
    faiss.copy_array_to_vector(offsets.astype(np.uint64), graph.offsets)
    graph.neighbors.resize(len(neighbours))
    faiss.rev_swig_ptr(graph.neighbors.data(), len(neighbours))[:] = neighbours
    graph.entry_point, graph.max_level = int(entry), int(levels.max()) - 1
    storage = faiss.downcast_index(index.storage)
    for start in range(0, n, _AT_ONCE):
        storage.add(np.ascontiguousarray(vectors[start : start + _AT_ONCE]))
    index.ntotal = n


def _on_their_levels(
    levels: Int32[np.ndarray, "n"],
    neighbours: Int32[np.ndarray, "e"],
    offsets: Int64[np.ndarray, "n+1"],
    ends: Int64[np.ndarray, "l"],
) -> bool:
    """Whether all neighbours above the lowest level are there themselves: faiss would read beyond their own links."""
    for level in range(1, int(levels.max())):
        rows = np.flatnonzero(levels > level)
        places = offsets[rows, None] + np.arange(ends[level], ends[level + 1])
        linked = neighbours[places]
        if (levels[linked[linked >= 0]] <= level).any():
            return False
    return True


def _checked(
    arrays: Mapping[str, Any],
    name: str,
    dtype: type,
    shape: tuple[int, ...],
    low: int | None = None,
    below: int | None = None,
) -> Any:
    """An array of exactly this type and shape, finite, with values from `low` to under `below`."""
    array = arrays[name]
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(
            f"{name} of the approximation are {array.dtype} of shape {array.shape}, not {np.dtype(dtype)} of {shape}"
        )
    if not np.isfinite(array).all() or (low is not None and ((array < low) | (array >= below)).any()):
        raise ValueError(f"{name} of the approximation are out of range")
    return np.ascontiguousarray(array)
