"""The module is the user's: what is borrowed comes back, and what the user changes is noticed."""

import copy
import gc
import inspect
import weakref

import pytest
import torch
from torch import Tensor, nn

from dubito.errors import ModelError
from dubito.models import wrap
from dubito.models.frozen import frozen

from .conftest import Mlp, X, check


def test_a_module_may_write_into_its_input():
    class Normalising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.sub_(0.5).mul_(2))

    module, x = Normalising(), X.clone()
    model = wrap(module)
    with torch.no_grad():
        expected = module.fc((X - 0.5) * 2)
    for _ in range(2):
        assert torch.allclose(model.logits(model.features(x)), expected, atol=1e-6)
    assert torch.equal(x, X)


def test_a_second_try_in_inference_mode_says_the_same():
    model = wrap(Mlp(then=torch.sigmoid))
    with torch.inference_mode():
        for _ in range(2):
            with pytest.raises(ModelError, match="Mlp: its logits differ from those of its last linear layer"):
                model.features(X + 0)


def test_features_are_not_the_input_s_memory():
    module = nn.Linear(6, 2)
    x = X.clone()
    z = wrap(module).features(x)
    z.zero_()
    assert torch.equal(x, X)


def must_not_compile(graph, inputs):
    raise AssertionError("compiled")


def test_a_compiled_module_is_watched_without_compiling():
    module = Mlp()
    compiled = torch.compile(module, backend=must_not_compile)
    for model in (wrap(compiled), wrap(compiled, head="fc")):
        with torch.no_grad():
            assert torch.allclose(model.logits(model.features(X)), module(X), atol=1e-6)
        assert model.module is compiled
        assert model.fingerprint()["weights"] == wrap(module).fingerprint()["weights"]


def test_a_parallel_module_is_the_module_inside():
    module = Mlp()
    parallel = nn.DataParallel(module)
    model = wrap(parallel)
    check(model, module, X)
    assert model.module is parallel
    assert model.fingerprint()["weights"] == wrap(module).fingerprint()["weights"]


def test_without_a_device_or_with_its_own_the_module_is_the_user_s():
    module = Mlp()
    for device in (None, "cpu", torch.device("cpu")):
        assert wrap(module, device=device).module is module


def test_another_device_gets_a_copy():
    module = Mlp()
    before = copy.deepcopy(module.state_dict())
    model = wrap(module, device="meta")
    assert model.module is not module
    assert model.device == torch.device("meta")
    assert all(parameter.device.type == "meta" for parameter in model.module.parameters())
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_a_device_that_does_not_exist():
    with pytest.raises(ModelError, match=r"device: 'gpu' cannot be used here \(.*\)\. Try device='cpu'\."):
        wrap(Mlp(), device="gpu")


def test_what_is_no_module():
    with pytest.raises(
        ModelError, match=r"wrap: module must be a torch\.nn\.Module; got str\. For a name, use dubito\.load\."
    ):
        inspect.unwrap(wrap)("timm:test_vit")  # the type check of the tests would come first
    with pytest.raises(ModelError, match=r"got OrderedDict\. Load that state dict into its module\."):
        inspect.unwrap(wrap)(Mlp().state_dict())


def test_names():
    assert wrap(Mlp()).name == "Mlp"
    assert repr(wrap(Mlp(), name="mine")) == "WrappedClassifier('mine' on cpu)"


def test_buffers_and_random_state_come_back_even_in_eval_mode():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("latest", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            self.latest = torch.rand(1)
            return self.fc(x)

    module = Counting()
    model, random = wrap(module), torch.get_rng_state()
    for _ in range(3):
        model.features(torch.zeros(2, 4))
    assert (module.calls.item(), module.latest.item()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_replaced_head_is_found_anew():
    module, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(6, 4)
    model = wrap(module)
    before = model.features(x)
    module[2] = nn.Linear(5, 7)
    with pytest.raises(ModelError, match="has not seen a batch yet since its head was replaced"):
        model.logits(before)
    assert torch.equal(model.logits(model.features(x)), module(x))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.Linear(4, 2))


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def test_eval_inside_and_every_mode_of_its_own_outside():
    module = network()
    module[1][0].eval()
    before = modes(module)
    assert before == [True, True, True, False, True, True]
    with frozen(module) as inside:
        assert inside is module
        assert modes(module) == [False] * 6
    assert modes(module) == before


def test_modes_come_back_after_an_exception():
    module = network()
    module[2].eval()
    before = modes(module)
    with pytest.raises(KeyError), frozen(module):
        raise KeyError("in the middle")
    assert modes(module) == before


def test_a_module_s_own_train_and_eval_are_not_called():
    class Merging(nn.Linear):
        """Like an adapter that folds its weights into the layer when it is put into eval mode."""

        def train(self, mode=True):
            self.weight.data += 1
            return super().train(mode)

    module = nn.Sequential(Merging(2, 2))
    before = module[0].weight.clone()
    with frozen(module):
        assert torch.equal(module[0].weight, before)
    assert torch.equal(module[0].weight, before)
    assert modes(module) == [True, True]


def test_statistics_and_random_numbers_stand_still():
    module, x = network(), torch.randn(8, 4)
    mean, random = module[1][0].running_mean.clone(), torch.get_rng_state()
    with frozen(module):
        assert torch.equal(module(x), module(x))
    assert torch.equal(module[1][0].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_no_gradients_inside_and_the_caller_s_choice_outside(around):
    module = network()
    with around():
        enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with frozen(module):
            out = module(torch.ones(2, 4))
            assert not out.requires_grad
            assert not out.is_inference()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (enabled, inference)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_module_shared_by_two_parents_is_restored():
    shared = nn.Dropout()
    module = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    shared.eval()
    with frozen(module), frozen(module):
        pass
    assert modes(module) == [True, True, False, True]


def test_a_module_is_not_kept_alive():
    module = network()
    with frozen(module):
        pass
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None
