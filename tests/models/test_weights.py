import argparse
import copy
import hashlib
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import dubito
from dubito.errors import CheckpointError, ModelError
from dubito.models import wrap
from dubito.models.weights import module_digests, operations, put_weights, read_weights
from dubito.storage import tensors_digest

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


def same(result: dict[str, torch.Tensor]) -> bool:
    return result.keys() == WEIGHTS.keys() and all(torch.equal(result[key], WEIGHTS[key]) for key in WEIGHTS)


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
        CheckpointError, match=r"weights: no file '.*gone\.pth'\. Pass the path of a \.safetensors or PyTorch"
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
        with pytest.raises(CheckpointError, match=r"weights: '.*' (is not a|is no PyTorch|holds Python objects)"):
            read_weights(path)


@pytest.mark.parametrize("content", [b"<html>404 Not Found</html>", b'{"fc": [1, 2]}', b"\x00" * 600, b""])
def test_a_file_of_something_else(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"w\.pth' is no PyTorch file\. Pass one of torch\.save, or a \.safetensors"
    ):
        read_weights(tmp_path / "w.pth")
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.safetensors' is not a readable weights file \(.*\)\. Copy it again"):
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
        "Save model.state_dict() and pass that file."
    )


def shared(bottom, levels=60, twice=lambda part: nn.Sequential(part, part)):
    """Of two parts that are one, of two parts that are one ...: to follow them all would take 2^60 steps."""
    for _ in range(levels):
        bottom = twice(bottom)
    return bottom


@pytest.mark.parametrize(
    "beside",
    [
        shared(nn.Identity()),
        {"opt": argparse.Namespace(history=shared([1.0], twice=lambda part: [part, part]))},
        shared({"epoch": 3}, 5, lambda part: {str(key): part for key in range(300)}),
    ],
    ids=["modules", "lists", "dicts"],
)
def test_what_a_file_shares_is_looked_at_once(tmp_path, beside):
    torch.save({"best": WEIGHTS, "beside": beside}, tmp_path / "w.pth")
    assert same(read_weights(tmp_path / "w.pth"))


def test_layers_that_a_whole_module_shares_have_all_their_names(tmp_path):
    layer = nn.Linear(3, 3)
    module = nn.Sequential(layer, nn.Sequential(nn.ReLU(), layer))
    torch.save(module, tmp_path / "w.pth")
    assert list(read_weights(tmp_path / "w.pth")) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    torch.save(shared(layer), tmp_path / "w.pth")  # 2^61 names
    with pytest.raises(CheckpointError, match=r"not a readable weights file \(a module of more than 100,000 tensors"):
        read_weights(tmp_path / "w.pth")


def test_put_weights_fills_the_module():
    net = Net()
    put_weights(net, {key: value.half() for key, value in WEIGHTS.items()}, "w.pth")
    assert torch.equal(net.fc.weight, WEIGHTS["fc.weight"])
    assert net.fc.weight.dtype == torch.float32


def test_weights_that_do_not_fit_are_reported_and_nothing_is_loaded():
    net = Net(classes=4)
    before = net.fc.weight.clone()
    weights = {"fc.weight": WEIGHTS["fc.weight"], **{f"old.{i}": torch.ones(1) for i in range(5)}}
    with pytest.raises(CheckpointError) as error:
        put_weights(net, weights, "w.pth")
    assert str(error.value) == (
        "weights: 'w.pth' does not fit Net: 1 missing: fc.bias; 5 unknown: old.0, old.1, old.2 ...; "
        "1 of another shape: fc.weight ((2, 3), the model has (4, 3)). "
        "It is of another architecture. Load the one that the file was saved from."
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


def weights_digest(module: nn.Module) -> str:
    return module_digests(module)["weights"]


def network(stride: int = 1, negative_slope: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=stride),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(negative_slope),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def test_equal_copies_have_equal_digests():
    module = network()
    assert len(weights_digest(module)) == 32
    assert weights_digest(copy.deepcopy(module)) == weights_digest(module) == weights_digest(network())


@pytest.mark.parametrize("key", list(network().state_dict()))
def test_every_tensor_counts(key):
    module = network()
    before = weights_digest(module)
    tensor = module.state_dict()[key].flatten()
    tensor[-1:] += 1
    assert weights_digest(module) != before


def test_the_last_bit_of_one_weight_counts():
    module = network()
    before = weights_digest(module)
    with torch.no_grad():
        module[0].weight[1, 2, 0, 1] = torch.nextafter(module[0].weight[1, 2, 0, 1], torch.tensor(9.0))
    assert weights_digest(module) != before


def test_a_buffer_that_is_not_saved_counts():
    module = network()
    module.register_buffer("scale", torch.ones(1), persistent=False)
    before = weights_digest(module)
    assert before != weights_digest(network())
    module.scale += 1
    assert weights_digest(module) != before


def test_architecture_counts_where_weights_agree():
    base = network()
    others = [network(stride=2), network(negative_slope=0.2)]
    swapped = network()
    swapped[2] = nn.GELU()
    digests = {weights_digest(module) for module in (base, *others, swapped)}
    assert len(digests) == 4


def test_the_order_of_values_and_the_type_count():
    one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with torch.no_grad():
        one.weight.copy_(torch.tensor([[1.0, 2.0]]))
        other.weight.copy_(torch.tensor([[2.0, 1.0]]))
        other.bias.copy_(one.bias)
    assert weights_digest(one) != weights_digest(other)
    assert weights_digest(copy.deepcopy(one).double()) != weights_digest(one)
    assert len(weights_digest(copy.deepcopy(one).bfloat16())) == 32


def test_memory_layout_mode_and_gradients_do_not_count():
    module = network()
    before = weights_digest(module)
    module.to(memory_format=torch.channels_last).eval().requires_grad_(False)
    assert not module[0].weight.is_contiguous()
    assert weights_digest(module) == before


def test_empty_and_scalar_tensors_are_hashed():
    module = nn.Module()
    module.empty, module.one = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
    before = weights_digest(module)
    module.one.data += 1
    assert weights_digest(module) != before


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def extra_repr(self) -> str:
        return f"built at {hex(id(self))}"


def test_the_digests_are_the_same_in_every_process_and_version():
    # Written down, because caches and heads on disk carry them.
    content = hashlib.blake2b(struct.pack("<2f", 1.0, 2.0), digest_size=16).hexdigest()
    tensors = hashlib.blake2b(f"weight|torch.float32|(2,)|{content}\n".encode(), digest_size=16).hexdigest()
    weights = hashlib.blake2b(f"|Constant|built at \n{tensors}".encode(), digest_size=16).hexdigest()
    assert module_digests(Constant()) == {"weights": weights, "tensors": tensors}
    assert (weights, tensors) == ("eb354e3cd0d19aedb4eea959c0426199", "49c77e6f2070f92a6127a4124c9ba336")


def test_tensors_do_not_depend_on_classes_settings_or_order():
    renamed = network(stride=2)
    renamed[2] = nn.GELU()
    one, other = module_digests(network()), module_digests(renamed)
    assert one["tensors"] == other["tensors"]
    assert one["weights"] != other["weights"]
    state = {**dict(network().named_parameters()), **dict(network().named_buffers())}
    assert tensors_digest(dict(reversed(state.items()))) == one["tensors"]


@pytest.mark.parametrize("key", list(network().state_dict()))
def test_tensors_tell_every_value_apart(key):
    module = network()
    before = module_digests(module)["tensors"]
    module.state_dict()[key].flatten()[-1:] += 1
    assert module_digests(module)["tensors"] != before


def test_tensors_tell_names_types_and_shapes_apart():
    x = torch.tensor([1.0, 2.0])
    result = [{"a": x}, {"b": x}, {"a": x.double()}, {"a": x[None]}, {"a": x.flip(0)}, {"a": x, "b": x}]
    assert len({tensors_digest(tensors) for tensors in result}) == len(result)


def test_a_classifier_s_fingerprint_names_weights_and_transform():
    model = wrap(network(), name="mine")
    assert model.fingerprint() == {
        "model": "mine",
        "head": {"layer": None, "output": "logits"},
        **module_digests(network()),
        "operations": operations(network()),
        "transform": {"kind": "none"},
    }


def test_operations_are_activations_and_pools_by_their_settings():
    assert operations(network()) == ["AdaptiveAvgPool2d(output_size=1)", "LeakyReLU(negative_slope=0.1)"]
    assert operations(network(negative_slope=0.2)) != operations(network())
    assert operations(network(stride=2)) == operations(network())
    assert operations(nn.Sequential(nn.ReLU(inplace=True))) == operations(nn.Sequential(nn.ReLU())) == ["ReLU"]
    assert operations(nn.Sequential(nn.LeakyReLU(0.1, inplace=True))) == ["LeakyReLU(negative_slope=0.1)"]
    assert operations(nn.MultiheadAttention(4, 2)) == []  # lies among torch's activations, and has weights


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet", "test_convnext"])
def test_operations_of_timm_models(name):
    module = timm.create_model(name)
    before = operations(module)
    replaced = {"ReLU", "SiLU", "GELU", "GELUTanh"}
    assert any(one.partition("(")[0] in replaced for one in before)
    for part in list(module.modules()):
        for child, activation in part.named_children():
            if type(activation).__name__ in replaced:
                setattr(part, child, nn.Tanh())
    kept = [one for one in before if one.partition("(")[0] not in replaced]
    assert operations(module) == sorted([*kept, "Tanh"])


def test_a_shared_activation_is_as_good_as_several():
    shared = nn.ReLU()
    assert operations(nn.Sequential(shared, nn.Linear(2, 2), shared)) == ["ReLU"]
    assert operations(nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == ["ReLU"]


@pytest.mark.parametrize(
    ("older", "newer"), [("PytorchGELUTanh", "GELUTanh"), ("SiLUActivation", "SiLU"), ("Activation", "Activation")]
)
def test_names_of_other_versions(older, newer):
    old, new = (type(name, (nn.Module,), {"__module__": "transformers.activations"})() for name in (older, newer))
    assert operations(nn.Sequential(old)) == operations(nn.Sequential(new)) == [newer]
