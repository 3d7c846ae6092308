"""A classifier with other weights: a copy, with everything else as it was."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dubito
from dubito.errors import CheckpointError, ModelError
from dubito.models.checkpoint import with_weights

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3))


def test_only_the_weights_are_others(tmp_path):
    save_file(network(1).state_dict(), tmp_path / "one.safetensors")
    module = network(0)
    model = dubito.wrap(module, classes=["a", "b", "c"], head="4", name="net")
    before = model.logits(model.features(X))
    other = with_weights(model, tmp_path / "one.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other.features(X)), network(1).eval()(X))
    assert torch.equal(model.logits(model.features(X)), before)
    assert other.module is not module
    assert (other.name, other.classes) == ("net with one.safetensors", ["a", "b", "c"])
    assert (other.transform, other.fingerprint()["head"]) == (model.transform, model.fingerprint()["head"])
    assert other.fingerprint()["weights"] == dubito.wrap(network(1)).fingerprint()["weights"]


def test_a_compiled_module_has_its_plain_names(tmp_path):
    class Compiled(nn.Module):  # as torch.compile leaves it, without the seconds that it takes
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = network(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._orig_mod(x)

    save_file(network(1).state_dict(), tmp_path / "one.safetensors")
    other = with_weights(dubito.wrap(Compiled()), tmp_path / "one.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other.features(X)), network(1).eval()(X))


def test_a_module_on_several_gpus_has_its_plain_names(tmp_path):
    save_file(network(1).state_dict(), tmp_path / "one.safetensors")
    other = with_weights(dubito.wrap(nn.DataParallel(network(0))), tmp_path / "one.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other.features(X)), network(1).eval()(X))


def test_what_cannot_be_copied(tmp_path):
    with pytest.raises(CheckpointError, match="weights: no file"):
        with_weights(dubito.wrap(network(0)), tmp_path / "none.pt")
    with pytest.raises(ModelError, match=r"with_weights: model must come from dubito.load or dubito.wrap; got Linear"):
        with_weights.__wrapped__(nn.Linear(2, 2), tmp_path / "none.pt")  # past the type checks of the tests
