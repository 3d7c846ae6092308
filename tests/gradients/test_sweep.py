"""One forward pass, several backward passes: what it leaves behind, and what it refuses."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from dubito.errors import GradientFallbackWarning, ModelError
from dubito.gradients import sweep as sweep_module
from dubito.gradients.plan import Borrowed, GradientPlan
from dubito.gradients.sweep import Prepared, Sweep
from tests.gradients.reference import classifier, error, inputs, jacobian, squares_and_totals, swept
from tests.gradients.zoo import C, made, rows

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def small():
    x = inputs(4, 3, 4, 4)
    return GradientPlan(Borrowed(classifier(made("shared"))), x), x


def test_passes_do_not_know_of_each_other(small):
    plan, x = small
    c = inputs(4, C).double()
    with Sweep(plan, x, 4) as sweep:
        first = sweep.norms(c)["squares"]
        sweep.norms(10 * c.flip(0), ("totals",))
        assert torch.equal(sweep.norms(c)["squares"], first)
        assert set(sweep.norms(c, ("totals",))) == {"totals"}


def test_norms_scale_with_the_cotangent_and_none_is_zero(small):
    plan, x = small
    c = inputs(4, C).double()
    with Sweep(plan, x, 4) as sweep:
        whole = sweep.norms(c, ("squares", "totals"))
        tiny = sweep.norms(1e-30 * c, ("squares", "totals"))
        nothing = c.clone()
        nothing[2] = 0.0
        some = sweep.norms(nothing)["squares"]
    torch.testing.assert_close(tiny["squares"], 1e-60 * whole["squares"], rtol=1e-6, atol=0)
    torch.testing.assert_close(tiny["totals"], 1e-30 * whole["totals"], rtol=1e-6, atol=0)
    assert not some[2].any()
    torch.testing.assert_close(some[[0, 1, 3]], whole["squares"][[0, 1, 3]], rtol=1e-5, atol=0)


def test_equal_copies_are_the_image_itself(small):
    plan, x = small
    c = inputs(4, C).double()
    with Sweep(plan, x, 4) as sweep:
        alone = sweep.norms(c, ("squares", "totals"))
    with Sweep(plan, x.repeat_interleave(3, 0), 4) as sweep:
        copies = sweep.norms(c.repeat_interleave(3, 0), ("squares", "totals"))
        opposite = sweep.norms((c[:, None] * torch.tensor([1.0, -1.0, 0.0])[:, None]).flatten(0, 1))
    for measure in alone:
        torch.testing.assert_close(copies[measure], alone[measure], rtol=1e-5, atol=0)
    assert float(opposite["squares"].max()) < 1e-10 * float(alone["squares"].max())  # they cancel before the norm


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(small, fails):
    """The graph dies with the block, without the garbage collector; no hook and no .grad stays."""
    plan, x = small
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError), Sweep(plan, x, 4) as sweep:
            sweep.norms(inputs(4, C).double())
            graph, output = weakref.ref(sweep._graph), weakref.ref(sweep._attached)
            1 / (not fails)
        assert graph() is None
        assert output() is None
    finally:
        gc.enable()
    assert all(leaf.grad is None for leaf in plan.borrowed.leaves.values())
    assert all(not leaf._backward_hooks for leaf in plan.borrowed.leaves.values())


def test_a_model_that_computes_otherwise_for_this_batch():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(48, 4)

        def forward(self, x):
            output = self.head(x.flatten(1))
            return output.tanh() if len(x) == 5 else output

    plan = GradientPlan(Borrowed(classifier(Odd())), inputs(5, 3, 4, 4))
    with pytest.raises(
        ModelError, match=r"net computes differently for these 5 images than for the first .* another batch_size"
    ):
        Sweep(plan, inputs(5, 3, 4, 4), 5)
    with Sweep(plan, inputs(4, 3, 4, 4), 4) as sweep:
        assert sweep.norms(torch.ones(4, 4).double())["squares"].shape == (4, 1)


@pytest.mark.parametrize("known", [True, False])
def test_a_model_that_chooses_its_layers_by_image(known):
    """The same operations with other weights: their norms must not go under the first ones' names."""

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = nn.Linear if known else SlowLinear
            self.warm, self.cold = kind(48, 4), kind(48, 4)

        def forward(self, x):
            return (self.warm if bool(x.mean() > 0) else self.cold)(x.flatten(1))

    x = inputs(4, 3, 4, 4).abs()
    plan = GradientPlan(Borrowed(classifier(Choosing())), x)
    assert bool(plan.parameters) == known
    with Sweep(plan, x, 4), pytest.raises(ModelError, match=r"a model that chooses its layers by image"):
        Sweep(plan, -x, 4)


class SlowLinear(nn.Linear):
    """By an operation without a rule."""

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x[:, None].expand(-1, 2, -1), self.weight).sum(1)


pytestmark = pytest.mark.usefixtures("one_thread")


class Bilinear(nn.Module):
    """An operation that torch has and no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pair, self.head = nn.Linear(12, 5), nn.Bilinear(5, 5, 6), nn.Linear(6, 4)

    def forward(self, x):
        z = torch.tanh(self.first(x.flatten(1)))
        return self.head(torch.tanh(self.pair(z, z)))


class Choosing(nn.Module):
    """Looks at numbers to decide what to do, which vmap cannot; its scan has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(12, 6), nn.GRUCell(6, 6), nn.Linear(6, 4)
        self.power = nn.Parameter(torch.rand(6) + 1)

    def forward(self, x):
        z = torch.sigmoid(self.first(x.flatten(1)))
        if bool((z.detach() < 0).any()):
            return self.head(z)
        return self.head(self.cell(z**self.power))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.rnn(x.flatten(2).transpose(1, 2))[0][:, -1])


@pytest.mark.parametrize(
    ("make", "named", "looped"),
    [(Bilinear, "'pair' of net", False), (Choosing, "net .*there is no rule for", True)],
)
@pytest.mark.parametrize("images", [4, 2])
def test_the_numbers_are_right(monkeypatch, make, named, looped, images):
    torch.manual_seed(0)
    module = make().double()
    model, x = classifier(module), inputs(4, 3, 2, 2).double()
    logits, loops = Borrowed.logits, []

    def watched(borrowed, x, instead=None):
        loops.extend(not is_functorch_wrapped_tensor(leaf) for leaf in (instead or {}).values())
        return logits(borrowed, x, instead)

    monkeypatch.setattr(Borrowed, "logits", watched)
    cotangent = inputs(4, 4, seed=3).double()
    with pytest.warns(GradientFallbackWarning, match=named):
        squares, totals, layers = swept(model, x, cotangent, images)
    assert any(loops) == looped
    parts = zip(x.unflatten(0, (images, -1)), cotangent.unflatten(0, (images, -1)), strict=True)
    truth = [squares_and_totals(jacobian(module, rows)[1], c, layers) for rows, c in parts]
    assert error(squares, torch.stack([one for one, _ in truth])) < 1e-9
    assert error(totals, torch.stack([one for _, one in truth])) < 1e-9


def test_a_few_images_at_a_time(monkeypatch):
    torch.manual_seed(0)
    model, x = classifier(Bilinear().double()), inputs(5, 3, 2, 2).double()
    cotangent = inputs(5, 4, seed=3).double()
    with pytest.warns(GradientFallbackWarning):
        whole = swept(model, x, cotangent)[0]
    monkeypatch.setattr(sweep_module, "BYTES", 4 * 2 * (5 * 5 * 6 + 6))
    vmapped, sizes = sweep_module._vmapped, []
    monkeypatch.setattr(sweep_module, "_vmapped", lambda *a: sizes.append(len(a[2])) or vmapped(*a))
    with pytest.warns(GradientFallbackWarning):
        torch.testing.assert_close(swept(model, x, cotangent)[0], whole)
    assert sizes == [2, 2, 1]


def test_a_recurrent_layer():
    """A loop of linear layers over time: torch's own rules are enough."""
    torch.manual_seed(0)
    module = Recurrent().double()
    model, x, cotangent = classifier(module), inputs(3, 3, 2, 2).double(), inputs(3, 4, seed=3).double()
    squares, _, layers = swept(model, x, cotangent)
    pairs = zip(x, cotangent, strict=True)
    truth = [squares_and_totals(jacobian(module, row[None])[1], c[None], layers)[0] for row, c in pairs]
    assert error(squares, torch.stack(truth)) < 1e-9


pytestmark = pytest.mark.usefixtures("one_thread")


class Refusing(torch.autograd.Function):
    """The identity, of which there is no way back."""

    refuses = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if Refusing.refuses:
            raise AssertionError("differentiated")
        return g


class Early(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(48, 6), nn.Linear(6, 6), nn.Linear(6, C)

    def forward(self, x):
        z = torch.tanh(self.first(x.flatten(1)))
        if z.requires_grad:
            z = Refusing.apply(z)
        return self.head(torch.tanh(self.second(z)))


def test_layers_that_do_not_count_are_not_differentiated(monkeypatch):
    model, x, c = classifier(Early()), inputs(4, 3, 4, 4), inputs(4, C).double()
    whole, some = (Prepared(model, x, lambda layers, n=n: layers[-n:]) for n in (3, 2))
    assert some.notes == {"layers": ["second", "head"], "depth": [1, 2], "of": 3}
    assert whole.notes == {"layers": ["first", "second", "head"], "depth": [0, 1, 2], "of": 3}
    monkeypatch.setattr(Refusing, "refuses", True)
    with Sweep(some.plan, x, 4) as sweep:
        assert not any("Refusing" in name for name, *_ in sweep._graph.signature())
        kept = sweep.norms(c)["squares"]
    with Sweep(whole.plan, x, 4) as sweep, pytest.raises(AssertionError, match="differentiated"):
        sweep.norms(c)
    monkeypatch.setattr(Refusing, "refuses", False)
    with Sweep(whole.plan, x, 4) as sweep:
        torch.testing.assert_close(sweep.norms(c)["squares"][:, 1:], kept, rtol=1e-6, atol=0)


def test_the_graph_of_early_layers_is_not_built():
    model, x = classifier(made("test_resnet")), inputs(2, 3, 32, 32)
    whole = Prepared(model, x, lambda layers: layers)
    some = Prepared(model, x, lambda layers: layers[-3:])
    assert some.layers == whole.layers[-3:]
    assert len(some.plan.signature) < 0.2 * len(whole.plan.signature)


def test_it_fits_the_model_it_was_made_of():
    module = rows(nn.Linear(48, 6), nn.BatchNorm1d(6), nn.Linear(6, C))
    model, x = classifier(module), inputs(4, 3, 4, 4)
    prepared = Prepared(model, x, lambda layers: layers)
    assert prepared.fits(model, x[:2])
    assert not prepared.fits(model, x.double())
    assert not prepared.fits(classifier(made("linear")), x)
    module.train()(torch.randn(5, 48))
    assert prepared.fits(model, x)  # statistics are taken over
    with torch.no_grad():
        module[1].weight.mul_(2)
    assert not prepared.fits(model, x)  # the same memory, but what is proved of it may not hold any more
    prepared = Prepared(model, x, lambda layers: layers)
    module[3] = nn.Linear(6, C)
    assert not prepared.fits(model, x)


def test_statistics_follow_the_model():
    module = rows(nn.Linear(48, 6), nn.BatchNorm1d(6), nn.Linear(6, C))
    model, x, c = classifier(module), inputs(4, 3, 4, 4), inputs(4, C).double()
    prepared = Prepared(model, x, lambda layers: layers)
    with Sweep(prepared.plan, x, 4) as sweep:
        before = sweep.norms(c)["squares"]
    module.train()(inputs(64, 3, 4, 4, seed=9) * 5)
    assert prepared.fits(model, x)
    with Sweep(prepared.plan, x, 4) as sweep:
        after = sweep.norms(c)["squares"]
    with Sweep(Prepared(model, x, lambda layers: layers).plan, x, 4) as sweep:
        torch.testing.assert_close(after, sweep.norms(c)["squares"])
    assert not torch.allclose(after, before)
