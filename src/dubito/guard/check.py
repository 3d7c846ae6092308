"""Is a guarantee kept on labelled images? What they show, with its exact interval, and whether they can show it at all.

    risk           wrong among accepted images        kept: the interval lies at or below the level
    coverage       accepted among all images          kept: at or above
    false_alarms   refused among correct predictions  kept: at or below
    cost           mean cost of accepted images       kept: at or below

The interval of a share is that of Clopper and Pearson (1934), at the confidence of the guarantee, half of the error on
either side. A guarantee is broken where the whole interval lies on the wrong side of its level. In between, there are
too few images to tell. The interval of a mean cost is that of `dubito.guard.losses`. A guarantee of several parts, such
as one for every class, is broken if one of them is and kept if all of them are; each of K parts has an interval of
confidence 1 - delta / K. Images that the threshold was calibrated on are no independent check, and the result says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Bool, Float64

from dubito.guard.guarantee import Guarantee
from dubito.guard.losses import mean_interval
from dubito.guard.shift import Shift
from dubito.guard.thresholds import percent
from dubito.metrics import Interval, proportion
from dubito.result import Result
from dubito.types import Json

Status = Literal["kept", "broken", "too few to tell"]
_WORDS = {
    "risk": "{} of {} accepted images are wrong",
    "coverage": "{} of {} images are accepted",
    "false_alarms": "{} of {} correct predictions are refused",
    "cost": "{} of {} accepted images have a cost",
}
_SHOWN = 3
"""Parts that a sentence names."""


@final
@dataclass(frozen=True)
class PartCheck:
    """Whether one part of a guarantee is kept: that of a class or group, or that of a class that is rarely missed.

    Attributes:
        name: Which part, in words.
        status: "kept", "broken" or "too few to tell".
        count: How many images are wrong, have a cost, or are missed.
        of: How many images the part is about.
        observed: The share or the mean cost, with its interval; None if there is no such image.
        level: What is guaranteed of it.
    """

    name: str
    status: Status
    count: int
    of: int
    observed: Interval | None
    level: float


@final
@dataclass(frozen=True)
class GuaranteeCheck(Result):
    """Whether labelled images show that a guarantee is kept.

    Attributes:
        status: "kept", "broken" or "too few to tell"; of a guarantee that has several parts, all of it.
        guarantee: What is guaranteed.
        count: Of the images that the guarantee is about, how many are wrong (risk), accepted (coverage) or refused
            (false alarms).
        of: How many images it is about: accepted ones (risk), all (coverage), or correct ones (false alarms).
        observed: The share, with its exact interval; None if there is no such image.
        shift: Whether the images are like the calibration images.
        own: About which share of the images are calibration images themselves; 0 if next to none are.
        parts: The parts of a guarantee that has several, such as one for every class; none of a guarantee without.
        together: Like status, of all images together, as counted here; it differs only where there are parts.
    """

    status: Status
    guarantee: Guarantee
    count: int
    of: int
    observed: Interval | None
    shift: Shift = field(repr=False)
    own: float = 0.0
    parts: tuple[PartCheck, ...] = ()
    together: Status = "too few to tell"

    def title(self) -> str:
        """The answer in one line."""
        return f"guarantee {self.status}" if self.status != "too few to tell" else "too few images to tell"

    def records(self) -> list[dict[str, Any]]:
        """One row, and one for each part."""
        values = {"status": self.together, "count": self.count, "of": self.of, "observed": self.observed}
        if not self.parts:
            return [{**values, "guaranteed": self.guarantee.level}]
        whole = {"part": "all", **values, "guaranteed": self.guarantee.level}
        columns = ("part", "status", "count", "of", "observed", "guaranteed")
        return [whole, *(dict(zip(columns, vars(part).values(), strict=True)) for part in self.parts)]

    def findings(self) -> list[str]:
        """What was observed, and what it shows."""
        return [self.sentence(), *self.shift.findings()]

    def to_dict(self) -> Json:
        """With whether the images are like the calibration images."""
        return {**super().to_dict(), "shift": self.shift.to_dict()}

    def sentence(self) -> str:
        """What the labels show, and whether that is an independent check."""
        side = "at least" if self.guarantee.kind == "coverage" else "at most"
        cost = self.guarantee.kind == "cost"
        limit = f"{side} {self.guarantee.level:g} is guaranteed" if cost else _limit(side, self.guarantee.level)
        observed = _WORDS[self.guarantee.kind].format(f"{self.count:,}", f"{self.of:,}")
        if (share := self.observed) is not None:
            value, low, high = (f"{one:.3g}" if cost else percent(one) for one in share[:3])
            mean = "a mean of " if cost else ""
            observed += f", {mean}{value} ({100 * share.confidence:g} % interval {low} to {high})"
        answer = self.together if self.together != "too few to tell" else "too few images to tell"
        start = f"All together: {answer}," if self.parts else f"{answer.capitalize()}:"
        own = f"About {percent(self.own)} of these images are the guard's own calibration images"
        caveat = f" {own}, so this is no independent check." if self.own else ""
        return f"{start} {observed}; {limit}.{self._parts_in_words()}{caveat}"

    def _parts_in_words(self) -> str:
        broken = [part for part in self.parts if part.status == "broken"]
        named = "; ".join(
            f"{part.name}: {part.count:,} of {part.of:,}, {_limit('at most', part.level)}" for part in broken[:_SHOWN]
        )
        details = f" ({named})" if broken and self.guarantee.kind != "cost" else ""
        kept = sum(part.status == "kept" for part in self.parts)
        words = [f"{kept} of {len(self.parts)} kept"]
        words += [f"{len(broken)} broken{details}"] if broken else []
        few = len(self.parts) - kept - len(broken)
        words += [f"{few} with too few images to tell"] if few else []
        return f" Parts: {', '.join(words)}." if self.parts else ""


@dataclass(frozen=True)
class GuaranteePart:
    """What one part of a guarantee is about.

    Attributes:
        name: Which part, in words.
        about: Which images it is about.
        counted: Which images it counts, or what they cost as shares of the largest cost.
        level: What is guaranteed.
        at_least: Whether the level is a lower limit.
    """

    name: str
    about: Bool[np.ndarray, "n"]
    counted: Bool[np.ndarray, "n"] | Float64[np.ndarray, "n"]
    level: float
    at_least: bool = False


def check_guarantee(
    guarantee: Guarantee,
    accept: Bool[np.ndarray, "n"],
    wrong: Bool[np.ndarray, "n"] | Float64[np.ndarray, "n"] | None,
    shift: Shift,
    *,
    own: float = 0.0,
    parts: Sequence[GuaranteePart] = (),
) -> GuaranteeCheck:
    """Compare what a guard did with what it guarantees.

    Args:
        guarantee: What is guaranteed.
        accept: Which images are accepted.
        wrong: Which predictions are wrong, or what they cost; None where a coverage is guaranteed, which needs no
            labels.
        shift: Whether the images are like the calibration images.
        own: About which share of the images are calibration images themselves.
        parts: The parts of a guarantee that has several.
    """
    counted, about = accept, np.ones_like(accept)
    if wrong is not None and guarantee.kind != "coverage":
        counted, about = (wrong, accept) if guarantee.kind in ("risk", "cost") else (~accept, ~wrong.astype(bool))
    if guarantee.kind == "cost":
        counted = np.asarray(counted, dtype=np.float64) / guarantee.largest
    confidence = 1 - (1 - guarantee.confidence) / max(1, len(parts) + (guarantee.per is None))
    whole = _check_part(
        GuaranteePart("all", about, counted, guarantee.level, at_least=guarantee.kind == "coverage"),
        guarantee,
        confidence,
    )
    checked = tuple(_check_part(part, guarantee, confidence) for part in parts)
    statuses = [part.status for part in checked]
    if guarantee.per is None or not parts:
        statuses.append(whole.status)
    worst: tuple[Status, ...] = ("broken", "too few to tell")
    status: Status = next((one for one in worst if one in statuses), "kept")
    return GuaranteeCheck(status, guarantee, whole.count, whole.of, whole.observed, shift, own, checked, whole.status)


def _check_part(part: GuaranteePart, guarantee: Guarantee, confidence: float) -> PartCheck:
    values, largest = part.counted[part.about], 1.0
    count, of = int((values > 0).sum()), len(values)
    if of == 0:
        return PartCheck(part.name, "too few to tell", count, of, None, part.level)
    if values.dtype == np.float64:
        share, largest = mean_interval(values, confidence), guarantee.largest
        share = Interval(largest * share.value, largest * share.low, largest * share.high, share.confidence)
    else:
        share = proportion(count, of, confidence=confidence)
    above: Status
    below: Status
    above, below = ("kept", "broken") if part.at_least else ("broken", "kept")
    status = below if share.high < part.level else above if share.low > part.level else "too few to tell"
    return PartCheck(part.name, status, count, of, share, part.level)


def _limit(side: str, level: float) -> str:
    return f"{side} {100 * level:g} % are guaranteed"
