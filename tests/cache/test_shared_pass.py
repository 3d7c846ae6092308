"""Two probes, one pass: what the forward probe is handed, and that it changes no byte of what it writes."""

import pytest
import torch
from torch import nn

import dubito
from dubito import extract
from dubito.data import Augment
from dubito.errors import ValueRangeError
from dubito.probes import Forward, PreActivation
from dubito.probes.tiles import Tiles

from .conftest import contents

SIZES = {"batch_size": 4, "shard_size": 8, "workers": 0, "progress": False}


class Counted(nn.Module):
    """Counts its passes by images; has a hidden layer behind the pool, where more rows may round otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.hidden = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Linear(8, 33)
        self.head = nn.Linear(33, 3)
        self.passes: list[int] = []

    def forward(self, x):
        self.passes.append(len(x))
        z = self.norm(self.conv(x)).relu().mean((2, 3))
        return self.head(self.hidden(z).tanh())


@pytest.fixture
def network():
    return Counted()


def shards(folder, probe: str) -> dict[str, str]:
    return {name: digest for name, digest in contents(folder).items() if name.startswith(f"{probe}-")}


def test_both_probes_cost_one_pass_a_batch(model, network, folder, tmp_path):
    model.features(torch.zeros(2, 3, 16, 16))  # understood before, which takes passes of its own
    network.passes.clear()
    table = extract(model, folder, tmp_path / "cache", probes=[Tiles()], label_space="model", **SIZES)
    # One image to check the labels, half a batch twice to see whether the model is random, then every batch once.
    assert network.passes == [1, 2, 2, 4, 4, 4, 4, 4, 3]
    assert {"feature", "logit", "loss", "tiles_2", "tiles_7", "tiles_7_loss"} <= set(table.columns)
    assert table.shape("tiles_7") == (23, 9)


def test_the_forward_columns_are_the_same_bytes(model, folder, tmp_path):
    extract(model, folder, tmp_path / "alone", label_space="model", **SIZES)
    extract(model, folder, tmp_path / "both", probes=[Tiles([2, 3])], label_space="model", **SIZES)
    extract(model, folder, tmp_path / "later", label_space="model", **SIZES)
    extract(model, folder, tmp_path / "later", probes=[Tiles([2, 3])], label_space="model", **SIZES)
    assert shards(tmp_path / "alone", "forward") == shards(tmp_path / "both", "forward")
    assert shards(tmp_path / "later", "tiles") == shards(tmp_path / "both", "tiles")
    assert len(shards(tmp_path / "both", "tiles")) == 3


@pytest.mark.parametrize("lost", ["forward-00001", "tiles-00001"])
def test_what_is_lost_comes_back_the_same(model, network, folder, tmp_path, lost):
    settings = {"probes": [Tiles([2, 3])], "label_space": "model", **SIZES}
    extract(model, folder, tmp_path / "cache", **settings)
    before = contents(tmp_path / "cache")
    (name,) = [name for name in before if name.startswith(lost)]
    (tmp_path / "cache" / name).unlink()
    network.passes.clear()
    with pytest.warns(dubito.errors.RepairedShardWarning, match=name):
        extract(model, folder, tmp_path / "cache", **settings)
    assert contents(tmp_path / "cache") == before
    assert sum(network.passes) == 8 + 1 + 2 * 2  # the block, an image to check the labels, half a batch twice


def test_an_interrupted_extraction_goes_on_to_the_same_bytes(model, folder, tmp_path, monkeypatch):
    settings = {"probes": [Tiles([2], keep="logits")], "label_space": "model", **SIZES}
    extract(model, folder, tmp_path / "whole", **settings)
    run, calls = Tiles.run_and_share, []

    def tired(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(Tiles, "run_and_share", tired)
    with pytest.raises(KeyboardInterrupt):
        extract(model, folder, tmp_path / "cut", **settings)
    assert len(shards(tmp_path / "cut", "tiles")) == 1
    monkeypatch.setattr(Tiles, "run_and_share", run)
    extract(model, folder, tmp_path / "cut", **settings)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_other_probes_go_their_own_way(folder, tmp_path):
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    model = dubito.wrap(nn.Sequential(*layers), transform=dubito.Preprocess((16, 16), 16))
    with_tiles = extract(model, folder, tmp_path / "a", probes=[PreActivation(), Tiles([2])], **SIZES)
    without = extract(model, folder, tmp_path / "b", probes=[PreActivation()], **SIZES)
    for name in ("pre_activation", "feature", "logit"):
        assert torch.equal(with_tiles.whole(name), without.whole(name))


def test_settings_of_the_forward_probe_hold(model, folder, tmp_path):
    probes = [Tiles([2]), Forward(store_logit=False, feature_dtype="float32")]
    table = extract(model, folder, tmp_path / "cache", probes=probes, **SIZES)
    z = table.feature
    assert z.dtype == torch.float32
    torch.testing.assert_close(table.logit, model.logits(z))


def test_mixed_photographs_have_their_mixed_loss(model, folder, tmp_path):
    mixed = {"epochs": 2, "augment": Augment(strong="mixup"), "label_space": "model", **SIZES}
    alone = extract(model, folder, tmp_path / "alone", **mixed)
    both = extract(model, folder, tmp_path / "both", probes=[Tiles([2])], **mixed)
    assert torch.equal(alone.loss, both.loss)
    assert "tiles_2" in both.columns
    assert "tiles_2_loss" not in both.columns  # of which of the two photographs?


def test_not_a_number_is_named_as_without_tiles(model, network, folder, tmp_path):
    model.features(torch.zeros(2, 3, 16, 16))
    with torch.no_grad():
        network.conv.bias[0] = float("nan")
    with pytest.raises(
        ValueRangeError, match=r"image 'a/000\.png': the model gives NaN or infinite values in 'feature"
    ):
        extract(model, folder, tmp_path / "cache", probes=[Tiles()], **SIZES)
