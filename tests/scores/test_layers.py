"""Weights of layers: by hand, in order of depth, and refused where a truncated column does not have what they weigh."""

import math

import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.scores import PredictedGradient, REGrad
from dubito.scores._layers import LayersKept, check_layers, layer_weights, layers_kept
from dubito.table import Provenance, Table

ALL = LayersKept(range(4), 4, {})
LAST_TWO = LayersKept((2, 3), 4, {"last": 2})
BY_WEIGHT = LayersKept((2, 3), 4, {"beta": 8.0, "tolerance": 0.02, "last": None})


def weights(layers, beta=2.0, kept=ALL):
    return layer_weights(layers, beta, kept, "score: column 'g' of t").tolist()


def table(kept: LayersKept, values=((1.0, 10.0), (2.0, 20.0)), **columns) -> Table:
    notes = {"layers": ["a"] * len(kept.depth), "depth": [*kept.depth], "of": kept.of}
    probe = {"settings": dict(kept.settings), "notes": notes}
    return Table(gradient=torch.tensor(values), provenance=Provenance(probes={"gradient": probe}), **columns)


def test_by_hand():
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
        "was left out has weight 0.02. Choose beta=8 or more; layers='kept' takes those that are there, alike; or give "
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
    assert f"; layers='{layers}' weighs all 4. layers='kept' takes those that are there, alike; or give" in str(
        error.value
    )


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
        REGrad().check_layers_of(table(LAST_TWO))
    REGrad(layers="kept").check_layers_of(table(LAST_TWO))
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
        "regrad.score: column 'gradient' of t has 2 of 2 layers; got 3 weights. "
        "Give one weight for each layer of the column."
    )


@pytest.mark.parametrize("bad", [[-1.0, 2.0], [math.nan, 1.0], [math.inf], [0.0, 0.0], []])
def test_weights_that_cannot_be(bad):
    with pytest.raises(ValueRangeError, match="regrad: weights of layers must be finite, none negative and not all"):
        REGrad(layers=bad)


def test_names_that_are_not_there():
    said = r"regrad: layers must be one of exponential, uniform, kept, or a weight for each layer; got 'deep'\."
    with pytest.raises(ValueRangeError, match=said):
        check_layers("deep", "regrad")
    for beta in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueRangeError, match=f"regrad: beta must be finite and not negative; got {beta}"):
            REGrad(beta=beta)


@pytest.mark.parametrize("column", [torch.ones(3), torch.ones(3, 2, 2), torch.ones(3, 2).long(), torch.ones(3, 0)])
def test_a_column_without_layers(column):
    with pytest.raises(TableError, match=r"regrad\.score: column 'gradient' must have one number per layer, \(n, l\); "):
        REGrad().score(Table(gradient=column))
