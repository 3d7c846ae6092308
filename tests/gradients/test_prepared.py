"""A model made ready: which layers are wanted, what is not even built for the others, and when it is out of date."""

import pytest
import torch
from torch import nn

from dubito.gradients.prepared import Prepared
from tests.gradients.reference import classifier, inputs
from tests.gradients.zoo import C, made, rows

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
    assert some.notes() == {"layers": ["second", "head"], "depth": [1, 2], "of": 3}
    assert whole.notes() == {"layers": ["first", "second", "head"], "depth": [0, 1, 2], "of": 3}
    monkeypatch.setattr(Refusing, "refuses", True)
    with some.sweep(x, 4) as sweep:
        assert not any("Refusing" in name for name, *_ in sweep._graph.signature())
        kept = sweep.norms(c)["squares"]
    with whole.sweep(x, 4) as sweep, pytest.raises(AssertionError, match="differentiated"):
        sweep.norms(c)
    monkeypatch.setattr(Refusing, "refuses", False)
    with whole.sweep(x, 4) as sweep:
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
    with prepared.sweep(x, 4) as sweep:
        before = sweep.norms(c)["squares"]
    module.train()(inputs(64, 3, 4, 4, seed=9) * 5)
    assert prepared.fits(model, x)
    with prepared.sweep(x, 4) as sweep:
        after = sweep.norms(c)["squares"]
    with Prepared(model, x, lambda layers: layers).sweep(x, 4) as sweep:
        torch.testing.assert_close(after, sweep.norms(c)["squares"])
    assert not torch.allclose(after, before)
