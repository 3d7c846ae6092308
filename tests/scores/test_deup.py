"""DEUP: its inputs by numpy, what it predicts, and what it refuses."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dubito.errors import TableError, ValueRangeError
from dubito.heads import Recipe
from dubito.metrics import spearman
from dubito.scores import DEUP, Entropy, UncertaintyHead, available_scores
from dubito.table import Table

C, D = 3, 5
QUICK = {"width": 16, "depth": 1}


def recipe(loss: str = "l2") -> Recipe:
    return Recipe(loss=loss, batch=50, rows=10_000)


def table(n: int = 300, seed: int = 0) -> Table:
    """Losses that grow with the last feature, which no logit depends on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=generator)
    feature = 2 * torch.eye(C, D)[label] + torch.randn(n, D, generator=generator)
    logit, noise = feature[:, :C] + 0.5, torch.rand(n, generator=generator)
    return Table(feature=feature, logit=logit, label=label, loss=feature[:, -1].exp() * noise)


def numbers(rows: Table, train: Table) -> np.ndarray:
    """The logarithms of the Mahalanobis distance and of the information by a diagonalised Kronecker posterior."""
    z, q, y = train.feature.double().numpy(), rows.feature.double().numpy(), train.label.numpy()
    means = np.stack([z[y == k].mean(0) for k in range(C)])
    within = (z - means[y]).T @ (z - means[y]) / len(z) + 1e-5 * np.eye(D)
    away = q[:, None] - means
    distance = np.einsum("nkd,de,nke->nk", away, np.linalg.inv(within), away).min(1)
    x, p = np.hstack([z, np.ones((len(z), 1))]), train.logit.double().softmax(1).numpy()
    fisher = np.mean([np.diag(one) - np.outer(one, one) for one in p], axis=0)
    weight = np.linalg.lstsq(x, train.logit.double().numpy(), rcond=None)[0]
    curvature = len(z) * np.kron(fisher, x.T @ x / len(z))
    eigenvalues, tau = np.linalg.eigvalsh(curvature), 1.0
    for _ in range(500):  # MacKay's fixed point
        tau = (eigenvalues / (eigenvalues + tau)).sum() / np.square(weight).sum()
    covariance = np.linalg.inv(curvature + tau * np.eye(len(curvature)))
    u = []
    for one, logit in zip(np.hstack([q, np.ones((len(q), 1))]), rows.logit.double().softmax(1).numpy(), strict=True):
        jacobian = np.kron(np.eye(C), one)
        u.append(0.5 * np.trace((np.diag(logit) - np.outer(logit, logit)) @ jacobian @ covariance @ jacobian.T))
    return np.log(np.stack([distance, np.array(u)], axis=1))


def test_it_is_a_head_on_standardised_inputs():
    train, rows = table(), table(40, seed=1)
    own = {name: np.hstack([one.feature.numpy(), numbers(one, train)]) for name, one in (("fit", train), ("q", rows))}
    mean, deviation = own["fit"].mean(0), own["fit"].std(0)
    fit = Table(feature=((own["fit"] - mean) / deviation).astype(np.float32), loss=train.loss)
    head = UncertaintyHead(**QUICK, recipe=recipe()).fit(fit)
    expected = head.score(Table(feature=((own["q"] - mean) / deviation).astype(np.float32)))
    score = DEUP(**QUICK, recipe=recipe()).fit(train)
    assert torch.allclose(score.score(rows), expected, rtol=0.01, atol=1e-3)
    # Nothing but these inputs matters: without the features, the two numbers are left.
    two = DEUP(inputs=("density", "variance"), **QUICK, recipe=recipe()).fit(train)
    assert two.shift_.numpy() == pytest.approx(mean[D:], rel=1e-4)
    assert two.scale_.numpy() == pytest.approx(deviation[D:], rel=1e-4)


def test_it_predicts_the_mean_loss():
    train, rows = table(2000), table(500, seed=1)
    score = DEUP(inputs=["feature"], recipe=Recipe(loss="l2", batch=100, rows=60_000), **QUICK).fit(train)
    u = score.score(rows)
    assert score.learns_from == ("feature", "loss")
    assert u.mean().item() == pytest.approx(rows.loss.mean().item(), rel=0.2)
    assert spearman(u, rows.feature[:, -1]) > 0.95


def test_less_the_entropy():
    train, rows = table(), table(40, seed=1)
    whole, rest = (
        DEUP(aleatoric=one, inputs=("feature",), recipe=recipe("variance_nll"), **QUICK).fit(train).score(rows)
        for one in ("none", "entropy")
    )
    assert torch.allclose(whole - rest, Entropy().score(rows))


def test_its_default_makes_ten_passes():
    score = DEUP(width=8, depth=1).fit(table())
    assert score.trained_["rows_seen"] == pytest.approx(10 * 300, rel=0.1)
    assert score.score(table(9, seed=1)).min() > 0


def test_features_that_never_vary():
    train, rows = table(), table(40, seed=1)
    wider = [one.extended(feature=F.pad(one.feature, (0, 2), value=0.3)) for one in (train, rows)]
    score = DEUP(inputs=("feature",), recipe=recipe(), **QUICK).fit(wider[0])
    assert score.scale_[-2:].tolist() == [1.0, 1.0]
    assert bool(score.score(wider[1]).isfinite().all())


def test_it_is_made_only_where_it_is_named():
    result = available_scores(table(50, seed=1), table())
    assert "deup" not in result.scores
    assert "losses of images that the model was not trained on" in result.left_out["deup"]
    assert {"deup", "vbll"} <= set(result.not_extracted)
    assert (
        "deup" in available_scores(table(50, seed=1), table(), settings={"deup": {**QUICK, "recipe": recipe()}}).scores
    )


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"deup: with aleatoric='entropy'.* got a recipe with loss 'log_l2'"):
        DEUP(aleatoric="entropy")
    with pytest.raises(ValueRangeError, match=r"deup: the recipe's loss must be one of l2, .*; got 'ranking'"):
        DEUP(recipe=Recipe())
    with pytest.raises(ValueRangeError, match=r"deup: inputs must be different names, at least one; got \(\)"):
        DEUP(inputs=())
    with pytest.raises(TableError, match=r"deup\.score: features must be 5 wide, as in fit; got 4"):
        DEUP(recipe=recipe(), **QUICK).fit(table()).score(Table(feature=torch.ones(2, 4), logit=torch.ones(2, C)))
    with pytest.raises(TableError, match=r"deup\.fit.* at least 2"):
        DEUP().fit(table(1))


def test_logits_of_other_classes_are_refused():
    score, rows = DEUP(**QUICK, recipe=recipe()).fit(table()), table(4)
    with pytest.raises(TableError, match=r"logits must be of 3 classes, as in fit; got 2 in"):
        score.score(rows.extended(logit=rows.logit[:, :2]))
