"""The radius of a query's uncertainty in cosine distance, by matching quantiles.

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

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float64

from dubito.errors import TableError
from dubito.search.backend import Backend
from dubito.types import Json

REACH = 10
"""Radii are distances to the tenth neighbour, so a median ball holds about ten items."""
SAMPLE = 500
_LEVELS = np.linspace(0.0, 1.0, 101)


@final
@dataclass(frozen=True)
class Radii:
    """The map from uncertainty to radius.

    Attributes:
        u: Uncertainties, ascending.
        distances: The radius at each of them.
        revision: The revision of the items that it was measured on.
    """

    u: Float64[np.ndarray, "m"]
    distances: Float64[np.ndarray, "m"]
    revision: int

    def of(self, u: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """The radius of each uncertainty; beyond the items' own range it stays constant."""
        radius: Float64[np.ndarray, "n"] = np.interp(u, self.u, self.distances)
        return radius

    def to_json(self) -> Json:
        """Plain values, for the disk."""
        return {"u": self.u.tolist(), "distances": self.distances.tolist()}

    @classmethod
    def from_json(cls, values: Json, revision: int) -> "Radii":
        """The inverse of `to_json`; ValueError if it is no such map."""
        u, distances = (np.array(values[name], dtype=np.float64) for name in ("u", "distances"))
        if u.ndim != 1 or not len(u) or u.shape != distances.shape or not np.isfinite([u, distances]).all():
            raise ValueError("radii must be as many distances as uncertainties, all of them finite")
        return cls(u, distances, revision)


def measure_radii(backend: Backend) -> Radii:
    """The radii of an index, from distances between its own kept items."""
    state = backend.state()
    if state.kept < 2:
        raise TableError(
            f"SafeIndex.search: sets need distances between at least two kept items; got {state.kept}. Add items, "
            f"or search with sets=False."
        )
    ids, vectors = backend.sample(SAMPLE)
    hits = backend.nearest(vectors, min(REACH, state.kept - 1) + 1, exact=False)
    own = hits.ids == np.array(ids, dtype=object)[:, None]
    own[~own.any(1), -1] = True  # equal items may push an item out of its own list
    others = hits.similarities[~own].reshape(len(ids), -1)
    distances = np.quantile(np.maximum(0.0, 1.0 - others[:, -1].astype(np.float64)), _LEVELS)
    return match_quantiles(backend.uncertainty_quantiles(_LEVELS), distances, state.revision)


def match_quantiles(u: Float64[np.ndarray, "m"], distances: Float64[np.ndarray, "m"], revision: int) -> Radii:
    """Quantiles of uncertainties and of distances as one map; of equal uncertainties, the widest radius counts.

    >>> radii = match_quantiles(np.array([1.0, 1.0, 2.0]), np.array([0.1, 0.2, 0.4]), 0)
    >>> radii.of(np.array([0.0, 1.0, 1.5, 9.0])).round(2).tolist()
    [0.2, 0.2, 0.3, 0.4]
    """
    last = np.append(u[1:] != u[:-1], True)
    return Radii(u[last], distances[last], revision)
