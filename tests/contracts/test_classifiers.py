"""One suite over classifiers of every source and of every kind of head.

Each stands in the zoo with the shape of a small batch, the width of its features, and its tiles as its own
submodules compute them, so that the feature map is checked against code that knows the architecture.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification
from transformers import ViTImageProcessor as Processor

import dubito
from dubito.errors import ModelError
from dubito.models import WrappedClassifier
from dubito.types import Classifier

C = 5
NAMES = ["ant", "bee", "cat", "dog", "eel"]


@dataclass(frozen=True)
class Case:
    """A classifier, what goes in, and what must come out.

    Attributes:
        make: Builds it; the argument is an empty folder.
        size: Height and width of the images; an MLP reads them as well.
        width: d.
        tiles: (n, t, d) by the module's own parts, or None where there is no map.
        averages: The features are the mean of the tiles.
    """

    make: Callable[..., WrappedClassifier]
    size: tuple[int, int]
    width: int
    tiles: Callable[[nn.Module, Tensor], Tensor] | None
    averages: bool = False


def timm(name: str, **options) -> Callable[..., WrappedClassifier]:
    return lambda folder: dubito.load(f"timm:{name}", weights=None, num_classes=C, **options)


def torchvision(name: str, **options) -> Callable[..., WrappedClassifier]:
    return lambda folder: dubito.load(f"torchvision:{name}", weights=None, num_classes=C, **options)


def hf(module: Callable[[], nn.Module]) -> Callable[..., WrappedClassifier]:
    def make(folder) -> WrappedClassifier:
        built = module()
        lively(built)
        built.save_pretrained(folder)
        Processor(size={"height": 32, "width": 32}).save_pretrained(folder)
        return dubito.load(f"hf:{folder}")

    return make


def plain(*layers: nn.Module) -> Callable[..., WrappedClassifier]:
    return lambda folder: dubito.wrap(nn.Sequential(*layers), classes=NAMES)


def tiny_vit() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, id2label=dict(enumerate(NAMES)), **sizes))


def tiny_resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(id2label=dict(enumerate(NAMES)), **sizes))


def rows(tiles: Tensor) -> Tensor:
    """(n, d, h, w) to (n, t, d)."""
    return tiles.flatten(2).transpose(1, 2)


def each(tiles: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    """A layer behind the pool on every tile in turn, as if each were a pooled image."""
    return torch.stack([layer(tile) for tile in tiles.flatten(2).unbind(2)], dim=1)


def timm_map(m: nn.Module, x: Tensor) -> Tensor:
    return rows(m.forward_features(x))


def timm_head(m: nn.Module, x: Tensor) -> Tensor:
    def behind_pool(tile):
        return m.head.pre_logits(m.head.flatten(m.head.norm(tile[:, :, None, None])))

    return each(m.forward_features(x), behind_pool)


def timm_tokens(m: nn.Module, x: Tensor) -> Tensor:
    return m.fc_norm(m.forward_features(x)[:, m.num_prefix_tokens :])


def distilled_tokens(m: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([m.forward_features(x)[:, 2:]] * 2, dim=-1)


def torchvision_tokens(m: nn.Module, x: Tensor) -> Tensor:
    patches = m._process_input(x)
    return m.encoder(torch.cat([m.class_token.expand(len(x), -1, -1), patches], dim=1))[:, 1:]


def squeezenet_tiles(m: nn.Module, x: Tensor) -> Tensor:
    """What the convolution reads, and how far the ReLU lifts what it says."""
    z = m.features(x)
    output = m.classifier[1](z)
    return rows(torch.cat([z, output.relu() - output], dim=1))


class ByHand(nn.Module):
    """A head that is no layer: any function of the module and its pooled features."""

    def __init__(self, head: Callable[..., object]) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), head
        self.weight, self.bias = nn.Parameter(torch.randn(C, 8)), nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> object:
        return self.head(self, self.conv(x).mean((2, 3)))


def by_hand(head: Callable[..., object]) -> Callable[..., WrappedClassifier]:
    return lambda folder: dubito.wrap(ByHand(head), classes=NAMES)


def cosine(m: nn.Module, z: Tensor) -> Tensor:
    return 10 * F.linear(F.normalize(z, dim=-1), F.normalize(m.weight, dim=-1))


def einsum(m: nn.Module, z: Tensor) -> Tensor:
    return torch.einsum("nd,cd->nc", z, m.weight) + m.bias


def in_a_dict(m: nn.Module, z: Tensor) -> dict[str, Tensor]:
    return {"logits": F.linear(z, m.weight, m.bias), "pooled": z}


pytestmark = pytest.mark.usefixtures("one_thread")

ZOO = {
    "timm_vit_token": Case(timm("test_vit", img_size=64), (64, 64), 64, timm_tokens),
    "timm_vit_pooled": Case(timm("test_vit2", img_size=(64, 32)), (64, 32), 64, timm_tokens),
    "timm_vit_attention_pool": Case(timm("test_vit3", img_size=64), (64, 64), 96, None),
    "timm_deit_distilled": Case(
        timm("deit_tiny_distilled_patch16_224", img_size=(32, 48), depth=2, embed_dim=24, num_heads=2),
        (32, 48),
        48,
        distilled_tokens,
    ),
    "timm_convnext": Case(timm("test_convnext"), (64, 96), 64, timm_head),
    "timm_maxvit": Case(
        timm("maxvit_rmlp_pico_rw_256", img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 32, 64)),
        (64, 64),
        64,
        timm_map,
        averages=True,
    ),
    "timm_maxvit_hidden_layer": Case(
        timm("maxvit_tiny_tf_224", img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 32, 64), stem_width=8),
        (64, 64),
        512,
        timm_head,
    ),
    "timm_efficientnet": Case(timm("test_efficientnet"), (64, 96), 256, timm_map, averages=True),
    "timm_resnet": Case(timm("test_resnet"), (64, 96), 96, timm_map, averages=True),
    "torchvision_resnet": Case(
        torchvision("resnet18"),
        (64, 96),
        512,
        lambda m, x: rows(nn.Sequential(*list(m.children())[:-2])(x)),
        averages=True,
    ),
    "torchvision_squeezenet": Case(torchvision("squeezenet1_0"), (64, 96), 512 + C, squeezenet_tiles, averages=True),
    "torchvision_mobilenet": Case(
        torchvision("mobilenet_v3_small"), (64, 96), 1024, lambda m, x: each(m.features(x), m.classifier[:-1])
    ),
    "torchvision_vit": Case(
        lambda folder: dubito.wrap(VisionTransformer(32, 16, 2, 2, 24, 32, num_classes=C), name="vit"),
        (32, 32),
        24,
        torchvision_tokens,
    ),
    "torchvision_densenet": Case(
        torchvision("densenet121"), (64, 96), 1024, lambda m, x: rows(F.relu(m.features(x))), averages=True
    ),
    "hf_vit": Case(hf(tiny_vit), (32, 32), 24, lambda m, x: m.vit(x).last_hidden_state[:, 1:]),
    "hf_resnet": Case(hf(tiny_resnet), (48, 32), 16, lambda m, x: rows(m.resnet(x).last_hidden_state), averages=True),
    "cnn": Case(
        plain(
            nn.Conv2d(3, 8, 3, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, C),
        ),
        (13, 9),
        8,
        lambda m, x: rows(m[:3](x)),
        averages=True,
    ),
    "cnn_without_bias": Case(
        plain(nn.Conv2d(3, 8, 3), nn.AvgPool2d((7, 5)), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, C, bias=False)),
        (9, 7),
        8,
        lambda m, x: rows(m[0](x)),
        averages=True,
    ),
    "cnn_convolution_behind_pool": Case(
        plain(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, C, 1), nn.Flatten()),
        (9, 7),
        8,
        lambda m, x: rows(m[0](x)),
        averages=True,
    ),
    "cnn_flattened": Case(plain(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, C)), (7, 6), 80, None),
    "cosine_head": Case(by_hand(cosine), (9, 7), 8, lambda m, x: F.normalize(rows(m.conv(x)), dim=-1)),
    "einsum_head": Case(by_hand(einsum), (9, 7), 8, lambda m, x: rows(m.conv(x)), averages=True),
    "logits_in_a_dict": Case(by_hand(in_a_dict), (9, 7), 8, lambda m, x: rows(m.conv(x)), averages=True),
    "mlp": Case(plain(nn.Flatten(), nn.Linear(60, 11), nn.Dropout(0.5), nn.GELU(), nn.Linear(11, C)), (5, 4), 11, None),
}


@dataclass(frozen=True)
class Built:
    case: Case
    model: WrappedClassifier
    x: Tensor
    expected: Tensor

    def fresh(self, module: nn.Module | None = None) -> WrappedClassifier:
        """A classifier of the module (or of another like it) that has not seen a batch."""
        return dubito.wrap(module or self.model.module, name="fresh")


@pytest.fixture(scope="module", params=ZOO)
def built(request, tmp_path_factory) -> Built:
    case = ZOO[request.param]
    torch.manual_seed(0)
    model = case.make(tmp_path_factory.mktemp(request.param))
    lively(model.module)
    x = torch.randn(3, 3, *case.size)
    settle(model.module, x)
    return Built(case, model, x, answer(model.module, x))


def lively(module: nn.Module) -> None:
    """Weights, biases and statistics that are all different and nowhere zero: a fresh head often is."""
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                noise = torch.rand_like(tensor) if name.endswith("running_var") else torch.randn_like(tensor)
                tensor.add_(0.1 * noise if tensor.dim() < 2 else 0.02 * noise)


def settle(module: nn.Module, x: Tensor) -> None:
    """Statistics of the images themselves: with random ones, deep networks say the same about every image."""
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        module.train()(x)
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
    module.eval()


def answer(module: nn.Module, x: Tensor) -> Tensor:
    """What the module itself says, from a copy, so that the original stays as it is."""
    with torch.no_grad():
        out = copy.deepcopy(module).eval()(x)
    return out if isinstance(out, Tensor) else out["logits"]


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def state(module: nn.Module) -> dict[str, object]:
    """Everything that a guest could leave behind."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    hooks = {
        f"{name}.{kind}": len(value)
        for name, part in module.named_modules()
        for kind, value in vars(part).items()
        if kind.endswith("_hooks") and value is not None
    }
    return {
        "training": [part.training for part in module.modules()],
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors},
        "written": {name: tensor._version for name, tensor in tensors},
        "places": {name: tensor.data_ptr() for name, tensor in tensors},
        "bytes": {name: crc32(tensor.detach().contiguous().numpy()) for name, tensor in tensors},
        "grad": [parameter.grad for parameter in module.parameters()],
        "hooks": hooks,
        "attributes": {name: sorted(vars(part)) for name, part in module.named_modules()},
    }


@pytest.fixture
def mixed(built):
    """The module as a user might have it: in training mode, parts of it frozen."""
    module = built.model.module
    module.train()
    for number, part in enumerate(module.modules()):
        if number % 3 == 1:
            part.training = False
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    yield module
    module.requires_grad_(True).eval()


def test_keeps_the_contract_of_a_classifier(built):
    assert isinstance(built.model, Classifier)
    assert built.model.device == torch.device("cpu")
    assert built.model.classes in (None, NAMES)


def test_the_head_on_the_features_is_the_module(built):
    z = built.model.features(built.x)
    assert z.shape == (3, built.case.width)
    logits = built.model.logits(z)
    assert logits.shape == (3, C)
    assert close(logits, built.expected)
    assert not close(built.expected[:1], built.expected[1:2], 1e-3)  # the images can be told apart


def test_head_is_what_logits_applies(built):
    z = built.model.features(built.x)
    weight, bias = built.model.head()
    assert weight.shape == (C, built.case.width)
    assert close(z @ weight.T + (0 if bias is None else bias), built.expected)


def test_one_image_alone_is_the_same_as_in_a_batch(built):
    model, one = built.fresh(), built.x[1:2]
    alone = model.features(one)
    assert alone.shape == (1, built.case.width)
    assert close(model.logits(alone), answer(model.module, one))
    # Not tighter: kernels for one image round differently, and random weights amplify it.
    assert close(alone, built.model.features(built.x)[1:2], 1e-3)


def test_the_map_is_the_head_s_view_of_every_tile(built):
    if built.case.tiles is None:
        with pytest.raises(ModelError) as error:
            built.model.feature_map(built.x)
        assert str(error.value) == (
            f"{built.model.name} has no feature map: nothing pools tiles or tokens before its last layer. "
            "Use a score that needs none, or a model with a global pool or a token grid."
        )
        return
    tiles = built.model.feature_map(built.x)
    with torch.no_grad():
        expected = built.case.tiles(built.model.module, built.x)
        expected_of_one = built.case.tiles(built.model.module, built.x[:1])
    assert tiles.shape == (3, expected.shape[1], built.case.width)
    assert expected.shape[1] > 1
    assert close(tiles, expected)
    assert close(built.fresh().feature_map(built.x[:1]), expected_of_one)
    means_agree = close(tiles.mean(1), built.model.features(built.x))
    assert means_agree == built.case.averages


def test_the_grid_is_the_map_in_rows_of_tiles(built):
    if built.case.tiles is None:
        with pytest.raises(ModelError, match="has no feature map"):
            built.model.feature_grid(built.x)
        return
    grid, tiles = built.model.feature_grid(built.x), built.model.feature_map(built.x)
    assert torch.equal(grid.flatten(1, 2), tiles)
    height, width = built.case.size
    if height != width and grid.shape[1] != grid.shape[2]:
        assert (grid.shape[1] > grid.shape[2]) == (height > width)
    assert built.model.logits(tiles).shape == (*tiles.shape[:2], C)


def test_one_pass_reports_features_and_tiles(built):
    if built.case.tiles is None:
        with pytest.raises(ModelError, match="has no feature map: nothing pools tiles or tokens before its last layer"):
            built.model.tiled(built.x)
        return
    tiled, grid = built.model.tiled(built.x), built.model.feature_grid(built.x)
    assert torch.equal(
        tiled.features, built.model.features(built.x)
    )  # to the last bit, whatever stands behind the pool
    assert tiled.grid == tuple(grid.shape[1:3])
    expected = built.model.logits(grid.flatten(1, 2))
    assert close(tiled.logits(0, 3), expected)
    assert close(tiled.logits(1, 2), expected[1:2])
    assert tiled.logits(0, 0).shape == (0, *expected.shape[1:])
    means_agree = close(expected.mean(1), built.expected)
    assert means_agree == built.case.averages


def test_nothing_of_the_module_changes(built, mixed):
    before = state(mixed)
    random = torch.get_rng_state()
    model = built.fresh()
    z = model.features(built.x)
    assert close(model.logits(z), built.expected)  # in eval mode inside, whatever stood outside
    if built.case.tiles is not None:
        model.feature_map(built.x)
        model.tiled(built.x)
    model.fingerprint()
    assert state(mixed) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not z.requires_grad
    assert not model.logits(z).requires_grad


@pytest.mark.parametrize("seen", [False, True])
def test_nothing_changes_when_the_forward_pass_fails(built, mixed, seen):
    model = built.fresh()
    if seen:
        model.features(built.x)
    before = state(mixed)
    two_channels = torch.zeros(2, 2, *built.case.size)
    with pytest.raises((RuntimeError, ValueError)):
        model.features(two_channels)
    assert state(mixed) == before
    assert close(model.logits(model.features(built.x)), built.expected)


def test_the_input_is_not_written_to(built):
    original = built.x.clone()
    built.fresh().features(original)
    assert torch.equal(original, built.x)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes_of_the_caller_do_not_matter(built, mode):
    with mode():
        model = built.fresh()
        made_inside = built.x.clone()
        z = model.features(made_inside)
        logits = model.logits(z)
        tiles = None if built.case.tiles is None else model.feature_map(made_inside)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert torch.equal(z, built.model.features(built.x))
    assert close(logits, built.expected)
    assert tiles is None or torch.equal(tiles, built.model.feature_map(built.x))


def test_double_precision_stays_double(built):
    module = copy.deepcopy(built.model.module).double()
    model = built.fresh(module)
    z = model.features(built.x)
    assert z.dtype == torch.float64
    assert close(model.logits(z), answer(module, built.x.double()), 1e-10)


def test_the_fingerprint_follows_every_weight(built):
    first = built.model.fingerprint()["weights"]
    last = [*built.model.module.parameters()][-1].data.view(-1)
    kept = last[-1].clone()
    last[-1] += 1e-3
    other = built.model.fingerprint()["weights"]
    last[-1] = kept
    assert other != first
    assert built.model.fingerprint()["weights"] == first
