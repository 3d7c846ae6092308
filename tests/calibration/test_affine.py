"""Vector, matrix and Dirichlet scaling: against other optimisers, and against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from dubito.calibration import DirichletScaling, MatrixScaling, TemperatureScaling, VectorScaling, calibrate
from dubito.calibration._affine import _as_matrix
from dubito.errors import DubitoWarning, ValueRangeError
from dubito.metrics import nll, nll_per_row
from dubito.table import Table
from dubito.table.folds import folds_of
from tests.calibration.samples import sample

INF = float("inf")


def reference(table, inputs, own, off):
    """The objective of `_affine.py`, with all matrices written out, minimised by a method without gradients of ours."""
    t = TemperatureScaling().fit(table).temperature_
    x, y = inputs(table.logit) / t, table.label
    n, c = x.shape

    def objective(flat):
        theta = torch.tensor(flat, requires_grad=True)
        weight, bias = theta[: c * c].reshape(c, c), theta[c * c :]
        diagonal = weight.diagonal()
        mixing = weight - torch.diag(diagonal)
        if off is None:
            weight = torch.diag(diagonal)
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        loss = loss + ((diagonal - 1).square().sum() / own**2 + bias.square().sum() / own**2) / (2 * n)
        if off is not None:
            loss = loss + mixing.square().sum() / off**2 / (2 * n)
        loss.backward()
        return loss.item(), theta.grad.numpy()

    start = np.append(np.eye(c).ravel(), np.zeros(c))
    found = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
    return torch.tensor(found.x[: c * c]).reshape(c, c), torch.tensor(found.x[c * c :])


@pytest.mark.parametrize(
    ("method", "inputs"),
    [
        (VectorScaling(deviation=0.4), lambda z: z),
        (MatrixScaling(deviation=0.4, off_diagonal=0.2), lambda z: z),
        (DirichletScaling(deviation=0.4, off_diagonal=0.2), lambda z: z.log_softmax(1)),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_weights_are_those_of_another_optimiser(method, inputs):
    table = sample(200, 3, bias=0.5)
    method.fit(table)
    weight, bias = reference(table, inputs, 0.4, getattr(method, "off_diagonal", None))
    own = method.weight_ if method.weight_.dim() == 2 else torch.diag(method.weight_)
    if method.name == "vector":
        weight = torch.diag(weight.diagonal())
    assert torch.allclose(own, weight, atol=1e-5)
    assert torch.allclose(method.bias_, bias, atol=1e-5)


@pytest.mark.parametrize("count", [8, 20], ids=["vector", "matrix"])
def test_the_hessian_is_that_of_automatic_differentiation(count):
    table, c = sample(300, 4), 4
    method = MatrixScaling().fit(table)
    theta = torch.linspace(-1, 1, count, dtype=torch.float64)

    def loss(theta):
        weight = theta[:-c].reshape(c, c) if count > 2 * c else torch.diag(theta[:-c])
        z = table.logit.double() / method.temperature_ @ weight.T + theta[-c:]
        return torch.nn.functional.cross_entropy(z, table.label)

    curvature = torch.empty(c, count // c, c, count // c, dtype=torch.float64)
    method._loss(table, theta, curvature)
    expected = torch.autograd.functional.hessian(loss, theta)
    assert torch.allclose(torch.from_numpy(_as_matrix(curvature)) / len(table), expected, atol=1e-5)


@pytest.mark.parametrize("method", [VectorScaling(), DirichletScaling()], ids=lambda one: one.name)
def test_small_maps_are_those_of_lbfgs(method, monkeypatch):
    table = sample(600, 5, bias=0.5)
    newton = method.fit(table).probability(table)
    monkeypatch.setattr("dubito.calibration._affine._SMALL", 0)
    assert torch.allclose(method.fit(table).probability(table), newton, atol=1e-5)


@pytest.mark.parametrize(
    "method", [MatrixScaling(deviation=INF, off_diagonal=INF), DirichletScaling(INF, off_diagonal=INF)]
)
def test_without_penalties_it_is_logistic_regression(method):
    table = sample(400, 3, bias=0.7)
    x = table.logit.log_softmax(1) if method.name == "dirichlet" else table.logit
    expected = LogisticRegression(C=1e10, tol=1e-10, max_iter=5000).fit(x.numpy(), table.label.numpy()).predict_proba(x)
    assert np.abs(method.fit(table).probability(table).numpy() - expected).max() < 1e-4


def test_vector_scaling_of_two_classes_is_logistic_regression():
    # softmax(w * z + b) of two classes is sigmoid(w1 z1 - w0 z0 + b1 - b0)
    table = sample(400, 2, bias=0.7)
    z = table.logit.numpy()
    expected = LogisticRegression(C=1e10, tol=1e-10, max_iter=5000).fit(z, table.label.numpy()).predict_proba(z)
    assert np.abs(VectorScaling(INF).fit(table).probability(table).numpy() - expected).max() < 1e-5


def test_a_tight_prior_is_temperature_scaling():
    table = sample(400, 3, bias=0.5)
    expected = TemperatureScaling().fit(table).probability(table)
    for method in (
        VectorScaling(1e-6),
        MatrixScaling(1e-6, off_diagonal=1e-6),
        DirichletScaling(1e-6, off_diagonal=1e-6),
    ):
        assert torch.allclose(method.fit(table).probability(table), expected, atol=1e-6)


def test_deviations_are_chosen_by_what_the_rows_say():
    assert VectorScaling().fit(sample(200, 30)).deviation_ <= 0.1  # 60 numbers from 200 rows would be noise
    assert VectorScaling().fit(sample(1000, 3, bias=1.5)).deviation_ >= 0.3
    mixed = sample(2000, 3, seed=3)
    swap = torch.tensor([[1.0, 0.8, 0.0], [0.0, 1.0, 0.8], [0.8, 0.0, 1.0]], dtype=torch.float64)
    test = sample(2000, 3, seed=4)
    mixed, test = (one.extended(logit=one.logit @ swap) for one in (mixed, test))
    losses = {m.name: nll(m.fit(mixed).apply(test).logit, test.label) for m in (VectorScaling(), MatrixScaling())}
    assert losses["matrix"] < losses["vector"] - 0.01


def copies(times: int = 20) -> Table:
    """Crops of 25 images of ten classes, alike but for little noise."""
    few, noise = sample(25, 10), torch.Generator().manual_seed(0)
    logit = few.logit.repeat(times, 1)
    logit = logit + 0.05 * torch.randn(logit.shape, generator=noise)
    names = [f"{image:02d}@{epoch}" for epoch in range(times) for image in range(25)]
    return Table(logit=logit, label=few.label.repeat(times), id=names)


def test_deviations_are_chosen_on_other_images_than_the_weights_learn_from():
    rows = copies()
    apart = rows.select("logit", "label")  # rows that are taken for images of their own
    assert VectorScaling().fit(apart).deviation_ > VectorScaling().fit(rows).deviation_
    # So it is inside the cross-validation of methods.
    losses = [calibrate(one, ["vector"], resamples=50)["vector"].nll.value for one in (rows, apart)]
    fold = folds_of(rows, 5, seed=0)
    parts = []
    for one in range(5):
        held_out, rest = rows.rows(fold == one), rows.rows(fold != one)
        parts.append(nll_per_row(VectorScaling().fit(rest).apply(held_out).logit, held_out.label))
    assert losses[0] == pytest.approx(torch.cat(parts).mean().item())


def test_classes_that_do_not_occur_stay_finite():
    table = sample(300, 4)
    table = table.rows(table.label != 3)
    for method in (VectorScaling(), DirichletScaling(off_diagonal=0.1)):
        p = method.fit(table).probability(table)
        assert p[:, 3].min() > 0
        assert p[:, 3].mean() < table.logit.softmax(1)[:, 3].mean()


def test_an_optimiser_that_stops_early_warns():
    with pytest.warns(DubitoWarning, match="vector.fit: 1 steps did not suffice on 300 rows of 4 classes.*Raise steps"):
        VectorScaling(deviation=1.0, steps=1).fit(sample(300, bias=0.5))


@pytest.mark.parametrize(
    "settings", [{"deviation": 0.0}, {"deviation": -1.0}, {"steps": 0}, {"off_diagonal": float("nan")}]
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValueRangeError, match=f"matrix: {next(iter(settings))} must be"):
        MatrixScaling(**settings)


def test_dirichlet_ignores_a_constant_in_all_logits():
    table = sample(200, 3)
    shifted = table.extended(logit=table.logit + torch.arange(200)[:, None] % 7)
    method = DirichletScaling(0.3, off_diagonal=0.1)
    one, two = method.fit(table).probability(table), method.fit(shifted).probability(shifted)
    assert torch.allclose(one, two, atol=1e-6)


def test_many_classes_in_float32_and_streamed(monkeypatch):
    monkeypatch.setattr("dubito.calibration._affine.EXACT", 2)
    monkeypatch.setattr("dubito.calibration._affine._HELD", 0)
    table = sample(300, 4, bias=0.3)
    table = Table(logit=table.logit.float(), label=table.label)
    coarse = MatrixScaling(0.3, off_diagonal=0.1).fit(table).probability(table)
    monkeypatch.setattr("dubito.calibration._affine.EXACT", 128)
    assert torch.allclose(coarse, MatrixScaling(0.3, off_diagonal=0.1).fit(table).probability(table), atol=2e-3)
