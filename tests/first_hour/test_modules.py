"""Modules as people have them: outputs in dicts and tuples, two inputs, cosine and einsum heads, backbones alone."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel
from transformers.modeling_outputs import ImageClassifierOutput

import dubito
from dubito.errors import MissingColumnError, ModelError

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
pytestmark = pytest.mark.usefixtures("one_thread")
Pair = namedtuple("Pair", "feature answer")


@dataclass
class Output:
    answer: Tensor
    loss: float = 0.0


class Net(nn.Module):
    """A convolution, a pool, a head, and whatever should be made of features and logits."""

    def __init__(self, then) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc, self.then = nn.Conv2d(3, 6, 3), nn.Linear(6, 4), then

    def forward(self, x: Tensor):
        z = self.conv(x).relu().mean((2, 3))
        return self.then(z, self.fc(z))


@pytest.mark.parametrize(
    "then",
    [
        lambda z, y: {"loss": torch.tensor(0.0), "logits": y, "feature": z},
        lambda z, y: {"mine": y},
        lambda z, y: (y, z),
        lambda z, y: [z, y],
        Pair,
        lambda z, y: Output(y),
        lambda z, y: ImageClassifierOutput(logits=y, hidden_states=(z,)),
    ],
)
def test_the_logits_are_found_among_several_outputs(then):
    model, plain = dubito.wrap(Net(then)), Net(lambda z, y: y)
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(X)), plain(X), atol=1e-6)


def test_of_several_heads_one_is_named():
    module = Net(lambda z, y: {"coarse": y[:, :2] + 0, "fine": y})
    module.other = nn.Linear(6, 4)
    module.then = lambda z, y: {"coarse": module.other(z), "fine": y}
    with pytest.raises(
        ModelError, match=r"several tensors with a row per image: 'coarse' \(n, 4\), 'fine' \(n, 4\)\. Name"
    ):
        dubito.wrap(module).features(X)
    model = dubito.wrap(module, output_key="fine")
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(X)), module(X)["fine"], atol=1e-6)
    with pytest.raises(ModelError, match=r"must return a tensor as 'finest'; got dict of coarse, fine"):
        dubito.wrap(module, output_key="finest").features(X)


class TwoInputs(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x * mask)


def test_two_inputs_get_a_wrapper_of_two_lines():
    with pytest.raises(ModelError) as error:
        dubito.wrap(TwoInputs(lambda z, y: y))
    sentence, *lines = str(error.value).splitlines()
    assert sentence == ("wrap: TwoInputs takes 2 inputs (x, mask); images are one. Wrap a module that sets the others:")
    space = {"TwoInputs": TwoInputs}
    exec("\n".join(lines).replace("mask=...", "mask=1.0"), space)  # noqa: S102 (the lines must run)
    assert dubito.wrap(space["OneInput"](lambda z, y: y)).features(X).shape == (4, 6)


class ByName(Net):
    def forward(self, *, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values)


def test_an_input_by_name_alone_gets_a_wrapper_of_two_lines():
    with pytest.raises(ModelError, match=r"ByName takes its input by name only \(pixel_values\)\. Wrap") as error:
        dubito.wrap(ByName(lambda z, y: y))
    space = {"ByName": ByName}
    exec("\n".join(str(error.value).splitlines()[1:]), space)  # noqa: S102 (the lines must run)
    assert dubito.wrap(space["OneInput"](lambda z, y: y)).features(X).shape == (4, 6)


class Head(nn.Module):
    """A head written by hand on pooled features."""

    def __init__(self, head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 6, 3), head
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, self.conv(x).relu().mean((2, 3)))


HEADS = {
    "cosine": lambda m, z: m.scale.exp() * F.linear(F.normalize(z), F.normalize(m.weight)),
    "cosine_product": lambda m, z: F.normalize(z) @ F.normalize(m.weight).T / 0.07,
    "cosine_similarity": lambda m, z: 16 * F.cosine_similarity(z[:, None], m.weight, dim=-1),
    "cosine_of_classes_first": lambda m, z: F.cosine_similarity(m.weight.T[None], z[:, :, None]) / 0.07,
    "cosine_module": lambda m, z: nn.CosineSimilarity(2)(z[:, None], m.weight[None].expand(len(z), -1, -1)) * m.scale,
    "product": lambda m, z: z @ m.weight.T,
    "product_with_bias": lambda m, z: torch.matmul(z, m.weight.t()) + m.bias,
    "addmm": lambda m, z: torch.addmm(m.bias, z, m.weight.T),
    "einsum": lambda m, z: torch.einsum("nd,cd->nc", z, m.weight),
    "einsum_turned": lambda m, z: torch.einsum("dc,bd->bc", m.weight.T, z) + m.bias,
    "written_into": lambda m, z: F.linear(z, m.weight, m.bias).mul_(3),
}


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("head", HEADS)
def test_cosine_product_and_einsum_heads_are_understood(head, n):
    module = Head(HEADS[head])
    model = dubito.wrap(module)
    z = model.features(X[:n])
    with torch.no_grad():
        expected = module(X[:n])
        assert torch.allclose(model.logits(z), expected, atol=1e-5)
    weight, bias = model.head()
    assert torch.allclose(z @ weight.T + (0 if bias is None else bias), expected, atol=1e-5)
    assert torch.allclose(dubito.wrap(module).features(X)[:n], z, atol=1e-6)


@pytest.mark.parametrize("head", ["cosine", "cosine_module", "product_with_bias", "written_into"])
def test_a_head_that_is_trained_further_is_understood_again(head):
    module = Head(HEADS[head])
    model = dubito.wrap(module)
    model.features(X)
    with torch.no_grad():
        module.weight.add_(1)
        module.scale.add_(1)
        assert torch.allclose(model.logits(model.features(X)), module(X), atol=1e-4)


def test_a_head_that_is_not_linear_is_refused_with_a_way_on():
    module = Head(lambda m, z: -torch.cdist(z, m.weight))
    with pytest.raises(
        ModelError, match=r"gives its 5 outputs\. Name the classifying layer with head='\.\.\.'; if it "
    ):
        dubito.wrap(module).features(X)


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    model = dubito.load("timm:test_resnet", weights=None, classes=0)
    inputs = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = ["cat" if row % 2 else "dog" for row in range(24)]
    return model, dubito.extract(
        model, inputs, tmp_path_factory.mktemp("cache"), labels=labels, workers=0, progress=False
    )


def test_a_backbone_alone_is_extracted_and_searched(cached):
    _, table = cached
    assert {"feature", "label"} <= set(table.columns)
    assert not {"logit", "loss"} & set(table.columns)
    assert (table.label_space, table.label_names) == ("own", ["cat", "dog"])
    score = dubito.scores.Neighbours(k=2).fit(table)
    assert score.score(table).shape == (24,)
    index = dubito.SafeIndex.build(table, score)
    assert index.search(table, k=1).ids[0].tolist()
    assert len(dubito.report.Map.of(table, score.score(table))) == 24


def test_what_needs_logits_says_that_a_backbone_has_none(cached):
    model, table = cached
    with pytest.raises(ModelError, match=r"test_resnet has features and no logits: it has no classifying layer\. Use"):
        model.logits(torch.zeros(2, 96))
    with pytest.raises(ModelError, match="has no feature map"):
        model.feature_map(torch.zeros(2, 3, 32, 32))
    with pytest.raises(
        MissingColumnError, match=r"Guard\.fit needs column 'logit'; .*a backbone without one has no logits"
    ):
        dubito.Guard.fit(None, table, coverage=0.5)


@pytest.mark.parametrize("module", ["timm", "dict"])
def test_wrap_takes_backbones(module):
    backbone = timm.create_model("test_vit", num_classes=0, img_size=32)
    if module == "dict":
        backbone.forward = lambda x: {"x_norm_patchtokens": x, "x_norm_clstoken": backbone.forward_features(x)[:, 0]}
    model = dubito.wrap(backbone, output="features")
    assert model.features(torch.randn(2, 3, 32, 32)).shape == (2, 64)
    with pytest.raises(ModelError, match=r"pass output='features'"):
        dubito.wrap(timm.create_model("test_vit", num_classes=0, img_size=32)).features(torch.randn(2, 3, 32, 32))


def test_folders_of_transformers_without_a_processor_or_a_head(tmp_path):
    config = ViTConfig(image_size=32, patch_size=8, id2label={0: "a", 1: "b"}, **SIZES)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"has no preprocessor_config\.json, so it is not known .* Pass transform=\.\.\. with"
    ):
        dubito.load(f"hf:{tmp_path}")
    model = dubito.load(f"hf:{tmp_path}", transform={"size": 32, "mean": (0.5, 0.5, 0.5)})
    assert (model.transform.size, model.classes) == ((32, 32), ["a", "b"])
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "backbone")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "backbone")
    with pytest.raises(ModelError, match=r"not a trained classifier, .* or pass classes=0 for its features alone"):
        dubito.load(f"hf:{tmp_path / 'backbone'}")
    backbone = dubito.load(f"hf:{tmp_path / 'backbone'}", classes=0)
    assert backbone.features(torch.randn(2, 3, 32, 32)).shape == (2, 16)
