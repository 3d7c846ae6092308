import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.errors import DubitoError, ValueRangeError
from dubito.scores import Energy, Entropy, Margin, MaxLogit, MaxProbability, ScaledEntropy, make_score
from dubito.scores.softmax import energy, entropy, margin, max_logit, max_probability
from dubito.table import Table

LOG2, LOG3 = math.log(2), math.log(3)


def one(logits: list[float]) -> torch.Tensor:
    return torch.tensor([logits])


def test_by_hand():
    # exp: 6, 3, 1 of 10: p = 0.6, 0.3, 0.1
    logits = one([math.log(6), math.log(3), 0.0])
    assert max_probability(logits).item() == pytest.approx(-0.6, abs=1e-7)
    assert margin(logits).item() == pytest.approx(0.3 - 0.6, abs=1e-7)
    expected = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1))
    assert entropy(logits).item() == pytest.approx(expected, abs=1e-7)
    assert max_logit(logits).item() == pytest.approx(-math.log(6), abs=1e-7)
    assert energy(logits).item() == pytest.approx(-math.log(10), abs=1e-7)
    # T = 2: exp(logit / 2) = sqrt 6, sqrt 3, 1
    assert energy(logits, 2.0).item() == pytest.approx(-2 * math.log(6**0.5 + 3**0.5 + 1), abs=1e-6)


def test_scaled_entropy_by_hand():
    # 0.5 of the logits log 4, 0: exp = 2, 1: p = 2/3, 1/3 and H = log 3 - 2/3 log 2
    table = Table(logit=[[math.log(4), 0.0]])
    assert ScaledEntropy(scale=0.5).score(table).item() == pytest.approx(LOG3 - 2 / 3 * LOG2, abs=1e-12)
    # the paper's 0.1: p = 1 / (1 + 4^-0.1)
    p = 1 / (1 + 4**-0.1)
    assert ScaledEntropy().score(table).item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-12)


def test_against_scipy_with_a_thousand_classes():
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 5, (40, 1000)))
    p = scipy.special.softmax(logits.numpy(), axis=1)
    ordered = np.sort(p, axis=1)
    for ours, theirs in (
        (max_probability(logits), -ordered[:, -1]),
        (margin(logits), ordered[:, -2] - ordered[:, -1]),
        (entropy(logits), scipy.stats.entropy(p, axis=1)),
        (max_logit(logits), -logits.numpy().max(axis=1)),
        (energy(logits), -scipy.special.logsumexp(logits.numpy(), axis=1)),
        (energy(logits, 3.0), -3 * scipy.special.logsumexp(logits.numpy() / 3, axis=1)),
        (
            ScaledEntropy(0.1).score(Table(logit=logits)),
            scipy.stats.entropy(scipy.special.softmax(logits.numpy() / 10, 1), axis=1),
        ),
    ):
        assert ours.numpy() == pytest.approx(theirs, rel=1e-10, abs=1e-13)


def test_bounds_are_met():
    c = 7
    even, sure = torch.zeros(1, c), torch.zeros(1, c)
    sure[0, 3] = 1e4
    assert max_probability(even).item() == pytest.approx(-1 / c)
    assert max_probability(sure).item() == -1
    assert margin(even).item() == 0
    assert margin(sure).item() == -1
    assert entropy(even).item() == pytest.approx(math.log(c))
    assert entropy(sure).item() == 0


@pytest.mark.parametrize("score", [max_probability, margin, entropy])
def test_confident_float32_logits_keep_their_order(score):
    # From a lead of 17 on, a float32 softmax is exactly one.
    logits = torch.tensor([[lead, 0.0, 0.0] for lead in (20.0, 24.0, 28.0, 32.0)])
    assert len(logits.softmax(1).amax(1).unique()) == 1
    assert bool((score(logits).diff() < 0).all())


def test_energy_and_max_logit_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4], [2e4, 0.0]])
    assert energy(logits).tolist() == [-1e4, -2e4]
    assert max_logit(logits).tolist() == [-1e4, -2e4]


rows = st.lists(st.floats(-30, 30), min_size=2, max_size=9)


@given(rows, st.floats(-50, 50))
@settings(deadline=None, max_examples=50)
def test_a_shift_of_all_logits_is_invisible_to_the_softmax_but_not_to_energy(logits, shift):
    here, there = torch.tensor([logits], dtype=torch.float64), torch.tensor([logits], dtype=torch.float64) + shift
    for score in (max_probability, margin, entropy):
        assert score(there).item() == pytest.approx(score(here).item(), abs=1e-9)
    for score in (max_logit, energy):
        assert score(there).item() == pytest.approx(score(here).item() - shift, abs=1e-9)


@given(rows)
@settings(deadline=None, max_examples=50)
def test_the_order_of_classes_is_invisible(logits):
    here, there = torch.tensor([logits]), torch.tensor([logits[::-1]])
    for score in (max_probability, margin, entropy, max_logit, energy):
        assert score(there).item() == pytest.approx(score(here).item(), abs=1e-12)


def test_the_family_disagrees_where_it_should():
    # Row 0: a close second. Row 1: a lower top, but many small others. Row 2: sure, with small logits.
    logits = torch.tensor([[5.0, 4.8] + [-20.0] * 8, [5.0, 2.0] + [2.5] * 8, [3.0] + [-9.0] * 9])
    assert margin(logits).argmax() == 0
    assert entropy(logits).argmax() == 1
    assert max_logit(logits).argmax() == 2


def test_classes_are_their_functions():
    table = Table(logit=torch.randn(9, 4, generator=torch.Generator().manual_seed(0)))
    pairs = [
        (MaxProbability(), max_probability),
        (Entropy(), entropy),
        (Margin(), margin),
        (MaxLogit(), max_logit),
        (Energy(), energy),
        (Energy(2.0), lambda logits: energy(logits, 2.0)),
    ]
    for score, function in pairs:
        assert torch.equal(score.score(table), function(table.logit))


def test_one_class_has_no_margin():
    with pytest.raises(ValueRangeError, match=r"margin needs at least two classes; got logits of shape \(3, 1\)"):
        margin(torch.zeros(3, 1))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_settings_that_would_turn_the_score_round_are_refused(value):
    with pytest.raises(ValueRangeError, match=rf"scaled_entropy: scale must be .*; got {value}\. The paper"):
        ScaledEntropy(value)
    with pytest.raises(ValueRangeError, match=rf"energy: temperature must be a number, above 0; got {value}\."):
        make_score("energy", temperature=value)


def test_infinite_and_undefined_logits_are_errors():
    table = Table(logit=[[0.0, 1.0], [float("nan"), 1.0], [float("nan"), 1.0]])
    with pytest.raises(DubitoError) as error:
        Entropy().score(table)
    assert str(error.value) == (
        "entropy.score: column 'logit' must be finite; row 1 of table in memory holds nan. Look at that image."
    )


@pytest.mark.parametrize("name", ["max_probability", "entropy", "margin", "max_logit", "energy"])
def test_a_class_that_is_masked_with_minus_infinity_needs_a_large_negative_logit(name):
    table = Table(logit=[[0.0, 1.0, 2.0], [0.0, 1.0, float("-inf")]])
    repair = r"row 1 of .* holds -inf\. Give an impossible class a large negative logit, such as -1e4\."
    with pytest.raises(ValueRangeError, match=rf"{name}\.score: column 'logit' must be finite; {repair}"):
        make_score(name).score(table)
    large = make_score(name).score(Table(logit=[[0.0, 1.0, -1e4]]))
    assert torch.equal(large, make_score(name).score(Table(logit=[[0.0, 1.0]])))


@pytest.mark.parametrize("function", [max_probability, entropy, margin])
def test_a_single_logit_says_nothing(function):
    with pytest.raises(ValueRangeError, match=r"needs at least two classes; got logits of shape \(3, 1\)"):
        function(torch.zeros(3, 1))


@pytest.mark.parametrize("rows", [1, 300])
def test_blocks_of_a_table_change_nothing(rows):
    logits = 4 * torch.randn(rows, 1000, generator=torch.Generator().manual_seed(3))  # 262 rows are a block
    table = Table(logit=logits)
    for score, function in ((MaxProbability(), max_probability), (Entropy(), entropy), (Energy(), energy)):
        assert torch.allclose(score.score(table), function(logits), rtol=1e-14, atol=0)
    assert torch.allclose(Energy(temperature=3.0).score(table), energy(logits, 3.0), rtol=1e-14, atol=0)
    assert torch.allclose(ScaledEntropy(scale=0.3).score(table), entropy(0.3 * logits.double()), rtol=1e-12, atol=0)


@pytest.mark.parametrize("function", [max_probability, entropy, energy])
def test_gradients_of_the_functions(function):
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (logits,))


def test_a_sure_entropy_keeps_its_digits():
    # Of two classes, a lead of t gives log(1 + e^-t) + t e^-t / (1 + e^-t), about (1 + t) e^-t.
    for lead in (10.0, 20.0, 30.0):
        expected = math.log1p(math.exp(-lead)) + lead * math.exp(-lead) / (1 + math.exp(-lead))
        assert entropy(one([lead, 0.0])).item() == pytest.approx(expected, rel=1e-4)
