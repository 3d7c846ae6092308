"""Features and tiles from one pass: what it costs, and that images are not touched by the tiles beside them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dubito.errors import ModelError
from dubito.models import wrap
from dubito.models.head import Call

from .conftest import X

IMAGES = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(1))


def network(*behind_pool: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *behind_pool, nn.Linear(8, 50))


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_tiles_add_no_product_to_the_pass():
    model = wrap(network())
    tiled = model.tiled(IMAGES)
    convolution = 2 * 4 * 24 * 8 * 27  # images, tiles, channels out, channels and pixels in
    assert flops(lambda: model.features(IMAGES)) == convolution
    assert flops(lambda: model.tiled(IMAGES)) == convolution
    assert flops(lambda: tiled.logits(1, 3)) == 2 * 2 * 24 * 8 * 50  # the head, on two images of 24 tiles


def test_the_module_runs_once():
    module, passes = network(nn.Linear(8, 8), nn.ReLU()), []
    model = wrap(module)
    model.features(IMAGES)
    module.register_forward_pre_hook(lambda *_: passes.append(1))
    tiled = model.tiled(IMAGES)
    tiled.logits(0, 4)
    assert passes == [1]
    assert tiled.grid == (6, 4)


def test_features_do_not_keep_the_memory_of_tiles():
    features = wrap(network()).tiled(IMAGES).features
    assert features.untyped_storage().nbytes() == features.nbytes


def test_a_norm_in_training_mode_sees_no_tiles():
    module = network(nn.BatchNorm1d(8)).train()
    model = wrap(module)
    assert torch.equal(model.tiled(IMAGES).features, model.features(IMAGES))
    assert int(module[3].num_batches_tracked) == 0


@pytest.mark.parametrize("role", ["linear", "conv"])
def test_a_hidden_layer_gives_images_what_they_get_alone(role):
    layer = F.linear if role == "linear" else F.conv2d
    weight = torch.randn(5, 6) if role == "linear" else torch.randn(5, 6, 1, 1)
    source = torch.cat([X, torch.randn(9, 6)]).view(13, 6, *weight.shape[2:])
    rounded = layer(source, weight) + 1e-6  # stands for a longer product that rounds otherwise
    result = Call(0, role, source, rounded, weight=weight).with_own_rows(4)
    assert torch.equal(result[:4], layer(source[:4], weight))
    assert torch.equal(result[4:], rounded[4:])
    alone = Call(0, role, source[:4], rounded[:4], weight=weight)
    assert alone.with_own_rows(4) is alone.output


def test_what_follows_the_pool_may_refuse_more_rows_than_images():
    class Stubborn(nn.Module):
        def forward(self, z):
            return z.view(2, 8) if len(z) == 2 else z.view(4, 8)

    model = wrap(network(Stubborn()))
    assert model.features(IMAGES).shape == (4, 8)
    with pytest.raises(ModelError, match="Sequential has no feature map: nothing pools tiles"):
        model.tiled(IMAGES)
