"""Locks that forks, copies and pickles leave usable; random numbers and warnings that come back."""

import copy
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import torch

from dubito.threads import Local, Lock, one_at_a_time, quiet, seeded


def free(lock):
    """Whether another thread can take it."""
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(lock._lock.acquire, blocking=False).result()
        if taken:
            pool.submit(lock._lock.release).result()
    return taken


def test_a_lock_is_re_entrant_and_its_copies_are_others():
    lock = Lock()
    with lock, lock:
        assert not free(lock)
        assert free(copy.deepcopy(lock))
        assert free(pickle.loads(pickle.dumps(lock)))  # noqa: S301
    assert free(lock)


def draw():
    """Not from Python's generator: the type checks of these tests draw from it."""
    return float(torch.rand(1)), float(np.random.rand())  # noqa: NPY002 (the state of the process)


def test_seeds_are_set_inside_and_everything_goes_on_afterwards():
    inside = []
    with seeded(1):
        expected = [draw(), draw()]
    with seeded(1):
        first = draw()
        for _ in range(2):
            with suppress(KeyError), seeded(5):
                inside.append(draw())
                assert not free(one_at_a_time)
                raise KeyError
        assert [first, draw()] == expected
    assert inside[0] == inside[1] != first


def test_mps_is_put_back(monkeypatch):
    state = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([5]))
    monkeypatch.setattr(torch.mps, "set_rng_state", state.append)
    monkeypatch.setattr(torch.mps, "manual_seed", state.append)
    with seeded(7, [torch.device("mps")]):
        pass
    assert state == [7, torch.tensor([5])]


def test_one_gpu_is_seeded_and_no_other(monkeypatch):
    class Gpus:
        """Three, the first of which is the current one, as torch.cuda has it."""

        current, seeds = 0, ["user's", "user's", "user's"]

        @contextmanager
        def device(self, device):
            self.current, before = device.index, self.current
            yield
            self.current = before

        def manual_seed(self, seed):
            self.seeds[self.current] = seed

        def get_rng_state(self, device):
            return self.seeds[device.index]

        def set_rng_state(self, state, device):
            self.seeds[device.index] = state

    gpus = Gpus()
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpus)
    with seeded(5, [torch.device("cpu"), torch.device("cuda", 2)]):
        assert (gpus.seeds, gpus.current) == (["user's", "user's", 5], 0)
    assert gpus.seeds == ["user's"] * 3


def test_overlapping_threads_restore_the_filters_of_warnings():
    filters = list(warnings.filters)
    inside, leave = threading.Event(), threading.Event()

    def first():
        with quiet(message="of the first"):
            inside.set()
            leave.wait()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first)
        inside.wait()
        with quiet(message="of the second"):
            leave.set()
            done.result()
            warnings.warn("of the second", stacklevel=1)
    assert warnings.filters == filters


def test_values_of_a_thread_do_not_travel():
    values = Local()
    values.x = 1
    assert values.x == 1
    assert not hasattr(pickle.loads(pickle.dumps(values)), "x")  # noqa: S301 (our own)
    assert not hasattr(copy.deepcopy(values), "x")
