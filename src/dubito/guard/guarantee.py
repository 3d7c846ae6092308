"""What a guard guarantees, and its sentences.

    risk           of the accepted images, at most this share is wrong
    coverage       of all images, at least this share is accepted
    false_alarms   of the images that the model gets right, at most this share is refused
    cost           the accepted images cost at most this much on average, by a matrix of costs

Each holds with a stated confidence over calibration sets, for images like those that it was calibrated on; the
thresholds that keep it are those of `dubito.guard.thresholds`.

A guarantee for every class or group (`dubito.guard.groups`), and one about missed classes (`dubito.guard.missed`), hold
together with the others at the stated confidence: each has its share of delta.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
from jaxtyping import Bool, Float64

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.losses import fewest_images
from dubito.guard.missed import LEVELS, Missed
from dubito.guard.thresholds import (
    Losses,
    Outcomes,
    Threshold,
    check_levels,
    cost_threshold,
    counted,
    images_needed,
    needed,
    risk_threshold,
    share_threshold,
)
from dubito.validate import check_number

if TYPE_CHECKING:
    from dubito.guard.costs import CostMatrix

GuaranteeKind = Literal["risk", "coverage", "false_alarms", "cost"]
RISK = 0.05
CLASS = "class"
"""Of `Guarantee.per`: every predicted class."""


@final
@dataclass(frozen=True)
class Guarantee:
    """One of the four, with its level and its confidence.

    Attributes:
        kind: What is bounded.
        level: By how much.
        confidence: With which probability over calibration sets all of it holds.
        per: "class" if it holds for every predicted class, or the column whose groups it holds for; None for all images
            together. What holds for each holds for all of them together, too.
        largest: The largest cost.
        two_costs: Whether all costs are 0 or the largest.
        missed: Classes that are rarely missed, in addition.

    >>> print(Guarantee("risk", 0.05, 0.95))
    Of images like those that it was calibrated on, at most 5 % of those accepted are wrong (confidence 95 %).
    """

    kind: GuaranteeKind
    level: float
    confidence: float
    per: str | None = None
    largest: float = 1.0
    two_costs: bool = False
    missed: tuple[Missed, ...] = ()

    def __post_init__(self) -> None:
        check_levels(confidence=self.confidence)
        if self.kind == "cost":
            hint = f"With costs, it is the largest mean cost, and no prediction costs more than {self.largest:g}."
            check_number(self.level, f"(0, {self.largest:.15g})", by="guard", what="risk", hint=hint)
        else:
            check_levels(**{self.kind: self.level})
        if self.per is not None and self.kind not in ("risk", "cost"):
            raise ValueRangeError(
                f"guard: per='{self.per}' goes with a risk or with costs, because a class or group with too few images "
                f"is refused; got {self.kind}={self.level:g}. Leave out one of them."
            )

    @classmethod
    def of(
        cls,
        confidence: float,
        *,
        per: str | None = None,
        costs: "CostMatrix | None" = None,
        missed: tuple[Missed, ...] = (),
        **levels: float | None,
    ) -> "Guarantee":
        """The one whose level is set, a risk of 0.05 where none is; with costs, the risk is the largest mean cost."""
        chosen = {kind: level for kind, level in levels.items() if level is not None} or {"risk": RISK}
        if len(chosen) > 1:
            raise ValueRangeError(
                f"guard: one threshold keeps one guarantee; got {' and '.join(chosen)}. Choose one of them."
            )
        ((kind, level),) = chosen.items()
        if costs is None:
            return cls(kind, level, confidence, per, missed=missed)  # type: ignore[arg-type]
        if kind != "risk":
            raise ValueRangeError(
                f"guard: costs go with a risk, which is the largest mean cost; got {kind}={level!r}. Leave out one of "
                f"them."
            )
        return cls("cost", level, confidence, per, costs.largest, costs.two_costs, missed)

    def with_risk(self, risk: float, confidence: float) -> "Guarantee":
        """The same with another risk or mean cost, in place of what else is guaranteed of all images."""
        kind: GuaranteeKind = "cost" if self.kind == "cost" else "risk"
        return replace(self, kind=kind, level=risk, confidence=confidence)

    @property
    def needs_labels(self) -> bool:
        """Whether images without labels cannot be calibrated on."""
        return self.kind != "coverage" or bool(self.missed)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Guarantee":
        """Read back what `to_json` returned."""
        return cls(**{**saved, "missed": tuple(Missed(**one) for one in saved.get("missed", ()))})

    def to_json(self) -> dict[str, Any]:
        """As plain values; what is not part of it is left out."""
        plain = {"kind": self.kind, "level": self.level, "confidence": self.confidence}
        costs = {"largest": self.largest, "two_costs": self.two_costs} if self.kind == "cost" else {}
        missed = {"missed": [vars(one) for one in self.missed]} if self.missed else {}
        return {**plain, **({} if self.per is None else {"per": self.per}), **costs, **missed}

    @property
    def bound(self) -> float:
        """The largest rate of errors, of refused images or of refused correct predictions that it allows."""
        return 1 - self.level if self.kind == "coverage" else self.level / self.largest

    @property
    def tested_at(self) -> float:
        """The confidence of the threshold's own tests.

        Half of the error is for missed classes, if there are any, and what is left for every level that their
        thresholds may have, because the same images choose it.
        """
        delta = 1 - self.confidence
        return 1 - (delta / 2 / LEVELS ** len(self.missed) if self.missed else delta)

    def shared(self, confidence: float) -> str:
        """Why one of its tests has this confidence, for errors."""
        what = {"cost": "mean cost", "false_alarms": "share of false alarms"}.get(self.kind, self.kind)
        classes = f"class{'es' if len(self.missed) > 1 else ''} {' and '.join(one.name for one in self.missed)}"
        together = f"the {what} and the missed {classes} hold together with {self.confidence:g}"
        return f"Confidence {confidence:g} is needed so that {together}."

    @property
    def enough(self) -> int:
        """The fewest images that must be accepted without an error, for its tests to pass."""
        if self.kind == "cost" and not self.two_costs:
            return fewest_images(self.bound, self.tested_at, 0)
        return needed(self.bound, self.tested_at)

    def threshold(self, calibration: Outcomes) -> Threshold:
        """The threshold that keeps it, tested on images that nothing was chosen on.

        Raises:
            GuardError: There is none; the message says why, and how many images it takes.
        """
        u, wrong = calibration
        tested, share, what, confidence = u, self.level, "calibration images", self.tested_at
        if self.kind != "coverage":
            if wrong is None:
                raise GuardError(
                    f"to guarantee {self.kind}, labels must show which predictions are wrong. Use coverage=... instead."
                )
            if self.kind == "cost":
                return self._cost_threshold(u, wrong)
            if self.kind == "risk":
                return risk_threshold(u, wrong > 0, risk=self.level, confidence=confidence)
            wrong = wrong > 0
            tested, share, what = u[~wrong], 1 - self.level, "calibration images that the model gets right"
        value = share_threshold(tested, share=share, confidence=confidence, what=what).value
        return counted(value, u, wrong)

    def _cost_threshold(self, u: Float64[np.ndarray, "n"], loss: Losses) -> Threshold:
        if not self.two_costs:
            return cost_threshold(u, loss, cost=self.level, confidence=self.tested_at, largest=self.largest)
        try:
            return risk_threshold(u, loss > 0, risk=self.bound, confidence=self.tested_at)
        except GuardError as error:
            raise GuardError(
                f"predictions cost 0 or {self.largest:g}, so a mean cost of at most {self.level:g} is an error rate of "
                f"at most {self.bound:g}, where errors are those with a cost: {error}"
            ) from error

    def feasible(self, calibration: Outcomes, rows: int) -> str:
        """What could be guaranteed with these images instead, and how many it would take, where a risk cannot be.

        `rows` is the number of rows of the whole table, of which calibration images are a part.
        """
        u, loss = calibration
        if self.kind not in ("risk", "cost") or self.per is not None or loss is None:
            return ""
        lowest = smallest_feasible(self, calibration)
        instead = "no risk is feasible" if lowest is None else f"risk={lowest:g} is feasible"
        repair = "" if self.kind == "cost" and not self.two_costs else self._repair(u, loss > 0, rows)
        return f"With these images, {instead} at confidence {self.confidence:g}.{repair}"

    def _repair(self, u: Float64[np.ndarray, "n"], wrong: Bool[np.ndarray, "n"], rows: int) -> str:
        """How many images the level would take, or that more may not help."""
        enough = images_needed(u, wrong, risk=self.bound, confidence=self.tested_at)
        if enough is not None:
            table = float(f"{enough * rows / len(u):.2g}")
            return f" A risk of {self.level:g} would take about {table:,.0f} images like these (an estimate)."
        if len(u) > needed(self.bound, self.tested_at):
            return " More images of this kind may not help: even of the most certain ones, more are wrong."
        return ""  # so few images show nothing about a larger number

    def sentence(self, images: int | None = None) -> str:
        """What holds, for which images, with what confidence; `images` is the number of calibration images."""
        like = "those" if images is None else f"the {images:,}"
        text = {
            "risk": "at most {} of those accepted are wrong",
            "coverage": "at least {} are accepted",
            "false_alarms": "at most {} of those predicted correctly are refused",
            "cost": "those accepted cost at most {} on average",
        }[self.kind]
        held = text.format(f"{self.level:g}" if self.kind == "cost" else f"{100 * self.level:g} %")
        each = (
            ""
            if self.per is None
            else " in every predicted class"
            if self.per == CLASS
            else f" in every group of '{self.per}'"
        )
        missed = "".join(
            f", and at most {100 * one.level:g} % of those of class {one.name} are accepted as another class"
            for one in self.missed
        )
        confidence = f"confidence {100 * self.confidence:g} %{', all together' if each or missed else ''}"
        return f"Of images like {like} that it was calibrated on, {held}{each}{missed} ({confidence})."

    def __str__(self) -> str:
        return self.sentence()


def smallest_feasible(guarantee: Guarantee, calibration: Outcomes) -> float | None:
    """The smallest risk or mean cost above the guaranteed one that some threshold keeps; None if there is none.

    Up to a thousandth of the largest cost. Where a larger risk fails and a smaller one passes, which tests that begin
    elsewhere allow, it may be missed.
    """
    largest = guarantee.largest
    low, high = math.floor(1000 * guarantee.level / largest), 1000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            replace(guarantee, level=middle * largest / 1000).threshold(calibration)
            high = middle
        except GuardError:
            low = middle
    return None if high == 1000 else high * largest / 1000
