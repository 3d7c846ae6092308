"""Items in the memory of this process, searched by faiss.

All vectors are rows of one float32 matrix, and **those that are kept come first**. So an exact search is faiss's flat
search of the first rows, as fast as without any rule: no mask is consulted, and nothing is there twice. When items
come or go, the threshold moves, and the rows that have changed sides are swapped. The matrix grows in place, and may
be mapped from a file.

An approximation (IVF, HNSW, any factory string of faiss) holds codes of the kept rows. Its candidates are compared
again by their vectors, so similarities are exact. Items that come or go end it.

Threads may search at once, as a search moves nothing. While one adds or removes, no other may ask.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import faiss
import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from dubito.errors import ValueRangeError
from dubito.search.backend import Approximation, Block, Hits, Origin, State, lot
from dubito.search.rule import Rule, Thresholds

_SWAP = 16_384
"""Rows that are swapped together."""
_CANDIDATES = 4
"""So many times more candidates are taken from an approximation than neighbours are asked for."""
_TRAINING = 64
"""Vectors for each centre of an IVF that its centres are learned from."""


@final
class InMemory:
    """The backend that needs no server."""

    def __init__(self, width: int, rule: Rule) -> None:
        self.width, self.rule = width, rule
        self.vectors: Float32[np.ndarray, "c d"] = np.empty((0, width), dtype=np.float32)
        self.u: Float64[np.ndarray, "n"] = np.empty(0, dtype=np.float64)
        self.labels: Int64[np.ndarray, "n"] | None = None
        self.ids: list[str] = []
        self.origin = Origin()
        self.index: Any = None
        self._approximation: Approximation | None = None
        self._places: dict[str, int] | None = {}
        self._named: Shaped[np.ndarray, "n"] | None = None
        self._thresholds: Thresholds | None = None
        self._kept = self._revision = 0

    def state(self) -> State:
        """What is known of all items."""
        labelled = None if not self.ids else self.labels is not None
        return State(len(self.ids), self._kept, self._thresholds, labelled, self._revision, self.origin)

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:
        """Written behind the last item; they count once all are there."""
        start = first = len(self.ids)
        self._reserve(first + rows)
        ids: list[str] = []
        u, labels = [self.u], [] if self.labels is None else [self.labels]
        for block in blocks:
            self.vectors[start : start + len(block.ids)] = block.vectors
            start += len(block.ids)
            ids += block.ids
            u.append(block.u)
            labels += [] if block.labels is None else [block.labels]
        all_u, all_labels = np.concatenate(u), np.concatenate(labels) if labels else None
        # Nothing fails from here on.
        self.origin = self.origin if first else origin
        self.u, self.labels = all_u, all_labels
        self.ids += ids
        if self._places is not None:
            self._places.update(zip(ids, range(first, start), strict=True))
        self._changed()

    def remove(self, ids: Sequence[str]) -> None:
        """The last rows fill the gaps."""
        places = self._known_places()
        gone = np.sort(np.array([places.pop(name) for name in ids], dtype=np.int64))
        left = len(self.ids) - len(gone)
        gaps = gone[gone < left]
        movers = np.setdiff1d(np.arange(left, len(self.ids)), gone)
        for start in range(0, len(gaps), _SWAP):
            self.vectors[gaps[start : start + _SWAP]] = self.vectors[movers[start : start + _SWAP]]
        for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
            self.ids[gap] = self.ids[mover]
            places[self.ids[gap]] = gap
        self.u[gaps] = self.u[movers]
        self.u = self.u[:left].copy()
        if self.labels is not None:
            self.labels[gaps] = self.labels[movers]
            self.labels = self.labels[:left].copy() if left else None
        del self.ids[left:]
        self.origin = self.origin if left else Origin()
        self._changed()

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that are there."""
        places = self._known_places()
        return {name for name in ids if name in places}

    def left_out(self) -> list[str]:
        """The ids behind those that are kept."""
        return sorted(self.ids[self._kept :])

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """Of the kept rows."""
        exactly = exact or self.index is None
        similarities, rows = self._compared(queries, k) if exactly else self._candidates(queries, k)
        return Hits(self._names()[rows], similarities, None if self.labels is None else self.labels[rows], exactly)

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """The kept items whose lots are lowest."""
        rows = heapq.nsmallest(count, range(self._kept), key=lambda row: lot(self.ids[row]))
        return [self.ids[row] for row in rows], self.vectors[rows]

    def levels(self, shares: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all uncertainties."""
        found: Float64[np.ndarray, "m"] = np.quantile(self.u, shares)
        return found

    def approximate(self, kind: str | None, effort: int | None) -> str:
        """Codes of the kept rows; by default an IVF with eight bits a number."""
        centres = 2 ** int(math.log2(max(1, min(2 * math.sqrt(self._kept), self._kept / _TRAINING))))
        kind = kind or f"IVF{centres},SQ8"
        try:
            index = faiss.index_factory(self.width, kind, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                some = np.random.default_rng(0).permutation(self._kept)[: max(_TRAINING * centres, _SWAP)]
                index.train(self.vectors[np.sort(some)])
            for start in range(0, self._kept, _SWAP):
                index.add(self.vectors[start : min(start + _SWAP, self._kept)])
        except RuntimeError as error:
            reason = str(error).rpartition("Error: ")[2].strip()
            raise ValueRangeError(
                f"SafeIndex.approximate: faiss cannot build '{kind}' of {self._kept} vectors of {self.width} numbers "
                f"({reason}). Use 'IVF{centres},SQ8', 'HNSW32' or another string that faiss.index_factory takes."
            ) from error
        _take_pains(index, effort)
        self.index = index
        return kind

    def remember(self, approximation: Approximation) -> None:
        """What was measured of the approximation."""
        self._approximation = approximation

    @property
    def approximation(self) -> Approximation | None:
        """None as soon as items have come or gone."""
        return self._approximation

    def close(self) -> None:
        """Nothing but memory is held."""

    def refill(
        self,
        vectors: Float32[np.ndarray, "n d"],
        u: Float64[np.ndarray, "n"],
        ids: list[str],
        labels: Int64[np.ndarray, "n"] | None,
        origin: Origin,
    ) -> None:
        """Become an index that was saved; no row moves, as the kept ones were first then."""
        self.vectors, self.u, self.ids, self.labels, self.origin = vectors, u, ids, labels, origin
        self._places = None
        self._changed()

    def _changed(self) -> None:
        """Find the threshold and bring the kept rows to the front."""
        self.index, self._approximation, self._named = None, None, None
        self._revision += 1
        self._thresholds, self._kept = None, 0
        if not self.ids:
            return
        thresholds = self.rule.thresholds(self.u, self.labels)
        keep = self.rule.keeps(self.u, self.labels, thresholds)
        kept = int(keep.sum())
        front, back = np.flatnonzero(~keep[:kept]), kept + np.flatnonzero(keep[kept:])
        for start in range(0, len(front), _SWAP):
            self._swap(front[start : start + _SWAP], back[start : start + _SWAP])
        self._thresholds, self._kept = thresholds, kept

    def _names(self) -> Shaped[np.ndarray, "n"]:
        """The ids as an array, of which many can be taken at once; made again when rows have changed places."""
        if self._named is None:
            named = np.empty(len(self.ids), dtype=object)
            named[:] = self.ids
            self._named = named
        return self._named

    def _known_places(self) -> dict[str, int]:
        if self._places is None:
            self._places = {name: row for row, name in enumerate(self.ids)}
        return self._places

    def _reserve(self, rows: int) -> None:
        have = len(self.vectors)
        if rows <= have:
            return
        # A first filling takes what it needs; later ones leave room, so that adding item by item does not move all.
        size = rows if not self.ids else max(rows, have + have // 4 + 64)
        try:
            self.vectors.resize((size, self.width))
        except ValueError:  # mapped from a file, or somebody still looks at it: then it must not move
            grown = np.empty((size, self.width), dtype=np.float32)
            grown[: len(self.ids)] = self.vectors[: len(self.ids)]
            self.vectors = grown

    def _swap(self, here: Int64[np.ndarray, "s"], there: Int64[np.ndarray, "s"]) -> None:
        for column in (self.vectors, self.u, self.labels):
            if column is not None:
                column[here], column[there] = column[there], column[here]
        for one, other in zip(here.tolist(), there.tolist(), strict=True):
            self.ids[one], self.ids[other] = self.ids[other], self.ids[one]
            if self._places is not None:
                self._places[self.ids[one]], self._places[self.ids[other]] = one, other

    def _compared(
        self, queries: Float32[np.ndarray, "n d"], k: int
    ) -> tuple[Float32[np.ndarray, "n k"], Int64[np.ndarray, "n k"]]:
        """The best of all kept rows."""
        found: tuple[Any, Any] = faiss.knn(queries, self.vectors[: self._kept], k, metric=faiss.METRIC_INNER_PRODUCT)
        return found

    def _candidates(
        self, queries: Float32[np.ndarray, "n d"], k: int
    ) -> tuple[Float32[np.ndarray, "n k"], Int64[np.ndarray, "n k"]]:
        """More than are wanted from the approximation, then the best of them by their vectors."""
        _, rows = self.index.search(queries, min(self._kept, _CANDIDATES * k))
        similarities = np.full(rows.shape, -np.inf, dtype=np.float32)
        for one, found in enumerate(rows):
            there = found >= 0
            similarities[one, there] = self.vectors[found[there]] @ queries[one]
        best = np.argsort(-similarities, axis=1, kind="stable")[:, :k]
        similarities, rows = np.take_along_axis(similarities, best, 1), np.take_along_axis(rows, best, 1)
        missing = (rows < 0).any(1)
        if missing.any():  # an IVF that has looked into too few lists: such a query is compared with all
            similarities[missing], rows[missing] = self._compared(queries[missing], k)
        return similarities, rows


def _take_pains(index: Any, effort: int | None) -> None:
    """How much of an approximation is looked at: lists of an IVF, candidates of an HNSW."""
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.nprobe = effort or max(8, lists.nlist // 16)
    elif isinstance(graph := faiss.downcast_index(index), faiss.IndexHNSW):
        graph.hnsw.efSearch = effort or 128
