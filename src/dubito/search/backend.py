"""What a `SafeIndex` requires of the place that holds its items: the memory of this process, or a database server.

A backend stores unit vectors with their ids, uncertainties and classes, and searches those that the rule keeps.
`SafeIndex` has checked everything that it passes on. `approximate` builds an approximate search and measures it:

    recall = mean over items of |exact top 10 and approximate top 10| / 10, the item itself not counted

on up to 200 kept items as queries. An approximation is built from the items, so new images get a slightly lower recall.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from dubito.errors import ValueRangeError
from dubito.search.rule import Rule, Thresholds
from dubito.table.provenance import Provenance
from dubito.types import Json

_TOP, _QUERIES = 10, 200


def sampling_key(name: str) -> str:
    """The key that orders items for sampling: random with respect to content, and the same in Python and in SQL.

    >>> sampling_key("cat.jpg")
    '43bfc6b38f0311f4f73e8d67166836fd'
    """
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


@final
@dataclass(frozen=True)
class Block:
    """A block of items to be added.

    Attributes:
        ids: Their ids.
        vectors: Their features, scaled to length one.
        u: Their uncertainties.
        labels: Their classes, if known.
    """

    ids: Sequence[str]
    vectors: Float32[np.ndarray, "n d"]
    u: Float64[np.ndarray, "n"]
    labels: Int64[np.ndarray, "n"] | None


@final
@dataclass(frozen=True)
class Origin:
    """Where items come from, as far as it is known. It must be the same for all items, and for queries.

    Attributes:
        provenance: The model that made their features.
        classes: Hash of the class names: only items with the same names give a class number the same meaning.
        scored_by: Name of the score that their uncertainties are values of.
    """

    provenance: Provenance | None = None
    classes: str | None = None
    scored_by: str | None = None

    @property
    def model_id(self) -> str | None:
        """The hash of the model."""
        return None if self.provenance is None else self.provenance.model_id

    def conflict(self, other: "Origin") -> str | None:
        """What differs where both are known, in words; None if nothing does."""
        pairs = {
            "model": (self.model_id, other.model_id),
            "set of classes": (self.classes, other.classes),
            "score": (self.scored_by, other.scored_by),
        }
        differing = (f"{what} ({one}, not {two})" for what, (one, two) in pairs.items() if one and two and one != two)
        return next(differing, None)

    def to_json(self) -> Json:
        """Plain values, for the disk."""
        provenance = None if self.provenance is None else self.provenance.to_json()
        return {"provenance": provenance, "classes": self.classes, "scored_by": self.scored_by}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> "Origin":
        """The inverse of `to_json`; `where` is named in errors."""
        return cls(Provenance.from_json(values["provenance"], where), values["classes"], values["scored_by"])


@final
@dataclass(frozen=True)
class Hits:
    """The nearest items of each query, the most similar first.

    Attributes:
        ids: Their ids, as strings.
        similarities: Their cosines with the query.
        labels: Their classes, if known.
        exact: Whether every kept item was compared.
    """

    ids: Shaped[np.ndarray, "n k"]
    similarities: Float32[np.ndarray, "n k"]
    labels: Int64[np.ndarray, "n k"] | None
    exact: bool


@final
@dataclass(frozen=True)
class State:
    """A summary of all items.

    Attributes:
        rows: How many items there are.
        kept: How many of them are searched.
        thresholds: None while there are no items.
        labelled: Whether items have classes; None while there are no items.
        revision: A counter that grows with every addition and removal.
        origin: Where the items come from.
    """

    rows: int
    kept: int
    thresholds: Thresholds | None
    labelled: bool | None
    revision: int
    origin: Origin


@final
@dataclass(frozen=True)
class Approximation:
    """An approximate search beside the exact one.

    Attributes:
        kind: As faiss spells it ("IVF1024,SQ8", "HNSW32"), or "hnsw" on a server.
        recall: The share of the ten nearest items that it finds, measured on items as queries.
        queries: How many queries the recall was measured on.
    """

    kind: str
    recall: float
    queries: int

    def to_json(self) -> Json:
        """Plain values, for the disk."""
        return asdict(self)


@runtime_checkable
class Backend(Protocol):
    """Stores and searches items."""

    width: int
    rule: Rule

    def state(self) -> State:
        """A summary of all items."""
        ...

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:
        """Add all blocks, or none if one fails; `rows` is how many items they hold together."""
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Remove existing items, all or none."""
        ...

    def existing(self, ids: Sequence[str]) -> set[str]:
        """The ids among these that are in the index."""
        ...

    def left_out(self) -> list[str]:
        """The ids that the rule does not keep, sorted."""
        ...

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """The k most similar kept items of each query; `exact` ignores an approximation."""
        ...

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """At most `count` kept items, those with the lowest `sampling_key`: the same ones in every backend."""
        ...

    def uncertainty_quantiles(self, levels: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Interpolated quantiles of the uncertainties of all items."""
        ...

    def build_approximation(self, kind: str | None, effort: int | None) -> str:
        """Build an approximation of the kept items, use it from now on, and return its kind."""
        ...

    def store_approximation(self, approximation: Approximation) -> None:
        """Keep the measured recall of the approximation."""
        ...

    @property
    def approximation(self) -> Approximation | None:
        """The approximation in use, if any."""
        ...

    def close(self) -> None:
        """Release what is not memory, such as a connection; a later call opens it again."""
        ...


def approximate(backend: Backend, kind: str | None, effort: int | None) -> Approximation:
    """Build an approximation, measure its recall, and let the backend keep both."""
    if effort is not None and effort < 1:
        raise ValueRangeError(
            f"SafeIndex.approximate: effort must be at least 1; got {effort}. Leave it out for the default."
        )
    built = backend.build_approximation(kind, effort)
    ids, vectors = backend.sample(_QUERIES)
    k = min(_TOP + 1, backend.state().kept)
    exact, approximated = (backend.nearest(vectors, k, exact=exact).ids.tolist() for exact in (True, False))
    recalls = [
        len({*one} & {*other} - {own}) / max(1, len({*one} - {own}))
        for own, one, other in zip(ids, exact, approximated, strict=True)
    ]
    approximation = Approximation(built, float(np.mean(recalls)) if k > 1 else 1.0, len(ids))
    backend.store_approximation(approximation)
    return approximation
