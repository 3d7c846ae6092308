"""Scores of the gradient probe's columns: by hand, which column each reads, and a network's own gradients."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from dubito.errors import MissingColumnError, ValueRangeError
from dubito.scores import LastLayerGradient, PredictedGradient, REGrad, load_score, save_score
from dubito.scores.last_layer_gradient import last_layer_gradient
from dubito.table import Table, writer_of

COLUMNS = {
    "gradient": [[1.0, 2.0], [0.0, 4.0]],
    "gradient_root": [[3.0, 1.0], [1.0, 1.0]],
    "gradient_l1": [[5.0, 7.0], [2.0, 2.0]],
    "gradient_predicted": [[0.5, 0.25], [8.0, 16.0]],
    "other": [[10.0, 20.0], [30.0, 40.0]],
}
TABLE = Table(**COLUMNS)


def test_by_hand():
    # Two layers at beta = 2: weights exp(2/2 - 2) = exp(-1) and 1.
    first = math.exp(-1)
    assert REGrad(beta=2.0).score(TABLE).tolist() == pytest.approx([first + 2, 4])
    assert REGrad("root", beta=2.0).score(TABLE).tolist() == pytest.approx([3 * first + 1, first + 1])
    assert REGrad("expected_l1", "uniform").score(TABLE).tolist() == [12, 4]
    assert REGrad(layers=(0.5, 0.0)).score(TABLE).tolist() == [0.5, 0]
    assert REGrad(of="other", layers="uniform").score(TABLE).tolist() == [30, 70]
    assert PredictedGradient(beta=2.0).score(TABLE).tolist() == pytest.approx([0.5 * first + 0.25, 8 * first + 16])
    assert PredictedGradient("uniform").score(TABLE).tolist() == [0.75, 24]
    assert REGrad(beta=0.0).score(TABLE).tolist() == REGrad(layers="uniform").score(TABLE).tolist() == [3, 4]


def test_one_layer_is_itself_whatever_beta():
    table = Table(gradient=[[3.0], [5.0]])
    for score in (REGrad(beta=0.0), REGrad(beta=16.0), REGrad(layers="uniform")):
        assert score.score(table).tolist() == [3.0, 5.0]


@pytest.mark.parametrize("weighting", ["fisher", "root", "expected_l1"])
def test_of_a_network_by_its_jacobian(weighting):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    column = torch.stack([torch.stack(norms(net, row, weighting)) for row in x])
    suffix = {"fisher": "", "root": "_root", "expected_l1": "_l1"}[weighting]
    with torch.no_grad():
        feature, logit = net[:2](x), net(x)
    table = Table(**{f"gradient{suffix}": column}, feature=feature, logit=logit)
    found = REGrad(weighting, beta=3.0).score(table)
    torch.testing.assert_close(found, column @ torch.tensor([math.exp(-1.5), 1.0], dtype=torch.float64))
    # The last layer alone is the closed form.
    last = REGrad(weighting, layers=(0.0, 1.0)).score(table)
    torch.testing.assert_close(last, LastLayerGradient(weighting).score(table), rtol=1e-12, atol=0)
    torch.testing.assert_close(last, last_layer_gradient(feature, logit, weighting), rtol=1e-12, atol=0)


def norms(net, x, weighting):
    """Of both layers of a network, class by class."""
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(net, w, (x,)).log_softmax(-1))(weights)
    p = net(x).softmax(-1).detach()
    found = []
    for layer in ("0", "2"):
        grads = torch.cat([jacobian[f"{layer}.weight"].flatten(1), jacobian[f"{layer}.bias"]], 1)
        if weighting == "fisher":
            found.append(sum(p[y] * grads[y].square().sum() for y in range(len(p))))
        elif weighting == "root":
            found.append(sum(p[y].sqrt() * grads[y].square().sum().sqrt() for y in range(len(p))))
        else:
            found.append(sum(p[y] * grads[y].abs().sum() for y in range(len(p))))
    return found


def test_what_is_not_a_number_counts_even_where_its_layer_does_not():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueRangeError, match=r"regrad\.score of table in memory: 1 of 2 values are NaN or inf"):
            REGrad(layers=(0.0, 1.0)).score(Table(gradient=[[bad, 1.0], [1.0, 1.0]]))


def test_no_rows():
    assert REGrad().score(Table(gradient=torch.ones(0, 3))).shape == (0,)


def test_settings_that_are_not_there():
    wrong = REGrad()
    wrong.weighting = "l2"
    with pytest.raises(ValueRangeError, match=r"^regrad: weighting must be one of fisher, root, expected_l1; got 'l2'"):
        wrong.__post_init__()


def test_needs_follow_the_settings():
    assert REGrad().needs == ("gradient",)
    assert REGrad("root", of="mine").needs == ("mine_root",)
    assert REGrad("expected_l1").needs == ("gradient_l1",)
    assert PredictedGradient(of="mine").needs == ("mine_predicted",)
    with pytest.raises(MissingColumnError) as error:
        REGrad("root").score(Table(gradient=[[1.0]]))
    assert str(error.value) == (
        "regrad.score needs column 'gradient_root'; table in memory has gradient. It is written by the gradient probe "
        '(extract(..., probes=[dubito.Gradient()])), with method="exact" and weightings=["root"].'
    )
    assert writer_of("gradient") == "the gradient probe (extract(..., probes=[dubito.Gradient()]))"


@pytest.mark.parametrize("layers", ["exponential", "kept", [0.5, 2.0], (1.0, 0.0)])
def test_saved_and_loaded(layers, tmp_path):
    score = REGrad("root", layers, 1.5)
    loaded = load_score(save_score(score, tmp_path))
    assert loaded == score
    assert torch.equal(loaded.score(TABLE), score.score(TABLE))
