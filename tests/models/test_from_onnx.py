"""An exported guard as a model: what PyTorch computes, the same identity, and files that are none."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ModelError, StaleCacheError
from dubito.guard import Guard
from dubito.models.wrap import WrappedClassifier
from dubito.probes import Gradient

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("one_thread")

SIDE = 16


def pixels(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8).repeat(4, 1).repeat(4, 2)


@pytest.fixture(scope="module")
def model() -> WrappedClassifier:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3, bias=False),
    )
    return dubito.wrap(module, transform=dubito.Preprocess(SIDE, SIDE), classes=["ant", "bee", "cat"], name="net")


@pytest.fixture(scope="module")
def guard(model, tmp_path_factory) -> Guard:
    table = dubito.extract(model, pixels(300, 0), tmp_path_factory.mktemp("cache"), workers=0, progress=False)
    return Guard.fit(model, table, coverage=0.7)


@pytest.fixture(scope="module")
def file(guard, tmp_path_factory) -> Path:
    return guard.export_onnx(tmp_path_factory.mktemp("onnx") / "guard.onnx")


def test_features_and_logits_are_those_of_pytorch(model, file):
    exported = dubito.load(f"onnx:{file}")
    x = model.transform.finish(torch.from_numpy(pixels(7, 1)))
    z = model.features(x)
    assert exported.features(x).numpy() == pytest.approx(z.numpy(), abs=1e-5)
    assert exported.logits(z).numpy() == pytest.approx(model.logits(z).numpy(), abs=1e-6)
    weight, bias = exported.head()
    assert torch.equal(weight, model.module[-1].weight)
    assert not bias.any()  # the layer has none
    assert exported.classes == ["ant", "bee", "cat"]
    assert exported.transform == model.transform


def test_a_guard_takes_it_for_its_own_model(guard, file, tmp_path):
    folder = guard.save(tmp_path / "guard")
    loaded = Guard.load(folder, f"onnx:{file}")
    images = pixels(40, 2)
    ours, theirs = loaded(images), guard(images)
    assert [one.reason for one in ours] == [one.reason for one in theirs]
    assert torch.equal(ours.accept, theirs.accept)
    assert ours.uncertainty.numpy() == pytest.approx(theirs.uncertainty.numpy(), abs=1e-4)
    assert 0 < int(ours.accept.sum()) < 40


def test_another_models_guard_refuses_it(file, tmp_path):
    torch.manual_seed(1)
    other = dubito.wrap(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
        transform=dubito.Preprocess(SIDE, SIDE),
    )
    table = dubito.extract(other, pixels(100, 0), tmp_path / "cache", workers=0, progress=False)
    folder = Guard.fit(other, table, coverage=0.7).save(tmp_path / "guard")
    with pytest.raises(ModelError, match="its weights differ"):
        Guard.load(folder, f"onnx:{file}")


def test_with_another_transform_it_is_another_model(guard, file, tmp_path):
    folder = guard.save(tmp_path / "guard")
    with pytest.raises(ModelError, match="its transform differs"):
        Guard.load(folder, dubito.load(f"onnx:{file}", transform={"std": (1.0, 1.0, 1.0)}))


def test_a_file_that_was_changed_is_refused(file, tmp_path):
    onnx = pytest.importorskip("onnx")
    proto = onnx.load(str(file))
    kernel = next(one for one in proto.graph.initializer if len(one.dims) == 4)
    values = onnx.numpy_helper.to_array(kernel)
    kernel.CopyFrom(onnx.numpy_helper.from_array(values * np.float32(1.05), kernel.name))
    onnx.save(proto, str(tmp_path / "other.onnx"))
    with pytest.raises(ModelError, match=r"is not what was exported: its features differ by 0\.0\d+ of the largest"):
        dubito.load(f"onnx:{tmp_path / 'other.onnx'}")


def test_a_cache_holds_rows_of_one_runtime(model, file, tmp_path):
    images = pixels(20, 0)
    dubito.extract(model, images, tmp_path / "cache", workers=0, progress=False)
    with pytest.raises(StaleCacheError, match="the model's weights"):
        dubito.extract(f"onnx:{file}", images, tmp_path / "cache", workers=0, progress=False)


def test_copies_and_pickles_read_the_file_again(file):
    network = dubito.load(f"onnx:{file}").module
    x = torch.randn(2, 3, SIDE, SIDE)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):  # noqa: S301
        assert torch.equal(other(x), network(x))


def test_files_that_cannot_be_loaded(guard, model, file, tmp_path):
    with pytest.raises(ModelError, match=r"there is no file '.*none\.onnx'"):
        dubito.load(f"onnx:{tmp_path / 'none.onnx'}")
    (tmp_path / "text.onnx").write_text("no graph")
    with pytest.raises(ModelError, match="cannot be read as an ONNX graph"):
        dubito.load(f"onnx:{tmp_path / 'text.onnx'}")
    (tmp_path / "cut.onnx").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be read as an ONNX graph"):
        dubito.load(f"onnx:{tmp_path / 'cut.onnx'}")
    with pytest.raises(ModelError, match="takes no options; got num_classes"):
        dubito.load(f"onnx:{file}", num_classes=3)
    torch.onnx.export(nn.Linear(3, 2).eval(), (torch.zeros(1, 3),), tmp_path / "other.onnx", verbose=False)
    with pytest.raises(ModelError, match="is no exported guard"):
        dubito.load(f"onnx:{tmp_path / 'other.onnx'}")


def test_inputs_of_another_shape_are_refused(file):
    with pytest.raises(ModelError, match=r"exported for inputs of shape \(n, 3, 16, 16\)"):
        dubito.load(f"onnx:{file}").features(torch.zeros(2, 3, 20, 20))


def test_probes_that_need_layers_are_refused(file, tmp_path):
    with pytest.raises(ModelError, match=r"probe 'gradient' needs the layers of onnx:.*Load the model"):
        dubito.extract(f"onnx:{file}", pixels(4, 0), tmp_path, probes=[Gradient()], workers=0, progress=False)


def test_a_transform_that_is_a_function_must_be_passed(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    model = dubito.wrap(net, transform=shrunk)
    table = dubito.extract(model, pixels(60, 0), tmp_path / "cache", workers=0, progress=False)
    guard = Guard.fit(model, table, coverage=0.7, scores=["entropy"], novel=0.0)
    file = guard.export_onnx(tmp_path / "guard.onnx", torch.zeros(2, 3, 2, 2))
    assert (
        json.loads(onnxruntime.InferenceSession(str(file)).get_modelmeta().custom_metadata_map["dubito.classes"])
        is None
    )
    with pytest.raises(ModelError, match=r"is a function, which is not in the file\. Pass transform="):
        dubito.load(f"onnx:{file}")
    loaded = Guard.load(guard.save(tmp_path / "guard"), dubito.load(f"onnx:{file}", transform=shrunk))
    assert torch.equal(loaded(pixels(9, 1)).accept, guard(pixels(9, 1)).accept)


def shrunk(image):
    return torch.from_numpy(np.array(image.resize((2, 2)))).permute(2, 0, 1).float() / 255
