"""Last-layer Laplace: by hand, against the Hessian by autograd and samples, and what it does not depend on."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from dubito.errors import TableError, ValueRangeError
from dubito.scores import Laplace
from dubito.scores.laplace import evidence_precision, logit_information
from dubito.table import Table

C, D = 3, 4


def layer(seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(C, D, generator=generator).double(), torch.randn(C, generator=generator).double()


def table(n: int = 60, seed: int = 0, scale: float = 1.0) -> Table:
    weight, bias = layer(scale=scale)
    feature = torch.randn(n, D, generator=torch.Generator().manual_seed(seed + 1)).double() + 0.5
    return Table(feature=feature, logit=feature @ weight.T + bias)


def gauss_newton(rows: Table) -> torch.Tensor:
    """The Hessian of the summed cross-entropy in (W, b), class by class; for a linear layer it has no other part."""
    weight, bias = layer()
    x, label = torch.cat([rows.feature, torch.ones(len(rows), 1)], dim=1).double(), torch.zeros(len(rows)).long()

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ theta.view(C, D + 1).T, label, reduction="sum")

    return torch.autograd.functional.hessian(loss, torch.cat([weight, bias[:, None]], dim=1).flatten())


def logit_covariance(rows: Table, covariance: torch.Tensor) -> torch.Tensor:
    x = torch.cat([rows.feature, torch.ones(len(rows), 1)], dim=1).double()
    jacobian = torch.einsum("ck,ne->ncke", torch.eye(C).double(), x).reshape(len(rows), C, -1)
    return jacobian @ covariance @ jacobian.mT


def information(rows: Table, covariance: torch.Tensor) -> torch.Tensor:
    p = rows.logit.softmax(1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return 0.5 * torch.einsum("nij,nji->n", fisher, covariance)


def precision(train: Table, structure: str, tau: float) -> torch.Tensor:
    """H as the module's docstring has it, with nothing but torch.kron and diag."""
    if structure == "full":
        whole = gauss_newton(train)
    elif structure == "diagonal":
        whole = torch.diag(gauss_newton(train).diagonal())
    else:
        x, p = torch.cat([train.feature, torch.ones(len(train), 1)], dim=1).double(), train.logit.softmax(1)
        fisher = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
        whole = len(train) * torch.kron(fisher, x.T @ x / len(x))
    return whole + tau * torch.eye(C * (D + 1)).double()


def test_by_hand():
    # One row z = 0, so x = (0, 1); two classes alike, so F = 1/4 (1, -1; -1, 1), with one eigenvalue of 1/2 for the
    # direction (1, -1) / sqrt 2. With tau = 1/2, that direction has variance 1 / (1/2 + 1/2) = 1, and 1/2 tr(F S) =
    # 1/2 * 1/2 * 1. At z = 2 the weight, of which nothing is known, adds 2^2 / tau = 8 to it: 1/2 * 1/2 * (1 + 8).
    train = Table(feature=[[0.0]], logit=[[0.0, 0.0]])
    rows = Table(feature=[[0.0], [2.0]], logit=[[0.0, 0.0], [0.0, 0.0]])
    assert Laplace(prior_precision=0.5).fit(train).score(rows).tolist() == pytest.approx([0.25, 2.25])
    assert Laplace("full", prior_precision=0.5).fit(train).score(rows).tolist() == pytest.approx([0.25, 2.25])
    # Diagonal: each bias has 1 / (1/4 + 1/2) = 4/3, and each weight 1 / (1/2): 1/2 (1/4 + 1/4) (4/3 + 4 * 2).
    diagonal = Laplace("diagonal", prior_precision=0.5).fit(train).score(rows)
    assert diagonal.tolist() == pytest.approx([1 / 3, 7 / 3])


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_against_the_explicit_hessian(structure):
    train, rows = table(), table(25, seed=5)
    covariance = logit_covariance(rows, torch.linalg.inv(precision(train, structure, 0.7)))
    score = Laplace(structure, prior_precision=0.7).fit(train)
    assert torch.allclose(score.score(rows), information(rows, covariance), rtol=1e-9)


def test_the_information_is_that_of_sampled_logits_where_they_vary_little():
    rows = table(5, seed=5)
    covariance = logit_covariance(rows, torch.linalg.inv(precision(table(4000), "full", 1.0)))
    noise = torch.randn(400_000, C, generator=torch.Generator().manual_seed(0)).double()
    for number, row in enumerate(covariance):
        p = (rows.logit[number] + noise @ torch.linalg.cholesky(row).T).softmax(1)
        entropy = -(p.mean(0) * p.mean(0).log()).sum() + (p * p.log()).sum(1).mean()
        u = Laplace("full", prior_precision=1.0).fit(table(4000)).score(rows)[number]
        assert u.item() == pytest.approx(entropy.item(), rel=0.02)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_the_prior_precision_is_where_the_evidence_is_largest(structure):
    train, (weight, bias) = table(), layer()
    norm = float(weight.square().sum() + bias.square().sum())

    def negative_evidence(log_tau: float) -> float:
        tau = math.exp(log_tau)
        determinant = torch.linalg.slogdet(precision(train, structure, tau)).logabsdet
        return 0.5 * (float(determinant) + tau * norm - C * (D + 1) * log_tau)

    best = minimize_scalar(negative_evidence, bounds=(-10, 10), method="bounded", options={"xatol": 1e-9}).x
    assert Laplace(structure).fit(train).precision_ == pytest.approx(math.exp(best), rel=1e-4)


def test_the_evidence_needs_eigenvalues():
    with pytest.raises(
        ValueRangeError, match=r"laplace\.fit: the evidence has no maximum .* pass prior_precision=1\.0"
    ):
        evidence_precision(torch.zeros(4), 1.0)


def test_information_by_directions_is_that_by_classes():
    logits = 3 * torch.randn(30, C, generator=torch.Generator().manual_seed(0)).double()
    variances = torch.rand(30, C, generator=torch.Generator().manual_seed(1)).double()
    by_class = logit_information(logits, variances)
    assert torch.allclose(by_class, logit_information(logits, variances, torch.eye(C).double()), rtol=1e-12)


@pytest.mark.parametrize("structure", ["kron", "diagonal", "full"])
def test_certain_rows_keep_their_order(structure):
    # 1 - p falls from 1e-4 to 1e-39, where float64 has no such difference from 1; u falls in proportion.
    logit = torch.tensor([[10.0, 0, 0], [40, 0, 0], [90, 0, 0]]).double()
    u = Laplace(structure, prior_precision=1.0).fit(table()).score(Table(feature=torch.ones(3, D), logit=logit))
    assert u.diff().max() < 0
    assert (u[1] / u[2]).item() == pytest.approx(math.exp(50), rel=1e-6)


def test_what_all_logits_share_does_not_matter():
    train, rows = table(), table(20, seed=5)
    shifted = rows.extended(logit=rows.logit + torch.arange(20.0)[:, None])
    for structure in ("kron", "diagonal", "full"):
        score = Laplace(structure, prior_precision=2.0).fit(train)
        assert torch.allclose(score.score(shifted), score.score(rows), rtol=1e-9)


def test_far_from_all_rows_less_is_known():
    score = Laplace().fit(table(500))
    far = table(50, seed=5)
    assert bool((score.score(far.extended(feature=10 * far.feature)) > 5 * score.score(far)).all())
    fewer = Laplace(prior_precision=1.0).fit(table(50)).score(far)
    assert bool((fewer > Laplace(prior_precision=1.0).fit(table(5000)).score(far)).all())


def test_in_blocks_it_is_the_same(monkeypatch):
    score, rows = Laplace("full", prior_precision=1.0).fit(table()), table(40, seed=5)
    whole = score.score(rows)
    monkeypatch.setattr("dubito.scores.laplace._NUMBERS", 100)
    assert torch.allclose(score.score(rows), whole, rtol=1e-12)


def test_features_that_never_vary():
    train, rows = table(), table(20, seed=5)
    wider = [Table(feature=F.pad(one.feature, (0, 1)), logit=one.logit) for one in (train, rows)]
    plain = Laplace(prior_precision=1.0).fit(train).score(rows)
    assert torch.allclose(Laplace(prior_precision=1.0).fit(wider[0]).score(wider[1]), plain, rtol=1e-9)
    assert np.isfinite(Laplace().fit(wider[0]).precision_)


def test_what_cannot_be():
    with pytest.raises(ValueRangeError, match=r"laplace: prior_precision must be a number, above 0; got 0\.0\."):
        Laplace(prior_precision=0.0)
    wide = Table(feature=torch.ones(2, 600), logit=torch.eye(2, 10))
    with pytest.raises(ValueRangeError, match=r"10 classes and 600 features have 6,010. Use structure='kron'"):
        Laplace("full").fit(wide)
    nonlinear = Table(feature=table(500).feature, logit=table(500, seed=9).logit)
    with pytest.raises(
        TableError, match=r"laplace\.fit: logits must be linear in the features.*or set prior_precision"
    ):
        Laplace().fit(nonlinear)
    with pytest.raises(ValueRangeError, match=r"laplace\.fit needs at least two classes"):
        Laplace(prior_precision=1.0).fit(Table(feature=torch.ones(2, 2), logit=torch.ones(2, 1)))
    with pytest.raises(TableError, match=r"laplace\.score: features must be 4 wide, as in fit; got 5"):
        Laplace().fit(table()).score(Table(feature=torch.ones(2, 5), logit=torch.ones(2, C)))
    with pytest.raises(TableError, match=r"laplace\.score: logits must be of 3 classes, as in fit; got 4"):
        Laplace().fit(table()).score(Table(feature=torch.ones(2, D), logit=torch.ones(2, 4)))
