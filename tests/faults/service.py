"""A service and a stream, both with a watch, ended by signals while they are at work: `experiments/kill_service.py`.

Its counts, kill by kill: what is missing is lost, what is there twice or cannot be read is silent, and what does not
end, or leaves processes behind, hangs.
"""

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from experiments import kill_service

from tests.faults.outcome import HUNG, LOST, OK, SILENT, Outcome, generator

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
_RESULTS = {
    LOST: ("lost", "labels_lost", "requests_lost", "alarms_lost"),
    SILENT: ("labels_doubled", "alarms_doubled", "broken_states"),
    HUNG: ("orphans", "hangs"),
}


@dataclass
class ServicePart:
    """Signals for a service of a guard, while clients send images and labels.

    Attributes:
        place: A folder of its own.
        faults: How many there are by default.
    """

    place: Path
    faults: int = 9
    name: str = "service"
    kill: ClassVar = staticmethod(kill_service.kill_service)

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Signals in turn."""
        kill_service.make_guard(self.place)
        counts = Counter(dict.fromkeys(kill_service.COUNTS, 0))
        draw, numbers = generator(seed, self.name, 0), list(SIGNALS.values())
        before, cases = counts.copy(), range(faults)
        for case, _ in zip(cases, self.kill(self.place, faults, draw, counts, numbers), strict=True):
            new = {key: counts[key] - before[key] for key in counts}
            worst = next((result for result, keys in _RESULTS.items() if any(new[key] for key in keys)), OK)
            note = str({key: new[key] for key in new if new[key]}) if worst != OK else ""
            if "same_tests" in counts and not counts["same_tests"]:
                worst, note = SILENT, "tests of images do not end as those of an undisturbed stream"
            yield Outcome(self.name, list(SIGNALS)[case % len(SIGNALS)], case, worst, note)
            before = counts.copy()


class StreamPart(ServicePart):
    """Signals for a stream of verdicts that requests labels, and labels them."""

    kill: ClassVar = staticmethod(kill_service.kill_stream)

    def __init__(self, place: Path) -> None:
        super().__init__(place, name="stream")
