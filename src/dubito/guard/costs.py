"""What predictions cost, by true and predicted class: in place of errors, which all cost the same."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from jaxtyping import Float64, Int64

from dubito.errors import ValueRangeError


@final
@dataclass(frozen=True, eq=False)
class CostMatrix:
    """What predictions cost.

    Attributes:
        costs: (true class, predicted class), from 0 on.

    >>> CostMatrix.of([[0, 1], [5, 0]], 2).of_rows(np.array([1, 0]), np.array([0, 0])).tolist()
    [5.0, 0.0]
    """

    costs: Float64[np.ndarray, "c c"]

    @classmethod
    def of(cls, costs: Any, classes: int) -> "CostMatrix":
        """Checked numbers, for so many classes."""
        try:
            matrix = np.array(costs, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueRangeError(
                f"guard: costs must be a matrix of numbers ({error}). Pass a row per true class and a column per "
                f"predicted class, such as 1 - np.eye({classes}), where every error costs 1."
            ) from error
        if matrix.shape != (classes, classes):
            raise ValueRangeError(
                f"guard: costs must be a matrix ({classes}, {classes}), a row per true class and a column per "
                f"predicted class; got {matrix.shape}. Begin with 1 - np.eye({classes}), where every error costs 1."
            )
        if not np.isfinite(matrix).all() or matrix.min() < 0 or matrix.max() <= 0:
            raise ValueRangeError(
                f"guard: costs must be finite numbers from 0 on, some above 0; got {matrix.min():g} to "
                f"{matrix.max():g}. Correct predictions usually cost 0."
            )
        return cls(matrix)

    @property
    def largest(self) -> float:
        """The largest cost."""
        return float(self.costs.max())

    @property
    def two_costs(self) -> bool:
        """Whether all costs are 0 or the largest."""
        return bool(np.isin(self.costs, [0.0, self.largest]).all())

    def of_rows(self, label: Int64[np.ndarray, "n"], predicted: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """What each prediction costs."""
        return np.asarray(self.costs[label, predicted], dtype=np.float64)
