"""What a search found: neighbours, the queries that were refused and why, and neighbours as sets."""

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped

from dubito.result import aligned
from dubito.types import Json


@final
@dataclass(frozen=True)
class NeighbourSet:
    """All items that lie within a query's uncertainty, the most similar first.

    Attributes:
        ids: Their names; none where nothing lies so near.
        similarities: Cosines.
        radius: The cosine distance that the query's uncertainty reaches.
        cut_off: Whether there are more than were asked for.
    """

    ids: tuple[str, ...]
    similarities: tuple[float, ...]
    radius: float
    cut_off: bool

    def to_json(self) -> Json:
        """All of it."""
        found = {"ids": list(self.ids), "similarities": list(self.similarities)}
        return found | {"radius": self.radius, "cut_off": self.cut_off}


@final
@dataclass(frozen=True)
class Retrieved:
    """The answers to some queries; rows of refused queries hold "", NaN and -1.

    Attributes:
        ids: The neighbours' names, as strings, the most similar first.
        similarities: Their cosines with the query.
        labels: Their classes, if the index knows them.
        refused: Which queries were not answered.
        uncertainty: Of every query; None where it was not asked for.
        thresholds: What it was held against; infinite where no query is refused.
        against: What the threshold is, in words.
        sets: For each query the set within its uncertainty, None for a refused one; None unless asked for.
        exact: Whether every item was compared, or an approximation was searched.
        queries: The queries' names, where they came as a table with ids.
    """

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

    def to_json(self) -> Json:
        """Everything, query by query."""
        return {"exact": self.exact, "queries": [self._query(row) for row in range(len(self))]}

    def _query(self, row: int) -> Json:
        answered = not self.refused[row]
        found: Json = {} if self.queries is None else {"id": self.queries[row]}
        found |= {"refused": not answered, "reason": self.reason(row)}
        if self.uncertainty is not None:
            found["uncertainty"] = float(self.uncertainty[row])
        found["ids"] = self.ids[row].tolist() if answered else []
        found["similarities"] = self.similarities[row].tolist() if answered else []
        if self.labels is not None:
            found["labels"] = self.labels[row].tolist() if answered else []
        if self.sets is not None:
            one = self.sets[row]
            found["set"] = None if one is None else one.to_json()
        return found

    def __str__(self) -> str:
        lines = [["query", "nearest", "cosine", "refused because"]]
        for row in range(len(self)):
            reason = self.reason(row)
            first = ["-", "-", reason] if reason else [str(self.ids[row, 0]), f"{self.similarities[row, 0]:.3f}", ""]
            lines.append([str(row) if self.queries is None else self.queries[row], *first])
        return "\n".join(aligned(lines))
