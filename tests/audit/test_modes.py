"""Random generators: only those that are put back afterwards are ever seeded."""

import pytest
import torch
from torch import nn

import dubito
from dubito.audit import modes
from dubito.audit.modes import check_steady, check_train_mode
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


def test_devices_are_those_of_weights_and_buffers():
    model = dubito.wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert modes._devices(model) == {torch.device("cpu")}
    model.module.register_buffer("elsewhere", torch.empty(1, device="meta"))
    assert modes._devices(model) == {torch.device("cpu"), torch.device("meta")}
