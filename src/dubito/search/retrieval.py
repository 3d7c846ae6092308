"""From nearest items to results: which queries are refused, how many items are searched for, and sets of neighbours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array
from dubito.result import Result, cell, plain
from dubito.search.backend import Backend, Hits, State
from dubito.search.inputs import Embeddings
from dubito.search.radius import Radii
from dubito.search.rule import Rule
from dubito.table import to_tensor
from dubito.types import Json

_ROUNDING = 1e-6
"""What float32 leaves open of a cosine: an item exactly at the radius is in the set, in every backend."""


@final
@dataclass(frozen=True)
class NeighbourSet:
    """All items within a query's uncertainty, the most similar first.

    Attributes:
        ids: Their ids; empty where no item is that near.
        similarities: Their cosines with the query.
        radius: The cosine distance that belongs to the query's uncertainty.
        cut_off: Whether there are more items than `at_most`.
    """

    ids: tuple[str, ...]
    similarities: tuple[float, ...]
    radius: float
    cut_off: bool


@final
@dataclass(frozen=True)
class SearchResult(Result):
    """The nearest items of each query. Rows of refused queries hold "", NaN and -1.

    Attributes:
        ids: The ids of the neighbours, as strings, the most similar first.
        similarities: Their cosines with the query.
        labels: Their classes, if the index knows them.
        refused: Which queries were refused.
        uncertainty: The uncertainty of every query; None where it was not needed.
        thresholds: The threshold of every query; infinite where no query is refused.
        against: What the threshold is, in words.
        sets: For each query the set within its uncertainty, None for a refused one; None unless `sets=True`.
        exact: Whether every item was compared, rather than an approximation searched.
        queries: The ids of the queries, where they are a table with ids.
    """

    titles: ClassVar = {
        "ids": "nearest items",
        "similarities": "cosines",
        "set": "in its set",
        "reason": "refused because",
    }
    text_rows: ClassVar = 50

    ids: Shaped[np.ndarray, "n k"]
    similarities: Float32[np.ndarray, "n k"]
    labels: Int64[np.ndarray, "n k"] | None
    refused: Bool[np.ndarray, "n"]
    uncertainty: Float64[np.ndarray, "n"] | None
    thresholds: Float64[np.ndarray, "n"]
    against: str
    sets: tuple[NeighbourSet | None, ...] | None
    exact: bool
    queries: list[str] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def reason(self, query: int) -> str | None:
        """Why a query was refused, in words; None if it was answered."""
        if not self.refused[query] or self.uncertainty is None:
            return None
        u, threshold = float(self.uncertainty[query]), float(self.thresholds[query])
        return f"its uncertainty {u:.4g} is above {threshold:.4g}, {self.against}"

    def title(self) -> str:
        """How many queries there are, and how many were refused."""
        search = "" if self.exact else " (approximate search)"
        return f"{len(self)} queries, {int(self.refused.sum())} refused{search}"

    def records(self) -> list[dict[str, Any]]:
        """One row per query."""
        names = self.queries or [str(row) for row in range(len(self))]
        return [{"query": name, **self._answer(row), "reason": self.reason(row)} for row, name in enumerate(names)]

    def cell(self, key: str, value: Any) -> str:
        """Neighbours in one cell, a set by its size."""
        if isinstance(value, list):
            return ", ".join(cell(one) for one in value) or "-"
        if key == "set" and value is not None:
            return f"{len(value['ids'])}{'+' * value['cut_off']}"
        return f"{value:.4g}" if key == "uncertainty" else cell(value)

    def to_dict(self) -> Json:
        """Everything, query by query."""
        return {"exact": self.exact, "queries": [self._query(row) for row in range(len(self))]}

    def _query(self, row: int) -> Json:
        name = {} if self.queries is None else {"id": self.queries[row]}
        return {**name, "refused": bool(self.refused[row]), "reason": self.reason(row), **self._answer(row)}

    def _answer(self, row: int) -> Json:
        answered = not self.refused[row]
        values: Json = {"ids": self.ids[row].tolist() if answered else []}
        values["similarities"] = self.similarities[row].tolist() if answered else []
        if self.labels is not None:
            values["labels"] = self.labels[row].tolist() if answered else []
        if self.uncertainty is not None:
            values["uncertainty"] = float(self.uncertainty[row])
        if self.sets is not None:
            values["set"] = plain(self.sets[row])
        return values


def query_limits(
    queries: Embeddings, rule: Rule, state: State, refuse_above: float | Array | None
) -> tuple[Float64[np.ndarray, "n"], str]:
    """The threshold of every query, and what it is, in words."""
    if refuse_above is not None:
        return _custom_limits(refuse_above, queries.rows), "the threshold that you set"
    if not rule.refuses_queries or state.thresholds is None:
        return np.full(queries.rows, np.inf), "no threshold"
    if rule.per_class and queries.labels is None:
        raise TableError(
            "SafeIndex.search: per_class=True needs the class of every query, true or predicted; got no labels. "
            "Give labels=..., refuse_above=index.thresholds.overall, or build the index with clean='items'."
        )
    if rule.per_class and other_classes(queries, state):
        raise TableError(
            f"SafeIndex.search: per_class=True needs queries of the items' classes; those of {queries.name} have other "
            f"names, so one number means two classes. Give labels=... with the numbers that the items have, or one "
            f"threshold with refuse_above=...."
        )
    limits = state.thresholds.of(queries.rows, queries.labels)
    which = "the items of its class" if rule.per_class else "the items"
    return limits, f"the {rule.quantile:.4g} quantile of {which}"


def other_classes(embeddings: Embeddings, state: State) -> bool:
    """Whether the classes have other names than those of the items, where both are known."""
    here, there = embeddings.origin.classes, state.origin.classes
    return bool(here and there and here != there)


def neighbour_count(k: int, at_most: int | None, state: State, exclude: Sequence[str] | None, queries: int) -> int:
    """How many neighbours to search for: k, or enough for sets of `at_most` items."""
    available = state.kept - (exclude is not None)
    if available < 1:
        raise ValueRangeError(
            f"SafeIndex.search: with exclude at least two items must be searched; there is {state.kept} ({state.rows} "
            f"in all). Add items, or search without exclude."
        )
    if not 1 <= k <= available:
        own = " less the excluded one" if exclude is not None else ""
        raise ValueRangeError(
            f"SafeIndex.search: k must be between 1 and {available}, the items that are searched{own} ({state.rows} in "
            f"all, {state.rows - state.kept} left out as too uncertain); got {k}. Choose a smaller k or add items."
        )
    if exclude is not None and len(exclude) != queries:
        raise TableError(
            f"SafeIndex.search: exclude must have one id per query, {queries}; got {len(exclude)}. Name all queries."
        )
    if at_most is None:
        return k
    if at_most < 1:
        raise ValueRangeError(f"SafeIndex.search: at_most must be at least 1; got {at_most}. 100 is usual.")
    # One more than a set may have shows whether it is cut off.
    return min(max(k, at_most + 1), available)


def nearest_items(
    backend: Backend,
    queries: Embeddings,
    refused: Bool[np.ndarray, "n"],
    k: int,
    exclude: Sequence[str] | None,
    *,
    labelled: bool,
) -> Hits:
    """The k nearest items of each query that is not refused."""
    more = k + (exclude is not None)
    parts = [backend.nearest(block, more, exact=False) for block in _accepted(queries, refused) if len(block)]
    hits = _concatenated(parts, more, labelled)
    np.clip(hits.similarities, -1.0, 1.0, out=hits.similarities)
    if exclude is None:
        return hits
    names: Any = np.array(exclude, dtype=object)
    return _without(hits, names[~refused])


def per_query(hits: Hits, refused: Bool[np.ndarray, "n"], k: int) -> Json:
    """The first k neighbours as columns with a row for every query, refused ones included."""

    def filled(values: Any, empty: object) -> Any:
        if not refused.any():
            return values[:, :k]
        column = np.full((len(refused), k), empty, dtype=values.dtype)
        column[~refused] = values[:, :k]
        return column

    return {
        "ids": filled(hits.ids, ""),
        "similarities": filled(hits.similarities, np.nan),
        "labels": None if hits.labels is None else filled(hits.labels, -1),
    }


def neighbour_sets(
    hits: Hits, radii: Radii, u: Float64[np.ndarray, "n"], refused: Bool[np.ndarray, "n"], at_most: int
) -> tuple[NeighbourSet | None, ...]:
    """For each query the items within its uncertainty; None for a refused one."""
    sets: list[NeighbourSet | None] = [None] * len(refused)
    radius = radii.of(u[~refused])
    near = (1.0 - hits.similarities.astype(np.float64) <= radius[:, None] + _ROUNDING).sum(1)
    for row, query in enumerate(np.flatnonzero(~refused).tolist()):
        size = min(int(near[row]), at_most)
        ids, cosines = hits.ids[row, :size].tolist(), hits.similarities[row, :size].tolist()
        sets[query] = NeighbourSet(tuple(ids), tuple(cosines), float(radius[row]), cut_off=bool(near[row] > at_most))
    return tuple(sets)


def _custom_limits(refuse_above: float | Array, rows: int) -> Float64[np.ndarray, "n"]:
    limits: Float64[np.ndarray, "..."] = to_tensor(refuse_above, "SafeIndex.search: refuse_above").double().numpy()
    if limits.ndim and limits.shape != (rows,):
        raise TableError(
            f"SafeIndex.search: refuse_above must be one number, or one per query, ({rows},); got {limits.shape}. Give "
            f"the same queries."
        )
    if np.isnan(limits).any():
        raise ValueRangeError("SafeIndex.search: refuse_above must be numbers; got NaN. Infinity refuses no query.")
    return np.full(rows, limits)


def _accepted(queries: Embeddings, refused: Bool[np.ndarray, "n"]) -> Iterator[Float32[np.ndarray, "_ d"]]:
    """Unit vectors of the queries that are not refused, block by block; the features of all are checked."""
    start = 0
    for block in queries.unit_vectors():
        here = refused[start : start + len(block)]
        yield block[~here] if here.any() else block
        start += len(block)


def _concatenated(parts: list[Hits], k: int, labelled: bool) -> Hits:
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
    """One neighbour fewer per query: the excluded one, or the last."""
    own = hits.ids == exclude[:, None]
    own[~own.any(1), -1] = True
    shape = (len(own), own.shape[1] - 1)
    labels = None if hits.labels is None else hits.labels[~own].reshape(shape)
    return Hits(hits.ids[~own].reshape(shape), hits.similarities[~own].reshape(shape), labels, hits.exact)
