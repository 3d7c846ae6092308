import copy
import hashlib
import struct

import pytest
import torch
from torch import nn

from dubito.models import wrap
from dubito.models.fingerprint import weights_digest


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


def test_the_digest_is_the_same_in_every_process_and_version():
    # Written down, because caches on disk carry it.
    state = hashlib.blake2b(b"|Constant|built at \n", digest_size=16)
    state.update(b"weight|torch.float32|(2,)\n" + struct.pack("<2f", 1.0, 2.0))
    assert weights_digest(Constant()) == state.hexdigest()
    assert weights_digest(Constant()) == "50be2142976942c998b379fe378d9dde"


def test_a_classifier_s_fingerprint_names_weights_and_transform():
    model = wrap(network(), name="mine")
    assert model.fingerprint() == {
        "model": "mine",
        "head": {"layer": None, "output": "logits"},
        "weights": weights_digest(network()),
        "transform": {"kind": "none"},
    }
