"""Joint training as a guest: it leaves the module as it was, reads the right layer, and refuses what it cannot read."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from tests.heads.conftest import Cnn, batches, cnn, same
from torch import Tensor, nn

import dubito
from dubito.errors import ModelError
from dubito.heads import HeadModule
from dubito.heads.joint import with_uncertainty


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def test_creation_and_forward_leave_module_and_random_state_as_they_were():
    module = cnn().train()
    module.body.eval()  # frozen in part, as one does
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    for how in ({}, {"layer": "fc"}, {"example": batches(16)[0][0]}):
        model = with_uncertainty(module, **how)
    assert model.module is module
    assert torch.equal(torch.get_rng_state(), random)
    assert same(module.state_dict(), before)
    assert module.training
    assert not module.body.training
    model(batches(16)[0][0])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_the_module_runs_once_and_u_is_the_head_on_what_the_layer_reads():
    module, (x, _) = cnn().eval(), batches(16)[0]
    runs = []
    module.body.register_forward_hook(lambda *_: runs.append(1))
    model = with_uncertainty(module, seed=3)
    with torch.no_grad():
        logit, u = model(x)
    assert len(runs) == 1
    assert not u.requires_grad
    assert model(x[:1]).u.shape == (1,)
    assert torch.equal(logit, module(x))
    z = dubito.wrap(module).features(x)
    assert torch.equal(u, model.head_module(z))
    assert torch.equal(u, HeadModule(8, seed=3)(z))
    assert not torch.equal(u, HeadModule(8, seed=4)(z))


def test_state_dicts_and_the_head_by_itself():
    module = cnn()
    model = with_uncertainty(module, width=4, depth=1, seed=2)
    own = {key.removeprefix("module."): value for key, value in model.state_dict().items() if key.startswith("module.")}
    assert same(own, module.state_dict())
    Cnn().load_state_dict(own, strict=True)
    again = with_uncertainty(Cnn(), width=4, depth=1)
    again.load_state_dict(model.state_dict(), strict=True)
    x = batches(16)[0][0]
    assert torch.equal(again.eval()(x).u, model.eval()(x).u)
    assert isinstance(model.head_module, HeadModule)
    rest = {key for key in model.state_dict() if not key.startswith("module.")}
    assert rest == {f"head_module.{key}" for key in HeadModule(8, width=4, depth=1).state_dict()}


def test_a_copy_reads_its_own_layer():
    model = with_uncertainty(cnn()).eval()
    x = batches(16)[0][0]
    u = model(x).u
    other = copy.deepcopy(model)
    nn.init.zeros_(other.module.body[0].weight)
    assert not torch.equal(other(x).u, u)
    assert torch.equal(model(x).u, u)


def test_one_module_in_two_wrappers():
    module, x = cnn().eval(), batches(16)[0][0]
    first, second = with_uncertainty(module, seed=1), with_uncertainty(module, seed=2)
    one, two = first(x), second(x)
    assert torch.equal(one.logit, two.logit)
    assert not torch.equal(one.u, two.u)
    with pytest.raises(ModelError, match=r"already has an uncertainty head. Pass its .module instead"):
        with_uncertainty(first)


def test_a_layer_that_is_called_twice_counts_by_its_last_call():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.again = self.fc

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.fc(x).relu())

    module, x = Twice(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for model in (with_uncertainty(module), with_uncertainty(module, layer="again")):
        assert torch.equal(model(x).u, model.head_module(module.fc(x).relu()))


def test_a_named_convolution_is_averaged_over_its_positions():
    module = torchvision.models.squeezenet1_1(weights=None, num_classes=5).eval()
    model, x = with_uncertainty(module, layer="classifier.1"), batches(64, n=2)[0][0]
    logit, u = model(x)
    assert torch.equal(logit, module(x))
    assert torch.equal(u, model.head_module(module.features(x).mean((2, 3))))


def test_an_output_with_logits():
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Like(Cnn):
        def forward(self, x: Tensor) -> Output:
            return Output(super().forward(x))

    assert with_uncertainty(Like())(batches(16)[0][0]).logit.shape == (6, 5)


class Scaled(Cnn):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Unused(Cnn):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x).mean((2, 3)), self.fc.weight)


class Tokens(Cnn):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).flatten(2).transpose(1, 2)).mean(1)


class Pair(Cnn):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Twice(Cnn):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logit = super().forward(x)
        return 2 * logit, logit


class Inputs(Cnn):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        super().forward(x)
        return x, 0


def test_the_logits_of_a_tuple_are_the_one_output_with_a_row_per_image():
    module, x = Pair().eval(), batches(16)[0][0]
    assert torch.equal(with_uncertainty(module).eval()(x).logit, module(x)[0])


@pytest.mark.parametrize(
    ("module", "how", "text"),
    [
        (Cnn(), {"layer": "fcc"}, r"layer: Cnn has no layer 'fcc'. Nearest: fc"),
        (Cnn(), {"layer": "drop"}, r"layer: 'drop' is a Dropout. Name the nn.Linear or 1x1 convolution"),
        (Cnn(), {"layer": "body.0"}, r"layer: 'body.0' is a Conv2d."),
        (nn.Conv2d(3, 5, 1), {}, r"Conv2d has no linear layer. Name the layer .* layer='...'; it may be a 1x1"),
        (
            torchvision.models.squeezenet1_1(weights=None, num_classes=5),
            {"example": torch.zeros(2, 3, 64, 64)},
            r"SqueezeNet does not classify by a single nn.Linear. .* layer='...'",
        ),
    ],
)
def test_what_creation_refuses(module, how, text):
    with pytest.raises(ModelError, match=text):
        with_uncertainty(module, **how)


@pytest.mark.parametrize(
    ("module", "how", "text"),
    [
        (
            Scaled(),
            {},
            r"'fc', the last linear layer of Scaled, does not return its output. Name .* layer='...', or pass",
        ),
        (Unused(), {}, r"Unused did not call its layer 'fc' in this pass. Name the layer"),
        (Tokens(), {"layer": "fc"}, r"layer 'fc' must read one row of 8 features per image; got \(6, 49, 8\)"),
        (
            Inputs(),
            {},
            r"^with_uncertainty: Inputs must return a tensor \(n, classes\), alone or .*; got tuple of 0, 1\.",
        ),
        (Twice(), {}, r"^with_uncertainty: Twice returns several tensors with a row per image: 0 \(n, 5\), 1 \(n, 5\)"),
    ],
)
def test_what_a_pass_refuses(module, how, text):
    model = with_uncertainty(module, **how)
    with pytest.raises(ModelError, match=text):
        model(batches(16)[0][0])
    assert not module.fc._forward_hooks


def test_a_named_layer_is_taken_at_its_word():
    assert with_uncertainty(Scaled(), layer="fc")(batches(16)[0][0]).u.shape == (6,)


def test_a_head_that_was_replaced_by_a_wider_one_is_noticed():
    module = cnn()
    model = with_uncertainty(module, layer="fc")
    module.fc = nn.Linear(6, 5)
    module.drop = nn.Sequential(nn.Linear(8, 6))
    with pytest.raises(ModelError, match=r"layer 'fc' must read one row of 8 features per image; got \(6, 6\) for 6"):
        model(batches(16)[0][0])


def test_the_width_is_the_layer_s_own_even_where_its_weight_is_packed():
    """As quantised and sharded layers keep it."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    module[1].weight = nn.Parameter(module[1].weight.detach().reshape(18, 1))
    assert with_uncertainty(module, layer="1", width=4, depth=1).head_module.features == 6


def test_the_layer_s_output_is_compared_in_the_first_pass_only(monkeypatch):
    model = with_uncertainty(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), width=4, depth=1)
    model(torch.ones(2, 6))
    monkeypatch.setattr(torch, "allclose", None)  # it would wait for the device in every step of a training
    model(torch.ones(2, 6))
