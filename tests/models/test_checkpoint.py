import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dubito
from dubito.errors import CheckpointError, ModelError
from dubito.models.checkpoint import put_weights, read_weights

WEIGHTS = {"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.tensor([1.0, -1.0])}


class Bomb:
    """Unpickling it writes a file: what a hostile checkpoint would do, made visible."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "boom")


class Net(nn.Module):
    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.fc = nn.Linear(3, classes)


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[key], WEIGHTS[key]) for key in WEIGHTS)


def test_safetensors(tmp_path):
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    assert same(read_weights(tmp_path / "w.safetensors"))
    assert same(read_weights(str(tmp_path / "w.safetensors")))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda w: w,
        lambda w: {"state_dict": w, "epoch": 3, "args": {"lr": 0.1}},
        lambda w: {"model": w},
        lambda w: {"model_state_dict": w, "optimizer": {"step": 7}},
        lambda w: {"state_dict": {"model": w}},
        lambda w: {f"module.{key}": value for key, value in w.items()},
        lambda w: {"state_dict": {f"module._orig_mod.{key}": value for key, value in w.items()}},
    ],
    ids=["plain", "lightning", "model", "trainer", "nested", "parallel", "compiled"],
)
def test_torch_files_in_their_usual_wrappings(tmp_path, wrapped, zipped):
    torch.save(wrapped(WEIGHTS), tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    assert same(read_weights(tmp_path / "w.pth"))


def test_a_prefix_that_only_some_keys_have_is_a_name(tmp_path):
    torch.save({"module.fc": torch.ones(1), "fc": torch.ones(1)}, tmp_path / "w.pth")
    assert sorted(read_weights(tmp_path / "w.pth")) == ["fc", "module.fc"]


def test_a_missing_file(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"weights: no file '.*gone\.pth'\. Give the path of a \.safetensors or PyTorch"
    ):
        read_weights(tmp_path / "gone.pth")
    with pytest.raises(CheckpointError, match="weights: no file"):
        read_weights(tmp_path)  # a folder is no file


@pytest.mark.parametrize(("ending", "zipped"), [("pth", True), ("pth", False), ("safetensors", True)])
def test_a_file_cut_short_anywhere(tmp_path, ending, zipped):
    path = tmp_path / f"w.{ending}"
    if ending == "pth":
        torch.save({"a": torch.randn(40, 40)}, path, _use_new_zipfile_serialization=zipped)
    else:
        save_file({"a": torch.randn(40, 40)}, path)
    content = path.read_bytes()
    for length in (0, 1, 7, 60, 300, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"weights: '.*' (is not a|holds Python objects)"):
            read_weights(path)


@pytest.mark.parametrize("content", [b"<html>404 Not Found</html>", b'{"fc": [1, 2]}', b"\x00" * 600, b""])
def test_a_file_of_something_else(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"w\.pth' is not a PyTorch file\. Give a file of torch\.save, or a safetensors file"
    ):
        read_weights(tmp_path / "w.pth")
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"w\.safetensors' is not a whole safetensors file \(.*\)\. Copy it again"
    ):
        read_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize("zipped", [True, False])
def test_damage_is_always_a_checkpoint_error(tmp_path, zipped):
    path = tmp_path / "w.pth"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        at = int(torch.randint(min(len(content), 700), (), generator=generator))
        damaged[at] = int(torch.randint(256, (), generator=generator))
        path.write_bytes(bytes(damaged))
        try:
            read_weights(path)
        except CheckpointError:
            refused += 1
    assert refused > 15


def bombs(folder: Path, marker: Path) -> list[Path]:
    """The same bomb in every form of file that torch reads."""
    bomb = Bomb(marker)
    torch.save({"fc.weight": WEIGHTS["fc.weight"], "extra": bomb}, folder / "zip.pth")
    torch.save({"state_dict": WEIGHTS, "hyper": bomb}, folder / "old.pth", _use_new_zipfile_serialization=False)
    (folder / "plain.pkl").write_bytes(pickle.dumps(bomb))
    with zipfile.ZipFile(folder / "hand.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": bomb}, protocol=2))
        archive.writestr("archive/version", "3\n")
    return sorted(folder.iterdir())


def test_a_pickle_bomb_is_refused_and_not_executed(tmp_path):
    marker = tmp_path / "boom"
    folder = tmp_path / "files"
    folder.mkdir()
    for path in bombs(folder, marker):
        with pytest.raises(CheckpointError) as error:
            read_weights(path)
        assert str(error.value) == (
            f"weights: '{path}' holds Python objects besides tensors, which could run code; nothing was executed. "
            "Save model.state_dict() alone, as safetensors or with torch.save, where you trust the file."
        )
        assert not marker.exists()
    pickle.loads((folder / "plain.pkl").read_bytes())  # noqa: S301 (the bomb is ours, and proves that it would go off)
    assert marker.exists()


@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:squeezenet1_0", "pypi:efficientnet_lite0"])
def test_load_refuses_a_bomb_too(tmp_path, name):
    marker = tmp_path / "boom"
    torch.save({"extra": Bomb(marker)}, tmp_path / "bomb.pth")
    with pytest.raises(CheckpointError, match=r"holds Python objects besides tensors, .* nothing was executed"):
        dubito.load(name, weights=tmp_path / "bomb.pth")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"epoch": 3, "lr": 0.1}, "a dict of epoch, lr"),
        ({}, "a dict of nothing"),
        ([torch.ones(2)], "list"),
        (torch.ones(2), "Tensor"),
        ({"fc": torch.ones(1), "epoch": 3}, "a dict of epoch, fc"),
    ],
)
def test_a_file_without_named_tensors(tmp_path, content, what):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError) as error:
        read_weights(tmp_path / "w.pth")
    assert str(error.value) == (
        f"weights: '{tmp_path / 'w.pth'}' must hold tensors by name; got {what}. "
        "Save model.state_dict() and give that file."
    )


def test_put_weights_fills_the_module():
    net = Net()
    put_weights(net, {key: value.half() for key, value in WEIGHTS.items()}, "w.pth")
    assert torch.equal(net.fc.weight, WEIGHTS["fc.weight"])
    assert net.fc.weight.dtype == torch.float32


def test_weights_that_do_not_fit_are_told_apart_and_nothing_is_loaded():
    net = Net(classes=4)
    before = net.fc.weight.clone()
    weights = {"fc.weight": WEIGHTS["fc.weight"], **{f"old.{i}": torch.ones(1) for i in range(5)}}
    with pytest.raises(CheckpointError) as error:
        put_weights(net, weights, "w.pth")
    assert str(error.value) == (
        "weights: 'w.pth' does not fit Net: 1 missing: fc.bias; 5 unknown: old.0, old.1, old.2 ...; "
        "1 of another shape: fc.weight ((2, 3), the model has (4, 3)). "
        "Load the architecture that the file was saved from (and its number of classes)."
    )
    assert torch.equal(net.fc.weight, before)


def test_only_the_counter_of_batchnorm_may_be_missing():
    net = nn.BatchNorm1d(2)
    weights = {key: value + 1 for key, value in net.state_dict().items() if key != "num_batches_tracked"}
    put_weights(net, weights, "w.pth")
    assert net.running_mean.tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match="1 missing: running_var"):
        put_weights(net, {k: v for k, v in weights.items() if k != "running_var"}, "w.pth")


def test_checkpoint_errors_are_model_errors():
    assert issubclass(CheckpointError, ModelError)
