"""Exact binomial tests: is a count of successes more than chance explains?

    P(X >= k),  X ~ Binomial(n, p)

McNemar's test of two classifiers on the same images is this tail with p = 1/2 over the images that only one of them
gets right (Dietterich 1998, Neural Computation 10). Here the exact form is used, because such images may be few.
"""

import math


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X >= k), summed in log space.

    >>> binomial_tail(2, 2, 0.5)
    0.25
    """
    if k <= 0 or p >= 1:
        return 1.0
    if k > n or p <= 0:
        return 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    ways = math.lgamma(n + 1)
    terms = [ways - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q for i in range(k, n + 1)]
    largest = max(terms)
    return min(1.0, math.exp(largest) * math.fsum(math.exp(term - largest) for term in terms))


def upper_bound(k: int, n: int, alpha: float) -> float:
    """The exact one-sided bound of Clopper and Pearson: the largest p with P(X <= k) >= alpha.

    >>> round(upper_bound(0, 30, 0.01), 4), upper_bound(30, 30, 0.01)  # 1 - 0.01^(1/30)
    (0.1423, 1.0)
    """
    if k >= n:
        return 1.0
    low, high = k / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if binomial_tail(n - k, n, 1 - middle) >= alpha:
            low = middle
        else:
            high = middle
    return low


def paired_p(better: int, worse: int, *, tests: int = 1) -> float:
    """McNemar's exact one-sided test: `better` images that only the new one gets right, `worse` only the old one.

    Args:
        better: For the new one.
        worse: For the old one.
        tests: How many alternatives were tried (Bonferroni).
    """
    return min(1.0, tests * binomial_tail(better, better + worse, 0.5))


def below(p: float) -> str:
    """A p-value for a sentence: the power of ten that it lies under.

    >>> below(3e-9), below(0.004)
    ('p < 1e-08', 'p < 0.01')
    """
    exponent = math.floor(math.log10(max(p, 1e-99))) + 1
    return f"p < {10.0**exponent:.0e}" if exponent < -3 else f"p < {10.0**exponent:g}"
