"""What a watch reports: what has moved, since when, which images show it, where the rate lies, and what to do next."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from dubito.guard.guarantee import Guarantee
from dubito.guard.thresholds import images_needed, needed, percent
from dubito.guard.verdict import class_name
from dubito.guard.watch_memory import KNOWN, TITLES, WatchMemory
from dubito.result import Axes, Result, axes
from dubito.types import Json

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

_EXAMPLES, _NAMED = 12, 3
"""Images that show a change: so many are kept, and named in a sentence."""
_ALARMS = {"images": "images have changed", "guarantee": "the guarantee is broken"}
_RATES = {
    "risk": "errors among accepted images",
    "coverage": "refused images",
    "false_alarms": "refused correct predictions",
}


@final
@dataclass(frozen=True)
class WatchReport(Result):
    """What a watch has seen.

    Attributes:
        images: How many images it has taken note of.
        alpha: The probability of a false alarm, over the whole life.
        guarantee: What is guaranteed.
        alarms: For "images" and "guarantee", where it was raised: after how many images, at which one, and since when.
        evidence: By test, its capital: 1 at the beginning, and at most 1 / alpha, by Ville, where nothing has changed.
        since: By test, the number of images before the change, if there is one.
        outcomes: How many outcomes of the guarantee are known.
        observed: An estimate of their rate, at most 1, that weights each by its draw; too low if labels are missing;
            None without any.
        interval: Where the rate lies, at all times at once, at confidence 1 - alpha / 2, whatever missing labels are.
        requested: How many images are still to be labelled.
        waiting: Labels that wait for those of images that were drawn before.
        missing: Labels of drawn images that did not arrive while 100 others waited for them, or that cannot be known.
        repeated: Images with the name of an earlier one that could have been labelled.
        volunteered: Labels of images that were not drawn at random: they are not tested.
        unknown: Labels whose images the watch does not remember.
        moved: What has moved, in words, one sentence for each test.
        advice: What to do next.
        examples: By test that has moved, the images that show it most, the clearest first.
        history: Of some numbers of images: log-evidence of the images and of the guarantee.
        rates: Of some numbers of images: how many outcomes of the guarantee were known, their rate, and its interval.
    """

    images: int
    alpha: float
    guarantee: Guarantee
    alarms: tuple[Json, ...]
    evidence: dict[str, float]
    since: dict[str, int]
    outcomes: int
    observed: float | None
    interval: tuple[float, float]
    requested: int
    waiting: int
    missing: int
    repeated: int
    volunteered: int
    unknown: int
    moved: tuple[str, ...]
    advice: str
    examples: dict[str, tuple[str, ...]]
    history: tuple[tuple[float, ...], ...] = field(repr=False)
    rates: tuple[tuple[float, ...], ...] = field(repr=False)

    @property
    def alarm(self) -> bool:
        """Whether images have changed, or the guarantee is broken."""
        return bool(self.alarms)

    def title(self) -> str:
        """The answer in one line."""
        if not self.alarms:
            return f"{self.images:,} images, no alarm"
        kinds = " and ".join(_ALARMS[one["kind"]] for one in self.alarms)
        return f"{self.images:,} images: {kinds}"

    @property
    def rate(self) -> str:
        """What the guarantee bounds, in words."""
        return _RATES[self.guarantee.kind]

    @property
    def rate_observed(self) -> str:
        """The observed rate, in words."""
        return _in_outcomes(self.observed or 0.0, self.outcomes, self.missing)

    @property
    def alarm_at(self) -> float:
        """The log-evidence at which an alarm is raised: half of alpha is for the images, half for the guarantee."""
        return math.log(2 / self.alpha)

    def alarms_in_words(self) -> list[str]:
        """Where each alarm was raised, and where the change began."""
        return [
            f"Alarm {number} after {one['images']:,} images, at '{one['id']}': {_ALARMS[one['kind']]}, since about "
            f"image {one['since'] + 1:,}."
            for number, one in enumerate(self.alarms, 1)
        ]

    def facts(self) -> dict[str, str]:
        """What is tested, and what the labels show."""
        low, high = (percent(one) if 0 < one < 1 else f"{100 * one:.0f} %" for one in self.interval)
        shown = (
            "none known" if self.observed is None else f"{self.rate_observed} (at all times within {low} and {high})"
        )
        facts = {
            "guarantee": str(self.guarantee),
            self.rate: shown,
            "false alarms": f"{percent(self.alpha)} at most, ever",
            "alarm": f"where the mean evidence of the images, or that of the guarantee, reaches {2 / self.alpha:,.0f}",
        }
        if self.guarantee.per is not None or self.guarantee.missed:
            facts["tested"] = "all images together; guard.check examines every class or group, and missed classes"
        if self.requested:
            facts["labels requested"] = f"{self.requested:,}"
        if self.waiting:
            facts["labels waiting"] = f"{self.waiting:,}, for those of images that were drawn before"
        if self.missing:
            facts["labels missing"] = f"{self.missing:,}: no alarm depends on them; the interval allows for any class"
        if self.volunteered:
            facts["labels not tested"] = f"{self.volunteered:,}, of images that were not drawn at random"
        if self.unknown:
            facts["labels without an image"] = (
                f"{self.unknown:,}, of images that are not among the latest, or have a label already"
            )
        if self.repeated:
            facts["names seen before"] = (
                f"{self.repeated:,}: a label is of the image that it was requested for, else of the latest of its name"
            )
        return facts

    def records(self) -> list[dict[str, Any]]:
        """One row per test."""
        return [
            {"test": TITLES.get(name, name), "evidence": value, "since_image": self.since[name] + 1}
            for name, value in self.evidence.items()
        ]

    def cell(self, key: str, value: Any) -> str:
        """Evidence with two digits."""
        return f"{value:.2g}" if key == "evidence" else super().cell(key, value)

    def findings(self) -> list[str]:
        """What has changed, and what to do next."""
        return [*self.moved, self.advice]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Evidence by number of images, with the line at which an alarm is raised."""
        ax = axes(ax)
        images, of_images, of_guarantee = np.array(self.history or [(0, 0, 0)]).T
        ax.plot(images, of_images / math.log(10), label="images")
        ax.plot(images, of_guarantee / math.log(10), label=self.rate)
        ax.axhline(self.alarm_at / math.log(10), color="0.5", linestyle="--", label="alarm")
        ax.set(xlabel="images", ylabel="evidence, powers of ten")
        ax.legend()
        return ax


def make_report(guard: "Guard", state: WatchMemory, alpha: float) -> WatchReport:
    """What a watch has seen, in numbers and in words."""
    tests = {name: test.capital for name, test in state.tests.items()}
    capitals = {**tests, "guarantee": state.rate.capital}
    peaks = {name: state.peaks[name] for name in state.tests if name in state.peaks}
    return WatchReport(
        images=state.images,
        alpha=alpha,
        guarantee=guard.guarantee,
        alarms=tuple(state.alarms),
        evidence={name: math.exp(min(one.log_total, 700.0)) for name, one in capitals.items()},
        since={name: one.since for name, one in capitals.items()},
        outcomes=state.rate.known,
        observed=state.rate.observed,
        interval=(state.rates[-1][3], state.rates[-1][4]) if state.rates else (0.0, 1.0),
        requested=len(state.awaited),
        waiting=state.waiting,
        missing=state.missing,
        repeated=state.repeated,
        volunteered=sum(not one["requested"] and one["label"] in KNOWN for one in state.pending.values()),
        unknown=state.unknown,
        moved=tuple(_moved(guard, state)),
        advice=_advice(guard, state, alpha),
        examples={name: tuple(peak["examples"]) for name, peak in peaks.items()},
        history=tuple(tuple(one) for one in state.history),
        rates=tuple(tuple(one) for one in state.rates),
    )


def note_peaks(guard: "Guard", state: WatchMemory, alpha: float) -> None:
    """Keep what each test shows where its evidence is highest: a change may be over when somebody reads of it.

    Only after an alarm, as the evidence of one test alone proves less.
    """
    if all(one["kind"] != "images" for one in state.alarms):
        return
    for name, test in state.tests.items():
        log_evidence, before = test.capital.log_total, state.peaks.get(name)
        if log_evidence < math.log(1 / alpha) or (before and before["log_evidence"] >= log_evidence):
            continue
        words, examples = _in_words(guard, name, _latest(state, name)), _clearest(state, name)
        since = test.capital.since
        state.peaks[name] = {"log_evidence": log_evidence, "since": since, "words": words, "examples": examples}


def _clearest(state: WatchMemory, name: str) -> tuple[str, ...]:
    rising = sorted(_latest(state, name), key=lambda one: abs(one[3][name] - 0.5))
    return tuple(dict.fromkeys(str(one[0]) for one in reversed(rising)))[:_EXAMPLES]


def _latest(state: WatchMemory, name: str) -> list[list[Any]]:
    """The latest images since a test began to move."""
    return state.recent[max(0, len(state.recent) - (state.images - state.tests[name].capital.since)) :]


def _moved(guard: "Guard", state: WatchMemory) -> Iterator[str]:
    """One sentence for each test that has moved."""
    for peak in (state.peaks[name] for name in state.tests if name in state.peaks):
        shown = ", ".join(f"'{one}'" for one in reversed(peak["examples"][:_NAMED]))
        yield f"{peak['words']} since image {peak['since'] + 1:,}; most of all {shown}."
    if broken := next((one for one in state.alarms if one["kind"] == "guarantee"), None):
        what, bound = _RATES[guard.guarantee.kind], percent(state.rate.bound)
        overall = _in_outcomes(state.rate.observed or 0.0, state.rate.known, state.missing)
        yield f"The guarantee is broken: {what} above {bound} since about image {broken['since'] + 1:,} ({overall})."


def _in_outcomes(observed: float, outcomes: int, missing: int) -> str:
    least = "at least " if missing and observed < 1 else ""
    return f"{least}{percent(observed)} from {outcomes:,} outcomes"


def _in_words(guard: "Guard", name: str, latest: list[list[Any]]) -> str:
    calibration, n = guard.calibration, max(1, len(latest))
    if name == "classes":
        before = np.bincount(calibration.predicted, minlength=1) / len(calibration)
        now = np.bincount([one[2] for one in latest], minlength=len(before)) / n
        before = np.pad(before, (0, len(now) - len(before)))
        worst = int(np.argmax(np.abs(now - before)))
        return (
            f"'{class_name(guard.classes, worst)}' is predicted for {percent(now[worst])} of the images and was for "
            f"{percent(before[worst])} of the calibration images,"
        )
    if name == "uncertainty":
        accepted = sum(one[1] for one in latest) / n
        earlier = guard.threshold.accepted / guard.threshold.of
        return f"{percent(accepted)} of the images are accepted and {percent(earlier)} of the calibration images were,"
    middle = float(np.median([one[3][name] for one in latest]))
    return f"Features are {'rarer' if middle < 0.5 else 'more usual'} than those of the calibration images"


def _advice(guard: "Guard", state: WatchMemory, alpha: float) -> str:
    kinds = {one["kind"] for one in state.alarms}
    if not kinds:
        if guard.guarantee.kind == "coverage":
            return "Nothing has to be done."
        count, rate = state.rate.needed(alpha / 2)
        return f"Nothing has to be done. About {count:,} randomly drawn labels would reveal a rate of {percent(rate)}."
    u, wrong = guard.calibration.outcomes
    level, confidence = guard.guarantee.level, guard.guarantee.confidence
    enough = None if wrong is None else images_needed(u, wrong, risk=level, confidence=confidence)
    enough = max(enough or 0, needed(level, confidence), min(len(u), 500))
    then = f"label about {float(f'{enough:.2g}'):,.0f} new images drawn at random and calibrate on them (guard.refit)"
    if "guarantee" in kinds and guard.guarantee.kind == "risk":
        return (
            f"Stop using its verdicts; {then}. Until then, guard.with_risk with a smaller risk accepts less, and "
            f"guarantees nothing: its threshold is tested on the old calibration images."
        )
    if "guarantee" in kinds:
        return f"It refuses more than is guaranteed: {then}."
    return f"The guarantee says nothing about such images: {then}, or label some of them to see whether it is kept."
