"""What a watch remembers: tests, the latest images, those whose labels are awaited, alarms, and how evidence grew."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dubito.guard.combination import rank
from dubito.guard.martingale import ExchangeabilityTest, RateTest
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
_HISTORY = 512


@dataclass
class WatchMemory:
    """What a watch remembers.

    Attributes:
        requests: Images that labels were requested for, in the order of the draw.
        missing: Labels that did not come, and were given up.
        repeated: Images of a name that is remembered, of an earlier one.
        peaks: By test, what it showed when its evidence was highest: `log_evidence`, `since`, `words`, `examples`.
    """

    tests: dict[str, ExchangeabilityTest]
    rate: RateTest
    images: int = 0
    draws: int = 0
    unknown: int = 0
    missing: int = 0
    repeated: int = 0
    requests: list[str] = field(default_factory=list)
    peaks: dict[str, Json] = field(default_factory=dict)
    recent: list[list[Any]] = field(default_factory=list)
    pending: dict[str, Json] = field(default_factory=dict)
    alarms: list[Json] = field(default_factory=list)
    history: list[list[float]] = field(default_factory=list)
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
        return cls({**tests, "classes": classes_test}, RateTest(guard.guarantee.bound))

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

    def settled_requests(self) -> Iterator[tuple[str, Json]]:
        """Drawn images whose labels are there, taken out in the order of the draw.

        Whoever takes labels as they come, errors first, say, sees another rate than that of the images. So a label
        waits for those of images that were drawn before, and a label that `_WAITING` others wait for is given up.
        """
        while self.requests:
            entry = self.pending.get(self.requests[0])
            if entry is not None and entry["wrong"] is None:
                waiting = sum(
                    name in self.pending and self.pending[name]["wrong"] is not None for name in self.requests
                )
                if waiting < _WAITING:
                    return
            name = self.requests.pop(0)
            self.pending.pop(name, None)
            if entry is None or entry["wrong"] is None:
                self.missing += 1
            else:
                yield name, entry

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
            self.history.append([float(self.images), log_evidence, 0.0, 0.0, 0.0])
            if len(self.history) > _HISTORY:
                self.history, self.every = self.history[1::2], 2 * self.every
        if self.history:  # labels may come after the last image
            rate = self.rate
            self.history[-1][2:] = [rate.capital.log_total, float(rate.capital.seen), float(rate.total)]

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
