"""Where the processes of a training come from: worker processes of this machine, or those that torchrun has started.

    train(..., processes=4)          this process leads; it starts three workers, which end with it
    torchrun ... script.py           every process makes the same call; that of rank 0 leads, saves and shows the bar

A worker that this process has started is replaced when it dies, at most three times. It gets the column of features as
a pickle, which for a cache names its shards, and tensors as files that all workers map into memory. What torchrun has
started, torchrun starts again, and the training continues from its last state.
"""

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import torch
import torch.distributed
from safetensors.torch import load_file, save_file
from torch import Tensor

from dubito.errors import EngineError, LostProcessError, TableError, ValueRangeError
from dubito.heads.distributed import Group, Processes, failure, follow
from dubito.table import Column, Table
from dubito.threads import torch_threads
from dubito.validate import check_number

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

dist: Any = torch.distributed
"""Hardly typed, and almost empty in some builds of torch."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in the environment of every process."""
_RESTARTS = 3
_JOIN_SECONDS, _START_SECONDS, _END_SECONDS, _POLL_SECONDS = 300.0, 300.0, 2.0, 0.02
_HOST = "127.0.0.1"
_COLUMN = "features.pickle"
_START = "from dubito.heads.workers import work; work()"
_numbers = count()


def launched() -> tuple[int, int]:
    """The rank of this process and the number of processes that torchrun has started; 0 and 1 without torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if all(os.environ.get(name) for name in _TORCHRUN):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def joined(processes: int | None) -> Group | None:
    """The processes of torchrun, connected; None where this process is to train without them, or there are none.

    Args:
        processes: How many the user expects; None takes those of torchrun if there are any; 1 trains in this one alone.
    """
    if processes is not None:
        hint = "1 trains in this process alone."
        check_number(processes, "[1, inf)", by="train", what="processes", hint=hint, whole=True)
    rank, size = launched()
    if processes == 1 or size == 1:
        return None
    if processes not in (None, size):
        raise ValueRangeError(
            f"train: processes must be the number that torchrun has started, {size}, or 1 to train in this one alone; "
            f"got {processes}. Leave it out."
        )
    try:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS)))
        store = dist.PrefixStore(f"dubito/{next(_numbers)}", store)
        return Group(dist.PrefixStore(agreed_name(store, rank, size), store), rank, size)
    except (LostProcessError, RuntimeError, TimeoutError) as error:
        raise LostProcessError(
            f"train: not all of the {size} processes of torchrun met within {_JOIN_SECONDS:.0f} s. Every one of them "
            f"must make the same call; with processes=1, this one trains alone."
        ) from error


def agreed_name(store: "Store", rank: int, size: int) -> str:
    """A name that these very processes agree on, once all are there.

    The store of torchrun outlives the processes that it starts again, and so does what earlier ones have written.
    Therefore each writes a name that nobody else can have: process 0 proposes the names that it reads, the others
    confirm a proposal that has their own, and it counts once all have confirmed it.

    Args:
        store: Where they meet.
        rank: Which of them this one is.
        size: How many there are.
    """

    def read(key: str) -> str:
        return str(store.get(key), "ascii") if store.check([key]) else ""

    own, others = secrets.token_hex(8), range(1, size)
    if rank:
        store.set(f"name-{rank}", own)
    deadline = time.monotonic() + _JOIN_SECONDS
    while time.monotonic() < deadline:
        if rank:
            proposal = read("proposal")
            if own in proposal.split("-"):
                store.set(f"confirmed-{rank}", proposal)
                if read("agreed") == proposal:
                    return proposal
        else:
            proposal = "-".join([own, *(read(f"name-{other}") for other in others)])
            store.set("proposal", proposal)
            if all(read(f"confirmed-{other}") == proposal for other in others):
                store.set("agreed", proposal)
                return proposal
        time.sleep(_POLL_SECONDS)
    raise TimeoutError


@contextlib.contextmanager
def leading(processes: int | None, group: Group | None, table: Table) -> Iterator[Processes | None]:
    """The processes that train together, for the one that leads; None if it trains alone.

    Args:
        processes: How many there are to be, if they are not those of torchrun.
        group: The processes of torchrun.
        table: Has the column `feature`.
    """
    if group is not None:
        together = Processes(group.size, group=group)
        try:
            yield together
        except Exception as error:
            together.finish(error)
            raise
        finally:
            group.close()
    elif processes is None or processes == 1:
        yield None
    else:
        threads = max(1, torch.get_num_threads() // processes)
        with Workers(processes, table, threads) as workers, torch_threads(threads):
            try:
                yield Processes(processes, start=workers.connect, restarts=_RESTARTS)
            except LostProcessError as error:
                reason = workers.end() or str(error).removeprefix("train: ").partition(". ")[0]
                raise LostProcessError(
                    f"train: {reason}, although workers had been started again {_RESTARTS} times. Use fewer processes "
                    f"if memory is short. What a folder holds is safe: the same call continues from there."
                ) from error


@final
class Workers:
    """Worker processes of this machine, started anew with every connection.

    Args:
        processes: How many processes there are, this one included.
        table: Has the column `feature`.
        threads: Threads of each.
    """

    def __init__(self, processes: int, table: Table, threads: int) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise EngineError("train: this build of torch has no torch.distributed. Leave out processes.")
        self._size, self._table, self._threads = processes, table, threads
        self._folder: Path | None = None
        self._all: list[subprocess.Popen[bytes]] = []

    def connect(self) -> Group:
        """Start the workers, and connect to them."""
        self.end()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dubito-train-"))
            send_column(self._table.column("feature"), self._folder, self._table.name)
        meeting = self._folder / f"store-{next(_numbers)}"
        store = dist.FileStore(str(meeting), self._size)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109 (text)
        arguments = [str(meeting), str(self._size), str(self._threads), str(os.getpid()), self._table.name]
        for rank in range(1, self._size):
            command = [sys.executable, "-c", _START, str(rank), *arguments]
            environment = {**os.environ, "PYTHONPATH": paths}
            nowhere = subprocess.DEVNULL
            # A session of its own: Ctrl-C is for this process, with which the workers end.
            started = subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, start_new_session=True)  # noqa: S603
            self._all.append(started)
        self._wait(store)
        return Group(store, 0, self._size, host=_HOST)

    def _wait(self, store: "Store") -> None:
        """Return when all workers are about to connect; an error if one ends before."""
        ready, began = [f"ready-{rank}" for rank in range(1, self._size)], time.monotonic()
        while not store.check(ready):
            if any(one.poll() is not None for one in self._all) or time.monotonic() - began > _START_SECONDS:
                raise failure(store) or LostProcessError("train: a worker process could not be started. Use fewer.")
            time.sleep(_POLL_SECONDS)

    def end(self) -> str:
        """End all workers; returns which had ended before, and how, if any had."""
        began = time.monotonic()
        while self._all and all(one.poll() is None for one in self._all) and time.monotonic() - began < _END_SECONDS:
            time.sleep(_POLL_SECONDS)  # a connection breaks a moment before its process has ended
        codes = sorted((code, rank) for rank, one in enumerate(self._all, 1) if (code := one.poll()))
        self._kill()
        if not codes:
            return ""
        code, rank = codes[0]  # signals are negative: what ends by itself may do so because another was killed
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"worker process {rank} {how}"

    def _kill(self) -> None:
        for one in self._all:
            one.kill()
            one.wait()
        self._all = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def work() -> None:
    """The life of a worker process."""
    rank, meeting, size, threads, parent, name = sys.argv[1:]
    folder = Path(meeting).parent
    if os.getppid() != int(parent):
        _end_with(int(parent), folder)
    threading.Thread(target=_end_with, args=(int(parent), folder), daemon=True).start()
    torch.set_num_threads(int(threads))
    store = dist.FileStore(meeting, int(size))
    features = receive_column(folder)
    store.set(f"ready-{rank}", "")
    try:
        follow(Group(store, int(rank), int(size), host=_HOST), features, name)
    except LostProcessError:  # another process has failed: process 0 reports it, or has ended, which is seen shortly
        time.sleep(2 * _END_SECONDS)
        sys.exit(1)


def _end_with(parent: int, folder: Path) -> None:
    """End this process when the one that has started it has ended, and remove what that could not remove any more."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(_END_SECONDS)  # a worker that begins now would wait for a folder that is gone
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@final
class _Pickler(pickle.Pickler):
    """Tensors go into files of their own, which processes map into memory instead of copying them."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        super().__init__(file)
        self._folder, self._written = folder, dict[int, tuple[str, Tensor]]()

    def persistent_id(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._written:  # held, so that no other tensor gets its id
            self._written[id(value)] = f"{len(self._written)}.safetensors", value
            save_file({"tensor": value.contiguous()}, self._folder / self._written[id(value)][0])
        return self._written[id(value)][0]


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], folder: Path) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_load(self, name: str) -> Tensor:
        return load_file(self._folder / name)["tensor"]


def send_column(column: Column, folder: Path, name: str) -> None:
    """Write a column of a table for other processes of this machine; one on the disk stays there."""
    try:
        with (folder / _COLUMN).open("wb") as file:
            _Pickler(file, folder).dump(column)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TableError(
            f"train: the features of {name} cannot be sent to other processes ({error}). Train in one process, or from "
            f"a cache."
        ) from error


def receive_column(folder: Path) -> Column:
    """What `send_column` wrote."""
    with (folder / _COLUMN).open("rb") as file:
        column: Column = _Unpickler(file, folder).load()  # of the process that has started this one
    return column
