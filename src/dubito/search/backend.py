"""What a `SafeIndex` asks of the place where its items are: the memory of this process, or a database server.

A backend holds unit vectors with their ids, uncertainties and classes, and searches those that the rule keeps.
What is given to it has been checked: `SafeIndex` knows the errors, a backend the items.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from dubito.search.rule import Rule, Thresholds
from dubito.types import Json


def lot(name: str) -> str:
    """By which samples of items are drawn: by chance as far as items go, and the same in Python and in SQL.

    >>> lot("cat.jpg")
    '43bfc6b38f0311f4f73e8d67166836fd'
    """
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


@final
@dataclass(frozen=True)
class Block:
    """Some items, on their way into a backend.

    Attributes:
        ids: Their names.
        vectors: Of length one.
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
    """Where items come from, as far as that is known: what must be the same for all of them, and for queries.

    Attributes:
        model_id: The model that made their features, by its hash.
        classes: What their classes are called, as a hash of the names: only then a number means one class.
        judged_by: The score that their uncertainties are of, by its name.
    """

    model_id: str | None = None
    classes: str | None = None
    judged_by: str | None = None

    def to_json(self) -> Json:
        """As it is kept."""
        return {"model_id": self.model_id, "classes": self.classes, "judged_by": self.judged_by}

    @classmethod
    def from_json(cls, found: Json) -> "Origin":
        """Back from `to_json`, among other things that are kept."""
        return cls(found["model_id"], found.get("classes"), found.get("judged_by"))


@final
@dataclass(frozen=True)
class Hits:
    """The nearest items of some queries, the most similar first.

    Attributes:
        ids: Their names, as strings.
        similarities: Cosines.
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
    """What is known of all items.

    Attributes:
        rows: How many there are.
        kept: How many of them are searched.
        thresholds: None while there are no items.
        labelled: Whether they have classes; None while there are no items.
        revision: Grows whenever items come or go.
        origin: Where they come from.
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
    """An approximate search that stands beside the exact one.

    Attributes:
        kind: As faiss spells it ("IVF1024,SQ8", "HNSW32"), or "hnsw" on a server.
        recall: The share of the ten nearest items that it finds, measured on items as queries; new ones are harder.
        queries: How many it was measured on.
    """

    kind: str
    recall: float
    queries: int

    def to_json(self) -> Json:
        """As it is kept."""
        return {"kind": self.kind, "recall": self.recall, "queries": self.queries}


@runtime_checkable
class Backend(Protocol):
    """Where items are kept and searched."""

    width: int
    rule: Rule

    def state(self) -> State:
        """What is known of all items."""
        ...

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:
        """All blocks, or none of them if one fails; `rows` is how many items they hold together."""
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Items that are there, all or none."""
        ...

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that are there."""
        ...

    def left_out(self) -> list[str]:
        """The ids that the rule does not keep, sorted."""
        ...

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """The k most similar kept items of each query; `exact` even where there is an approximation."""
        ...

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """At most so many kept items, those whose `lot` is lowest: the same ones in every backend."""
        ...

    def levels(self, shares: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Quantiles of all items' uncertainties, interpolated."""
        ...

    def approximate(self, kind: str | None, effort: int | None) -> str:
        """Build an approximation of what is kept, and say of which kind; from now on it is used."""
        ...

    def remember(self, approximation: Approximation) -> None:
        """What was measured of the approximation."""
        ...

    @property
    def approximation(self) -> Approximation | None:
        """The one that is used, if any."""
        ...

    def close(self) -> None:
        """Let go of what is not memory, such as a connection; a later call opens it again."""
        ...
