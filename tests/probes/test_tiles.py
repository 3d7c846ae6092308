"""Tiles: what each grid says, against parts of the networks taken by hand; and what is asked that cannot be."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet, SqueezeNet
from torchvision.models.resnet import Bottleneck

import dubito
from dubito.errors import ModelError, TableError, ValueRangeError
from dubito.metrics.streaming import SUMMARY, MemberStream
from dubito.models import WrappedClassifier
from dubito.probes import tiles as tiles_module
from dubito.probes.tiles import Tiles, pooling
from dubito.types import SharingProbe

C = 5
LABEL = torch.tensor([4, 0, 2])
pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Case:
    """A small network, and the logits of its tiles (n, c, h, w) from its own parts."""

    make: Callable[[], nn.Module]
    size: tuple[int, int]
    tiles: Callable[[nn.Module, Tensor], Tensor]
    linear: bool = True


def resnet(**options) -> Callable[[], nn.Module]:
    return lambda: ResNet(Bottleneck, [1, 1, 1, 1], num_classes=C, **options)


def small(name: str, **options) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=C, **options)


def maxvit() -> nn.Module:
    sizes = {"depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 64), "stem_width": 8}
    return timm.create_model("maxvit_tiny_tf_224", img_size=128, num_classes=C, **sizes)


def everywhere(fc: nn.Linear, tiles: Tensor) -> Tensor:
    return F.conv2d(tiles, fc.weight[:, :, None, None], fc.bias)


def resnet_tiles(m: nn.Module, x: Tensor) -> Tensor:
    return everywhere(m.fc, nn.Sequential(*list(m.children())[:-2])(x))


def whole_head(m: nn.Module, x: Tensor) -> Tensor:
    """One tile of the map at a time, handed to the network as if it were the map."""
    result = m.forward_features(x)
    output = [m.forward_head(result[:, :, i : i + 1, j : j + 1]) for i, j in np.ndindex(*result.shape[2:])]
    return torch.stack(output, -1).unflatten(-1, result.shape[2:])


def vit_tiles(m: nn.Module, x: Tensor) -> Tensor:
    tokens = m.fc_norm(m.forward_features(x)[:, m.num_prefix_tokens :])
    return m.head(tokens).transpose(1, 2).unflatten(2, m.patch_embed.grid_size)


ZOO = {
    "resnet": Case(resnet(), (128, 96), resnet_tiles),
    "resnext": Case(resnet(groups=4, width_per_group=8), (96, 128), resnet_tiles),
    "wide_resnet": Case(resnet(width_per_group=128), (96, 96), resnet_tiles),
    "efficientnet": Case(small("test_efficientnet"), (160, 128), whole_head),
    "convnext": Case(small("test_convnext"), (128, 128), whole_head, linear=False),
    "maxvit": Case(maxvit, (128, 128), whole_head, linear=False),
    "squeezenet": Case(
        lambda: SqueezeNet("1_1", num_classes=C), (96, 128), lambda m, x: m.classifier[:3](m.features(x))
    ),
    "vit_class_token": Case(small("test_vit", img_size=64), (64, 64), vit_tiles, linear=False),
    "vit_average": Case(small("test_vit2", img_size=(64, 48)), (64, 48), vit_tiles, linear=False),
}


@dataclass(frozen=True)
class Built:
    case: Case
    model: WrappedClassifier
    x: Tensor
    tile_logits: Tensor


@pytest.fixture(scope="module", params=ZOO)
def built(request) -> Built:
    return build(request.param)


def build(name: str) -> Built:
    case = ZOO[name]
    torch.manual_seed(0)
    module = case.make().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        x = 2 * torch.randn(3, 3, *case.size)
        layer = [part for part in module.modules() if isinstance(part, nn.Linear | nn.Conv2d)][-1]
        scale = 2 / float(case.tiles(module, x).std())  # tiles that are neither all sure nor all unsure
        for parameter in layer.parameters():
            parameter.mul_(scale)
        return Built(case, dubito.wrap(module, name=name), x, case.tiles(module, x))


def by_hand(members: Tensor, label: Tensor) -> dict[str, np.ndarray]:
    """Some fields from logits (n, c, k, k), member by member in numpy."""
    z = members.flatten(2).double().numpy()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    mean = p.mean(2)
    aleatoric = np.mean([-(p[:, :, m] * np.log(p[:, :, m])).sum(1) for m in range(p.shape[2])], axis=0)
    total = -(mean * np.log(mean)).sum(1)
    votes = [np.bincount(z[i].argmax(0), minlength=C).max() for i in range(len(z))]
    return {
        "members": np.full(len(z), p.shape[2]),
        "total": total,
        "aleatoric": aleatoric,
        "epistemic": total - aleatoric,
        "variation": 1 - np.array(votes) / p.shape[2],
        "predicted": mean.argmax(1),
        "confidence": mean.max(1),
        "loss": -np.log(mean[np.arange(len(z)), label.numpy()]),
    }


def field(column: Tensor, name: str) -> Tensor:
    return column[:, SUMMARY.index(name)]


def test_every_grid_is_the_ensemble_of_averaged_tile_logits(built):
    columns = Tiles().run(built.model, built.x, LABEL)
    side = min(built.tile_logits.shape[2:])
    grids = range(2, min(7, side) + 1)
    assert list(columns) == [f"tiles_{k}" for k in grids] + [f"tiles_{k}_loss" for k in grids]
    for k in grids:
        expected = by_hand(F.adaptive_avg_pool2d(built.tile_logits, k), LABEL)
        loss = expected.pop("loss")
        assert columns[f"tiles_{k}"].shape == (3, len(SUMMARY))
        assert columns[f"tiles_{k}"].dtype == torch.float32
        for name, values in expected.items():
            np.testing.assert_allclose(field(columns[f"tiles_{k}"], name), values, rtol=2e-4, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(columns[f"tiles_{k}_loss"], loss, rtol=2e-4, atol=2e-5)
    assert float(field(columns["tiles_2"], "epistemic").min()) > 1e-6  # members do differ, or nothing was compared


def test_weighted_fields_are_those_of_the_stream(built):
    side = min(built.tile_logits.shape[2:])
    stream = MemberStream()
    stream.add(F.adaptive_avg_pool2d(built.tile_logits, side).flatten(2).transpose(1, 2))
    got = Tiles([side]).run(built.model, built.x, None)[f"tiles_{side}"]
    torch.testing.assert_close(got.double(), stream.summary(), rtol=1e-3, atol=1e-4)


def test_all_tiles_together_are_the_model_where_its_head_is_linear(built):
    mean = built.tile_logits.mean((2, 3))
    with torch.no_grad():
        own = built.model.module(built.x)
    assert torch.allclose(mean, own, rtol=1e-3, atol=1e-4 * float(own.abs().max())) == built.case.linear


@pytest.mark.parametrize("name", ["maxvit", "convnext"])
def test_averaged_features_are_another_ensemble_where_the_head_is_not_linear(name):
    one = build(name)
    result = one.model.module.forward_features(one.x)
    pooled = F.adaptive_avg_pool2d(result, 2)
    head = one.model.module.forward_head
    with torch.no_grad():
        of_features = torch.stack([head(pooled[:, :, i : i + 1, j : j + 1]) for i, j in np.ndindex(2, 2)], -1)
    wrong = by_hand(of_features, LABEL)["epistemic"]
    right = field(Tiles([2]).run(one.model, one.x, None)["tiles_2"], "epistemic").numpy()
    assert np.abs(wrong / right - 1).max() > 0.01


def grid_network(side: int = 7) -> WrappedClassifier:
    """A map as large as the input: each tile is one pixel, and what it says is linear in it."""
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, C)
    model = dubito.wrap(nn.Sequential(*layers), name="pixels")
    model.features(torch.randn(2, 3, side, side))
    return model


def pixels(n: int = 3, h: int = 7, w: int = 7) -> Tensor:
    return torch.randn(n, 3, h, w, generator=torch.Generator().manual_seed(2))


def test_grids_by_default_are_those_of_the_paper_or_what_the_map_has():
    model = grid_network()
    assert [*Tiles().run(model, pixels(), None)] == [f"tiles_{k}" for k in range(2, 8)]
    assert [*Tiles().run(model, pixels(h=16, w=16), None)] == [f"tiles_{k}" for k in range(2, 8)]
    assert [*Tiles().run(model, pixels(h=4, w=9), None)] == ["tiles_2", "tiles_3", "tiles_4"]
    assert [*Tiles([16, 8]).run(model, pixels(h=16, w=16), None)] == ["tiles_8", "tiles_16"]


def test_a_picture_of_one_colour_has_no_epistemic_uncertainty():
    one = pixels(n=3, h=1, w=1).expand(3, 3, 7, 7)
    columns = Tiles().run(grid_network(), one, None)
    assert max(float(field(column, "epistemic").max()) for column in columns.values()) < 1e-6


def test_temperature_divides_tile_logits():
    model, x = grid_network(), pixels()
    output = model.logits(model.feature_map(x)).transpose(1, 2).unflatten(2, (7, 7))
    warm = Tiles([3], temperature=2.5).run(model, x, None)["tiles_3"]
    expected = by_hand(F.adaptive_avg_pool2d(output, 3) / 2.5, LABEL)["epistemic"]
    np.testing.assert_allclose(field(warm, "epistemic"), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 1e-3), ("float32", 1e-6)])
def test_logits_are_kept_on_request_as_the_model_returns_them(dtype, digits):
    model, x = grid_network(), pixels()
    columns = Tiles([2, 7], keep="logits", temperature=3.0, dtype=dtype).run(model, x, None)
    assert [*columns] == ["tiles_2", "tiles_7", "tiles_2_logit", "tiles_7_logit"]
    output = model.logits(model.feature_map(x)).transpose(1, 2).unflatten(2, (7, 7))
    for k in (2, 7):
        expected = F.adaptive_avg_pool2d(output, k).flatten(2).transpose(1, 2)
        assert columns[f"tiles_{k}_logit"].dtype == getattr(torch, dtype)
        torch.testing.assert_close(columns[f"tiles_{k}_logit"].float(), expected, rtol=digits, atol=digits)


def test_logits_beyond_half_precision():
    model = grid_network()
    with torch.no_grad():
        model.module[3].bias[0] = 1e6
    with pytest.raises(ValueRangeError) as error:
        Tiles([2], keep="logits").run(model, pixels(), None)
    assert str(error.value) == (
        "tiles: logits reach 1e+06, beyond float16's 65504. "
        "Extract with probes=[Tiles(keep='logits', dtype='float32')]."
    )
    Tiles([2], keep="logits", dtype="float32").run(model, pixels(), None)


def test_few_images_at_a_time_are_the_same(monkeypatch):
    model, x, label = grid_network(), pixels(7), torch.arange(7) % C
    probe = Tiles(keep="logits", dtype="float32")
    expected = probe.run(model, x, label)
    args: list[int] = []
    logits = WrappedClassifier.logits

    def counted(self, z):
        args.append(len(z))
        return logits(self, z)

    monkeypatch.setattr(WrappedClassifier, "logits", counted)
    monkeypatch.setattr(tiles_module, "_COMPUTED", 4 * 4 * 49 * C)
    monkeypatch.setattr(tiles_module, "_WORKED", 3 * 4 * (139 + 49) * C)
    for name, column in probe.run(model, x, label).items():
        torch.testing.assert_close(column, expected[name], rtol=1e-5, atol=1e-6)
    assert args == [0, 4, 3]  # none, to learn the number of classes; then every tile once
    monkeypatch.setattr(tiles_module, "_COMPUTED", 1)
    monkeypatch.setattr(tiles_module, "_WORKED", 1)
    assert torch.equal(probe.run(model, x, label)["tiles_7_loss"].argsort(), expected["tiles_7_loss"].argsort())


def test_a_loss_needs_classes():
    model, x = grid_network(), pixels()
    shares = torch.full((3, C), 1 / C)
    for target in (None, shares, torch.tensor([0.0, 1.0, 0.5]), torch.tensor([True] * 3)):
        assert [*Tiles([2]).run(model, x, target)] == ["tiles_2"]
    with pytest.raises(TableError, match=f"the labels must be classes from 0 to {C - 1}; got 0 to {C}"):
        Tiles([2]).run(model, x, torch.tensor([0, 1, C]))


def test_an_empty_batch_has_empty_columns():
    columns = Tiles([2], keep="logits").run(grid_network(), pixels(0), torch.empty(0, dtype=torch.long))
    assert {name: tuple(column.shape) for name, column in columns.items()} == {
        "tiles_2": (0, 9),
        "tiles_2_loss": (0,),
        "tiles_2_logit": (0, 4, C),
    }


def test_the_pass_gives_the_features_too(built):
    probe = Tiles()
    assert isinstance(probe, SharingProbe)
    columns, features = probe.run_and_share(built.model, built.x, None)
    assert torch.equal(features, built.model.features(built.x))
    alone = probe.run(built.model, built.x, None)
    assert all(torch.equal(columns[name], alone[name]) for name in alone)


def test_windows_are_those_of_adaptive_pooling():
    for h, w in ((7, 7), (4, 9), (13, 13)):
        tiles = torch.randn(1, 1, h, w)
        result = pooling((h, w), [2, 3, 4]) @ tiles.flatten()
        expected = torch.cat([F.adaptive_avg_pool2d(tiles, k).flatten() for k in (2, 3, 4)])
        torch.testing.assert_close(result, expected)


class OtherClassifier:
    """A classifier of someone else: the contract, and nothing more."""

    def __init__(self, model: WrappedClassifier) -> None:
        self.inner, self.name, self.module = model, "foreign", model.module
        self.transform, self.classes, self.device = model.transform, model.classes, model.device
        self.features, self.logits, self.feature_map = model.features, model.logits, model.feature_map
        self.head, self.fingerprint = model.head, model.fingerprint


def test_any_classifier_with_a_square_map_will_do():
    model, x = grid_network(), pixels()
    expected = Tiles().run(model, x, LABEL)
    result = Tiles().run(OtherClassifier(model), x, LABEL)
    assert all(torch.allclose(result[name], expected[name], atol=1e-6) for name in expected)
    with pytest.raises(ModelError) as error:
        Tiles().run(OtherClassifier(model), pixels(h=3, w=4), None)
    assert str(error.value) == (
        "tiles: the feature map of foreign has 12 tiles, which form no square, and it does not report their height and "
        "width. Give the classifier a method tiled(x), see `dubito.types.Tiling`."
    )


def test_a_model_without_a_feature_map_says_so():
    model = dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(147, 4), nn.ReLU(), nn.Linear(4, C)), name="mlp")
    with pytest.raises(ModelError, match=r"mlp has no feature map: nothing pools tiles or tokens before its last laye"):
        Tiles().run(model, pixels(), None)


@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 5)])
def test_one_tile_is_no_ensemble(h, w):
    with pytest.raises(ModelError) as error:
        Tiles().run(grid_network(), pixels(h=h, w=w), None)
    assert str(error.value) == (
        f"tiles: the feature map of pixels is {h} x {w} for these inputs, so there are no tiles to compare. "
        "Use larger inputs, or a model that pools later."
    )


def test_a_grid_finer_than_the_map():
    with pytest.raises(ValueRangeError) as error:
        Tiles([2, 8]).run(grid_network(), pixels(h=7, w=9), None)
    assert str(error.value) == (
        "tiles: grids must not be finer than the feature map, which is 7 x 9 for pixels and these inputs; got 8. "
        "Give grids of 2 to 7, or larger inputs."
    )


@pytest.mark.parametrize("grids", [[], [1, 2], [2, 2], [-3]])
def test_grids_that_are_none(grids):
    with pytest.raises(ValueRangeError, match=r"grids must be different numbers of at least 2; got \[.*\]\. \[2, 7\]"):
        Tiles(grids)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("keep", "all", "keep must be one of summary, logits; got 'all'"),
        ("dtype", "int8", "dtype must be one of float16, float32; got 'int8'"),
        ("temperature", 0.0, r"temperature must be a number, above 0; got 0\.0"),
    ],
)
def test_settings_that_are_none(name, value, text):
    probe = Tiles()
    object.__setattr__(probe, name, value)  # past the type checks of the tests
    with pytest.raises(ValueRangeError, match=text):
        probe.__post_init__()


def test_settings_are_what_changes_columns():
    assert Tiles().settings() == {"grids": None, "keep": "summary", "temperature": 1.0}
    assert Tiles([7, 2], keep="logits").settings() == {
        "grids": [2, 7],
        "keep": "logits",
        "temperature": 1.0,
        "dtype": "float16",
    }
    assert Tiles([7, 2]) == Tiles((2, 7))


def test_it_can_be_sent_to_another_process():
    probe = Tiles([3], temperature=2.0)
    assert pickle.loads(pickle.dumps(probe)) == probe  # noqa: S301 (made here)
