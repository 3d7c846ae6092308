"""Logistic regression with a quadratic penalty, by L-BFGS.

b, w = argmin mean_i (log(1 + exp(z_i)) - y_i z_i) + ridge / 2 ||w||^2,     z_i = b + w . x_i
"""

import numpy as np
from jaxtyping import Bool, Float64
from scipy.optimize import minimize
from scipy.special import expit


def fit_logistic(
    x: Float64[np.ndarray, "n d"],
    y: Bool[np.ndarray, "n"],
    *,
    ridge: float,
    start: Float64[np.ndarray, "k"] | None = None,
    nonnegative: bool = False,
) -> tuple[float, Float64[np.ndarray, "d"]]:
    """The bias and the weights; the bias has no penalty.

    Args:
        x: Features.
        y: Which rows are of the second class.
        ridge: Weight of the penalty.
        start: The bias and the weights that the search starts from; by default zeros.
        nonnegative: Whether no weight may be below zero.
    """

    def loss(b: Float64[np.ndarray, "k"]) -> tuple[float, Float64[np.ndarray, "k"]]:
        z = b[0] + x @ b[1:]
        gap = expit(z) - y
        value = np.mean(np.logaddexp(0, z) - y * z) + ridge / 2 * (b[1:] ** 2).sum()
        return float(value), np.append(gap.mean(), gap @ x / len(gap) + ridge * b[1:])

    bounds = [(None, None), *[(0.0 if nonnegative else None, None)] * x.shape[1]]
    start = np.zeros(x.shape[1] + 1) if start is None else start
    b = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B").x
    return float(b[0]), np.asarray(b[1:], dtype=np.float64)
