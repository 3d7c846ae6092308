"""The released layout, synthesised: nobody has to fetch a file of a gigabyte to run this."""

import argparse
import os
import pathlib
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dubito
from dubito.cache.disk import model_identity
from dubito.errors import CheckpointError, DubitoWarning
from dubito.heads.authors import BACKBONES, authors_backbone, import_authors_head
from dubito.heads.checkpoint import read_head, write_head

UNPROVEN = pytest.mark.filterwarnings("ignore:head. .* does not hold a whole backbone")
TINY = "timm:vit_tiny_patch16_224.augreg_in21k"


def network(features: int = 192) -> nn.Sequential:
    """As in the authors' code: a softplus at the end, and 1e-6 added after it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(features, 512), nn.LeakyReLU(), nn.Linear(512, 512), nn.LeakyReLU(), nn.Linear(512, 1), nn.Softplus()
    )


def head_keys(module: nn.Module) -> dict[str, Tensor]:
    return {f"unc_module.unc_module.{key}": value for key, value in module.state_dict().items()}


def released(path: Path, weights: dict[str, Tensor], *, prefix: str = "", **changes: object) -> Path:
    """A file as timm's CheckpointSaver writes it."""
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1}]}
    content = {
        "epoch": 31,
        "arch": "vit_tiny_patch16_224.augreg_in21k",
        "state_dict": {prefix + key: value for key, value in weights.items()},
        "optimizer": optimizer,
        "version": 2,
        "args": argparse.Namespace(model="vit_tiny_patch16_224.augreg_in21k", lr=0.0028, mean=None, betas=(0.8, 0.95)),
        "metric": 0.7,
    }
    torch.save(content | changes, path)
    return path


@pytest.fixture(scope="module")
def backbone() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(timm.create_model("vit_tiny_patch16_224.augreg_in21k", num_classes=3).state_dict())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, backbone: dict[str, Tensor]) -> Path:
    weights = {f"model.{key}": value for key, value in backbone.items()} | head_keys(network())
    return released(tmp_path_factory.mktemp("released") / "vit_tiny_checkpoint.pth.tar", weights)


@UNPROVEN
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_head_says_what_the_authors_network_says(tmp_path, prefix):
    result = import_authors_head(
        released(tmp_path / "vit_tiny_checkpoint.pth.tar", head_keys(network()), prefix=prefix)
    )
    z = torch.randn(9, 192)
    assert torch.equal(result.module(z), network()(z)[:, 0] + 1e-6)
    assert not result.module.training
    assert (result.config.features, result.config.width, result.config.depth) == (192, 512, 2)
    assert result.config.model == TINY
    assert "ImageNet-21k" in result.config.trained["corpus"]
    assert "2402.16569" in result.card


@UNPROVEN
def test_a_prefix_on_some_keys_only(tmp_path):
    keys = head_keys(network())
    mixed = {("module." if "0." in key else "") + key: value for key, value in keys.items()}
    assert import_authors_head(released(tmp_path / "a.pth.tar", mixed)).config.features == 192


@pytest.mark.parametrize("features", [*BACKBONES, 640])
def test_the_width_names_the_backbone(tmp_path, features):
    path = released(tmp_path / "a.pth.tar", head_keys(network(features)))
    expected = BACKBONES.get(features, "the model that it was trained on")
    with pytest.warns(DubitoWarning, match=rf"cannot be refused\. Make sure that features come from {expected}"):
        result = import_authors_head(path)
    assert result.config.model == BACKBONES.get(features)
    assert result.config.provenance is None  # the file holds no backbone, so nothing is proven
    assert "Its exact weights were not recorded" in result.card


def test_the_backbone_in_the_file_is_guarded(whole, backbone, tmp_path, one_thread):
    result = import_authors_head(whole)
    tensors = authors_backbone(whole)
    assert tensors.keys() == backbone.keys()
    save_file(tensors, tmp_path / "backbone.safetensors")
    mine = dubito.load(TINY, weights=tmp_path / "backbone.safetensors", num_classes=3)
    assert result.config.provenance is not None
    assert result.config.provenance.difference(model_identity(mine)) is None
    assert result.config.provenance.operations == model_identity(mine).operations
    with torch.no_grad():
        mine.module.norm.bias[0] += 1  # fine-tuned
    reason = result.config.provenance.difference(model_identity(mine))
    assert reason is not None
    assert reason.startswith("its weights differ (")
    assert "transform" not in reason


def test_an_imported_head_can_be_kept(whole, tmp_path):
    result = import_authors_head(whole)
    again = read_head(write_head(tmp_path, result))
    assert again.config == result.config
    assert torch.equal(again.module.layers[4].weight, result.module.layers[4].weight)


@UNPROVEN
@pytest.mark.parametrize("change", ["left out", "of another shape", "one too many", "no classifier"])
def test_a_backbone_that_is_not_timm_s_proves_nothing(tmp_path, backbone, change):
    odd = dict(backbone)
    if change == "left out":
        del odd["norm.bias"]
    elif change == "of another shape":
        odd["patch_embed.proj.weight"] = torch.zeros(192, 3, 32, 32)
    elif change == "one too many":
        odd["extra"] = torch.zeros(1)
    else:
        del odd["head.weight"], odd["head.bias"]
    weights = {f"model.{key}": value for key, value in odd.items()} | head_keys(network())
    assert import_authors_head(released(tmp_path / "a.pth.tar", weights)).config.provenance is None


def test_no_backbone_to_take(tmp_path):
    path = released(tmp_path / "a.pth.tar", head_keys(network()))
    with pytest.raises(CheckpointError, match=r"holds no backbone: none of its keys begins with 'model\.'\. Take the"):
        authors_backbone(path)


class Bomb:
    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["args", "state_dict", "within args"])
def test_a_hostile_file_runs_nothing(tmp_path, place, zipped):
    marker = tmp_path / "ran"
    bomb = Bomb(os.system, f"touch {marker}")
    content = {"state_dict": head_keys(network()), "args": argparse.Namespace()}
    if place == "within args":
        content["args"] = argparse.Namespace(lr=bomb)
    else:
        content[place] = bomb
    torch.save(content, tmp_path / "a.pth.tar", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        CheckpointError, match=r"holds a Python object '\w+\.system', which could run code; nothing was ex"
    ):
        import_authors_head(tmp_path / "a.pth.tar")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("other", "name"),
    [(SimpleNamespace(lr=1), "types.SimpleNamespace"), (pathlib.PurePosixPath("/x"), "pathlib.PurePosixPath")],
)
def test_another_class_in_args_is_refused_by_name(tmp_path, other, name):
    path = released(tmp_path / "a.pth.tar", head_keys(network()), args=other)
    with pytest.raises(CheckpointError, match=f"holds a Python object '{name}.*only .* is argparse.Namespace"):
        import_authors_head(path)


def test_the_one_class_is_allowed_here_only(whole, backbone):
    import_authors_head(whole)
    assert argparse.Namespace not in torch.serialization.get_safe_globals()
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL argparse\.Namespace"):
        torch.load(whole, weights_only=True)
    module = dubito.load(TINY, weights=whole).module  # the Namespace is not made here, but replaced by a stand-in
    assert all(torch.equal(value, backbone[key]) for key, value in module.state_dict().items())


def test_a_bomb_that_the_importer_refuses_does_not_go_off_in_load_either(tmp_path, backbone):
    marker = tmp_path / "ran"
    bomb = Bomb(os.system, f"touch {marker}")
    weights = {f"model.{key}": value for key, value in backbone.items()}
    path = released(tmp_path / "a.pth.tar", weights, args=argparse.Namespace(lr=bomb))
    assert torch.equal(dubito.load(TINY, weights=path).module.head.bias, backbone["head.bias"])
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # it would have gone off


def test_files_that_are_no_head(tmp_path):
    path = tmp_path / "a.pth.tar"
    with pytest.raises(CheckpointError, match=r"weights: no file '.*a\.pth\.tar'"):
        import_authors_head(path)
    path.write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(CheckpointError, match="is not a readable weights file"):
        import_authors_head(path)
    with pytest.raises(CheckpointError, match=r"\(it has none of its layers\)\. Pass a vit_\*_checkpoint.*unc_module"):
        import_authors_head(released(path, {"model.head.weight": torch.ones(1)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"4.bias": None}, "a chain of linear layers"),
        (
            {"4.bias": None, "4.weight": None},
            r"; got layers\.0\.weight .*, layers\.2\.bias \(512,\)\)\. Pass",
        ),
        (
            {"6.weight": torch.ones(1, 1), "6.bias": torch.ones(1)},
            r"6\.weight \(1, 1\).*a chain of linear layers",
        ),
        ({"2.weight": torch.ones(512, 256)}, r"got .*2\.weight \(512, 256\)"),
        ({"2.bias": torch.ones(1, 512)}, "a chain of linear layers"),
        ({"0.weight": torch.ones(5)}, "a chain of linear layers"),
        ({"4.weight": torch.ones(2, 512), "4.bias": torch.ones(2)}, "a chain of linear layers"),
        ({"4.bias": torch.tensor([float("nan")])}, r"cannot be read \(NaN or infinite weights"),
    ],
)
def test_missing_keys_and_odd_shapes(tmp_path, change, message):
    head = {**network().state_dict(), **change}
    keys = {f"unc_module.unc_module.{key}": value for key, value in head.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        import_authors_head(released(tmp_path / "a.pth.tar", keys))
