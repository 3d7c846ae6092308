"""What is learned of a model: its layers, their uses; and what is told of those that have no rule, or no part."""

import warnings

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import GradientFallbackWarning, ModelError, UnusedLayersWarning, ValueRangeError
from dubito.gradients import rules
from dubito.gradients.plan import Borrowed, GradientPlan, warn_slow, warn_unused
from tests.gradients.reference import classifier, inputs
from tests.gradients.zoo import C, made, rows


class Doubling(torch.autograd.Function):
    """x w, times two: an operation of the user's own."""

    @staticmethod
    def forward(x, w):
        return 2 * x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * w, (2 * g * x).sum(0)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(48, 6), nn.Parameter(torch.rand(6)), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(Doubling.apply(self.first(x.flatten(1)), self.scale))


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(48, 4), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x.flatten(1))


def planned(module, x=None, **options):
    return GradientPlan(Borrowed(dubito.wrap(module, name="net", **options)), inputs(3, 3, 4, 4) if x is None else x)


def test_layers_are_in_order_of_use_not_of_definition():
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.first = nn.Linear(6, 4), nn.Linear(48, 6)

        def forward(self, x):
            return self.head(self.first(x.flatten(1)))

    plan = planned(Crossed())
    assert plan.layers == ("first", "head")
    assert plan.slow == {}
    assert set(plan.parameters) == {"first.weight", "first.bias", "head.weight", "head.bias"}


def test_the_backward_pass_ends_at_the_first_layer():
    plan = planned(rows(nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 4)))
    first = {use.node for use in plan.parameters["1.weight"]}
    assert set(plan.last) == first
    assert plan.borrowed.leaves["1.weight"].grad is None


def test_an_operation_without_a_rule_is_named():
    plan = planned(Own())
    assert set(plan.slow) == {"scale"}
    with pytest.warns(GradientFallbackWarning) as caught:
        warn_slow(plan)
    assert str(caught[0].message) == (
        "gradient: 'scale' of net (of 3 layers) cannot be differentiated for a whole batch at once: there is no rule "
        "for DoublingBackward. torch.func does it image by image, which is right but slow."
    )


def test_layers_that_take_no_part_are_named():
    plan = planned(Wrapping())
    assert plan.layers == ("used",)
    with pytest.warns(
        UnusedLayersWarning, match=r"net predicts for these images does not depend on 'spare', .* no column"
    ):
        warn_unused(plan)


def test_many_names_are_cut_short():
    module = Wrapping()
    module.spare = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    plan = planned(module)
    with pytest.warns(
        UnusedLayersWarning, match=r"'spare\.0', 'spare\.1', 'spare\.2', 'spare\.3', 'spare\.4' and 3 more"
    ):
        warn_unused(plan)


def test_images_that_are_mixed():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Flatten(), nn.Linear(16, 4)
    )
    with pytest.raises(
        ModelError, match=r"net predicts for an image depends on the other images .* Look for a BatchNorm"
    ):
        planned(module)


def test_nothing_to_differentiate():
    class Cut(Wrapping):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(ModelError, match=r"does not depend on its parameters .*Look for detach\(\), no_grad\(\)"):
        planned(Cut())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_answers_without_a_number(bad):
    """Told as what they are, not as images that are mixed or layers without rules."""
    module = Wrapping()
    with torch.no_grad():
        module.used.bias[1] = bad
    with pytest.raises(ValueRangeError, match=r"net gives NaN or infinite logits for image 0 of the batch"):
        planned(module)
    x = inputs(3, 3, 4, 4)
    x[2, 0, 0, 0] = bad
    with pytest.raises(ValueRangeError, match=r"for image 2 of the batch, .* Look at its weights, at the transform"):
        planned(Wrapping(), x)


def test_one_class():
    with pytest.raises(ModelError, match=r"net has one class, .* Give a yes-or-no model a second logit of zero\."):
        planned(rows(nn.Linear(48, 1)))


def test_operations_that_change_with_the_number_of_images():
    class Odd(Wrapping):
        def forward(self, x):
            return super().forward(x).tanh() if len(x) == 3 else super().forward(x)

    plan = planned(Odd())
    assert plan.parameters == {}
    assert set(plan.slow.values()) == {"its operations change with the number of images"}


def test_a_tensor_that_is_no_parameter_is_no_layer():
    class Strange(Wrapping):
        def __init__(self) -> None:
            super().__init__()
            self.free = torch.rand(48, requires_grad=True)
            del self.spare

        def forward(self, x):
            return self.used(x.flatten(1) * self.free)

    module = Strange()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(module)
    assert plan.layers == ("used",)
    assert plan.slow == {}
    assert module.free.grad is None


def test_a_use_that_a_rule_gets_wrong_falls_back(monkeypatch):
    """Whatever a rule says is held against autograd, for the first of two images and for the last of three."""
    true_rule = rules.RULES["NativeLayerNormBackward0"]

    def half_wrong(at, g):
        part = true_rule(at, g)
        return rules.Dense(part.values * 1.01) if at.images == 3 else part

    monkeypatch.setitem(rules.RULES, "NativeLayerNormBackward0", half_wrong)
    plan = GradientPlan(Borrowed(classifier(made("layer_norm"))), inputs(3, 3, 4, 4))
    assert plan.slow == {"2.weight": "it is used in an unknown way", "2.bias": "it is used in an unknown way"}


def test_images_that_say_nothing_of_a_layer_prove_nothing():
    """Tokens come before images here, which black ones do not show: no gradient gets past ReLUs of zero."""

    class TokensFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, C)

        def forward(self, x):
            return self.head(torch.relu(self.first(x.flatten(1, 2).transpose(0, 1).contiguous()))[0])

    black = torch.zeros(3, 3, 4, 4)
    assert planned(TokensFirst(), black).slow == {"first.weight": "images cannot be separated in what Mm gives"}
    assert planned(TokensFirst(), inputs(3, 3, 4, 4)).slow == {}
