"""What a `SafeIndex` requires of the place that holds its items: the memory of this process, or a database server.

A backend stores unit vectors with their ids, uncertainties and classes, and searches those that the rule keeps.
`SafeIndex` has checked everything that it passes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from dubito.errors import TableError
from dubito.search.rule import Rule, Thresholds
from dubito.table.provenance import Provenance, check_provenance
from dubito.types import Json

Block = tuple[Sequence[str], Float32[np.ndarray, "n d"], Float64[np.ndarray, "n"], Int64[np.ndarray, "n"] | None]
"""Items to be added: ids, features scaled to length one, uncertainties, and classes, if known."""


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

    def check(self, items: "Origin", *, by: str, name: str, classes: bool = False) -> None:
        """Raise TableError for another origin than the items have, as far as known; class names only with `classes`."""
        check_provenance(self.provenance, items.provenance, by=by, of=f"{name} and the items of the index")
        scale = "and values of two scores have no common scale. Leave the score out, or build another index"
        numbers = "so one number means two classes. Pass labels=... with the numbers that the items have"
        for what, one, other, consequence in (
            ("score", self.scored_by, items.scored_by, scale),
            ("set of classes", self.classes if classes else None, items.classes, numbers),
        ):
            if one and other and one != other:
                raise TableError(
                    f"{by}: {name} has another {what} ({one}) than the items of the index ({other}), {consequence}."
                )

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

    def without(self, exclude: Shaped[np.ndarray, "n"]) -> "Hits":
        """One neighbour fewer per query: the excluded one, or the last, where equal items have pushed it out."""
        other = self.ids != exclude[:, None]
        other[other.all(1), -1] = False
        shape = (len(other), other.shape[1] - 1)
        labels = None if self.labels is None else self.labels[other].reshape(shape)
        return Hits(self.ids[other].reshape(shape), self.similarities[other].reshape(shape), labels, self.exact)


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

    def check_new(self, origin: Origin, *, labelled: bool, by: str, name: str) -> None:
        """Raise unless new items have classes, or not, as the items do, and a number means the same class in both."""
        if self.labelled not in (None, labelled):
            raise TableError(
                f"{by}: either all items have classes or none has; those of the index have "
                f"{'some' if self.labelled else 'none'}, {name} has {'some' if labelled else 'none'}. Nothing was "
                f"added: {'pass labels=...' if self.labelled else 'leave the labels out'}."
            )
        origin.check(self.origin, by=by, name=name, classes=True)


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


@runtime_checkable
class Backend(Protocol):
    """Stores and searches items."""

    width: int
    rule: Rule
    approximation: Approximation | None
    """The approximation in use, if any, with its measured recall."""

    def state(self) -> State:
        """A summary of all items."""

    def add(self, blocks: Iterable[Block], rows: int, origin: Origin) -> None:
        """Add all blocks, or none if one fails; `rows` is how many items they hold together."""

    def remove(self, ids: Sequence[str]) -> None:
        """Remove existing items, all or none."""

    def existing(self, ids: Sequence[str]) -> set[str]:
        """The ids among these that are in the index."""

    def left_out(self) -> list[str]:
        """The ids that the rule does not keep, sorted."""

    def nearest(self, queries: Float32[np.ndarray, "n d"], k: int, *, exact: bool) -> Hits:
        """The k most similar kept items of each query; `exact` ignores an approximation."""

    def sample(self, count: int) -> tuple[list[str], Float32[np.ndarray, "s d"]]:
        """At most `count` kept items, those with the lowest MD5 of their id: random, and the same in every backend."""

    def uncertainty_quantiles(self, levels: Float64[np.ndarray, "m"]) -> Float64[np.ndarray, "m"]:
        """Interpolated quantiles of the uncertainties of all items."""

    def build_approximation(self, kind: str | None, effort: int | None) -> str:
        """Build an approximation of the kept items, use it from now on, and return its kind."""

    def close(self) -> None:
        """Release what is not memory, such as a connection; a later call opens it again."""
