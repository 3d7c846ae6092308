"""The Ray engine: blocks of images on the nodes of a cluster, each worker with its own copy of the model.

    driver    checks model, labels and probes on one batch; hands out a block at a time per worker; writes the manifest
    worker    an actor: reads the images of a block, runs the probes, writes the shards into the folder that all share

Work is put into the object store once, fetched by every node once and unpickled by every worker once. A task carries a
block's positions, and its result names the shards, so the object store holds one copy of the model and little else.

A worker that dies, by itself or with its node, is replaced as far as the cluster has room, and its block is run again.
Blocks are idempotent, so nothing is lost or doubled. If the driver dies, its workers end with it, and the same call
continues with the blocks that are missing.
"""

import math
import os
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, final

from dubito.engines.engine import Block, BlockWork, Finished
from dubito.errors import (
    CacheError,
    ClusterWarning,
    DubitoError,
    EngineError,
    FailedBlocksWarning,
    MissingPackageError,
    ModelError,
    StoreError,
    ValueRangeError,
    first_words,
    users_level,
)
from dubito.validate import check_number

_GPU_READERS = 4
_WAIT_SECONDS, _PATIENCE_SECONDS, _END_SECONDS = 2.0, 60.0, 10.0
_LOST_NODES = 30
"""How often a block is run again because its node has died: providers take back nodes, whatever runs there."""
_FATAL = (CacheError, ModelError, StoreError)
"""Errors that leaving out a block cannot repair."""
_SHARE = 0.0001
"""The smallest part of a CPU or GPU that Ray reserves."""
_SAFE = "Finished shards are safe: the same call continues from there."


@final
@dataclass(frozen=True)
class RayEngine:
    """Blocks on a Ray cluster.

    Attributes:
        address: Of the cluster, such as "ray://head:10001" or "auto". By default the one that this process is connected
            to, that of RAY_ADDRESS, or one that runs on this machine; without any, one is started for the call.
        replicas: Copies of the model that work at the same time; by default as many as the cluster has room for.
        cpus: CPUs that each copy reserves; by default its threads, or its processes that decode if these are more.
        gpus: GPUs that each copy reserves, such as 1 or 0.5; its models move there. By default 1 if the model is on a
            GPU, otherwise 0.
        retries: How often a block is run again when its worker dies, or it raises what another attempt may repair.
            Nodes that die do not count.
        failures: How many blocks may fail for good. Their images are left out, listed in `skipped` and warned of;
            with one block more, the extraction ends with an error.
    """

    address: str | None = None
    replicas: int | None = None
    cpus: float | int | None = None
    gpus: float | int | None = None
    retries: int = 3
    failures: int = 0

    def __post_init__(self) -> None:
        for name, interval in {"replicas": "[1, inf)", "retries": "[0, inf)", "failures": "[0, inf)"}.items():
            if (value := getattr(self, name)) is not None:
                check_number(value, interval, by="RayEngine", what=name, whole=True)
        for name, interval in {"cpus": "(0, inf)", "gpus": "[0, inf)"}.items():
            if (value := getattr(self, name)) is not None:
                check_number(value, interval, by="RayEngine", what=name)
                self._check_share(name, value)

    @staticmethod
    def _check_share(name: str, value: float | int) -> None:
        """Raise ValueRangeError for a share that Ray does not reserve."""
        if not math.isclose(value / _SHARE, round(value / _SHARE)) or (name == "gpus" and value > 1 and value % 1):
            raise ValueRangeError(
                f"RayEngine: {name} must be a multiple of {_SHARE}, and a whole number of GPUs above 1; got {value:g}. "
                f"1 is usual."
            )

    @property
    def default_threads(self) -> int:
        """As many as the CPUs that a worker reserves, otherwise one: copies of the model share the cores best so."""
        return max(1, int(self.cpus or 1))

    def run(
        self, work: BlockWork, blocks: Sequence[Block], *, workers: int | None = None, progress: bool = True
    ) -> Generator[Finished, None, None]:
        """Do every block on the cluster, in the order in which workers finish."""
        ray = _import_ray()
        gpus = (1.0 if work.device.type == "cuda" else 0.0) if self.gpus is None else float(self.gpus)
        if not gpus and work.device.type != "cpu":
            raise EngineError(
                f"RayEngine: gpus must be above 0 for a model on {work.device}; got 0. Load it with device='cpu', or "
                f"pass gpus=1."
            )
        readers = (_GPU_READERS if gpus else 0) if workers is None else workers
        cpus = float(self.cpus or max(work.threads, readers))
        # Before a cluster is started or kept busy: what does not fit here fits nowhere. A block without an image that
        # can be read shows nothing.
        any(map(work.check, blocks))
        with _connected(ray, self.address), work.bar(blocks, show=progress) as advance:
            run = _ClusterRun(ray, self, work, cpus, gpus, readers)
            run.check_room()
            for block, shards in run.run(blocks):
                yield block, shards
                advance(len(block.images), run.describe())


@final
@dataclass(frozen=True)
class _Failure:
    """Why a worker could not do what it should: in words, and as an error if it is one of ours."""

    why: str
    error: DubitoError | None


class _BlockWorker:
    """The actor: one copy of the work, in a process of its own on some node."""

    def start(self, copies: list[Any], device: str | None, place: str) -> str | _Failure:
        """Fetch the work and prepare it; returns the node's id."""
        ray = _import_ray()
        with suppress(OSError):  # relative paths mean what they mean to the driver
            os.chdir(place)
        try:
            self._work: BlockWork = ray.get(copies[0])
            self._work.start(device)
        except Exception as error:  # code of the user is unpickled and run
            return _failure(error, f"node {ray.util.get_node_ip_address()}")
        return str(ray.get_runtime_context().get_node_id())

    def run(self, block: Block, workers: int) -> list[Any] | _Failure:
        """Do one block; returns its shards."""
        try:
            ((_, shards),) = self._work.run([block], workers=workers)
        except Exception as error:  # a probe or a data set of the user may raise anything
            return _failure(error, self._work.describe_current())
        return shards


def _failure(error: Exception, where: str) -> _Failure:
    """What can be sent to the driver of an error: one of another package may not be importable there."""
    ours = error if isinstance(error, DubitoError) else None
    words = first_words(error)
    text = words if ours or words == type(error).__name__ else f"{type(error).__name__}: {words}"
    return _Failure(f"{where}: {text}", ours)


@dataclass
class _Replica:
    """A worker as the driver sees it.

    Attributes:
        actor: Its handle.
        task: What it is doing: starting, or a block; None if it is idle.
        block: That block.
        node: The id of its node, once it has started.
    """

    actor: Any
    task: Any
    block: Block | None = None
    node: str | None = None


@dataclass
class _ClusterRun:
    """One run over blocks: which worker does which, what was tried how often, and what has failed for good."""

    ray: Any
    engine: RayEngine
    work: BlockWork
    cpus: float
    gpus: float
    readers: int
    replicas: list[_Replica] = field(default_factory=list)
    waiting: deque[Block] = field(default_factory=deque)
    attempts: defaultdict[int, list[str | None]] = field(default_factory=lambda: defaultdict(list))
    failed: dict[Block, str] = field(default_factory=dict)
    false_starts: int = 0
    _idle_since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        options: Any = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_restarts": 0, "max_task_retries": 0}
        self.actor_class = self.ray.remote(**options, scheduling_strategy="SPREAD")(_BlockWorker)
        self.copy = _put(self.ray, self.work)

    def check_room(self) -> None:
        """Raise an error if no node is large enough for one worker; warn of GPUs that nobody uses."""
        each = f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        if not self._room():
            have = [f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in self._nodes()]
            raise EngineError(
                f"RayEngine: no node of the cluster has {each}, which one worker reserves; they have "
                f"{', '.join(sorted(set(have)))}. Pass smaller cpus and gpus, or fewer threads."
            )
        gpus = sum(node.get("GPU", 0) for node in self._nodes())
        used = self.gpus * (self.engine.replicas or self._room())
        if used <= gpus - 1:
            warnings.warn(
                f"the cluster has {gpus:g} GPUs, of which this extraction uses {used:g}. Pass gpus=1, or a fraction to "
                f"share one, and more replicas.",
                ClusterWarning,
                stacklevel=users_level(),
            )

    def describe(self) -> str:
        """How many nodes and workers are at work, for the bar."""
        nodes = [replica.node for replica in self.replicas if replica.node is not None]
        return f"{len(set(nodes))} nodes, {len(nodes)} workers"

    def run(self, blocks: Sequence[Block]) -> Iterator[Finished]:
        """Every block with its shards; those that are left out come last."""
        self.waiting.extend(blocks)
        try:
            while self.waiting or any(replica.block for replica in self.replicas):
                self._hand_out()
                for replica in self._answered():
                    yield from self._collect(replica)
            yield from [(block, self.work.leave_out(block, why)) for block, why in self.failed.items()]
        finally:
            self._end()
        if self.failed:
            warnings.warn(
                f"{self._failures()}. Their images are left out, and listed in table.skipped.",
                FailedBlocksWarning,
                stacklevel=users_level(),
            )

    def _hand_out(self) -> None:
        """Start workers as far as there is room and need for them, and give every idle one a block."""
        busy = sum(replica.block is not None for replica in self.replicas)
        wanted = min(self.engine.replicas or self._room(), len(self.waiting) + busy)
        while len(self.replicas) < wanted:
            actor = self.actor_class.remote()
            device = "cuda" if self.gpus else None
            self.replicas.append(_Replica(actor, actor.start.remote([self.copy], device, str(Path.cwd()))))
        for replica in self.replicas:
            if replica.task is None and self.waiting:
                replica.block = self.waiting.popleft()
                replica.task = replica.actor.run.remote(replica.block, self.readers)

    def _answered(self) -> list[_Replica]:
        """Workers that have finished or died; after some seconds, none."""
        by_task = {replica.task: replica for replica in self.replicas if replica.task is not None}
        if any(replica.node for replica in self.replicas):
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since > _PATIENCE_SECONDS:
            self._idle_since = float("inf")
            warnings.warn(
                f"no worker has started within {_PATIENCE_SECONDS:g} s: the cluster is busy, or its nodes are gone. "
                f"The extraction waits; when interrupted, the same call continues.",
                ClusterWarning,
                stacklevel=users_level(),
            )
        if not by_task:
            time.sleep(_WAIT_SECONDS)
            return []
        done, _ = self.ray.wait(list(by_task), num_returns=1, timeout=_WAIT_SECONDS)
        return [by_task[task] for task in done]

    def _collect(self, replica: _Replica) -> Iterator[Finished]:
        """What a worker has to say: that it has started, the shards of its block, or what went wrong."""
        block, replica.block, task, replica.task = replica.block, None, replica.task, None
        try:
            answer = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            self.replicas.remove(replica)
            self._lost(block, first_words(str(error).partition("\n")[0]), replica.node)
            return
        if block is None:
            self._started(replica, answer)
        elif isinstance(answer, _Failure):
            self._retry(block, answer)
        else:
            self.false_starts = 0
            yield block, answer

    def _started(self, replica: _Replica, answer: str | _Failure) -> None:
        if not isinstance(answer, _Failure):
            replica.node = answer
        elif isinstance(answer.error, StoreError) and self.false_starts < self.engine.retries:
            self.replicas.remove(replica)  # another one may reach the store
            self.ray.kill(replica.actor)
            self.false_starts += 1
        else:
            raise EngineError(f"a worker of Ray cannot start on {answer.why}. {_SAFE}") from answer.error

    def _lost(self, block: Block | None, why: str, node: str | None) -> None:
        """A worker has died: at its block, or before it had one."""
        if block is not None:
            self._retry(block, _Failure(f"{self.work.describe(block)}: the worker died ({why})", None), node)
            return
        self.false_starts += 1
        if self.false_starts > self.engine.retries:
            raise EngineError(f"workers of Ray die as they start, {self.false_starts} in a row: {why}. {_SAFE}")

    def _retry(self, block: Block, failure: _Failure, died_on: str | None = None) -> None:
        """Run a block again, or count it among those that have failed for good, if the engine allows as many."""
        self.attempts[block.number].append(died_on)
        repairable = failure.error is None or isinstance(failure.error, StoreError)
        if repairable and self._may_try_again(block):
            self.waiting.append(block)
            return
        self.failed[block] = failure.why
        fatal = isinstance(failure.error, _FATAL)
        if failure.error is not None and (fatal or not self.engine.failures):
            raise failure.error
        if len(self.failed) > self.engine.failures:
            raise EngineError(
                f"{self._failures()}; failures={self.engine.failures} allows no more. {_SAFE} Repair it first, or let "
                f"more blocks fail: their images are left out."
            )

    def _may_try_again(self, block: Block) -> bool:
        """Whether attempts of a block are left, where those whose node has died do not count."""
        attempts = self.attempts[block.number]
        if len(attempts) <= self.engine.retries:
            return True
        if attempts[-1] is not None:
            time.sleep(_WAIT_SECONDS)  # until the cluster has noticed
        alive = {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}
        lost = [node for node in attempts if node is not None and node not in alive]
        return len(attempts) - len(lost) <= self.engine.retries and len(lost) <= _LOST_NODES

    def _failures(self) -> str:
        listed = [f"{why} ({len(self.attempts[block.number])} attempts)" for block, why in self.failed.items()]
        return f"{len(listed)} blocks failed on Ray: {'; '.join(listed[:3])}{'; ...' if len(listed) > 3 else ''}"

    def _nodes(self) -> list[dict[str, float]]:
        """What each living node has."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _room(self) -> int:
        """How many workers the nodes have room for, if nobody else uses them."""
        by_cpu = [int(node.get("CPU", 0) / self.cpus) for node in self._nodes()]
        by_gpu = [int(node.get("GPU", 0) / self.gpus) if self.gpus else sys.maxsize for node in self._nodes()]
        return sum(map(min, by_cpu, by_gpu))

    def _end(self) -> None:
        """End all workers, and wait until none can write any more."""
        for replica in self.replicas:
            self.ray.kill(replica.actor)
        tasks = [replica.task for replica in self.replicas if replica.task is not None]
        if tasks:
            self.ray.wait(tasks, num_returns=len(tasks), timeout=_END_SECONDS)


def _import_ray() -> Any:
    """Ray, imported where it is needed."""
    try:
        import ray  # noqa: PLC0415 (it takes seconds, and most extractions never need it)
    except ImportError as error:
        raise MissingPackageError("engine='ray' needs Ray: pip install 'dubito[ray]'") from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """A connection to the cluster: the one that this process has, or one for as long as this lasts."""
    own = not ray.is_initialized()
    if own:
        _connect(ray, address)
    elif address is not None:
        warnings.warn(
            f"this process is connected to a cluster of Ray already; address={address!r} is not used. Call "
            f"ray.shutdown() first to use it.",
            ClusterWarning,
            stacklevel=users_level(),
        )
    try:
        yield
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise EngineError(f"the connection to the cluster of Ray is lost ({first_words(error)}). {_SAFE}") from error
    finally:
        if own:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    options: Any = {"include_dashboard": False} if address is None else {"address": address}
    try:
        ray.init(**options, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"RayEngine: no connection to the cluster at address={address!r} ({first_words(error)}). Is it running, "
            f"with the same versions of Ray and Python?"
        ) from error


def _put(ray: Any, work: BlockWork) -> Any:
    """The work in the object store, once. Code that workers cannot import travels with it."""
    with _by_value(ray):
        try:
            return ray.put(work)
        except Exception as error:  # whatever pickling the user's objects raises
            raise EngineError(
                f"model, images, transform or probes cannot be sent to other processes ({first_words(error)}). "
                f"Leave out locks, open files and connections, or use engine='local'."
            ) from error


@contextmanager
def _by_value(ray: Any) -> Iterator[None]:
    """Pickle code by value if it is from a file that no import would find, such as a model's own Python file."""
    paths = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    tops = {name.partition(".")[0] for name, path in paths.items() if path.endswith(".py")}
    hidden = {top for top in tops if top != "__main__" and PathFinder.find_spec(top) is None}
    modules = [sys.modules[name] for name, path in paths.items() if path and name.partition(".")[0] in hidden]
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            ray.cloudpickle.unregister_pickle_by_value(module)
