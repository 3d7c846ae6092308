"""Closed forms of the last layer: by hand, against autograd and brute force, and in order where softmax is sure."""

import math
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.scores import GradNorm, LastLayerGradient, load_score, save_score
from dubito.scores.last_layer_gradient import grad_norm, last_layer_gradient
from dubito.table import Provenance, Table

WEIGHTINGS = ("fisher", "root", "expected_l1")


def head(c: int = 5, d: int = 4, *, bias: bool = True, n: int = 7):
    torch.manual_seed(3)
    layer = nn.Linear(d, c, bias=bias).double()
    z = 2 * torch.randn(n, d, dtype=torch.float64)
    return layer, z, layer(z).detach()


def by_autograd(layer: nn.Linear, z: torch.Tensor, weighting: str) -> torch.Tensor:
    """One backward pass for every class and every row."""
    result = []
    for row in z:
        p = layer(row).softmax(-1).detach()
        total = 0.0
        for y in range(len(p)):
            grads = torch.autograd.grad(layer(row).log_softmax(-1)[y], list(layer.parameters()))
            flat = torch.cat([grad.flatten() for grad in grads])
            norm = {"fisher": flat.norm() ** 2, "root": flat.norm(), "expected_l1": flat.abs().sum()}[weighting]
            total = total + (p[y].sqrt() if weighting == "root" else p[y]) * norm
        result.append(total)
    return torch.stack(result)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_against_autograd(weighting, bias):
    layer, z, logits = head(bias=bias)
    result = last_layer_gradient(z, logits, weighting, bias=bias)
    torch.testing.assert_close(result, by_autograd(layer, z, weighting), rtol=1e-12, atol=0)
    assert not torch.allclose(result, last_layer_gradient(z, logits, weighting, bias=not bias))


@pytest.mark.parametrize("bias", [True, False])
def test_grad_norm_against_autograd(bias):
    layer, z, logits = head(bias=bias)
    result = []
    for row in z:
        uniform = torch.full((5,), 0.2, dtype=torch.float64)
        loss = F.kl_div(layer(row).log_softmax(-1), uniform, reduction="sum")
        result.append(sum(grad.abs().sum() for grad in torch.autograd.grad(loss, list(layer.parameters()))))
    torch.testing.assert_close(grad_norm(z, logits, bias=bias), torch.stack(result), rtol=1e-12, atol=0)
    # The paper's loss is the cross-entropy with a uniform target, whose gradient is the same.
    loss = sum(F.cross_entropy(layer(z[0])[None], torch.tensor([y])) for y in range(5)) / 5
    (weight, *_) = torch.autograd.grad(loss, list(layer.parameters()))
    assert float(weight.abs().sum()) == pytest.approx(float(grad_norm(z, logits)[0]), rel=1e-12)


def test_grad_norm_by_brute_force():
    _, z, logits = head()
    p = np.exp(logits.numpy())
    p /= p.sum(1, keepdims=True)
    for i in range(len(z)):
        entries = [abs((p[i, c] - 1 / 5) * float(z[i, j])) for c in range(5) for j in range(4)]
        assert float(grad_norm(z, logits)[i]) == pytest.approx(sum(entries), rel=1e-12)


def test_by_hand():
    # p = (3/4, 1/4), z = (3, -4): ||z||_2^2 + 1 = 26, ||z||_1 + 1 = 8.
    z, logits = torch.tensor([[3.0, -4.0]]), torch.tensor([[math.log(3), 0.0]], dtype=torch.float64)
    # e_0 - p = (1/4, -1/4), e_1 - p = (-3/4, 3/4)
    fisher = 0.75 * 2 / 16 + 0.25 * 2 * 9 / 16
    root = math.sqrt(0.75 * 2 / 16) + math.sqrt(0.25 * 2 * 9 / 16)
    l1 = 0.75 * 2 / 4 + 0.25 * 2 * 3 / 4
    assert last_layer_gradient(z, logits).tolist() == pytest.approx([26 * fisher])
    assert last_layer_gradient(z, logits, "root").tolist() == pytest.approx([math.sqrt(26) * root])
    assert last_layer_gradient(z, logits, "expected_l1").tolist() == pytest.approx([8 * l1])
    assert grad_norm(z, logits).tolist() == pytest.approx([7 * 0.5])  # |3/4 - 1/2| + |1/4 - 1/2|
    table = Table(feature=z, logit=logits)
    assert LastLayerGradient("root", bias=False).score(table).tolist() == pytest.approx([5 * root])
    assert GradNorm().score(table).tolist() == pytest.approx([-3.5])  # what the model knows is the less uncertain
    assert GradNorm(bias=True).score(table).tolist() == pytest.approx([-4.0])


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_confident_rows_keep_their_order(weighting):
    # 1 - p is exp(-gap): below 1e-16 a subtraction from one would give zero, and all these rows would tie.
    gap = torch.arange(30.0, 600.0, 30.0, dtype=torch.float64)
    logits = torch.stack([gap, torch.zeros_like(gap)], 1)
    result = last_layer_gradient(torch.ones(len(gap), 1), logits, weighting)
    rate = -result.log().diff() / 30
    # p = exp(-gap): 2 p, and for root sqrt(2) p + sqrt(2 p), whose second term is the larger
    assert rate.tolist() == pytest.approx([0.5 if weighting == "root" else 1.0] * len(rate), rel=1e-6)
    twice = {"fisher": 2 * 2, "expected_l1": 2 * 2 * 2, "root": math.sqrt(2) * math.sqrt(2)}[weighting]
    exact = twice * torch.exp(-gap * (0.5 if weighting == "root" else 1.0))
    torch.testing.assert_close(result, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_ties_and_symmetry(weighting):
    z = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    logits = torch.tensor([[2.0, 2.0, -1.0], [0.0, 0.0, 0.0], [-1.0, 2.0, 2.0], [7.0, 7.0, 7.0]])
    result = last_layer_gradient(z, logits, weighting)
    torch.testing.assert_close(result[:2], result[2:], rtol=1e-12, atol=0)  # classes have no order, logits no zero
    norm = z[1].double().abs().sum() + 1 if weighting == "expected_l1" else z[1].double().square().sum() + 1
    of_class = {"fisher": 2 / 3, "expected_l1": 4 / 3, "root": 3 * math.sqrt(2 / 9)}[weighting]
    assert float(result[1]) == pytest.approx(of_class * float(norm.sqrt() if weighting == "root" else norm))
    assert float(grad_norm(z, logits)[1]) == pytest.approx(0, abs=1e-12)


def test_a_thousand_classes_are_no_square_of_a_thousand():
    n, c = 2048, 1000
    logits, z = torch.randn(n, c), torch.randn(n, 64)
    start = time.perf_counter()
    for weighting in WEIGHTINGS:
        last_layer_gradient(z, logits, weighting)
    assert time.perf_counter() - start < 5  # (n, c, c) would be 16 GB
    p = logits[:3].double().softmax(-1)
    brute = torch.stack([(row[:, None] * (torch.eye(c) - row).square()).sum() for row in p])
    expected = brute * (z[:3].double().square().sum(-1) + 1)
    torch.testing.assert_close(last_layer_gradient(z[:3], logits[:3]), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("score", [LastLayerGradient(), GradNorm()])
def test_one_class_says_nothing(score):
    with pytest.raises(ValueRangeError, match=rf"{score.name} needs .* two classes; got logits of shape \(3, 1\)"):
        score.score(Table(feature=torch.ones(3, 2), logit=torch.ones(3, 1)))


@pytest.mark.parametrize("score", [LastLayerGradient(), GradNorm()])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_without_meaning(score, bad):
    for column in ("feature", "logit"):
        columns = {"feature": torch.ones(2, 2), "logit": torch.ones(2, 3)}
        columns[column][1, 0] = bad
        with pytest.raises(ValueRangeError, match=rf"{score.name}\.score: column '{column}' must be finite; row 1 "):
            score.score(Table(**columns))


def test_grad_norm_of_all_layers():
    table = Table(gradient_uniform=[[1.0, 2.0], [0.0, 0.5]], mine_uniform=[[7.0], [8.0]])
    assert GradNorm("gradient").score(table).tolist() == [-3.0, -0.5]
    assert GradNorm("mine").score(table).tolist() == [-7.0, -8.0]
    assert GradNorm("gradient", layers=(0.0, 1.0)).score(table).tolist() == [-2.0, -0.5]
    with pytest.raises(MissingColumnError, match=r"needs column 'gradient_uniform'.* with uniform=True\.$"):
        GradNorm("gradient").score(Table(feature=torch.ones(1, 1), logit=torch.ones(1, 2)))
    with pytest.raises(ValueRangeError, match="grad_norm: layers must be one of uniform, kept; got 'exponential'"):
        GradNorm("gradient", layers="exponential")


def test_grad_norm_of_a_truncated_probe():
    probe = {"settings": {"last": 2}, "notes": {"layers": ["b", "c"], "depth": [1, 2], "of": 3}}
    table = Table(gradient_uniform=[[1.0, 2.0]], provenance=Provenance(probes={"gradient": probe}))
    with pytest.raises(TableError, match=r"grad_norm\.score: .* has 2 of 3 layers .* layers='uniform' weighs all 3"):
        GradNorm("gradient").score(table)
    assert GradNorm("gradient", layers="kept").score(table).tolist() == [-3.0]


def test_weightings_that_are_not_there():
    wrong = LastLayerGradient()
    wrong.weighting = "l2"
    with pytest.raises(
        ValueRangeError, match="last_layer_gradient: weighting must be one of fisher, root, expected_l1"
    ):
        wrong.__post_init__()


@pytest.mark.parametrize(
    "score",
    [LastLayerGradient("expected_l1", bias=False), GradNorm(), GradNorm("gradient", bias=True, layers=(1.0, 0.0))],
)
def test_saved_and_loaded(score, tmp_path):
    _, z, logits = head()
    table = Table(feature=z, logit=logits, gradient_uniform=z[:, :2].abs())
    loaded = load_score(save_score(score, tmp_path))
    assert loaded == score
    assert torch.equal(loaded.score(table), score.score(table))
    assert score.score(table.rows(slice(0, 0))).shape == (0,)
