"""Scores of the gradient probe's columns: by hand, which column each reads, and a network's own gradients."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.scores import LastLayerGradient, PredictedGradient, REGrad, load_score, save_score
from dubito.scores.gradient import LayersKept, check_layers, layer_weights, layers_kept
from dubito.scores.last_layer_gradient import last_layer_gradient
from dubito.table import Provenance, Table, writer_of

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
    result = REGrad(weighting, beta=3.0).score(table)
    torch.testing.assert_close(result, column @ torch.tensor([math.exp(-1.5), 1.0], dtype=torch.float64))
    # The last layer alone is the closed form.
    last = REGrad(weighting, layers=(0.0, 1.0)).score(table)
    torch.testing.assert_close(last, LastLayerGradient(weighting).score(table), rtol=1e-12, atol=0)
    torch.testing.assert_close(last, last_layer_gradient(feature, logit, weighting), rtol=1e-12, atol=0)


def norms(net, x, weighting):
    """Of both layers of a network, class by class."""
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    jacobian = jacrev(lambda w: functional_call(net, w, (x,)).log_softmax(-1))(weights)
    p = net(x).softmax(-1).detach()
    result = []
    for layer in ("0", "2"):
        grads = torch.cat([jacobian[f"{layer}.weight"].flatten(1), jacobian[f"{layer}.bias"]], 1)
        if weighting == "fisher":
            result.append(sum(p[y] * grads[y].square().sum() for y in range(len(p))))
        elif weighting == "root":
            result.append(sum(p[y].sqrt() * grads[y].square().sum().sqrt() for y in range(len(p))))
        else:
            result.append(sum(p[y] * grads[y].abs().sum() for y in range(len(p))))
    return result


def test_what_is_not_a_number_counts_even_where_its_layer_does_not():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueRangeError, match=r"regrad\.score: column 'gradient' must be finite; row 0 "):
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
        '(dubito.extract(..., probes=[dubito.probes.Gradient()])), with method="exact" and weightings=["root"].'
    )
    assert writer_of("gradient") == "the gradient probe (dubito.extract(..., probes=[dubito.probes.Gradient()]))"


@pytest.mark.parametrize("layers", ["exponential", "kept", [0.5, 2.0], (1.0, 0.0)])
def test_saved_and_loaded(layers, tmp_path):
    score = REGrad("root", layers, 1.5)
    loaded = load_score(save_score(score, tmp_path))
    assert loaded == score
    assert torch.equal(loaded.score(TABLE), score.score(TABLE))


ALL = LayersKept(range(4), 4, {})
LAST_TWO = LayersKept((2, 3), 4, {"last": 2})
BY_WEIGHT = LayersKept((2, 3), 4, {"beta": 8.0, "tolerance": 0.02, "last": None})


def weights(layers, beta=2.0, kept=ALL):
    return layer_weights(layers, beta, kept, "score: column 'g' of t").tolist()


def table(kept: LayersKept, values=((1.0, 10.0), (2.0, 20.0)), **columns) -> Table:
    notes = {"layers": ["a"] * len(kept.depth), "depth": [*kept.depth], "of": kept.of}
    probe = {"settings": dict(kept.settings), "notes": notes}
    return Table(gradient=torch.tensor(values), provenance=Provenance(probes={"gradient": probe}), **columns)


def test_layer_weights_by_hand():
    # exp(2 (d + 1) / 4) / exp(2) at depth 0 to 3: exp of -3/2, -1, -1/2, 0
    assert weights("exponential") == pytest.approx([math.exp(-1.5), math.exp(-1), math.exp(-0.5), 1.0])
    assert weights("exponential", 0.0) == weights("uniform") == weights("kept") == [1.0] * 4
    assert weights((0.0, 3.0, 0.5, 1.0)) == [0.0, 3.0, 0.5, 1.0]
    assert weights("exponential", 1e6) == [0.0, 0.0, 0.0, 1.0]  # no overflow: the last layer alone


def test_what_is_kept_has_its_own_depth():
    assert weights("exponential", 8.0, BY_WEIGHT) == pytest.approx([math.exp(-2), 1.0])  # not exp(-4), 1 of two layers
    assert weights("kept", 8.0, LAST_TWO) == [1.0, 1.0]
    assert weights([2.0, 3.0], 8.0, LAST_TWO) == [2.0, 3.0]
    assert LAST_TWO.missing == [0, 1]
    assert ALL.missing == []


def test_a_beta_as_large_as_the_probes_is_fine():
    # At depth 1 of 4: exp(8 (2/4 - 1)) = exp(-4) = 0.0183, below the tolerance of 0.02.
    for beta in (8.0, 30.0):
        assert weights("exponential", beta, BY_WEIGHT)[1] == 1.0
    # exp(-7.9/2) = 0.0193 is still below it; exp(-7.8/2) = 0.0202 is not.
    assert weights("exponential", 7.9, BY_WEIGHT)[0] == pytest.approx(math.exp(-7.9 / 4))
    with pytest.raises(TableError) as error:
        weights("exponential", 7.8, BY_WEIGHT)
    assert str(error.value) == (
        "score: column 'g' of t has 2 of 4 layers (its probe had beta=8.0, tolerance=0.02); with beta=7.8 a layer that "
        "was left out has weight 0.02. Choose beta=8 or more; layers='kept' takes what is there, alike; or pass "
        "2 weights; or extract all layers."
    )


@pytest.mark.parametrize(
    ("layers", "kept", "had"),
    [
        ("uniform", LAST_TWO, "(its probe had last=2)"),
        ("exponential", LAST_TWO, "(its probe had last=2)"),
        ("uniform", BY_WEIGHT, "(its probe had beta=8.0, tolerance=0.02)"),
        ("exponential", LayersKept((3,), 4, {"last": 1, "beta": 8.0, "tolerance": 0.5}), "last=1, beta=8.0"),
        ("exponential", LayersKept((2, 3), 4, {}), "has 2 of 4 layers;"),
        ("exponential", LayersKept((2, 3), 4, {"beta": 8.0, "tolerance": None}), "beta=8.0)"),
    ],
)
def test_layers_that_are_not_there_are_no_zeros(layers, kept, had):
    with pytest.raises(TableError) as error:
        weights(layers, 50.0, kept)
    assert had in str(error.value)
    assert f"; layers='{layers}' weighs all 4. layers='kept' takes what is there, alike; or pass" in str(error.value)


def test_scores_know_what_their_table_has():
    assert REGrad(layers="kept").score(table(LAST_TWO)).tolist() == [11.0, 22.0]
    assert REGrad(layers=(2.0, 1.0)).score(table(LAST_TWO)).tolist() == [12.0, 24.0]
    assert REGrad(beta=8.0).score(table(BY_WEIGHT)).tolist() == pytest.approx(
        [math.exp(-2) + 10, 2 * math.exp(-2) + 20]
    )
    with pytest.raises(TableError, match=r"^regrad\.score: column 'gradient' of table in memory has 2 of 4 layers"):
        REGrad().score(table(LAST_TWO))
    with pytest.raises(TableError, match=r"^predicted_gradient\.score: .* layers='uniform' weighs all 4"):
        PredictedGradient("uniform").score(table(LAST_TWO, gradient_predicted=torch.ones(2, 2)))
    with pytest.raises(TableError, match=r"^regrad\.score: .* has 2 of 4 layers"):
        REGrad().check_columns(table(LAST_TWO))
    REGrad(layers="kept").check_columns(table(LAST_TWO))
    assert REGrad(beta=8.0).score(table(BY_WEIGHT).rows([1])).tolist() == pytest.approx([2 * math.exp(-2) + 20])


def test_a_table_in_memory_has_all_layers():
    kept = layers_kept(Table(gradient=torch.ones(2, 3)), "gradient", 3, "here")
    assert (list(kept.depth), kept.of, kept.missing) == ([0, 1, 2], 3, [])
    for provenance in (None, Provenance(), Provenance(probes={"other": {}})):
        assert layers_kept(Table(provenance=provenance), "gradient", 3, "here") == kept


def test_a_table_that_contradicts_itself():
    with pytest.raises(TableError, match=r"has 3 layers, but its probe 'gradient' has written 2\. Extract it again"):
        REGrad().score(table(BY_WEIGHT, values=((1.0, 2.0, 3.0),)))


def test_another_number_of_weights():
    with pytest.raises(TableError) as error:
        REGrad(layers=(1.0, 2.0, 3.0)).score(Table(gradient=torch.ones(2, 2), name="t"))
    assert str(error.value) == (
        "regrad.score: column 'gradient' of t has 2 of 2 layers; got 3 weights. Pass one for each layer of the column."
    )


@pytest.mark.parametrize("bad", [[-1.0, 2.0], [math.nan, 1.0], [math.inf], [0.0, 0.0], []])
def test_weights_that_cannot_be(bad):
    with pytest.raises(
        ValueRangeError, match="regrad: weights, one per layer, must be finite, none negative and not all"
    ):
        REGrad(layers=bad)


def test_names_that_are_not_there():
    message = r"regrad: layers must be one of exponential, uniform, kept; got 'deep'\."
    with pytest.raises(ValueRangeError, match=message):
        check_layers("deep", "regrad")
    for beta in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueRangeError, match=f"regrad: beta must be a number, at least 0; got {beta}"):
            REGrad(beta=beta)


@pytest.mark.parametrize("column", [torch.ones(3), torch.ones(3, 2, 2), torch.ones(3, 0)])
def test_a_column_without_layers(column):
    with pytest.raises(TableError, match=r"column 'gradient' must come from the gradient probe, \(n, l\)"):
        REGrad().score(Table(gradient=column))
