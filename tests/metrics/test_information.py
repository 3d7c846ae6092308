"""Entropies and mutual information of members: by hand, by brute force, and by their laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    chain_rule,
    decompose,
    decompose_variance,
    member_weights,
    partitioned,
    sub_ensembles,
    variation_ratio,
)
from dubito.metrics.information import entropy_of, log_size

LOG2 = math.log(2)


def drawn(m: int, n: int, c: int, *, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    """Logits of members."""
    return np.random.default_rng(seed).normal(size=(m, n, c)) * scale


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def entropy(p: np.ndarray) -> float:
    """Of one distribution, one class after the other."""
    return -sum(float(v) * math.log(float(v)) for v in p if v > 0)


def by_brute_force(p: np.ndarray, w: np.ndarray) -> list[tuple[float, float]]:
    """Total and aleatoric of every input, member by member; w is (m, n), of any scale."""
    result = []
    for i in range(p.shape[1]):
        share = w[:, i] / w[:, i].sum()
        mean = sum(share[m] * p[m, i] for m in range(len(p)))
        result.append((entropy(mean), sum(share[m] * entropy(p[m, i]) for m in range(len(p)))))
    return result


distributions = st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(2, 5)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.floats(-60, 60, width=32)).map(softmax)
)
"""Members of any number, from nearly uniform to saturated."""


def test_by_hand():
    # p = (3/4, 1/4) and (1/4, 3/4): mean (1/2, 1/2), total log 2; both entropies are log 4 - 3/4 log 3
    result = decompose([[[0.75, 0.25]], [[0.25, 0.75]]])
    inner = math.log(4) - 0.75 * math.log(3)
    assert float(result.total) == pytest.approx(LOG2, abs=1e-15)
    assert float(result.aleatoric) == pytest.approx(inner, abs=1e-15)
    assert float(result.epistemic) == pytest.approx(LOG2 - inner, abs=1e-15)


def test_unequal_weights_by_hand():
    # three times as much for the member that is sure of class 0: mean (3/4, 1/4), and neither has entropy
    result = decompose([[[1.0, 0.0]], [[0.0, 1.0]]], weights=[3.0, 1.0])
    expected = math.log(4) - 0.75 * math.log(3)
    assert [float(part) for part in result] == pytest.approx([expected, 0.0, expected], abs=1e-15)


@pytest.mark.parametrize("weighed", [False, True])
def test_brute_force(weighed):
    p = softmax(drawn(5, 7, 4))
    w = np.random.default_rng(1).random((5, 7)) if weighed else np.ones((5, 7))
    result = decompose(p, w if weighed else None)
    for i, (total, aleatoric) in enumerate(by_brute_force(p, w)):
        assert float(result.total[i]) == pytest.approx(total, abs=1e-13)
        assert float(result.aleatoric[i]) == pytest.approx(aleatoric, abs=1e-13)
        assert float(result.epistemic[i]) == pytest.approx(total - aleatoric, abs=1e-13)


@given(distributions)
@settings(deadline=None, max_examples=80)
def test_laws_of_any_members(p):
    total, aleatoric, epistemic = decompose(p)
    assert torch.allclose(total, aleatoric + epistemic, rtol=0, atol=1e-12)
    assert bool((epistemic >= 0).all())
    bound = min(math.log(len(p)), math.log(p.shape[-1]))  # neither the member nor the class can tell more than it has
    assert bool((epistemic <= bound + 1e-12).all())
    for part, turned in zip(decompose(p), decompose(p[::-1].copy()), strict=True):
        assert torch.allclose(part, turned, rtol=0, atol=1e-12)


@given(distributions)
@settings(deadline=None, max_examples=80)
def test_chain_rule_of_every_partition(p):
    whole = decompose(p).epistemic
    for count, size in sub_ensembles(len(p)):
        parts = chain_rule(partitioned(p, size))
        assert (count * size, count) == (len(p), partitioned(p, size).shape[0])
        assert torch.allclose(parts.total, parts.between + parts.within, rtol=0, atol=1e-12)
        assert torch.allclose(parts.total, whole, rtol=0, atol=1e-12)
        assert bool((parts.between >= 0).all())
        assert bool((parts.within >= 0).all())


def test_chain_rule_by_hand():
    # Sub-ensembles {A, A} and {A, B} of sure members: means (1, 0) and (1/2, 1/2). Within: (0 + log 2) / 2.
    a, b = [[1.0, 0.0]], [[0.0, 1.0]]
    parts = chain_rule([[a, a], [a, b]])
    whole = math.log(4) - 0.75 * math.log(3)
    assert float(parts.within) == pytest.approx(LOG2 / 2, abs=1e-15)
    assert float(parts.total) == pytest.approx(whole, abs=1e-15)
    assert float(parts.between) == pytest.approx(whole - LOG2 / 2, abs=1e-15)


def test_between_falls_as_averaging_alone_says_where_members_differ_little():
    # Over all partitions of fixed members, the variance of means of s of them is (m - s) / (s (m - 1)) of that of the
    # members, and MI is a variance as long as members differ little.
    p = softmax(drawn(6, 3, 4, scale=0.01))
    rng = np.random.default_rng(0)
    whole = decompose(p).epistemic.mean()
    for count, size in sub_ensembles(6):
        orders = [partitioned(p[rng.permutation(6)], size) for _ in range(400)]
        between = torch.stack([chain_rule(some).between.mean() for some in orders]).mean()
        assert float(between / whole) == pytest.approx((6 - size) / (size * 5), rel=0.05), (count, size)


def test_one_member_and_identical_members_know_of_no_disagreement():
    p = softmax(drawn(1, 9, 6))
    assert float(decompose(p).epistemic.abs().max()) <= 1e-15
    repeated = np.repeat(p, 7, axis=0)
    assert float(decompose(repeated).epistemic.max()) <= 1e-15
    assert torch.allclose(decompose(repeated).total, decompose(p).aleatoric, rtol=0, atol=1e-14)
    assert variation_ratio(repeated).tolist() == [0.0] * 9


def test_a_class_never_predicted_adds_nothing():
    p = softmax(drawn(4, 5, 3))
    wider = np.concatenate([p, np.zeros((4, 5, 2))], axis=-1)
    for part, with_empty in zip(decompose(p), decompose(wider), strict=True):
        assert torch.allclose(part, with_empty, rtol=0, atol=1e-15)


def test_a_class_that_one_member_rules_out():
    # p_1 = (1, 0), p_2 = (1/2, 1/2): mean (3/4, 1/4); KL = log 4/3 and 1/2 log 2/3 + 1/2 log 2
    result = decompose([[[1.0, 0.0]], [[0.5, 0.5]]])
    expected = (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * LOG2) / 2
    assert float(result.epistemic) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("gap", [1e-6, 1e-9, 1e-12])
def test_near_saturation_small_disagreement_is_not_lost(gap):
    # p = 1 - g and 1 - 3 g: I = [3 g log 3 g + g log g] / 2 - 2 g log 2 g + O(g^2) = g (3/2 log 3 - 2 log 2): far below
    # what a difference of two entropies near zero keeps in float32
    p = torch.tensor([[[1 - gap, gap]], [[1 - 3 * gap, 3 * gap]]], dtype=torch.float64)
    expected = gap * (1.5 * math.log(3) - 2 * LOG2)
    assert float(decompose(p).epistemic) == pytest.approx(expected, rel=1e-3)


def test_float32_probabilities_near_saturation():
    z = torch.from_numpy(drawn(6, 200, 10, scale=15.0))
    exact = decompose(z.softmax(-1))
    rounded = decompose(z.float().softmax(-1))
    assert bool((rounded.epistemic >= 0).all())
    assert torch.allclose(exact.epistemic, rounded.epistemic, rtol=0, atol=1e-6)
    assert torch.allclose(rounded.total, rounded.aleatoric + rounded.epistemic, rtol=0, atol=1e-12)


def test_sums_that_rounding_left_beside_one_do_not_matter():
    p = softmax(drawn(3, 8, 5))
    off = p * (1 + 5e-4 * np.linspace(-1, 1, 24).reshape(3, 8, 1))
    for part, rounded in zip(decompose(p), decompose(off), strict=True):
        assert torch.allclose(part, rounded, rtol=0, atol=1e-14)


def test_half_precision_sums_are_near_enough():
    z = torch.from_numpy(drawn(3, 20, 1000, scale=1.0))
    result = decompose(z.softmax(-1).half())
    assert torch.allclose(result.epistemic, decompose(z.softmax(-1)).epistemic, rtol=0, atol=2e-3)


def test_sums_in_bfloat16_are_near_enough_and_those_of_other_precisions_are_not():
    exact = torch.from_numpy(softmax(drawn(3, 400, 3)))
    coarse = exact.bfloat16()
    assert float((coarse.double().sum(-1) - 1).abs().max()) > 1e-3  # more than float16 would leave
    for given_as in (coarse, list(coarse)):
        torch.testing.assert_close(decompose(given_as).epistemic, decompose(exact).epistemic, rtol=0, atol=5e-3)
    with pytest.raises(ValueRangeError, match="must sum to 1"):
        decompose(coarse.float())


@pytest.mark.parametrize("by", ["logsumexp", "sum"])
@pytest.mark.parametrize("over", ["input", "pooled"])
def test_four_readings_of_weights_by_brute_force(by, over):
    z = drawn(4, 6, 3, seed=2)
    size = np.exp(z).sum(-1) if by == "logsumexp" else np.exp(z.sum(-1))  # (m, n): exp of l
    expected = size / size.sum(0) if over == "input" else np.repeat((size.sum(1) / size.sum())[:, None], 6, axis=1)
    w = member_weights(z, by=by, over=over)
    assert np.allclose(w.numpy(), expected, rtol=1e-12, atol=0)
    result = decompose(softmax(z), w)
    for i, (total, aleatoric) in enumerate(by_brute_force(softmax(z), expected)):
        assert float(result.epistemic[i]) == pytest.approx(total - aleatoric, abs=1e-12)


def test_the_four_readings_differ():
    z = drawn(4, 6, 3, seed=2)
    readings = [decompose(softmax(z), member_weights(z, by=by, over=over)).epistemic
                for by in ("logsumexp", "sum") for over in ("input", "pooled")]  # fmt: skip
    gaps = [float((a - b).abs().max()) for i, a in enumerate(readings) for b in readings[:i]]
    assert min(gaps) > 1e-3


def test_weights_of_huge_logits_are_finite():
    w = member_weights(1000 * drawn(3, 5, 4))
    assert torch.isfinite(w).all()
    assert torch.allclose(w.sum(0), torch.ones(5, dtype=torch.float64))


def test_weights_of_one_for_each_member_count_for_every_input():
    p, w = softmax(drawn(3, 4, 3)), [1.0, 2.0, 0.0]
    same = decompose(p, np.repeat(np.array(w)[:, None], 4, axis=1))
    assert torch.equal(decompose(p, w).epistemic, same.epistemic)
    two = decompose(p[:2], [1.0, 2.0])  # a weight of zero is a member that is not there
    assert torch.allclose(two.epistemic, same.epistemic, rtol=0, atol=1e-15)


def test_sub_ensembles_of_24():
    assert sub_ensembles(24) == ((24, 1), (12, 2), (8, 3), (6, 4), (4, 6), (3, 8), (2, 12))
    assert sub_ensembles(7) == ((7, 1),)
    assert sub_ensembles(1) == ()


def test_partitioned_keeps_neighbours_together():
    p = softmax(drawn(6, 2, 3))
    assert np.allclose(partitioned(p, 2)[1].numpy(), p[2:4], rtol=1e-15)


def test_variation_ratio_by_hand():
    # votes 0, 0, 1, 2: two of four differ; a tie 1, 1, 0, 0 leaves half
    votes = np.eye(3)[[[0, 1], [0, 1], [1, 0], [2, 0]]]
    assert variation_ratio(votes).tolist() == [0.5, 0.5]


def test_variance_by_hand():
    # means 0, 2, 4: variance 8/3; noise 1, 2, 3: mean 2
    result = decompose_variance([[0.0], [2.0], [4.0]], [[1.0], [2.0], [3.0]])
    assert [float(part) for part in result] == pytest.approx([8 / 3 + 2, 2.0, 8 / 3], abs=1e-15)
    alone = decompose_variance([[0.0], [2.0], [4.0]])
    assert (float(alone.aleatoric), float(alone.total)) == (0.0, float(alone.epistemic))


def test_entropy_and_size():
    assert float(entropy_of(torch.tensor([1.0, 0.0]))) == 0.0
    assert float(log_size(torch.tensor([1.0, 2.0, 4.0]), "sum")) == 7.0
    assert float(log_size(torch.tensor([0.0, 0.0]), "logsumexp")) == pytest.approx(LOG2)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: decompose([[[0.5, 0.5], [0.6, 0.6]]]), ValueRangeError,
         r"decompose: probabilities must sum to 1, none negative; those of m 0, n 1 sum to 1\.2, the lowest "
         r"is 0\.6\. Pass the softmax of logits over the last axis\."),
        (lambda: chain_rule([[[[1.5, -0.5]]]]), ValueRangeError,
         r"those of k 0, m 0, n 0 sum to 1, the lowest is -0\.5"),
        (lambda: decompose([[[math.nan, 1.0]]]), ValueRangeError, r"decompose: probs.*"),
        (lambda: decompose([torch.ones(2, 3) / 3, torch.ones(2, 4) / 4]), TableError,
         r"members must have equal inputs and classes; they have \(2, 3\), \(2, 4\)\. Members of one ensemble share"),
        (lambda: decompose([[[1.0, 0.0]], [[1.0, 0.0, 0.0]]]), TableError, r"they have \(1, 2\), \(1, 3\)"),
        (lambda: decompose([[0.5, 0.5]]), TableError,
         r"must have the axes \(m, n, c\), none of them empty; got shape \(1, 2\)"),
        (lambda: decompose(np.zeros((0, 2, 3))), TableError, r"got shape \(0, 2, 3\)"),
        (lambda: decompose([[[0.5, 0.5]]], [1.0, 2.0]), TableError,
         r"weights must be \(1,\) or \(1, 1\); got \(2, 1\)\. Pass one weight per member"),
        (lambda: decompose([[[0.5, 0.5]]], [-1.0]), ValueRangeError, r"weights must not be negative, nor all zero"),
        (lambda: decompose([[[0.5, 0.5]]], [0.0]), ValueRangeError,
         r"nor all zero for an input; the lowest is 0\. `member_weights` makes"),
        (lambda: partitioned(np.full((6, 1, 2), 0.5), 4), ValueRangeError,
         r"size must divide the 6 members; got 4\. Choose among 1, 2, 3\."),
        (lambda: partitioned(np.full((1, 1, 2), 0.5), 0), ValueRangeError, r"the 1 members; got 0\. Choose among 1\."),
        (lambda: decompose_variance([[1.0]], [[-1.0]]), ValueRangeError,
         r"variances must be \(1, 1\) and not negative; got \(1, 1\), the lowest -1\. Pass one variance"),
        (lambda: decompose_variance([[1.0]], [[1.0, 2.0]]), ValueRangeError,
         r"variances must be \(1, 1\).*got \(1, 2\)"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_weights_that_are_not_a_choice():
    z = torch.zeros(2, 1, 2)
    for wrong in ({"by": "norm"}, {"over": "everything"}):
        with pytest.raises(Exception, match=r"norm|everything"):  # beartype speaks first under test
            member_weights(z, **wrong)


def test_a_member_without_weight_adds_nothing():
    sure, other = [[1.0, 0.0]], [[0.0, 1.0]]  # the class of the second has a mean probability of zero
    assert [float(part) for part in decompose([sure, other], [1.0, 0.0])] == [0.0, 0.0, 0.0]
