"""What a guard guarantees, and the threshold that keeps it.

    risk           of the accepted images, at most this share is wrong
    coverage       of all images, at least this share is accepted
    false_alarms   of the images that the model gets right, at most this share is refused

Each holds with a stated confidence over calibration sets, for images like those that it was calibrated on.
"""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from jaxtyping import Bool, Float64

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.thresholds import Threshold, check_levels, risk_threshold, share_threshold

GuaranteeKind = Literal["risk", "coverage", "false_alarms"]
RISK = 0.05
Outcomes = tuple[Float64[np.ndarray, "_"], Bool[np.ndarray, "_"] | None]
"""Uncertainties of images, and which of them are predicted wrong, if that is known."""


@final
@dataclass(frozen=True)
class Guarantee:
    """One of the three, with its level and its confidence.

    >>> print(Guarantee("risk", 0.05, 0.95))
    at most 5 % of the accepted images are wrong, with confidence 95 %
    """

    kind: GuaranteeKind
    level: float
    confidence: float

    def __post_init__(self) -> None:
        check_levels(**{self.kind: self.level}, confidence=self.confidence)

    @classmethod
    def of(
        cls, risk: float | None, confidence: float, coverage: float | None, false_alarms: float | None
    ) -> "Guarantee":
        """The one whose level is set; a risk of 0.05 where none is."""
        levels: dict[GuaranteeKind, float | None] = {"risk": risk, "coverage": coverage, "false_alarms": false_alarms}
        chosen = [(kind, level) for kind, level in levels.items() if level is not None]
        if len(chosen) > 1:
            raise ValueRangeError(
                f"guard: one threshold keeps one guarantee; got {' and '.join(kind for kind, _ in chosen)}. "
                f"Choose one of them."
            )
        kind, level = chosen[0] if chosen else ("risk", RISK)
        return cls(kind, level, confidence)

    def threshold(self, selection: Outcomes, calibration: Outcomes) -> Threshold:
        """The threshold that keeps it, tested on images that nothing was chosen on; candidates are the selection's.

        Raises:
            GuardError: There is none; the message says why, and how many images it takes.
        """
        u, wrong = calibration
        if self.kind == "coverage":
            threshold = share_threshold(u, share=self.level, confidence=self.confidence, what="calibration images")
            return threshold if wrong is None else threshold._replace(errors=int(wrong[u <= threshold.value].sum()))
        if wrong is None or selection[1] is None:
            raise GuardError(
                f"to guarantee {self.kind}, labels must show which predictions are wrong. Use coverage=... instead."
            )
        if self.kind == "risk":
            chosen, tested = (selection[0], selection[1]), (u, wrong)
            return risk_threshold(chosen, tested, risk=self.level, confidence=self.confidence)
        what = "calibration images that the model gets right"
        value = share_threshold(u[~wrong], share=1 - self.level, confidence=self.confidence, what=what).value
        inside = u <= value
        return Threshold(value, int(inside.sum()), int(wrong[inside].sum()), len(u))

    def __str__(self) -> str:
        text = {
            "risk": "at most {} of the accepted images are wrong",
            "coverage": "at least {} of the images are accepted",
            "false_alarms": "at most {} of the correct predictions are refused",
        }[self.kind]
        return f"{text.format(f'{100 * self.level:g} %')}, with confidence {100 * self.confidence:g} %"
