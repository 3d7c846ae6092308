"""From nearest items to answers: how many are looked for, one left out, refused rows, sets."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from dubito.apps.search._given import Given, Names
from dubito.apps.search.backend import Backend, Hits, State
from dubito.apps.search.radius import Radii
from dubito.apps.search.result import NeighbourSet
from dubito.errors import TableError, ValueRangeError
from dubito.types import Json


def how_many(k: int, at_most: int, state: State, exclude: Names | None, queries: int) -> int:
    """How many neighbours to look for; raises where there are not enough."""
    there = state.kept - (exclude is not None)
    if not 1 <= k <= there:
        own = " less the excluded one" if exclude is not None else ""
        raise ValueRangeError(
            f"SafeIndex.search: k must be between 1 and {there}, the items that are searched{own} ({state.rows} in "
            f"all, {state.rows - state.kept} left out as too uncertain); {k} came. Choose a smaller k or add items."
        )
    if exclude is not None and len(exclude) != queries:
        raise TableError(
            f"SafeIndex.search: exclude must have one id a query, {queries}; {len(exclude)} came. Name all queries."
        )
    if at_most < 0:
        raise ValueRangeError(f"SafeIndex.search: at_most must be at least 1; {at_most} came. 100 is usual.")
    # One more than a set may have tells whether it is cut off.
    return min(max(k, at_most + 1 if at_most else 0), there)


def accepted(found: Given, refused: Bool[np.ndarray, "n"]) -> Iterator[Float32[np.ndarray, "_ d"]]:
    """Directions of the queries that are answered, block by block; all of them are checked."""
    start = 0
    for block in found.directions():
        here = refused[start : start + len(block)]
        yield block[~here] if here.any() else block
        start += len(block)


def find(backend: Backend, found: Given, refused: Bool[np.ndarray, "n"], k: int, exclude: Names | None) -> Hits:
    """The k nearest items of each query that is answered."""
    more = k + (exclude is not None)
    parts = [backend.nearest(block, more, exact=False) for block in accepted(found, refused) if len(block)]
    labelled = bool(parts) and parts[0].labels is not None
    if not parts:
        return Hits(np.empty((0, k), dtype=object), np.empty((0, k), dtype=np.float32), None)
    hits = parts[0]
    if len(parts) > 1:
        labels = [part.labels for part in parts if part.labels is not None]
        hits = Hits(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.similarities for part in parts]),
            np.concatenate(labels) if labelled else None,
        )
    if exclude is None:
        return hits
    names: Any = np.empty(len(exclude), dtype=object)
    names[:] = [str(one) for one in exclude]
    return without(hits, names[~refused])


def without(hits: Hits, exclude: Any) -> Hits:
    """One neighbour less of each query: the excluded one, or the last."""
    own = hits.ids == exclude[:, None]
    own[~own.any(1), -1] = True
    shape = (len(own), own.shape[1] - 1)
    labels: Int64[np.ndarray, "n k"] | None = None if hits.labels is None else hits.labels[~own].reshape(shape)
    return Hits(hits.ids[~own].reshape(shape), hits.similarities[~own].reshape(shape), labels)


def spread(hits: Hits, refused: Bool[np.ndarray, "n"], k: int) -> Json:
    """The first k neighbours, in the rows of the queries that were answered."""
    if not refused.any():
        labels = None if hits.labels is None else hits.labels[:, :k]
        return {"ids": hits.ids[:, :k], "similarities": hits.similarities[:, :k], "labels": labels}
    shape = (len(refused), k)
    ids, similarities = np.full(shape, "", dtype=object), np.full(shape, np.nan, dtype=np.float32)
    ids[~refused], similarities[~refused] = hits.ids[:, :k], hits.similarities[:, :k]
    labels = None if hits.labels is None else np.full(shape, -1, dtype=np.int64)
    if labels is not None and hits.labels is not None:
        labels[~refused] = hits.labels[:, :k]
    return {"ids": ids, "similarities": similarities, "labels": labels}


def within(
    hits: Hits, radii: Radii, u: Float64[np.ndarray, "n"], refused: Bool[np.ndarray, "n"], at_most: int
) -> tuple[NeighbourSet | None, ...]:
    """For each query the items within its uncertainty; None for a refused one."""
    found: list[NeighbourSet | None] = [None] * len(refused)
    for row, query in enumerate(np.flatnonzero(~refused).tolist()):
        radius = float(radii.of(u[query : query + 1])[0])
        near = int((1.0 - hits.similarities[row].astype(np.float64) <= radius).sum())
        size = min(near, at_most)
        ids, cosines = hits.ids[row, :size].tolist(), hits.similarities[row, :size].tolist()
        found[query] = NeighbourSet(tuple(ids), tuple(cosines), radius, cut_off=near > at_most)
    return tuple(found)
