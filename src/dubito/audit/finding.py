"""The outcome of a check: findings with their severity, numbers and repair; or why it could not be made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from dubito.types import Json

Severity = Literal["wrong", "suspicious", "note"]
"""wrong: scores cannot be trusted; suspicious: look at it; note: good to know."""

_SHOWN = 5


@final
@dataclass(frozen=True)
class Finding:
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


@final
@dataclass(frozen=True)
class NotChecked:
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


def listed(names: Sequence[object], most: int = _SHOWN) -> str:
    """The first few of a list.

    >>> listed([3, 5, 8], most=2)
    '3, 5 and 1 more'
    """
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
