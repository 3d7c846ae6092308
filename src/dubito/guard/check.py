"""Is a guarantee kept on labelled images? What they show, with its exact interval, and whether they can show it at all.

    risk           wrong among accepted images        kept: the interval lies at or below the level
    coverage       accepted among all images          kept: at or above
    false_alarms   refused among correct predictions  kept: at or below

The interval of a share is that of Clopper and Pearson (1934), at the confidence of the guarantee, half of the error on
either side. A guarantee is broken where the whole interval lies on the wrong side of its level. In between, there are
too few images to tell. Images that the threshold was calibrated on are no independent check, and the result says so.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Bool

from dubito.guard.shift import Shift
from dubito.guard.thresholds import Guarantee, percent
from dubito.metrics import Interval, proportion
from dubito.result import Result
from dubito.types import Json

Status = Literal["kept", "broken", "too few to tell"]
_WORDS = {
    "risk": "{} of {} accepted images are wrong",
    "coverage": "{} of {} images are accepted",
    "false_alarms": "{} of {} correct predictions are refused",
}


@final
@dataclass(frozen=True)
class GuaranteeCheck(Result):
    """Whether labelled images show that a guarantee is kept.

    Attributes:
        status: "kept", "broken" or "too few to tell".
        guarantee: What is guaranteed.
        count: Of the images that the guarantee is about, how many are wrong (risk), accepted (coverage) or refused
            (false alarms).
        of: How many images it is about: accepted ones (risk), all (coverage), or correct ones (false alarms).
        observed: The share, with its exact interval; None if there is no such image.
        shift: Whether the images are like the calibration images.
        own: About which share of the images are calibration images themselves; 0 if next to none are.
    """

    status: Status
    guarantee: Guarantee
    count: int
    of: int
    observed: Interval | None
    shift: Shift = field(repr=False)
    own: float = 0.0

    def title(self) -> str:
        """The answer in one line."""
        return f"guarantee {self.status}" if self.status != "too few to tell" else "too few images to tell"

    def records(self) -> list[dict[str, Any]]:
        """One row."""
        values = {"status": self.status, "count": self.count, "of": self.of, "observed": self.observed}
        return [{**values, "guaranteed": self.guarantee.level}]

    def findings(self) -> list[str]:
        """What was observed, and what it shows."""
        return [self.sentence(), *self.shift.findings()]

    def to_dict(self) -> Json:
        """With whether the images are like the calibration images."""
        return {**super().to_dict(), "shift": self.shift.to_dict()}

    def sentence(self) -> str:
        """What the labels show, and whether that is an independent check."""
        side = "at least" if self.guarantee.kind == "coverage" else "at most"
        limit = f"{side} {100 * self.guarantee.level:g} % are guaranteed"
        observed = _WORDS[self.guarantee.kind].format(f"{self.count:,}", f"{self.of:,}")
        if (share := self.observed) is not None:
            interval = f"{100 * share.confidence:g} % interval {percent(share.low)} to {percent(share.high)}"
            observed += f", {percent(share.value)} ({interval})"
        answer = {"kept": "Kept", "broken": "Broken", "too few to tell": "Too few images to tell"}[self.status]
        own = f"About {percent(self.own)} of these images are the guard's own calibration images"
        caveat = f" {own}, so this is no independent check." if self.own else ""
        return f"{answer}: {observed}; {limit}.{caveat}"


def check_guarantee(
    guarantee: Guarantee,
    accept: Bool[np.ndarray, "n"],
    wrong: Bool[np.ndarray, "n"] | None,
    shift: Shift,
    *,
    own: float = 0.0,
) -> GuaranteeCheck:
    """Compare what a guard did with what it guarantees.

    Args:
        guarantee: What is guaranteed.
        accept: Which images are accepted.
        wrong: Which predictions are wrong; None where a coverage is guaranteed, which needs no labels.
        shift: Whether the images are like the calibration images.
        own: About which share of the images are calibration images themselves.
    """
    counted, about = accept, np.ones_like(accept)
    if wrong is not None and guarantee.kind != "coverage":
        counted, about = (wrong, accept) if guarantee.kind == "risk" else (~accept, ~wrong)
    count, of = int((counted & about).sum()), int(about.sum())
    if of == 0:
        return GuaranteeCheck("too few to tell", guarantee, count, of, None, shift, own)
    share = proportion(count, of, confidence=guarantee.confidence)
    above: Status
    below: Status
    above, below = ("kept", "broken") if guarantee.kind == "coverage" else ("broken", "kept")
    status = below if share.high < guarantee.level else above if share.low > guarantee.level else "too few to tell"
    return GuaranteeCheck(status, guarantee, count, of, share, shift, own)
