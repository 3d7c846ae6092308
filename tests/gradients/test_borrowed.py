"""A borrowed module: it can be differentiated, and nothing about the user's own changes."""

import copy
import threading

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ModelError
from dubito.gradients.plan import Borrowed, layer_of
from tests.gradients.reference import inputs


class Counting(nn.Module):
    """Counts its passes in a buffer and in an attribute; drops; may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)
        self.register_buffer("passes", torch.zeros(()))
        self.seen = 0
        self.fails = False

    def forward(self, x):
        self.passes += 1
        self.seen += 1
        x.mul_(2)  # the input is not the user's own
        torch.rand(3)
        z = self.drop(self.norm(self.conv(x)).mean((2, 3)))
        if self.fails:
            raise ValueError("on purpose")
        return self.head(z)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Counting()


def state(module: nn.Module):
    return {
        "values": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "same": [id(tensor) for tensor in (*module.parameters(), *module.buffers())],
        "wanted": [p.requires_grad for p in module.parameters()],
        "gradients": [p.grad for p in module.parameters()],
        "modes": [part.training for part in module.modules()],
        "hooks": [len(part._forward_hooks) for part in module.modules()],
        "seen": module.seen,
        "random": torch.get_rng_state(),
    }


def check_same(a, b) -> None:
    for name in a["values"]:
        assert torch.equal(a["values"][name], b["values"][name]), name
    assert torch.equal(a.pop("random"), b.pop("random"))
    a.pop("values"), b.pop("values")
    assert a == b


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes(module, fails):
    module.conv.requires_grad_(False)
    module.norm.eval()
    module.conv.register_forward_hook(lambda *_: None)
    module.fails = fails
    before, x = state(module), inputs(2, 3, 6, 6)
    kept = x.clone()
    borrowed = Borrowed(dubito.wrap(module))
    if fails:
        with pytest.raises(ValueError, match="on purpose"):
            borrowed.logits(borrowed.inputs(x))
    else:
        logits = borrowed.logits(borrowed.inputs(x))
        assert logits.requires_grad
        torch.autograd.grad(logits.sum(), list(borrowed.leaves.values()))
        assert torch.equal(borrowed.logits(borrowed.inputs(x)), logits)  # nothing is dropped
    check_same(state(module), before)
    assert torch.equal(x, kept)


def test_stand_ins_are_the_parameters_memory(module):
    borrowed = Borrowed(dubito.wrap(module))
    own = dict(module.named_parameters())
    assert list(borrowed.leaves) == list(own)
    for name, leaf in borrowed.leaves.items():
        assert leaf.data_ptr() == own[name].data_ptr()
        assert leaf is not own[name]
    x = inputs(2, 3, 6, 6)
    with torch.no_grad():
        module.head.bias.add_(1.0)
    torch.testing.assert_close(borrowed.logits(borrowed.inputs(x)), copy.deepcopy(module).eval()(x.clone()))


def test_only_some_layers(module):
    borrowed = Borrowed(dubito.wrap(module), ["head"])
    assert [name for name, leaf in borrowed.leaves.items() if leaf.requires_grad] == ["head.weight", "head.bias"]


def test_statistics_are_taken_over_when_they_have_changed(module):
    borrowed, x = Borrowed(dubito.wrap(module)), inputs(2, 3, 6, 6)
    module.train()(10 + 5 * inputs(8, 3, 6, 6))
    borrowed.refresh()
    torch.testing.assert_close(borrowed.logits(borrowed.inputs(x)), copy.deepcopy(module).eval()(x.clone()))


def test_a_buffer_that_the_forward_pass_makes():
    class Late(nn.Linear):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(()))
            return super().forward(x) * self.late

    module = Late(3, 2)
    borrowed, x = Borrowed(dubito.wrap(module)), inputs(2, 3)
    borrowed.logits(borrowed.inputs(x))
    borrowed.refresh()
    torch.testing.assert_close(borrowed.logits(borrowed.inputs(x)), nn.functional.linear(x, module.weight, module.bias))
    assert not hasattr(module, "late")


def test_a_module_that_cannot_be_copied(module):
    module.lock = threading.Lock()
    before = state(module)
    borrowed = Borrowed(dubito.wrap(module))
    assert borrowed.module is module
    assert borrowed.logits(borrowed.inputs(inputs(2, 3, 6, 6))).requires_grad
    before["seen"] += 1  # an attribute of a module that cannot be copied is its own
    check_same(state(module), before)


def test_without_parameters():
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match=r"gradient: net has no parameters .*Use a score of logits or features"):
        Borrowed(dubito.wrap(module, name="net"))


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("fc.weight", "fc"),
        ("blocks.0.attn.qkv.bias", "blocks.0.attn.qkv"),
        ("pos_embed", "pos_embed"),
        ("blocks.0.gamma", "blocks.0"),
        ("conv.parametrizations.weight.original1", "conv"),
    ],
)
def test_layer_of(parameter, layer):
    assert layer_of(parameter) == layer
