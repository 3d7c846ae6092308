import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from dubito.guard._logistic import fit_logistic


def drawn(n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3))
    return x, rng.random(n) < 1 / (1 + np.exp(1 - x @ [2.0, -1.0, 0.0]))


def test_as_scikit_learn() -> None:
    """Its penalty is ||w||^2 / (2 C), beside the sum over rows and not their mean: C = 1 / (n ridge)."""
    x, y = drawn()
    bias, weight = fit_logistic(x, y, ridge=0.05)
    other = LogisticRegression(C=1 / (400 * 0.05), tol=1e-8).fit(x, y)
    assert bias == pytest.approx(other.intercept_[0], abs=1e-3)
    assert weight == pytest.approx(other.coef_[0], abs=1e-3)


def test_no_weight_is_below_zero() -> None:
    """A weight that wants to be negative is 0, and the others are as without its feature."""
    x, y = drawn()
    assert fit_logistic(x, y, ridge=0.05)[1][1] < -0.3
    bias, weight = fit_logistic(x, y, ridge=0.05, start=np.ones(4), nonnegative=True)
    assert weight[1] == 0
    kept = weight > 0
    alone = fit_logistic(x[:, kept], y, ridge=0.05)
    assert bias == pytest.approx(alone[0], abs=1e-3)
    assert weight[kept] == pytest.approx(alone[1], abs=1e-3)
