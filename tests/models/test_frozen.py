import pytest
import torch
from torch import nn

from dubito.models.frozen import frozen


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
