"""From nearest items to answers: how many are looked for, one left out, refused rows, sets."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64

from dubito.errors import TableError, ValueRangeError
from dubito.search._given import Given
from dubito.search.backend import Backend, Hits, State
from dubito.search.radius import Radii
from dubito.search.result import NeighbourSet
from dubito.types import Json

_ROUNDING = 1e-6
"""What float32 leaves open of a cosine: an item at the very radius is in the set, in every backend."""


def how_many(k: int, at_most: int | None, state: State, exclude: Sequence[str] | None, queries: int) -> int:
    """How many neighbours to look for, `at_most` in a set if sets are asked for; raises where there are not enough."""
    there = state.kept - (exclude is not None)
    if there < 1:
        raise ValueRangeError(
            f"SafeIndex.search: with exclude at least two items must be searched; there is {state.kept} ({state.rows} "
            f"in all). Add items, or search without exclude."
        )
    if not 1 <= k <= there:
        own = " less the excluded one" if exclude is not None else ""
        raise ValueRangeError(
            f"SafeIndex.search: k must be between 1 and {there}, the items that are searched{own} ({state.rows} in "
            f"all, {state.rows - state.kept} left out as too uncertain); got {k}. Choose a smaller k or add items."
        )
    if exclude is not None and len(exclude) != queries:
        raise TableError(
            f"SafeIndex.search: exclude must have one id a query, {queries}; got {len(exclude)}. Name all queries."
        )
    if at_most is None:
        return k
    if at_most < 1:
        raise ValueRangeError(f"SafeIndex.search: at_most must be at least 1; got {at_most}. 100 is usual.")
    # One more than a set may have tells whether it is cut off.
    return min(max(k, at_most + 1), there)


def find(
    backend: Backend,
    found: Given,
    refused: Bool[np.ndarray, "n"],
    k: int,
    exclude: Sequence[str] | None,
    *,
    labelled: bool,
) -> Hits:
    """The k nearest items of each query that is answered."""
    more = k + (exclude is not None)
    parts = [backend.nearest(block, more, exact=False) for block in _accepted(found, refused) if len(block)]
    hits = _joined(parts, more, labelled)
    np.clip(hits.similarities, -1.0, 1.0, out=hits.similarities)
    if exclude is None:
        return hits
    names: Any = np.array(exclude, dtype=object)
    return _without(hits, names[~refused])


def spread(hits: Hits, refused: Bool[np.ndarray, "n"], k: int) -> Json:
    """The first k neighbours, in the rows of the queries that were answered."""

    def spread_out(found: Any, empty: object) -> Any:
        if not refused.any():
            return found[:, :k]
        column = np.full((len(refused), k), empty, dtype=found.dtype)
        column[~refused] = found[:, :k]
        return column

    return {
        "ids": spread_out(hits.ids, ""),
        "similarities": spread_out(hits.similarities, np.nan),
        "labels": None if hits.labels is None else spread_out(hits.labels, -1),
    }


def within(
    hits: Hits, radii: Radii, u: Float64[np.ndarray, "n"], refused: Bool[np.ndarray, "n"], at_most: int
) -> tuple[NeighbourSet | None, ...]:
    """For each query the items within its uncertainty; None for a refused one."""
    found: list[NeighbourSet | None] = [None] * len(refused)
    radius = radii.of(u[~refused])
    near = (1.0 - hits.similarities.astype(np.float64) <= radius[:, None] + _ROUNDING).sum(1)
    for row, query in enumerate(np.flatnonzero(~refused).tolist()):
        size = min(int(near[row]), at_most)
        ids, cosines = hits.ids[row, :size].tolist(), hits.similarities[row, :size].tolist()
        found[query] = NeighbourSet(tuple(ids), tuple(cosines), float(radius[row]), cut_off=bool(near[row] > at_most))
    return tuple(found)


def _accepted(found: Given, refused: Bool[np.ndarray, "n"]) -> Iterator[Float32[np.ndarray, "_ d"]]:
    """Directions of the queries that are answered, block by block; all of them are checked."""
    start = 0
    for block in found.directions():
        here = refused[start : start + len(block)]
        yield block[~here] if here.any() else block
        start += len(block)


def _joined(parts: list[Hits], k: int, labelled: bool) -> Hits:
    if len(parts) == 1:
        return parts[0]
    labels = [np.empty((0, k), dtype=np.int64), *(part.labels for part in parts if part.labels is not None)]
    return Hits(
        np.concatenate([np.empty((0, k), dtype=object), *(part.ids for part in parts)]),
        np.concatenate([np.empty((0, k), dtype=np.float32), *(part.similarities for part in parts)]),
        np.concatenate(labels) if labelled else None,
        all(part.exact for part in parts),
    )


def _without(hits: Hits, exclude: Any) -> Hits:
    """One neighbour less of each query: the excluded one, or the last."""
    own = hits.ids == exclude[:, None]
    own[~own.any(1), -1] = True
    shape = (len(own), own.shape[1] - 1)
    labels = None if hits.labels is None else hits.labels[~own].reshape(shape)
    return Hits(hits.ids[~own].reshape(shape), hits.similarities[~own].reshape(shape), labels, hits.exact)
