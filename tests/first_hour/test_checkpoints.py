"""Fine-tuned checkpoints: read in every form that training programs write, found again by a guard, never executed."""

import contextlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.cli import main
from dubito.errors import CheckpointError, ModelError

MODEL, CLASSES = "timm:test_resnet", ["ant", "bee", "cat"]
X = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("one_thread")


class AttributeDict(dict):
    """As Lightning saves hyper-parameters."""


class Callback:
    """An object of a class that is not there when the file is read."""

    def __init__(self) -> None:
        self.best, self.monitored = 0.3, {"loss"}


def call(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=3).eval()


@pytest.fixture
def lightning(monkeypatch):
    """A package that is there while a file is written, and gone when it is read."""
    package = ModuleType("a_trainer")
    for kind in (AttributeDict, Callback):
        monkeypatch.setattr(kind, "__module__", "a_trainer")
        setattr(package, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "a_trainer", package)
    yield
    assert "a_trainer" not in sys.modules  # each test forgets it before it reads


FORMS = {
    "plain.pt": lambda net: net.state_dict(),
    "model.pth": lambda net: {"model": net.state_dict(), "epoch": 3, "optimizer": {"state": {0: {"m": X}}}},
    "parallel.bin": lambda net: {"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}},
    "compiled.pt": lambda net: {f"_orig_mod.{k}": v for k, v in net.state_dict().items()},
    "nested.pt": lambda net: {"module.backbone." + k: v for k, v in net.state_dict().items()},
    "ema.pt": lambda net: {"epoch": 3, "ema": {f"module.{k}": v for k, v in net.state_dict().items()}},
    "whole.pt": lambda net: net,
    "lightning.ckpt": lambda net: {
        "state_dict": {
            **{f"model._orig_mod.{k}": v for k, v in net.state_dict().items()},
            "loss.weight": torch.ones(3),
            "accuracy.tp": torch.zeros(3),
        },
        "hyper_parameters": AttributeDict(lr=0.1, folder=Path("here")),
        "callbacks": {"checkpoint": Callback()},
        "optimizer_states": [{"state": {0: {"exp_avg": X}}, "param_groups": []}],
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("lightning")
def test_a_checkpoint_in_any_form_says_how_many_classes_it_has(form, net, tmp_path):
    torch.save(FORMS[form](net), tmp_path / form)
    del sys.modules["a_trainer"]
    model = dubito.load(MODEL, weights=tmp_path / form, classes=CLASSES)
    with torch.no_grad():
        assert torch.allclose(model.logits(model.features(X)), net(X), atol=1e-6)
    assert model.classes == CLASSES
    assert model.checkpoint["path"] == str(tmp_path / form)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_what_lies_beside_the_weights_is_never_executed(net, tmp_path):
    marker = tmp_path / "boom"
    torch.save({"state_dict": net.state_dict(), "callbacks": [Bomb(marker)]}, tmp_path / "w.ckpt")
    model = dubito.load(MODEL, weights=tmp_path / "w.ckpt")
    assert model.features(X).shape == (2, 96)
    assert not marker.exists()
    torch.load(tmp_path / "w.ckpt", weights_only=False)
    assert marker.exists()  # it would have gone off


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        (
            "timm:test_vit",
            {},
            r"92 unknown: bn1\.bias, .* It is of another architecture\. .* It fits 'timm:test_resnet'\.",
        ),
        (
            MODEL,
            {"fc.weight": None, "fc.bias": None},
            r"2 missing: fc\.bias, fc\.weight\. The file has no classifying ",
        ),
        (MODEL, {"fc.weight": "fc.1.weight", "fc.bias": "fc.1.bias"}, r"2 unknown: fc\.1\.bias.*head has other layers"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_why(name, form, message, net, tmp_path):
    renamed = {form.get(key, key): value for key, value in net.state_dict().items()}
    torch.save({key: value for key, value in renamed.items() if key is not None}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        dubito.load(name, weights=tmp_path / "w.pt")


def test_class_names_must_be_as_many_as_the_file_has(net, tmp_path):
    torch.save(net.state_dict(), tmp_path / "w.pt")
    with pytest.raises(
        ModelError, match=r"load: classes has 2 names; .*w\.pt' has 3 outputs\. Pass one name per output"
    ):
        dubito.load(MODEL, weights=tmp_path / "w.pt", classes="ant,bee")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "vit7.pt",
            "That is a file of weights: name its architecture, such as 'timm:resnet50', and pass weights='vit7.pt'",
        ),
        ("https://a.b/vit.pth", "Nothing is loaded from a URL: download the file"),
        ("model.onnx", "Did you mean 'onnx:model.onnx'"),
        ("net.keras", "That is a Keras model"),
        (".", "That is a folder. If it holds images, the model comes first"),
    ],
)
def test_what_is_no_model_s_name_is_recognised(name, hint):
    with pytest.raises(ModelError, match=hint):
        dubito.load(name)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(60):
        (folder / CLASSES[number % 3]).mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((48, 40)).save(folder / CLASSES[number % 3] / f"{number:02d}.png")
    return folder


def test_two_commands_lead_from_a_checkpoint_to_a_number_and_a_guard_finds_it_again(net, photos, tmp_path):
    weights, names, cache, guard = (tmp_path / name for name in ("my.ckpt", "names.txt", "cache", "guard"))
    torch.save({"state_dict": {f"model.{key}": value for key, value in net.state_dict().items()}}, weights)
    names.write_text("\n".join(CLASSES))
    size = ("--input-size", 64, "--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5")
    options = ("--weights", weights, "--classes", names, *size, "--workers", 0)
    code, out, err = call("extract", MODEL, photos, *options, "--to", cache, "--json")
    assert code == 0, err
    assert json.loads(out)["columns"]["logit"] == [60, 3]
    assert json.loads(out)["accuracy"] is not None
    assert dubito.open(cache).provenance.transform["size"] == [64, 64]
    # A wrong input size raises no error: every command that uses a cache shows it. 160 / 0.95 = 168, times 64 / 160.
    inputs = f"64x64 pixels, short side resized to 67 (bilinear); weights of '{weights}'"
    assert json.loads(out)["inputs"] == inputs
    code, out, err = call("score", cache, "-s", "entropy", "--json")
    assert code == 0, err

    fit = ("--coverage", 0.5, "--confidence", 0.6, "-s", "max_probability", "--sets", 0)
    code, out, err = call("guard", "fit", cache, "--to", guard, *fit)
    assert (code, f"inputs: {inputs}" in out) == (0, True), err
    code, out, err = call("report", cache, "--to", tmp_path / "report.html")
    assert (code, f"inputs: {inputs}" in out) == (0, True), err
    code, _, err = call("guard", "run", guard, photos / "ant", "--top", 0)
    assert code == 0, err
    assert f"weights of the model: '{weights}'" in err
    moved = weights.rename(tmp_path / "moved.ckpt")
    code, _, err = call("guard", "run", guard, photos / "ant")
    assert (code, f"the weights of '{weights}', which is not there" in err) == (2, True), err
    code, _, err = call("guard", "run", guard, photos / "ant", "--weights", moved, "--top", 0)
    assert code == 0, err
    weights.write_bytes(moved.read_bytes() + b" ")
    code, _, err = call("guard", "run", guard, photos / "ant")
    assert (code, f"the weights of '{weights}', which has changed since" in err) == (2, True), err


@pytest.mark.parametrize("command", ["extract", "audit"])
def test_images_that_are_not_there_are_reported_before_a_model_is_fetched(command, tmp_path, monkeypatch):
    monkeypatch.setattr(dubito, "load", None)
    to = ("--to", tmp_path / "cache") if command == "extract" else ()
    code, _, err = call(command, "timm:resnet18", "/nope", *to)
    assert (code, "'/nope' does not exist" in err) == (1, True), err


def test_a_place_that_cannot_hold_a_cache_is_refused_before_a_model_is_fetched(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(dubito, "load", None)
    (tmp_path / "file").write_text("")
    for place, reason in ((tmp_path / "file", "is a file"), (photos, "holds other things")):
        code, _, err = call("extract", "timm:resnet18", photos, "--to", place)
        assert (code, reason in err) == (1, True), err
