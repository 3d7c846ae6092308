"""The gradient probe whoever calls it: other modes, precisions and wrappers, and nothing about the module changes."""

import copy

import pytest
import torch
from tests.gradients import reference
from tests.gradients.reference import classifier, error, inputs
from tests.gradients.zoo import C, made
from torch import nn

import dubito
from dubito.probes.gradient import Gradient

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = {"weightings": ("root", "expected_l1"), "uniform": True}
SMALL = "batch_norm_of_rows"


@pytest.fixture(scope="module")
def model(one_thread):
    return classifier(made(SMALL))


@pytest.fixture(scope="module")
def x():
    return inputs(5, 3, 4, 4)


class Busy(nn.Module):
    """Counts in a buffer, drops, has statistics; may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.head = (
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.Dropout(),
            nn.Linear(6, C),
        )
        self.register_buffer("passes", torch.zeros(()))
        self.counts = self.fails = False

    def forward(self, x):
        if self.counts:
            self.passes += 1
            torch.rand(2)
        z = self.drop(self.norm(self.conv(x)).relu().mean((2, 3)))
        if self.fails:
            raise ValueError("on purpose")
        return self.head(z)


def everything(module: nn.Module):
    return (
        {name: tensor.tolist() for name, tensor in module.state_dict().items()},
        [(id(p), p.requires_grad, p.grad, p._backward_hooks) for p in module.parameters()],
        [(part.training, len(part._forward_hooks), len(part._backward_hooks)) for part in module.modules()],
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_any_caller_and_nothing_changes(mode, fails):
    torch.manual_seed(0)
    module = Busy()
    model, x = classifier(module), inputs(4, 3, 6, 6)
    expected = reference.columns(module, list(x[:, None]), ["conv", "norm", "head"])["gradient"]
    module.conv.requires_grad_(False)
    module.head.eval()
    module.norm.register_forward_hook(lambda *_: None)
    module.counts, module.fails = True, fails
    before = everything(module)
    with mode():
        if fails:
            with pytest.raises(ValueError, match="on purpose"):
                Gradient("exact").run(model, x, None)
        else:
            result = Gradient("exact").run(model, x.clone(), None)["gradient"]
            assert error(result, expected) < 1e-4
    assert everything(module) == before


def test_parameters_of_inference_mode():
    with torch.inference_mode():
        module = made(SMALL)
        model = classifier(module)
    x = inputs(3, 3, 4, 4)
    expected = Gradient("exact").run(classifier(made(SMALL)), x, None)["gradient"]
    torch.testing.assert_close(Gradient("exact").run(model, x, None)["gradient"], expected)
    with torch.inference_mode():
        torch.testing.assert_close(Gradient("exact").run(model, x.clone(), None)["gradient"], expected)


def test_a_model_that_has_been_trained_on_is_met_anew(x):
    module = made(SMALL)
    model, probe = classifier(module), Gradient("exact")
    probe.run(model, x, None)
    module.train()
    loss = module(x).square().sum()
    loss.backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    torch.testing.assert_close(probe.run(model, x, None)["gradient"], Gradient("exact").run(model, x, None)["gradient"])
    assert all(p.grad is not None for p in module.parameters())  # the user's own


class Compiled(nn.Module):
    """As torch.compile leaves a module, without the seconds that it takes; it must not be called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def eagerly(module: nn.Module) -> nn.Module:
    """By torch.compile itself, with the backend that needs no compiler."""
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("outside", [Compiled, eagerly, nn.DataParallel])
def test_compiled_and_parallel_modules(outside, x):
    module = made(SMALL)
    expected = Gradient().run(classifier(module), x, None)
    result = Gradient().run(dubito.wrap(outside(module)), x, None)
    for name, column in expected.items():
        assert torch.equal(result[name], column)


@pytest.mark.parametrize(
    ("last", "output"), [(nn.Softmax(1), "probabilities"), (nn.LogSoftmax(1), "log_probabilities")]
)
def test_models_that_return_probabilities(last, output, x):
    module = made(SMALL)
    expected = Gradient("exact", **ALL).run(classifier(module), x, None)
    twin = nn.Sequential(*copy.deepcopy(module), last)
    result = Gradient("exact", **ALL).run(dubito.wrap(twin, output=output), x, None)
    for name, column in expected.items():
        torch.testing.assert_close(result[name], column, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, x):
    expected = Gradient("exact").run(classifier(made(SMALL)), x, None)["gradient"]
    result = Gradient("exact").run(classifier(made(SMALL).to(dtype)), x, None)
    assert result["gradient"].dtype == torch.float32
    close = {torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    torch.testing.assert_close(result["gradient"].sum(0), expected.sum(0), rtol=close, atol=0)
