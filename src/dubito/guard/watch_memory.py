"""What a watch remembers: tests, the latest images, those whose labels are awaited, alarms, and how evidence grew."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dubito.guard.combination import rank
from dubito.guard.label_draws import PER_DRAW, PER_LABEL, draw, largest_weight, strata_of
from dubito.guard.martingale import ExchangeabilityTest, Outcomes, RateTest
from dubito.types import Json

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

TITLES = {"uncertainty": "uncertainty", "density": "features", "classes": "predicted classes"}
RECENT = 300
"""Images that findings are about, the latest ones."""
_BINS = 200
_PENDING = 1000
"""Images that labels may be requested for."""
_MOST = 10_000
"""Images that labels are awaited for."""
_WAITING = 100
"""Labels that wait for another before it is given up."""
_HISTORY, _RATES = 512, 64


@dataclass
class WatchMemory:
    """What a watch remembers.

    Attributes:
        edges: Of the strata of accepted images, by uncertainty.
        strata: By stratum, labels and errors among them.
        requests: Draws of images that labels were requested for, in order: `weights` (1 / pi by name), `images`,
            `largest` and `at`, the place of the first image.
        missing: Labels that did not come, and were given up.
        repeated: Images of a name that is remembered, of an earlier one.
        peaks: By test, what it showed when its evidence was highest: `log_evidence`, `since`, `words`, `examples`.
        history: Of some numbers of images, the log-evidence of the images and of the guarantee.
        rates: Of some numbers of images, the number of outcomes that were known, their rate and its interval.
    """

    tests: dict[str, ExchangeabilityTest]
    rate: RateTest
    edges: list[float]
    strata: list[list[float]]
    images: int = 0
    draws: int = 0
    unknown: int = 0
    missing: int = 0
    repeated: int = 0
    requests: list[Json] = field(default_factory=list)
    peaks: dict[str, Json] = field(default_factory=dict)
    recent: list[list[Any]] = field(default_factory=list)
    pending: dict[str, Json] = field(default_factory=dict)
    alarms: list[Json] = field(default_factory=list)
    history: list[list[float]] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    every: int = 1

    @classmethod
    def of(cls, guard: "Guard") -> "WatchMemory":
        """That of a watch which has seen nothing but the calibration images."""
        calibration, selection = guard.calibration, guard.selection
        u = torch.from_numpy(calibration.uncertainty)
        ranks = {"uncertainty": rank(u, selection.uncertainty_quantiles)}
        density = selection.roles.density
        if density is not None and calibration.density is not None:
            ranks["density"] = rank(torch.from_numpy(calibration.density), selection.reference_quantiles[density])
        tests = {
            name: ExchangeabilityTest(np.bincount([bin_of(one) for one in values.tolist()], minlength=_BINS + 2))
            for name, values in ranks.items()
        }
        classes = len(guard.classes) if guard.classes is not None else int(calibration.predicted.max()) + 1
        counts = np.bincount(calibration.predicted, minlength=classes)
        classes_test = ExchangeabilityTest(counts, ordered=False)
        return cls({**tests, "classes": classes_test}, RateTest(guard.guarantee.bound), *strata_of(guard))

    @property
    def log_evidence(self) -> float:
        """The logarithm of the mean capital of the tests."""
        return float(np.logaddexp.reduce(self._logs())) - math.log(len(self.tests))

    @property
    def since(self) -> int:
        """Where the test that has moved most has begun to."""
        return list(self.tests.values())[int(np.argmax(self._logs()))].capital.since

    def _logs(self) -> list[float]:
        return [test.capital.log_total for test in self.tests.values()]

    def stratum(self, uncertainty: float) -> int:
        """Of an image."""
        return bisect_left(self.edges, uncertainty)

    @property
    def awaited(self) -> list[str]:
        """Images whose labels were requested, and are not known."""
        names = (name for one in self.requests for name in one["weights"])
        return [name for name in names if name in self.pending and self.pending[name]["wrong"] is None]

    def request(self, names: list[str], count: int, rng: np.random.Generator) -> None:
        """Draw `count` of the latest of these images, a few at a time; the others are never drawn again."""
        count = min(count, len(names))
        names = names[-PER_LABEL * count :] if count else []
        rates = [errors / labels for labels, errors in self.strata]
        for before in range(0, count, PER_DRAW):
            few = min(PER_DRAW, count - before)
            start, end = (labels * len(names) // count for labels in (before, before + few))
            some = names[start:end]
            drawn = draw(np.array([rates[self.pending[name]["stratum"]] for name in some]), few, rng)
            largest, at = largest_weight(rates, few / len(some)), self.pending[some[0]]["at"]
            weights = {some[place]: 1 / probability for place, probability in drawn.items()}
            self.requests.append({"weights": weights, "images": len(some), "largest": largest, "at": at})
            for name in some:
                if name in weights:
                    self.pending[name]["requested"] = True
                else:
                    del self.pending[name]

    def request_alike(self, names: list[str], count: int, rng: np.random.Generator) -> None:
        """Draw `count` of these images, all with the same probability; the others may be drawn later."""
        for place in sorted(rng.permutation(len(names)).tolist()[:count]):
            entry = self.pending[names[place]]
            entry["requested"] = True
            self.requests.append({"weights": {names[place]: 1.0}, "images": 1, "largest": 1.0, "at": entry["at"]})

    def settled_requests(self) -> Iterator[tuple[Json, dict[str, Json]]]:
        """Draws whose labels are there, in order, with what is known of the drawn images.

        Whoever takes labels as they come, errors first, say, sees another rate than that of the images. So a label
        waits for those of images that were drawn before, and a label that `_WAITING` others wait for is given up.
        """
        while self.requests:
            first = self.requests[0]["weights"]
            known = {name: self.pending[name] for name in first if name in self.pending}
            if any(one["wrong"] is None for one in known.values()) and self.waiting < _WAITING:
                return
            known = {name: one for name, one in known.items() if one["wrong"] is not None}
            self.missing += len(first) - len(known)
            for name in first:
                self.pending.pop(name, None)
            yield self.requests.pop(0), known

    @property
    def waiting(self) -> int:
        """Labels that wait for those of images that were drawn before or with them."""
        return sum(one["requested"] and one["wrong"] is not None for one in self.pending.values())

    def take_errors(self, request: Json, known: Mapping[str, Json]) -> None:
        """Test whether drawn images are wrong. A label that was given up counts as right: alarms stay as rare."""
        for one in known.values():
            self.strata[one["stratum"]][0] += 1
            self.strata[one["stratum"]][1] += bool(one["wrong"])
        weights = request["weights"].items()
        x = np.array([weight * bool(name in known and known[name]["wrong"]) for name, weight in weights])
        self.rate.update(Outcomes(x, request["images"], request["largest"]), request["at"] - 1)

    def forget(self) -> None:
        """Drop the oldest images without a label: first those that no label was requested for."""
        plain = [name for name, one in self.pending.items() if not one["requested"]]
        for name in [*plain[: max(0, len(plain) - _PENDING)], *list(self.pending)[: max(0, len(self.pending) - _MOST)]]:
            self.pending.pop(name, None)

    def note(self, alpha: float, kind: str, name: str, log_evidence: float, since: int) -> None:
        """The first alarm of a kind, and how evidence grows; of a long history, every second point is dropped."""
        if log_evidence >= math.log(2 / alpha) and all(one["kind"] != kind for one in self.alarms):
            self.alarms.append({"kind": kind, "images": self.images, "id": name, "since": since})
        if self.images % self.every == 0 and kind == "images":
            self.history.append([float(self.images), log_evidence, 0.0])
            if len(self.history) > _HISTORY:
                self.history, self.every = self.history[1::2], 2 * self.every
        if self.history:  # labels may come after the last image
            self.history[-1][2] = self.rate.capital.log_total

    def note_rate(self, alpha: float) -> None:
        """Where the rate lies, if more outcomes are known than before; of many points, every second one is dropped."""
        outcomes = float(self.rate.capital.seen)
        if outcomes > (self.rates[-1][1] if self.rates else 0):
            interval = self.rate.interval.at(alpha / 2)
            self.rates.append([float(self.images), outcomes, self.rate.observed or 0.0, *interval])
            if len(self.rates) > _RATES:
                self.rates = self.rates[1::2]

    def to_json(self) -> Json:
        """As plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("tests", "rate")}
        tests = {name: test.to_json() for name, test in self.tests.items()}
        # A list keeps its order where keys are sorted.
        return {**plain, "pending": list(self.pending.items()), "tests": tests, "rate": self.rate.to_json()}

    @classmethod
    def from_json(cls, saved: Json) -> "WatchMemory":
        """What `to_json` returned."""
        own = ("tests", "rate", "format", "of", "alpha", "seed")
        plain = {name: value for name, value in saved.items() if name not in own}
        order = [name for name in TITLES if name in saved["tests"]]
        tests = {name: ExchangeabilityTest.from_json(saved["tests"][name]) for name in order}
        return cls(tests, RateTest.from_json(saved["rate"]), **{**plain, "pending": dict(plain["pending"])})


def bin_of(share: float) -> int:
    """Ranks of 0 and of 1 have a bin each: these are all images beyond the reference images."""
    return 0 if share <= 0 else _BINS + 1 if share >= 1 else 1 + int(share * _BINS)
