"""What all threads of a process share, used by one at a time: modules, random numbers, filters of warnings; servers.

A pass through a module changes its mode, hooks it, and may write into it; dropout and augmentation draw from the one
generator of the process. One lock serves all modules, because they share layers (the members of an implicit ensemble)
and the generator. It is held for one pass, or for as long as several belong together; decoding images and computing
scores need no lock. So answers do not depend on how many threads ask, and threads win what is outside of a pass.

A child process starts with every lock released and nothing half done: a fork waits for whoever holds a lock.
"""

import operator
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, TypeVar, final

import numpy as np
import torch

Running = TypeVar("Running", bound="RunningServer")
_numbers = count()
_locks: "weakref.WeakValueDictionary[int, Lock]" = weakref.WeakValueDictionary()
_forking = threading.local()


@final
class Lock:
    """A re-entrant lock, for a `with` block. A copy of it, or one from a pickle, is another lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks[next(_numbers)] = self

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()


@final
class Local(threading.local):
    """Values of each thread's own. A copy of it, or one from a pickle, has none."""

    def __reduce__(self) -> tuple[type["Local"], tuple[()]]:
        return Local, ()


def _acquire_all() -> None:
    # The newest first: an object's own lock is taken before those of modules, which exist since they were imported.
    _forking.locks = [lock for ref in reversed(_locks.valuerefs()) if (lock := ref()) is not None]
    for lock in _forking.locks:
        lock.__enter__()


def _release_all() -> None:
    for lock in _forking.locks:
        lock.__exit__()
    _forking.locks = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)

_filters = Lock()
_silenced: "list[warnings.catch_warnings[None]]" = []
"""One entry per thread inside `quiet`; the first one restores the filters, when the last thread has left."""
one_at_a_time = Lock()
"""Held during a pass through any module, and while the random state of the process is another."""
GENERATORS = ("torch", "numpy", "python")


def _same_numpy(one: Any, other: Any) -> bool:
    return one[0] == other[0] and one[2:] == other[2:] and bool((one[1] == other[1]).all())


_ACCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any, Any], bool]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state, torch.equal),
    "numpy": (np.random.get_state, np.random.set_state, _same_numpy),
    "python": (random.getstate, random.setstate, operator.eq),
}
"""How the state of a generator is read and set, and when two are the same."""


@final
class RandomStates:
    """The states of the random generators of the process, as they are now: "torch" (of the CPU), "numpy", "python".

    To be made and restored under `one_at_a_time`: a pass of another thread may be seeded.
    """

    def __init__(self, of: Iterable[str] = GENERATORS) -> None:
        self._before = {name: _ACCESS[name][0]() for name in of}

    def restore(self) -> set[str]:
        """Put back those that have changed, and no other, since threads may be drawing; returns which they are."""
        changed = {name for name, before in self._before.items() if not _ACCESS[name][2](_ACCESS[name][0](), before)}
        for name in changed:
            _ACCESS[name][1](self._before[name])
        return changed


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the random states of torch, numpy and Python afterwards, where code of the user runs that may draw.

    Other threads run meanwhile. A generator that nobody has drawn from is not touched; from any other, what other
    threads have drawn in the meantime will be drawn again, because nobody can say which thread drew. So this stands
    only around code that is not ours: our own draws from no global generator.
    """
    with one_at_a_time:
        states = RandomStates()
    try:
        yield
    finally:
        with one_at_a_time:
            states.restore()


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Inside, random numbers of the CPU, some devices, numpy and Python follow from a seed; all go on as before.

    Not torch.manual_seed, which would reach every device of the machine. A thread that does not use this library, and
    draws meanwhile, takes numbers of the seed.
    """
    others = {device for device in devices if device.type not in ("cpu", "meta")}
    with one_at_a_time:
        own = RandomStates()
        states = {device: _call("get_rng_state", device) for device in others}
        try:
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
            for device in others:
                kind: Any = torch.get_device_module(device)
                # One of several GPUs is seeded by being the current one; where there is only one, there is no choice.
                with kind.device(device) if hasattr(kind, "device") else nullcontext():
                    kind.manual_seed(seed)
            yield
        finally:
            own.restore()
            for device, state in states.items():
                _call("set_rng_state", device, state)


def _call(name: str, device: torch.device, *state: Any) -> Any:
    function: Any = getattr(torch.get_device_module(device), name)
    return function(*state) if device.type == "mps" else function(*state, device)


@contextmanager
def quiet(message: str = "", module: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignore warnings that match; overlapping `catch_warnings` would restore each other's filters.

    With several threads, they are ignored until the last one has left.
    """
    with _filters:
        _silenced.append(_silenced[0] if _silenced else warnings.catch_warnings())
        if len(_silenced) == 1:
            _silenced[0].__enter__()
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    try:
        yield
    finally:
        with _filters:
            catcher = _silenced.pop()
            if not _silenced:
                catcher.__exit__(None, None, None)


def cores() -> int:
    """How many this process may use: in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with so many threads: their number changes the last bits of what a network predicts."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RunningServer:
    """A server in a thread of this process; it ends with `close`, with its `with` block, or with the process."""

    _server: threading.Thread
    _stop: Callable[[], None]

    def wait(self) -> None:
        """Return when the server has ended; Ctrl-C ends it."""
        try:
            while self._server.is_alive():
                self._server.join(0.5)
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Accept no more requests, answer those under way, and end."""
        self._stop()

    def __enter__(self: Running) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
