"""The layers probe: by the modules' own outputs, over kinds of layers and sources of models."""

import pickle

import pytest
import timm
import torch
import torchvision
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.probes import Layers
from dubito.probes.layers import blocks

X = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
EXACT = "float32"

pytestmark = pytest.mark.usefixtures("one_thread")


def wrapped(module: nn.Module):
    return dubito.wrap(module, transform=dubito.Preprocess((32, 32)))


def network(*layers: nn.Module):
    torch.manual_seed(0)
    return wrapped(nn.Sequential(*layers))


def small():
    return network(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


def run(model, x=X, **settings) -> tuple[torch.Tensor, dict]:
    probe = Layers(dtype=EXACT, **settings)
    return probe.run(model, x, None)["layers"], probe.notes()


def test_convolutions_are_averaged_over_space():
    model = small()
    with torch.no_grad():
        first = model.module[0](X)
        second = model.module[2](first.relu())
    column, notes = run(model)
    # Also what an activation overwrites in place.
    torch.testing.assert_close(column, torch.cat([first.mean((2, 3)), second.mean((2, 3))], dim=1))
    assert notes == {"layers": ["0", "2"], "widths": [6, 4]}


def test_named_layers_in_the_order_of_the_names():
    model = small()
    column, notes = run(model, layers=["5", "0"])
    assert notes == {"layers": ["5", "0"], "widths": [4, 6]}
    torch.testing.assert_close(column[:, :4], model.features(X))


class Attending(nn.Module):
    """Two blocks of tokens, by other means in each test."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 8, 8, 8), nn.ModuleList([block(), block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x.flatten(1, -2).mean(1))


class Tokens(nn.Module):
    """(n, 16, 8), in a tuple as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layer(self.norm(x.flatten(1, -2))),)


class ChannelsLast(nn.Module):
    """(n, 4, 4, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


@pytest.mark.parametrize("block", [Tokens, ChannelsLast])
def test_tokens_and_channels_last(block):
    torch.manual_seed(0)
    model = wrapped(Attending(block))
    column, notes = run(model)
    assert notes == {"layers": ["blocks.0", "blocks.1"], "widths": [8, 8]}
    torch.testing.assert_close(column[:, 8:], model.features(X))  # which is the mean over tokens of the last block


def tiny_vit() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=3, **sizes))


def tiny_resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=3, **sizes))


@pytest.mark.parametrize(
    ("make", "names", "widths"),
    [
        (lambda: timm.create_model("test_resnet", num_classes=3), [f"layer{k}.0" for k in range(1, 5)], None),
        (
            lambda: timm.create_model("test_vit", num_classes=3, img_size=32),
            [f"blocks.{k}" for k in range(6)],
            [64] * 6,
        ),
        (lambda: timm.create_model("test_convnext", num_classes=3), [f"stages.{k}" for k in range(4)], None),
        (
            lambda: timm.create_model(
                "swin_tiny_patch4_window7_224",
                num_classes=3,
                img_size=32,
                window_size=4,
                embed_dim=24,
                depths=(1, 1, 1, 1),
                num_heads=(2, 2, 2, 2),
            ),
            [f"layers.{k}" for k in range(4)],
            [24, 48, 96, 192],
        ),
        (
            lambda: torchvision.models.resnet18(num_classes=3),
            [f"layer{k}.{j}" for k in range(1, 5) for j in range(2)],
            [64, 64, 128, 128, 256, 256, 512, 512],
        ),
        (tiny_vit, [f"vit.layers.{k}" for k in range(2)], [24, 24]),
        (tiny_resnet, [f"resnet.encoder.stages.{k}" for k in range(2)], [8, 16]),
    ],
    ids=["timm_resnet", "timm_vit", "timm_convnext", "timm_swin", "torchvision", "hf_vit", "hf_resnet"],
)
def test_blocks_of_real_architectures(make, names, widths):
    torch.manual_seed(0)
    model = wrapped(make())
    column, notes = run(model)
    assert notes["layers"] == names
    assert widths is None or notes["widths"] == widths
    assert column.shape == (5, sum(notes["widths"]))
    assert bool(column.isfinite().all())


def test_the_last_block_of_a_resnet_gives_the_feature():
    torch.manual_seed(0)
    model = wrapped(torchvision.models.resnet18(num_classes=3))
    torch.testing.assert_close(run(model)[0][:, -512:], model.features(X))


def test_features_are_those_of_the_same_pass():
    model = small()
    passes = []
    hook = model.module[0].register_forward_hook(lambda *_: passes.append(1))
    _, z = Layers().run_and_share(model, X, None)
    before = len(passes)
    Layers().run_and_share(model, X, None)
    assert len(passes) == before + 1
    hook.remove()
    assert torch.equal(z, model.features(X))


def test_it_is_a_column_of_a_cache_with_its_notes(tmp_path):
    pixels = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    table = dubito.extract(small(), pixels, tmp_path / "cache", probes=[Layers()], batch_size=4)
    assert table.shape("layers") == (9, 10)
    assert table.provenance.probes["layers"]["notes"] == {"layers": ["0", "2"], "widths": [6, 4]}
    alone = dubito.extract(small(), pixels, tmp_path / "other", batch_size=4)
    assert torch.equal(table.feature, alone.feature)


def test_rows_do_not_know_of_each_other():
    column, _ = run(small())
    torch.testing.assert_close(run(small(), X[3:4])[0], column[3:4])


def test_a_layer_of_a_class_of_its_own_counts_where_none_occurs_twice():
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x)

    assert list(blocks(nn.Sequential(Stem(), nn.Flatten(), nn.Linear(4, 2)))) == ["0"]


def test_the_module_is_left_as_it_was():
    model = small()
    run(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


def test_it_can_be_sent_to_another_process():
    probe = Layers(["0"])
    probe.run(small(), X, None)
    assert pickle.loads(pickle.dumps(probe)) == probe  # noqa: S301 (made here)


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"layers must be a list of different names of modules; got \('a', 'a'\)"):
        Layers(("a", "a"))
    with pytest.raises(ValueRangeError, match=r"layers must be a list of different names of modules; got 'layer1'"):
        Layers("layer1")
    with pytest.raises(ModelError, match=r"has no layer 'layer9'\. Its blocks are 0, 2\."):
        run(small(), layers=["layer9"])
    alone = wrapped(nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)))
    with pytest.raises(ModelError, match=r"has no blocks, convolutions or linear layers before its last layer"):
        run(alone)
