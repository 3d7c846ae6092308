"""The variational Bayesian last layer: by hand, against the bound minimised by scipy, and what it says of itself."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from dubito.errors import DubitoWarning, TableError, ValueRangeError
from dubito.scores import VBLL
from dubito.table import Table

C, D, TAU = 3, 4, 2.0


def table(n: int = 300, seed: int = 0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(C, (n,), generator=generator)
    feature = torch.eye(C, D)[place] * 1.5 + torch.randn(n, D, generator=generator) + 5
    return Table(feature=feature, label=torch.tensor([3, 7, 11])[place])


def inputs(rows: Table, train: Table) -> np.ndarray:
    """Features less their mean, by one scale, and a one."""
    z, own = train.feature.double().numpy(), rows.feature.double().numpy()
    scale = np.sqrt(z.var(axis=0).mean())
    return np.hstack([(own - z.mean(axis=0)) / scale, np.ones((len(own), 1))])


def bound(train: Table, mean: np.ndarray, variance: np.ndarray) -> float:
    """The whole loss of the module's docstring, straight from its formula."""
    x, y = inputs(train, train), np.searchsorted([3, 7, 11], train.label.numpy())
    logit = x @ mean.T
    likelihood = np.log(np.exp(logit + x**2 @ variance.T / 2).sum(1)) - logit[np.arange(len(x)), y]
    divergence = 0.5 * (TAU * variance + TAU * mean**2 - 1 - np.log(TAU * variance))
    return float(likelihood.sum() + divergence.sum())


def test_by_hand():
    # Features 1 and -1, so mean 0 and deviation 1. Weights have mean 0 and variance 1, biases 0 and 2: at z = 3, both
    # logits have variance 9 + 2, p = 1/2, and u = 1/2 (1/4 11 + 1/4 11).
    score = VBLL(epochs=1, tolerance=100.0).fit(Table(feature=[[1.0], [-1.0]], label=[0, 1]))
    assert (score.shift_.tolist(), score.scale_) == ([0.0], 1.0)
    score.mean_ = torch.zeros(2, 2).double()
    score.variance_ = torch.tensor([[1.0, 2.0], [1.0, 2.0]]).double()
    assert score.score(Table(feature=[[3.0]])).item() == pytest.approx(2.75)
    # A mean of 3 for the first logit, less certain by the probit: p = sigmoid(3 / sqrt(1 + 11 pi / 8)).
    score.mean_[0, 1] = 3.0
    score.variance_[1] = score.variance_[0]
    expected = 1 / (1 + np.exp(-3 / np.sqrt(1 + 11 * np.pi / 8)))
    assert score.probabilities(Table(feature=[[3.0]])).tolist()[0] == pytest.approx([expected, 1 - expected])


def test_against_the_bound_minimised_by_scipy():
    train, rows = table(), table(100, seed=1)
    score = VBLL(prior_precision=TAU, epochs=60).fit(train)

    def loss(flat: np.ndarray) -> float:
        mean, log_variance = flat.reshape(2, C, D + 1)
        return bound(train, mean, np.exp(log_variance))

    start = np.concatenate([np.zeros(C * (D + 1)), np.full(C * (D + 1), -4.0)])
    best = minimize(loss, start, method="L-BFGS-B", options={"maxfun": 100_000, "maxiter": 2000})
    ours = bound(train, score.mean_.numpy(), score.variance_.numpy())
    assert 0 <= (ours - best.fun) / len(train) < 1e-3
    mean, log_variance = best.x.reshape(2, C, D + 1)
    x = inputs(rows, train)
    v = x**2 @ np.exp(log_variance).T
    logit = x @ mean.T / np.sqrt(1 + np.pi / 8 * v)
    p = np.exp(logit) / np.exp(logit).sum(1, keepdims=True)
    assert score.score(rows).numpy() == pytest.approx(0.5 * (p * (1 - p) * v).sum(1), rel=0.05)
    assert score.probabilities(rows).numpy() == pytest.approx(p, abs=0.003)


def test_more_images_leave_less_open_and_far_ones_more():
    rows = table(100, seed=1)
    few, many = (VBLL(epochs=30).fit(table(n)).score(rows) for n in (100, 3000))
    assert bool((many < few / 5).all())
    between = rows.extended(feature=torch.full((100, D), 5.0) + torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert VBLL(epochs=30).fit(table()).score(between).min() > 5 * VBLL(epochs=30).fit(table()).score(rows).median()


def test_a_class_without_images_has_no_weights():
    score = VBLL(epochs=30).fit(table())
    assert score.classes_.tolist() == [3, 7, 11]
    assert score.mean_.shape == (C, D + 1)
    renamed = table().extended(label=table().label // 4)
    assert torch.equal(VBLL(epochs=30).fit(renamed).score(table(9, seed=1)), score.score(table(9, seed=1)))


def test_the_seed_decides_the_order_alone():
    rows = table(50, seed=1)
    first, again, other = (VBLL(epochs=60, seed=seed).fit(table()).score(rows) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.allclose(first, other, rtol=0.05)


def test_shift_and_scale_of_the_features_do_not_matter():
    train, rows = table(), table(50, seed=1)
    moved = [one.extended(feature=one.feature.double() * 100 - 7) for one in (train, rows)]
    plain = VBLL(epochs=30).fit(train).score(rows)
    assert torch.allclose(VBLL(epochs=30).fit(moved[0]).score(moved[1]), plain, rtol=1e-3)


def test_it_warns_before_it_has_converged():
    with pytest.warns(DubitoWarning, match=r"vbll\.fit: after 1 epochs, about .* nats per row .*Raise epochs"):
        score = VBLL(epochs=1).fit(table())
    assert score.left_ > 0.01
    assert VBLL(epochs=60).fit(table()).left_ < 1e-3


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"vbll: epochs must be a whole number, at least 1; got 0\."):
        VBLL(epochs=0)
    with pytest.raises(TableError, match=r"vbll\.fit needs labels of two classes or more; .* are all 7\."):
        VBLL().fit(table().extended(label=torch.full((300,), 7)))
    with pytest.raises(TableError, match=r"vbll\.fit needs labelled rows"):
        VBLL().fit(table().rows(slice(0, 0)))
    with pytest.raises(TableError, match=r"vbll\.score: features must be 4 wide, as in fit; got 5"):
        VBLL(epochs=60).fit(table()).score(Table(feature=torch.ones(2, 5)))
