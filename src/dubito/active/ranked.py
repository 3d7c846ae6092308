"""Images by their uncertainty alone: the highest, or a random batch that prefers high ones.

    top        the highest u
    random     all alike
    softmax    the highest  u_i + g_i / beta          p_i ~ exp(beta u_i)
    power      the highest  log u_i + g_i / beta      p_i ~ u_i^beta
    softrank   the highest  -log r_i + g_i / beta     p_i ~ r_i^-beta, r = 1 for the highest u

g are independent standard Gumbel numbers: the k highest perturbed values are a draw of k without replacement with
these probabilities. Kirsch, Farquhar, Atighehchian, Jesson, Branchaud-Charron, Gal 2023 (Stochastic Batch Acquisition,
TMLR), section 3. Equal uncertainties go by the order of the table; in softrank too, as one order or another is needed.
"""

import numpy as np
from jaxtyping import Float64, Int64

from dubito.errors import ValueRangeError


def top(u: Float64[np.ndarray, "n"], count: int) -> Int64[np.ndarray, "k"]:
    """Positions of the `count` highest, the highest first.

    >>> top(np.array([0.1, 0.9, 0.9, 0.5]), 3).tolist()
    [1, 2, 3]
    """
    found: np.ndarray = np.argsort(-u, kind="stable")[:count]
    return found


def stochastic(
    u: Float64[np.ndarray, "n"], count: int, kind: str, *, beta: float, rng: np.random.Generator
) -> Int64[np.ndarray, "k"]:
    """Positions of a random batch that prefers high uncertainties, in the order of the perturbed values.

    Args:
        u: Higher = more uncertain; for "power" not below 0.
        count: How many.
        kind: "softmax", "power" or "softrank".
        beta: Near 0 all images are alike; the larger, the closer to `top`.
        rng: Of the Gumbel numbers.
    """
    gumbel = rng.gumbel(size=len(u))
    # Images of no chance at all (power, u = 0) come last, and in no order: a pool is often sorted by class.
    chosen: np.ndarray = np.lexsort((-gumbel, -(_value(u, kind) + gumbel / beta)))[:count]
    return chosen


def _value(u: Float64[np.ndarray, "n"], kind: str) -> Float64[np.ndarray, "n"]:
    if kind == "softmax":
        return u
    if kind == "softrank":
        rank = np.empty(len(u))
        rank[np.argsort(-u, kind="stable")] = np.arange(1, len(u) + 1)
        return -np.log(rank)
    if len(u) and u.min() < 0:
        raise ValueRangeError(
            f"acquire: 'power' takes powers of the uncertainty, which must not be negative; got {u.min():.3g}. Choose "
            f"'softrank', which takes the order alone, or a score that begins at 0 (entropy, mutual information)."
        )
    with np.errstate(divide="ignore"):
        logarithm: np.ndarray = np.log(u)  # -inf for u = 0: chosen only when nothing else is left
    return logarithm
