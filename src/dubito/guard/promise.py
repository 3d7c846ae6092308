"""What a guard promises, and the threshold that keeps it.

    risk           of the accepted images, at most this share is wrong
    coverage       of all images, at least this share is accepted
    false_alarms   of the images that the model gets right, at most this share is refused

each with a stated confidence over calibration sets, for images like those that it was calibrated on.
"""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from jaxtyping import Bool, Float64

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.thresholds import Threshold, check_levels, risk_threshold, share_threshold

PromiseKind = Literal["risk", "coverage", "false_alarms"]
RISK = 0.05
Judged = tuple[Float64[np.ndarray, "_"], Bool[np.ndarray, "_"] | None]
"""Uncertainties of images, and which of them are wrong, if that is known."""


@final
@dataclass(frozen=True)
class Guarantee:
    """One of the three, with its level and its confidence.

    >>> print(Guarantee("risk", 0.05, 0.95))
    at most 5 % of the accepted images are wrong, with confidence 95 %
    """

    kind: PromiseKind
    level: float
    confidence: float

    def __post_init__(self) -> None:
        check_levels(**{self.kind: self.level}, confidence=self.confidence)

    @classmethod
    def of(
        cls, risk: float | None, confidence: float, coverage: float | None, false_alarms: float | None
    ) -> "Guarantee":
        """The one that is asked for; a risk of 0.05 where none is."""
        asked: dict[PromiseKind, float | None] = {"risk": risk, "coverage": coverage, "false_alarms": false_alarms}
        given = [(kind, level) for kind, level in asked.items() if level is not None]
        if len(given) > 1:
            raise ValueRangeError(
                f"guard: {' and '.join(kind for kind, _ in given)} came together; a threshold keeps one promise. "
                f"Give one of them."
            )
        kind, level = given[0] if given else ("risk", RISK)
        return cls(kind, level, confidence)

    def threshold(self, selection: Judged, calibration: Judged) -> Threshold:
        """The threshold that keeps it, from images that nothing was chosen on; candidates are the selection's.

        Raises:
            GuardError: There is none; the message says why, and how many images it takes.
        """
        u, wrong = calibration
        if self.kind == "coverage":
            found = share_threshold(u, share=self.level, confidence=self.confidence, what="calibration images")
            return found if wrong is None else found._replace(errors=int(wrong[u <= found.value].sum()))
        if wrong is None or selection[1] is None:
            raise GuardError(
                f"to promise {self.kind}, labels must tell which answers are wrong. Ask for coverage=... ."
            )
        if self.kind == "risk":
            judged, tested = (selection[0], selection[1]), (u, wrong)
            return risk_threshold(judged, tested, risk=self.level, confidence=self.confidence)
        what = "calibration images that the model gets right"
        value = share_threshold(u[~wrong], share=1 - self.level, confidence=self.confidence, what=what).value
        inside = u <= value
        return Threshold(value, int(inside.sum()), int(wrong[inside].sum()), len(u))

    def __str__(self) -> str:
        told = {
            "risk": "at most {} of the accepted images are wrong",
            "coverage": "at least {} of the images are accepted",
            "false_alarms": "at most {} of the right answers are refused",
        }[self.kind]
        return f"{told.format(f'{100 * self.level:g} %')}, with confidence {100 * self.confidence:g} %"
