"""Random generators: only those that are put back afterwards are ever seeded."""

import pytest
import torch
from torch import nn

import dubito
from dubito.audit import modes
from dubito.audit.modes import check_steady, check_train_mode, forked
from tests.audit.colours import Batched
from tests.audit.drawn import draw


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def test_no_generator_of_another_device_is_seeded(monkeypatch):
    """torch.manual_seed seeds all devices of the machine, of which a fork keeps one at most."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.mps, "manual_seed", seeded.append)
    model = dubito.wrap(nn.Sequential(Batched(), nn.Linear(3, 2)).train())
    x, state = draw(40, 3), torch.get_rng_state()
    [finding] = check_train_mode(model, x)
    assert finding.evidence["change_between_passes"] > 0.1  # so seeds were set
    assert check_steady(model, x) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert seeded == []


def test_every_cuda_device_of_the_model_is_seeded_and_put_back(monkeypatch):
    generators = [torch.Generator() for _ in range(4)]
    before = [generator.initial_seed() for generator in generators]
    put_back = []
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put_back.append((state, device)))
    devices = {torch.device("cuda", 1), torch.device("cuda", 3), torch.device("cpu")}
    monkeypatch.setattr(modes, "_devices", lambda model: devices)
    model = dubito.wrap(nn.Linear(2, 2))
    with forked(model, 7):
        assert torch.initial_seed() == 7
    assert [generator.initial_seed() for generator in generators] == [before[0], 7, before[2], 7]
    assert put_back == [("state of 1", 1), ("state of 3", 3)]


def test_mps_is_put_back(monkeypatch):
    state = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor([5]))
    monkeypatch.setattr(torch.mps, "set_rng_state", state.append)
    monkeypatch.setattr(torch.mps, "manual_seed", state.append)
    monkeypatch.setattr(modes, "_devices", lambda model: {torch.device("mps")})
    model = dubito.wrap(nn.Linear(2, 2))
    with forked(model, 7):
        pass
    assert state == [7, torch.tensor([5])]


def test_devices_are_those_of_weights_and_buffers():
    model = dubito.wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert modes._devices(model) == {torch.device("cpu")}
    model.module.register_buffer("elsewhere", torch.empty(1, device="meta"))
    assert modes._devices(model) == {torch.device("cpu"), torch.device("meta")}
