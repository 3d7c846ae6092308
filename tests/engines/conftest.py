"""Images and a model for engines, and a stand-in for Ray that runs actors in this process."""

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import dubito
from tests.cache.conftest import image_folder, small_network

SETTINGS: dict[str, Any] = {"batch_size": 4, "shard_size": 8, "threads": 1, "workers": 0, "progress": False}


@pytest.fixture(scope="session")
def model():
    return dubito.wrap(small_network(), transform=dubito.Preprocess((16, 16), 16), name="small")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images") / "photos", count=44)


def every_probe(model):
    other = dubito.wrap(small_network(), transform=model.transform, name="other")
    return [
        dubito.probes.Gradient(),
        dubito.probes.Tiles(grids=(2,)),
        dubito.probes.Members([model, other]),
        dubito.probes.Noise(copies=2),
    ]


class RayError(Exception):
    pass


@dataclass(eq=False)
class Task:
    """The result of a call of an actor, which runs when somebody waits for it."""

    actor: "Actor"
    name: str
    arguments: tuple[Any, ...]

    def result(self):
        if self.actor.ray.dies(self.name, *self.arguments):
            raise RayError("The actor died unexpectedly.\nMore lines.")
        return getattr(self.actor.inner, self.name)(*self.arguments)


@dataclass(eq=False)
class Actor:
    ray: "FakeRay"
    inner: Any

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: Task(self, name, arguments))


@dataclass
class FakeRay:
    """As much of Ray as the engine uses; an actor dies where `dies` says so of a call."""

    resources: list[dict[str, float]] = field(default_factory=lambda: [{"CPU": 1.0}, {"CPU": 2.0}])
    dies: Callable[..., bool] = lambda *_: False
    stored: list[bytes] = field(default_factory=list)
    started: list[Actor] = field(default_factory=list)
    killed: list[Actor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.exceptions = SimpleNamespace(RayError=RayError)
        registry = {"register_pickle_by_value": lambda _: None, "unregister_pickle_by_value": lambda _: None}
        self.cloudpickle = SimpleNamespace(**registry)
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")

    def is_initialized(self):
        return True

    def nodes(self):
        alive = [{"NodeID": f"node-{i}", "Alive": True, "Resources": one} for i, one in enumerate(self.resources)]
        return [*alive, {"NodeID": "gone", "Alive": False, "Resources": {}}]

    def put(self, value):
        self.stored.append(pickle.dumps(value))
        return len(self.stored) - 1

    def remote(self, **options):
        self.options = options

        def make(cls):
            def start():
                self.started.append(Actor(self, cls()))
                return self.started[-1]

            return SimpleNamespace(remote=start)

        return make

    def get(self, reference):
        return reference.result() if isinstance(reference, Task) else pickle.loads(self.stored[reference])  # noqa: S301

    def wait(self, tasks, num_returns, timeout):
        return tasks[-1:], tasks[:-1]  # the last one first: blocks finish in any order

    def kill(self, actor):
        self.killed.append(actor)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: f"node-{len(self.started) % 2}")


@pytest.fixture
def fake_ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake
