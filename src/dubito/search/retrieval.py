"""From nearest items to results: which queries are refused, how many items are searched for, and sets of neighbours.

A set is all items within a query's uncertainty. Its radius in cosine distance is found by matching quantiles:

    r(u) = Q_D(F_U(u))        F_U: the share of items whose uncertainty is at most u
                              Q_D: quantiles of the cosine distance 1 - cos from an item to its 10th nearest kept item
    set(x) = {items: 1 - cos(x, item) <= r(u(x))}

Kirchhof et al. (2024), Section 5.2, name "a set of potential neighbours that is close to an ambiguous input with
respect to its representation uncertainty" and leave open how wide it is: this definition is ours. It needs no labels,
grows with u and depends only on the order of uncertainties, so any score will do. A query as certain as the median item
gets a ball that holds ten items about half of the time; one as uncertain as the most uncertain item gets the widest.
It guarantees no coverage. Quantiles are kept at 101 levels, and distances are measured on up to 500 items, by the same
search that finds the neighbours: by an approximation where there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array
from dubito.result import Result, cell, plain
from dubito.search.backend import Backend, Hits, State
from dubito.search.inputs import Embeddings
from dubito.search.rule import Rule
from dubito.table import to_tensor
from dubito.types import Json
from dubito.validate import check_number

REACH = 10
"""Radii are distances to the tenth neighbour, so a median ball holds about ten items."""
SAMPLE = 500
_LEVELS = np.linspace(0.0, 1.0, 101)
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
        return [{"query": name, **self._answer(row)} for row, name in enumerate(names)]

    def cell(self, key: str, value: Any) -> str:
        """Neighbours in one cell, a set by its size."""
        if isinstance(value, list):
            return ", ".join(cell(one) for one in value) or "-"
        if key == "set" and value is not None:
            return f"{len(value['ids'])}{'+' * value['cut_off']}"
        return f"{value:.4g}" if key == "uncertainty" else cell(value)

    def to_dict(self) -> Json:
        """Everything, query by query."""
        queries = []
        for row, refused in enumerate(self.refused.tolist()):
            name = {} if self.queries is None else {"id": self.queries[row]}
            queries.append({**name, "refused": refused, **self._answer(row)})
        return {"exact": self.exact, "queries": queries}

    def _answer(self, row: int) -> Json:
        kept = 0 if self.refused[row] else None
        columns = {"ids": self.ids, "similarities": self.similarities, "labels": self.labels}
        values: Json = {key: column[row].tolist()[:kept] for key, column in columns.items() if column is not None}
        if self.uncertainty is not None:
            values["uncertainty"] = float(self.uncertainty[row])
        if self.sets is not None:
            values["set"] = plain(self.sets[row])
        return {**values, "reason": self.reason(row)}


Radii = Float64[np.ndarray, "2 levels"]
"""Uncertainties, ascending, and below them the radius at each; beyond their range the radius stays constant."""


def measure_radii(backend: Backend) -> Radii:
    """The radii of an index, from distances between its own kept items."""
    ids, vectors = backend.sample(SAMPLE)
    reach = min(REACH, backend.state().kept - 1)
    hits = backend.nearest(vectors, reach + 1, exact=False).without(np.array(ids, dtype=object))
    distances = np.quantile(np.maximum(0.0, 1.0 - hits.similarities[:, -1].astype(np.float64)), _LEVELS)
    u = backend.uncertainty_quantiles(_LEVELS)
    widest = np.append(u[1:] != u[:-1], True)  # of the levels that have the same uncertainty
    return np.stack([u, distances])[:, widest]


def query_limits(
    queries: Embeddings, rule: Rule, state: State, refuse_above: float | Array | None
) -> tuple[Float64[np.ndarray, "n"], str]:
    """The threshold of every query, and what it is, in words."""
    if refuse_above is not None:
        limits: Float64[np.ndarray, "..."] = to_tensor(refuse_above, "SafeIndex.search: refuse_above").double().numpy()
        if limits.shape not in ((), (queries.rows,)) or np.isnan(limits).any():
            raise ValueRangeError(
                f"SafeIndex.search: refuse_above must be one number, or one per query, ({queries.rows},); got shape "
                f"{limits.shape}, {np.isnan(limits).sum()} of them NaN. Infinity refuses no query."
            )
        return np.full(queries.rows, limits), "the threshold that you set"
    if not rule.refuses_queries or state.thresholds is None:
        return np.full(queries.rows, np.inf), "no threshold"
    if rule.per_class and queries.labels is None:
        raise TableError(
            "SafeIndex.search: per_class=True needs the class of every query, true or predicted; got no labels. "
            "Pass labels=..., refuse_above=index.thresholds.overall, or build the index with clean='items'."
        )
    queries.origin.check(state.origin, by=queries.by, name=queries.name, classes=rule.per_class)
    which = "the items of its class" if rule.per_class else "the items"
    return state.thresholds.of(queries.rows, queries.labels), f"the {rule.quantile:.4g} quantile of {which}"


def neighbour_count(k: int, at_most: int | None, state: State, exclude: Sequence[str] | None, queries: int) -> int:
    """How many neighbours to search for: k, or enough for sets of `at_most` items."""
    for argument, used in {"exclude": exclude is not None, "sets": at_most is not None}.items():
        if used:
            what, hint = f"with {argument}, the number of searched items", f"Add items, or search without {argument}."
            check_number(state.kept, "[2, inf)", by="SafeIndex.search", what=what, hint=hint)
    available = state.kept - (exclude is not None)
    less = ", less the excluded one" if exclude is not None else ""
    hint = f"{state.kept} of {state.rows} items are searched{less}: choose a smaller k, or add items."
    check_number(k, f"[1, {available}]", by="SafeIndex.search", what="k", whole=True, hint=hint)
    if exclude is not None and len(exclude) != queries:
        raise TableError(
            f"SafeIndex.search: exclude must have one id per query, {queries}; got {len(exclude)}. Name all queries."
        )
    if at_most is None:
        return int(k)
    check_number(at_most, "[1, inf)", by="SafeIndex.search", what="at_most", whole=True, hint="100 is usual.")
    # One more than a set may have shows whether it is cut off.
    return int(min(max(k, at_most + 1), available))


def nearest_items(
    backend: Backend, queries: Embeddings, refused: Bool[np.ndarray, "n"], k: int, exclude: Sequence[str] | None
) -> Hits:
    """The k nearest items of each query; rows of refused ones hold "", NaN and -1."""
    shape = (queries.rows, k)
    ids, labels = np.full(shape, "", dtype=object), np.full(shape, -1, dtype=np.int64)
    similarities = np.full(shape, np.nan, dtype=np.float32)
    for rows, block in queries.unit_vectors():  # the features of refused queries are checked, too
        answered = ~refused[rows]
        wanted = block if answered.all() else block[answered]
        hits = backend.nearest(wanted, k + (exclude is not None), exact=False)
        if exclude is not None:
            hits = hits.without(np.array(exclude[rows], dtype=object)[answered])
        ids[rows][answered], similarities[rows][answered] = hits.ids, hits.similarities.clip(-1.0, 1.0)
        if hits.labels is not None:
            labels[rows][answered] = hits.labels
    return Hits(ids, similarities, None if hits.labels is None else labels, hits.exact)


def neighbour_sets(
    hits: Hits, radii: Radii, u: Float64[np.ndarray, "n"], refused: Bool[np.ndarray, "n"], at_most: int
) -> tuple[NeighbourSet | None, ...]:
    """For each query the items within its uncertainty; None for a refused one."""
    sets: list[NeighbourSet | None] = [None] * len(refused)
    radius = np.interp(u, *radii)
    near = (1.0 - hits.similarities.astype(np.float64) <= radius[:, None] + _ROUNDING).sum(1)
    for row in np.flatnonzero(~refused).tolist():
        size = min(int(near[row]), at_most)
        ids, cosines = hits.ids[row, :size].tolist(), hits.similarities[row, :size].tolist()
        sets[row] = NeighbourSet(tuple(ids), tuple(cosines), float(radius[row]), cut_off=bool(near[row] > at_most))
    return tuple(sets)
