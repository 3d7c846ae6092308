"""A Ray cluster on this machine, whose workers and nodes are killed by `ray_engine.py` and by tests/faults."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from dubito.storage import Place


@contextmanager
def running_cluster(nodes: int = 2) -> Iterator[Cluster]:
    """A cluster of some nodes with one CPU each, and a head without any."""
    cluster = Cluster(initialize_head=True, head_node_args=node(cpus=0))
    try:
        for _ in range(nodes):
            cluster.add_node(**node(cpus=1))
        # Nodes that join later do so in another thread, where Ray cannot handle signals. They end with the head.
        cluster._shutdown_at_exit = False
        yield cluster
    finally:
        cluster.shutdown()


def node(cpus: int) -> dict[str, Any]:
    """Arguments of a node that is found dead within seconds."""
    system = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}
    head = {} if cpus else {"include_dashboard": False, "_system_config": system}
    return {"num_cpus": cpus, "object_store_memory": 100_000_000, **head}


class Killer:
    """Kills something whenever a cache has a new shard, after a random while: so an extraction always gets on."""

    def __init__(self, cache: Place, kill: Callable[[], bool], most: int, chance: random.Random) -> None:
        self.cache, self.kill, self.most, self.chance = cache, kill, most, chance
        self.count, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """How many there were."""
        self._done.set()
        self._thread.join()
        return self.count

    def _run(self) -> None:
        seen = 0
        while self.count < self.most and not self._done.wait(0.05):
            if (now := count_shards(self.cache)) > seen:
                seen = now
                if not self._done.wait(self.chance.uniform(0, 0.5)):
                    self.count += self.kill()


def count_shards(cache: Place) -> int:
    """How many blocks of images are done."""
    return sum(path.name.startswith("forward-") for path in cache.iterdir()) if cache.is_dir() else 0


def kill_worker(chance: random.Random) -> bool:
    """SIGKILL for one worker of this cluster, whose processes all descend from this one."""
    try:
        workers = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::_Block")]
        chance.choice(workers).kill()
    except (IndexError, psutil.NoSuchProcess):  # there is none, or not any more
        return False
    return True


def kill_node(cluster: Cluster, chance: random.Random) -> bool:
    """One of the nodes that work, and another one joins."""
    cluster.remove_node(chance.choice(sorted(cluster.worker_nodes, key=id)), allow_graceful=False)
    cluster.add_node(**node(cpus=1))
    return True
