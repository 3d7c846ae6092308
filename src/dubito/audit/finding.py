"""The outcome of a check: findings with their severity, numbers and repair; or why it could not be made.

Whether something is better by more than chance is decided by exact binomial tests. McNemar's test of two classifiers on
the same images is P(X >= k), X ~ Binomial(n, 1/2), over the n images that only one of them gets right (Dietterich 1998,
Neural Computation 10). Here the exact form is used, because such images may be few.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxtyping import Bool
from scipy.special import bdtrc
from torch import Tensor

from dubito.types import Json

Severity = Literal["wrong", "suspicious", "note"]
"""wrong: scores cannot be trusted; suspicious: look at it; note: good to know."""


class Finding(NamedTuple):
    """One fault of a set-up.

    Attributes:
        check: The check that found it.
        severity: "wrong", "suspicious" or "note".
        what: What was observed, as a sentence with its numbers.
        repair: What to do about it, as a sentence.
        evidence: The numbers, as JSON.
    """

    check: str
    severity: Severity
    what: str
    repair: str
    evidence: Json

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}. {self.what}\n    Repair: {self.repair}"


class NotChecked(NamedTuple):
    """Why a check could not be made."""

    reason: str


Outcome = list[Finding] | NotChecked
"""The findings of one check, an empty list if all is well; or why it could not be made."""


def percent(share: float) -> str:
    """A share for a sentence.

    >>> percent(0.7464)
    '74.6 %'
    """
    return f"{100 * share:.1f} %"


def counted(count: int, noun: str) -> str:
    """A count with its noun, singular or plural.

    >>> counted(1, "image"), counted(3, "image")
    ('1 image', '3 images')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[object], most: int = 5) -> str:
    """The first few of a list.

    >>> listed([3, 5, 8], most=2)
    '3, 5 and 1 more'
    """
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def below(p: float) -> str:
    """A p-value for a sentence: the power of ten that it lies under.

    >>> below(3e-9), below(0.004)
    ('p < 1e-08', 'p < 0.01')
    """
    exponent = math.floor(math.log10(max(p, 1e-99))) + 1
    return f"p < {10.0**exponent:.0e}" if exponent < -3 else f"p < {10.0**exponent:g}"


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(X >= k) of a binomial distribution.

    >>> binomial_tail(2, 2, 0.5)
    0.25
    """
    return float(bdtrc(k - 1, n, p))


def paired_gain(before: Bool[Tensor, "n"], after: Bool[Tensor, "n"], *, tests: int = 1) -> tuple[float, float]:
    """By which share of the images `after` is right more often than `before`, and the p-value of McNemar's exact test.

    Args:
        before: Which images are right as they are.
        after: Which of the same images are right with a repair.
        tests: How many repairs were tried (Bonferroni).
    """
    better, worse = int((after & ~before).sum()), int((before & ~after).sum())
    return (better - worse) / len(before), min(1.0, tests * binomial_tail(better, better + worse, 0.5))
