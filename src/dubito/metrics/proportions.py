"""How sure is a proportion, such as an accuracy? The exact interval of Clopper and Pearson (1934).

    low  = the p with P(Bin(n, p) >= k) = (1 - confidence) / 2          0 if k = 0
    high = the p with P(Bin(n, p) <= k) = (1 - confidence) / 2          1 if k = n

It holds the true value at least as often as stated, for every n and every proportion, however close to 0 or 1.
"""

from typing import NamedTuple

from dubito.validate import check_bootstrap, check_number


class Interval(NamedTuple):
    """A metric and the interval that holds its true value with the given confidence."""

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def proportion(count: int, of: int, *, confidence: float = 0.95) -> Interval:
    """A proportion with its exact interval, by Clopper and Pearson.

    Args:
        count: The number of rows that have the property.
        of: The number of all rows.
        confidence: The share of repetitions, at least, whose interval holds the true value, in (0, 1).

    >>> str(proportion(30, 30))  # low: p^30 = 0.025
    '1.0000 [0.8843, 1.0000]'
    """
    check_bootstrap(by="proportion", confidence=confidence)
    check_number(of, "[1, inf)", by="proportion", what="of", whole=True)
    check_number(count, f"[0, {of}]", by="proportion", what="count", whole=True)
    one_sided = (1 + confidence) / 2
    low, high = 1 - proportion_bound(of - count, of, one_sided), proportion_bound(count, of, one_sided)
    return Interval(count / of, low, high, confidence)


def proportion_bound(count: int, of: int, confidence: float) -> float:
    """The one-sided upper bound by Clopper and Pearson: the p with P(Bin(of, p) <= count) = 1 - confidence.

    >>> round(proportion_bound(0, 59, 0.95), 4)  # (1 - p)^59 = 0.05
    0.0495
    """
    from scipy.special import betaincinv  # noqa: PLC0415 (slow to import, and no score needs it)

    return 1.0 if count >= of else float(betaincinv(count + 1, of - count, confidence))
