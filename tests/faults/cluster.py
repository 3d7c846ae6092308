"""Workers, nodes and drivers of a Ray cluster die during an extraction, again and again.

An extraction goes on by itself when workers and nodes die; one whose driver was killed is resumed by the same call.
"""

import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks._cluster import Killer, kill_node, kill_worker, running_cluster
from ray.cluster_utils import Cluster

from dubito.engines import RayEngine
from tests.faults import processes
from tests.faults.folders import compare
from tests.faults.outcome import HUNG, LOST, OK, SILENT, Outcome, generator
from tests.faults.processes import Child, Ending, call, value_of
from tests.faults.victims import Extraction, extract

KINDS = ("worker killed", "node killed", "driver killed", "node killed")
"""In turn."""
_MOST = {"worker killed": 3, "node killed": 2}
"""Kills of one extraction."""
_PATIENCE = 300.0
"""Seconds after which an extraction on a cluster counts as hung: workers start anew after every kill."""


class Slow:
    """A probe that takes some time."""

    name, price, uses_labels = "slow", "some time", False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def run(self, model: Any, x: Any, label: Any) -> dict[str, Any]:
        """The brightness."""
        time.sleep(self.seconds)
        return {"slow": x.mean((1, 2, 3))}

    def settings(self) -> dict[str, Any]:
        """None: the time is no matter of the result."""
        return {}


@dataclass
class ClusterPart:
    """Kills during extractions on a cluster.

    Attributes:
        place: A folder of its own.
        faults: How many there are by default.
    """

    place: Path
    faults: int = 14
    name: str = "ray"

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Case after case, until there are as many faults."""
        self.victim = Extraction(self.place / "inputs")
        value_of(self.victim.prepare)
        value_of(extract_slowly, self.victim, self.place / "whole", None)
        self.expected = self.victim.contents(self.place / "whole")
        count = case = 0
        with running_cluster() as cluster:
            while count < faults:
                outcomes = self.strike(KINDS[case % len(KINDS)], case, seed, cluster)
                count, case = count + len(outcomes), case + 1
                yield from outcomes

    def strike(self, kind: str, case: int, seed: int, cluster: Cluster) -> list[Outcome]:
        """One extraction, with several kills; without an outcome where it had ended before."""
        draw = generator(seed, self.name, case)
        with tempfile.TemporaryDirectory(dir=self.place) as folder:
            to = Path(folder) / "to"
            driver = Child(extract_slowly, self.victim, to, cluster.address)
            if kind == "driver killed":
                kills, ending = self._kill_driver(driver, to, draw), driver.end(_PATIENCE)
                if kills:
                    ending = call(extract_slowly, self.victim, to, cluster.address, patience=_PATIENCE)
            else:
                chance = random.Random(int(draw.integers(2**32)))  # noqa: S311 (not a secret)
                kill = {"worker killed": lambda: kill_worker(chance), "node killed": lambda: kill_node(cluster, chance)}
                killer = Killer(to, kill[kind], _MOST[kind], chance)
                ending = driver.end(_PATIENCE)
                kills = killer.stop()
            result = self._judge(ending, to)
        return [Outcome(self.name, kind, case, *result)] * kills

    def _kill_driver(self, driver: Child, to: Path, draw: np.random.Generator) -> int:
        """SIGKILL, some time after some shards were there; how many there were."""
        shards, end = draw.integers(4), time.monotonic() + _PATIENCE
        while len(list(to.glob("*.safetensors"))) < shards and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        return int(driver.send(signal.SIGKILL))

    def _judge(self, ending: Ending, to: Path) -> tuple[str, str]:
        if ending.how == processes.HUNG:
            return HUNG, "the extraction hangs"
        if ending.how != processes.FINISHED:
            return LOST, f"the extraction ended: {ending.value}"
        result = compare(self.expected, self.victim.contents(to))
        if result[0] != OK:
            return result
        same = value_of(self.victim.values, to) == value_of(self.victim.values, self.place / "whole")
        return (OK, "") if same else (SILENT, "other values are read")


def extract_slowly(victim: Extraction, to: Path, address: str | None) -> None:
    """An extraction on a cluster, or without an address in this process."""
    engine = "local" if address is None else RayEngine(address=address, replicas=2, retries=1000)
    extract(victim.inputs / "photos", to, probes=[Slow(0.0 if address is None else 0.3)], engine=engine)
