import copy
import hashlib
import struct

import pytest
import timm
import torch
from torch import nn

from dubito.models import wrap
from dubito.models.fingerprint import module_digests, operations, tensors_digest


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
    found = [{"a": x}, {"b": x}, {"a": x.double()}, {"a": x[None]}, {"a": x.flip(0)}, {"a": x, "b": x}]
    assert len({tensors_digest(tensors) for tensors in found}) == len(found)


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
