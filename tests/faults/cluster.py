"""Workers, nodes and drivers of a Ray cluster die during an extraction, again and again: into a folder, or a store.

An extraction goes on by itself when workers and nodes die; one whose driver was killed is resumed by the same call.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks._cluster import Killer, count_shards, kill_node, kill_worker, running_cluster
from ray.cluster_utils import Cluster

from dubito.engines import RayEngine
from dubito.storage import Place, RemotePath
from tests.faults import processes
from tests.faults.folders import compare
from tests.faults.outcome import HUNG, LOST, OK, SILENT, Outcome, generator
from tests.faults.processes import Child, Ending, call, value_of
from tests.faults.proxy import running_store
from tests.faults.store import BUCKET, Job, credentials, make_bucket
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


class OnCluster(Extraction):
    """An extraction that takes its time.

    Attributes:
        address: Of the cluster; None for this process.
    """

    name = "cluster"
    address: str | None = None

    def work(self, to: Any) -> None:
        """Extract."""
        here = self.address is None
        engine = "local" if here else RayEngine(address=self.address, replicas=2, retries=1000)
        extract(self.inputs / "photos", to, probes=[Slow(0.0 if here else 0.3)], engine=engine)


@dataclass
class ClusterPart:
    """Kills during extractions on a cluster.

    Attributes:
        place: A folder of its own.
        faults: How many there are by default.
    """

    place: Path
    faults: int = 16
    name: str = "ray"

    def run(self, faults: int, seed: int) -> Iterator[Outcome]:
        """Case after case, until there are as many faults."""
        self.victim, whole = OnCluster(self.place / "inputs"), str(self.place / "whole")
        count = case = 0
        with running_store() as (self.store, _):
            value_of(make_bucket, self._job(whole))
            value_of(self.victim.prepare)
            value_of(self._job(whole).do, "work")
            self.expected = [value_of(self._job(whole).do, what) for what in ("contents", "values")]
            os.environ |= credentials(self.store)  # which nodes keep
            with running_cluster() as cluster:
                self.victim.address = cluster.address
                while count < faults:
                    outcomes = self.strike(KINDS[case % len(KINDS)], case, seed, cluster)
                    count, case = count + len(outcomes), case + 1
                    yield from outcomes

    def _job(self, to: str) -> Job:
        return Job(self.store, self.place / "copies", self.victim, to)

    def strike(self, kind: str, case: int, seed: int, cluster: Cluster) -> list[Outcome]:
        """One extraction, with several kills; without an outcome where it had ended before."""
        draw, stored = generator(seed, self.name, case), case // len(KINDS) % 2 == 1
        name = f"case-{case}"
        to: Place = RemotePath(f"{BUCKET}/{name}") if stored else self.place / name
        driver = Child(self._job(str(to)).do, "work")
        if kind == "driver killed":
            kills, ending = self._kill_driver(driver, to, draw), driver.end(_PATIENCE)
            if kills:
                ending = call(self._job(str(to)).do, "work", patience=_PATIENCE)
        else:
            chance = random.Random(int(draw.integers(2**32)))  # noqa: S311 (not a secret)
            kill = {"worker killed": lambda: kill_worker(chance), "node killed": lambda: kill_node(cluster, chance)}
            killer = Killer(to, kill[kind], _MOST[kind], chance)
            ending = driver.end(_PATIENCE)
            kills = killer.stop()
        result = self._judge(ending, str(to))
        return [Outcome(self.name, f"{kind}, store" if stored else kind, case, *result)] * kills

    def _kill_driver(self, driver: Child, to: Place, draw: np.random.Generator) -> int:
        """SIGKILL, some time after some blocks were done; how many there were."""
        blocks, end = draw.integers(2), time.monotonic() + _PATIENCE
        while count_shards(to) < blocks and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        return int(driver.send(signal.SIGKILL))

    def _judge(self, ending: Ending, to: str) -> tuple[str, str]:
        if ending.how == processes.HUNG:
            return HUNG, "the extraction hangs"
        if ending.how != processes.FINISHED:
            return LOST, f"the extraction ended: {ending.value}"
        contents, values = (value_of(self._job(to).do, what) for what in ("contents", "values"))
        result = compare(self.expected[0], contents)
        return (SILENT, "other values are read") if result[0] == OK and values != self.expected[1] else result
