"""Which items are left out and which queries are refused: those above a quantile of the items' uncertainties.

    t = the smallest uncertainty of an item such that at least the share q of the items has u <= t
    an item is kept, and a query is answered, if u <= t

Kirchhof et al., Pretrained Visual Uncertainties (2024), Section 5.2: "we reject and/or clean the 10% most uncertain
images per class". The text calls this label-free; the published code takes the quantile in each true class: by default
there is one threshold for all, with `per_class` one per class. Ties are kept. The threshold is the uncertainty of an
item and never between two, so a database computes the same one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int64

from dubito.choices import Clean
from dubito.errors import TableError, ValueRangeError
from dubito.types import Json
from dubito.validate import check_choice, check_number

_ROUNDING = 1e-12
"""0.55 of 100 items are 55 of them, whatever the last bit of the product says."""


@final
@dataclass(frozen=True)
class Thresholds:
    """The highest uncertainty that is accepted.

    Attributes:
        overall: The threshold of all items together.
        by_class: The threshold of each class, with `per_class`.
    """

    overall: float
    by_class: Mapping[int, float] | None = None

    def of(self, n: int, labels: Int64[np.ndarray, "n"] | None) -> Float64[np.ndarray, "n"]:
        """The threshold of each of n rows; with `by_class`, of the row's class."""
        if self.by_class is None or labels is None:
            return np.full(n, self.overall)
        classes, place = np.unique(labels, return_inverse=True)
        if unknown := [int(one) for one in classes if int(one) not in self.by_class]:
            raise ValueRangeError(
                f"SafeIndex: a threshold per class needs items of that class; there are none of class {unknown[0]}. "
                f"Add some, pass refuse_above=..., or build the index with per_class=False."
            )
        return np.array([self.by_class[int(one)] for one in classes], dtype=np.float64)[place]

    @classmethod
    def from_json(cls, values: Json) -> "Thresholds":
        """From plain values; the keys of JSON are strings."""
        by_class = values["by_class"]
        return cls(float(values["overall"]), by_class and {int(key): float(value) for key, value in by_class.items()})


@final
@dataclass(frozen=True)
class Rule:
    """How an index treats uncertainty.

    Attributes:
        quantile: The share of items that is kept, in (0, 1].
        clean: Whether uncertain "queries" are refused, uncertain "items" left out, "both" or "none".
        per_class: Take the quantile in each class.
    """

    quantile: float = 0.9
    clean: Clean = "both"
    per_class: bool = False

    def __post_init__(self) -> None:
        hint = "It is the share of items that is kept; 0.9 is usual."
        check_number(self.quantile, "(0, 1]", by="SafeIndex", what="quantile", hint=hint)
        check_choice(self.clean, get_args(Clean), by="SafeIndex", what="clean")

    @property
    def cleans_items(self) -> bool:
        """Whether uncertain items are left out."""
        return self.clean in ("both", "items")

    @property
    def refuses_queries(self) -> bool:
        """Whether uncertain queries are refused."""
        return self.clean in ("both", "queries")

    def thresholds(self, u: Float64[np.ndarray, "n"], labels: Int64[np.ndarray, "n"] | None) -> Thresholds:
        """The thresholds of at least one item.

        >>> Rule(quantile=0.75).thresholds(np.array([0.1, 0.4, 0.2, 0.9]), None).overall
        0.4
        """
        if not self.per_class:
            return Thresholds(self._quantile(u))
        if labels is None:
            raise TableError(
                "SafeIndex: per_class=True needs the class of every item; got no labels. Pass labels=..., a table "
                "with a column 'label', or per_class=False."
            )
        order = np.argsort(labels, kind="stable")
        classes, starts = np.unique(labels[order], return_index=True)
        by_class = zip(classes.tolist(), map(self._quantile, np.split(u[order], starts[1:])), strict=True)
        return Thresholds(self._quantile(u), dict(by_class))

    def keeps(
        self, u: Float64[np.ndarray, "n"], labels: Int64[np.ndarray, "n"] | None, thresholds: Thresholds
    ) -> Bool[np.ndarray, "n"]:
        """Which items are kept, and so searched."""
        if not self.cleans_items:
            return np.ones(len(u), dtype=bool)
        return np.asarray(u <= thresholds.of(len(u), labels))

    @property
    def share(self) -> float:
        """The quantile as a share: of n sorted values it is the one at position ceil(share n), at least the first."""
        return self.quantile * (1 - _ROUNDING)

    def _quantile(self, u: Float64[np.ndarray, "n"]) -> float:
        place = max(1, math.ceil(self.share * len(u))) - 1
        return float(np.partition(u, place)[place])
