"""What a watch remembers: tests, the latest images, those whose labels are awaited, alarms, and how evidence grew."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
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
KNOWN = ("right", "wrong")
"""What is known of a prediction once its image has a label."""
RECENT = 300
"""Images that findings are about, the latest ones."""
_BINS = 200
_PENDING = 1000
"""Images that labels may be requested for."""
_WAITING = 100
"""Labels that wait for another before it counts as missing."""
_HISTORY, _RATES = 512, 64


@dataclass
class WatchMemory:
    """What a watch remembers.

    Attributes:
        edges: Of the strata of accepted images, by uncertainty.
        strata: By stratum, labels and errors among them.
        requests: Draws of images whose labels were requested, in order: `names`, `weights` (1 / pi), `images`,
            `largest` and `at`, the place of the first image.
        pending: By name, images that may be drawn, or were, and are not tested yet: `accept`, `stratum`, `predicted`,
            `at`, `requested`, and `label`, which is "awaited", "right", "wrong" or "missing".
        missing: Drawn images that have no label, and will have none.
        repeated: Images of a name that is remembered, of an earlier one.
        noted: Outcomes of the guarantee, known or missing, at the latest of `rates`.
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
    noted: int = 0

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
        """Images whose labels were requested, and are neither known nor missing; the earliest draw first."""
        names = (name for request in self.requests for name in request["names"])
        return [name for name in names if self.pending[name]["label"] == "awaited"]

    def request(self, kind: str, count: int, rng: np.random.Generator) -> None:
        """Draw `count` images, or fewer, whose labels test a guarantee of this kind, `PER_DRAW` at a time.

        Of a risk, they are drawn among the latest accepted images; those that are passed over are not drawn again.
        """
        risk = kind == "risk"
        names = [name for name, one in self.pending.items() if not one["requested"] and (one["accept"] or not risk)]
        count = max(0, min(count, len(names)))
        latest = range(max(0, len(names) - PER_LABEL * count), len(names))
        places = latest if risk else np.sort(rng.choice(len(names), count, replace=False))
        for before in range(0, count, PER_DRAW):
            labels = min(PER_DRAW, count - before)
            start, end = (place * len(places) // count for place in (before, before + labels))
            self._draw([names[place] for place in places[start:end]], labels, rng)

    def _draw(self, pool: list[str], count: int, rng: np.random.Generator) -> None:
        rates = [errors / labels for labels, errors in self.strata]
        drawn = draw(np.array([rates[self.pending[name]["stratum"]] for name in pool]), count, rng)
        largest, at = largest_weight(rates, count / len(pool)), self.pending[pool[0]]["at"]
        weights = [min(1 / one, largest) for one in drawn.values()]  # larger by rounding alone
        names = [pool[place] for place in drawn]
        self.requests.append({"names": names, "weights": weights, "images": len(pool), "largest": largest, "at": at})
        for place, name in enumerate(pool):
            if place in drawn:
                self.pending[name]["requested"] = True
            else:
                del self.pending[name]

    def settled_requests(self) -> Iterator[tuple[Json, list[Json]]]:
        """Draws whose labels are there, in order, each with its images.

        Whoever takes labels as they arrive, errors first, say, sees another rate than that of the images. So a label
        waits for those of images that were drawn before, and a label that `_WAITING` others wait for is missing.
        """
        while self.requests:
            images = [self.pending[name] for name in self.requests[0]["names"]]
            awaited = [one for one in images if one["label"] == "awaited"]
            if awaited and self.waiting < _WAITING:
                return
            for one in awaited:
                one["label"] = "missing"
            for name in self.requests[0]["names"]:
                del self.pending[name]
            yield self.requests.pop(0), images

    @property
    def waiting(self) -> int:
        """Labels that wait for those of images that were drawn before or with them."""
        return sum(one["requested"] and one["label"] in KNOWN for one in self.pending.values())

    def test_outcomes(self, kind: str, request: Json, images: Sequence[Json]) -> None:
        """Test the outcomes of drawn images that a guarantee of this kind is about.

        An image whose label is missing may or may not be one of them: every bet on it counts as lost, which is the
        least that it can be worth.
        """
        drawn = [(one, weight) for one, weight in zip(images, request["weights"], strict=True) if _concerns(kind, one)]
        if not drawn:
            return
        for one, _ in drawn:
            if kind == "risk" and one["label"] in KNOWN:
                self.strata[one["stratum"]][0] += 1
                self.strata[one["stratum"]][1] += one["label"] == "wrong"
        y, weights = [_outcome(kind, one) for one, _ in drawn], [weight for _, weight in drawn]
        self.missing += y.count(None)
        pool = request["images"] - len(images) + len(drawn)
        self.rate.update(Outcomes.of(y, weights, images=pool, largest=request["largest"]), request["at"] - 1)

    def forget(self) -> None:
        """Drop the oldest images that no label was requested for."""
        names = [name for name, one in self.pending.items() if not one["requested"]]
        for name in names[: max(0, len(names) - _PENDING)]:
            del self.pending[name]

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
        """Where the rate lies, if there are more outcomes than before; of many points, every second one is dropped."""
        if self.rate.capital.seen > self.noted:
            self.noted, interval = self.rate.capital.seen, self.rate.interval.at(alpha / 2)
            self.rates.append([float(self.images), float(self.rate.known), self.rate.observed or 0.0, *interval])
            if len(self.rates) > _RATES:
                self.rates = self.rates[::2]

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


def single_request(name: str, image: Json) -> Json:
    """The draw of one image that was not drawn from others."""
    return {"names": [name], "weights": [1.0], "images": 1, "largest": 1.0, "at": image["at"]}


def _concerns(kind: str, image: Json) -> bool:
    """Whether a guarantee is about an image: a risk about accepted ones, false alarms about those that are right."""
    return bool(image["accept"]) if kind == "risk" else kind == "coverage" or image["label"] != "wrong"


def _outcome(kind: str, image: Json) -> bool | None:
    """Whether it is one of those that a guarantee bounds; None where its label is missing."""
    if kind != "coverage" and image["label"] == "missing":
        return None
    return image["label"] == "wrong" if kind == "risk" else not image["accept"]


def bin_of(share: float) -> int:
    """Ranks of 0 and of 1 have a bin each: these are all images beyond the reference images."""
    return 0 if share <= 0 else _BINS + 1 if share >= 1 else 1 + int(share * _BINS)
