"""Members in a stream: the numbers of `information`, whatever the blocks, in memory that does not grow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import (
    SUMMARY,
    MemberStream,
    VarianceStream,
    chain_rule,
    decompose,
    member_weights,
    partitioned,
    sub_ensembles,
    variation_ratio,
)
from dubito.metrics.streaming import summarise_groups


def drawn(n: int, m: int, c: int, *, scale: float = 3.0, seed: int = 0) -> Tensor:
    """Logits (n, m, c) in float64."""
    return scale * torch.randn(n, m, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def streamed(logits: Tensor, blocks: list[int] | int, **options) -> MemberStream:
    stream = MemberStream(**options)
    for part in logits.split(blocks, dim=1):
        stream.add(part)
    return stream


def at_once(z: Tensor) -> dict[str, Tensor]:
    """The same fields from all members together; z is (n, m, c)."""
    z = z.double().movedim(1, 0)
    p = z.softmax(-1)
    total, aleatoric, epistemic = decompose(p)
    confidence, predicted = p.mean(0).max(-1)
    return {
        "members": torch.full_like(total, len(z)),
        "total": total,
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "weighted_logsumexp": decompose(p, member_weights(z, by="logsumexp")).epistemic,
        "weighted_sum": decompose(p, member_weights(z, by="sum")).epistemic,
        "variation": variation_ratio(p),
        "predicted": predicted.double(),
        "confidence": confidence,
    }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.floats(0.1, 30), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_blocks_of_any_size_are_all_members_at_once(blocks, scale, seed):
    z = drawn(4, sum(blocks), 5, scale=scale, seed=seed)
    result = streamed(z, blocks).summary()
    for place, (name, expected) in enumerate(at_once(z).items()):
        assert SUMMARY[place] == name
        assert torch.allclose(result[:, place], expected, rtol=0, atol=1e-9), name


def test_float32_and_half_precision():
    z = drawn(50, 12, 1000, scale=2.0)
    expected = torch.stack(list(at_once(z).values()), 1)
    single = streamed(z.float(), 5).summary()
    assert torch.allclose(single[:, :7], expected[:, :7], rtol=0, atol=2e-5)  # what float32 has left of the logits
    for rounded in (z.float(), z.half(), z.bfloat16()):  # of what is left, nothing more is lost
        exact = torch.stack(list(at_once(rounded).values()), 1)
        assert torch.allclose(streamed(rounded, 5).summary(), exact, rtol=0, atol=1e-11)


def test_float32_near_saturation_is_never_negative_and_within_rounding():
    z = drawn(500, 8, 10, scale=20.0)
    result = streamed(z.float(), 3)
    exact = decompose(z.movedim(1, 0).softmax(-1)).epistemic
    assert bool((result.field("epistemic") >= 0).all())
    assert torch.allclose(result.field("epistemic"), exact, rtol=0, atol=2e-6)


def test_small_disagreement_of_sure_members_is_not_lost():
    # p = 1 - g and 1 - 3 g, as in the test of `decompose`: half of float32's smallest step at one, which it would round
    gap = 3e-8
    z = torch.tensor([[[-math.log(gap), 0.0], [-math.log(3 * gap), 0.0]]])
    expected = gap * (1.5 * math.log(3) - 2 * math.log(2))
    assert float(streamed(z, 1).field("epistemic")) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_member_and_identical_members(dtype):
    z, rounding = drawn(30, 1, 100).to(dtype), 1e-13
    for members in (1, 9):
        result = streamed(z.expand(-1, members, -1), 4, sizes=[1, 3] if members == 9 else [1])
        for name in ("epistemic", "weighted_logsumexp", "weighted_sum", "variation"):
            assert float(result.field(name).abs().max()) <= rounding, name
        assert float(result.between().abs().max()) <= rounding
        assert float(result.field("members")[0]) == members


def test_order_of_members_does_not_matter():
    z = drawn(6, 7, 4)
    turned = streamed(z[:, torch.randperm(7, generator=torch.Generator().manual_seed(1))], 2)
    assert torch.allclose(turned.summary(), streamed(z, 3).summary(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [1, 5, 24])
def test_between_is_that_of_the_chain_rule_for_every_partition(block):
    z = drawn(3, 24, 4)
    sizes = [size for _, size in sub_ensembles(24)]
    result = streamed(z, block, sizes=sizes).between()
    p = z.movedim(1, 0).softmax(-1)
    expected = torch.stack([chain_rule(partitioned(p, size)).between for size in sizes], 1)
    assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_temperature_divides_logits():
    z = drawn(5, 6, 4)
    result, expected = streamed(z, 2, temperature=2.5).summary(), streamed(z / 2.5, 6).summary()
    assert torch.allclose(result, expected, rtol=0, atol=1e-13)


def test_probs_and_loss():
    # members (3/4, 1/4) and (1/4, 3/4), by their logits log 3 and 0: mean 1/2 each
    stream = streamed(torch.tensor([[[math.log(3), 0.0], [0.0, math.log(3)]]], dtype=torch.float64), 1)
    assert stream.probs().tolist() == [pytest.approx([0.5, 0.5], abs=1e-15)]
    assert float(stream.loss(torch.tensor([1]))) == pytest.approx(math.log(2), abs=1e-15)


def test_a_class_never_predicted():
    z = torch.tensor([[[0.0, 0.0, -2000.0], [1.0, 0.0, -2000.0]]], dtype=torch.float64)
    stream, without = streamed(z, 1), streamed(z[..., :2], 1)
    assert torch.allclose(stream.summary()[:, :5], without.summary()[:, :5], rtol=0, atol=1e-15)
    assert float(stream.loss(torch.tensor([2]))) == pytest.approx(708.3964, abs=1e-3)  # -log of the smallest float64


def test_the_loss_of_a_label_that_float32_calls_impossible():
    # log of the mean of exp(-150) and exp(-160): -150 + log(1 + exp(-10)) - log 2
    z = torch.tensor([[[150.0, 0.0], [160.0, 0.0]]])
    expected = 150 - math.log1p(math.exp(-10)) + math.log(2)
    assert float(streamed(z, 1).loss(torch.tensor([1]))) == pytest.approx(expected, abs=1e-9)
    assert float(streamed(10 * z, 1, temperature=10.0).loss(torch.tensor([1]))) == pytest.approx(expected, abs=1e-9)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that any operation gave back."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def kept(stream: MemberStream) -> int:
    return sum(value.numel() for value in vars(stream).values() if isinstance(value, Tensor))


def test_memory_does_not_grow_with_members():
    n, c, block = 3, 50, 2
    held, largest = [], []
    for members in (4, 40):
        stream = MemberStream(sizes=[2, 4])
        with Largest() as watch:
            for number in range(members // block):
                stream.add(drawn(n, block, c, seed=number).float())
            stream.summary(), stream.between()
        held.append(kept(stream))
        largest.append(watch.numbers)
    assert held[0] == held[1]
    # Three means (n, 3, c), or the sub-ensembles being filled: never all members (n, 40, c).
    assert largest[0] == largest[1] <= max(3, block, 2) * n * c < n * 40 * c


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: MemberStream(temperature=0.0), ValueRangeError,
         r"temperature must be a number, above 0; got 0\.0\. 1 leaves logits as they are\."),
        (lambda: MemberStream(temperature=math.inf), ValueRangeError, r"got inf"),
        (lambda: MemberStream().summary(), TableError, r"there are no members\. Add the logits of at least one\."),
        (lambda: streamed(drawn(2, 5, 3), 1, sizes=[2]).between(), ValueRangeError,
         r"sizes of sub-ensembles must divide the 5 members; got \[2\]\. `sub_ensembles` lists those that do\."),
        (lambda: streamed(torch.full((1, 2, 3), math.nan), 1).summary(), ValueRangeError, r"uncertainty of members"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_members_of_other_classes():
    stream = MemberStream()
    stream.add(drawn(2, 1, 3))
    for other in (drawn(2, 1, 4), drawn(3, 1, 3)):
        with pytest.raises(TableError, match=r"\(n, c\) was \(2, 3\) at first and is \(\d, \d\) now\. Members of one"):
            stream.add(other)


def member_logits(n: int = 9, m: int = 7, c: int = 5) -> torch.Tensor:
    return 3 * torch.randn(n, m, c, generator=torch.Generator().manual_seed(0))


def variance(*blocks: torch.Tensor, **settings) -> torch.Tensor:
    stream = VarianceStream(**settings)
    for block in blocks:
        stream.add(block)
    return stream.variance()


def test_variance_against_numpy_in_any_blocks():
    z = member_logits()
    expected = torch.from_numpy(z.double().softmax(-1).numpy().var(1).sum(-1))
    for blocks in ([z], z.split(1, 1), z.split(3, 1), [z.flip(1)]):
        torch.testing.assert_close(variance(*blocks), expected, rtol=1e-12, atol=0)
    warm = torch.from_numpy((z.double() / 2).softmax(-1).numpy().var(1).sum(-1))
    torch.testing.assert_close(variance(z, temperature=2.0), warm, rtol=1e-12, atol=0)


def test_variance_of_one_member_and_of_equal_ones():
    assert variance(member_logits(m=1)).tolist() == [0.0] * 9
    assert variance(member_logits(m=1).expand(-1, 4, -1)).max() < 1e-30


def test_confident_inputs_keep_a_variance():
    # p = exp(-40), exp(-41): of squares near one, float64 would leave nothing of 1e-36.
    z = torch.tensor([[[40.0, 0.0], [41.0, 0.0]]], dtype=torch.float64)
    small = np.exp([-40.0, -41.0])
    value = float(variance(z))
    assert value == pytest.approx(small.var(), rel=1e-9)  # the variance of the other class is rounded away
    assert value > 0


def test_variance_errors():
    stream = VarianceStream()
    with pytest.raises(TableError, match=r"^there are no members\. Add the logits of at least one\.$"):
        stream.variance()
    stream.add(member_logits())
    with pytest.raises(TableError, match=r"\(n, c\) was \(9, 5\) at first and is \(8, 5\) now"):
        stream.add(member_logits(n=8))
    with pytest.raises(ValueRangeError, match="temperature must be a number, above 0"):
        VarianceStream(temperature=0.0)
    with pytest.raises(ValueRangeError, match="variance of members: 1 of 1 values are NaN or infinite"):
        variance(torch.tensor([[[np.nan, 0.0]]]))


EPISTEMIC = SUMMARY.index("epistemic")


def alone(logits: Tensor, temperature: float = 1.0) -> MemberStream:
    stream = MemberStream(temperature=temperature)
    stream.add(logits)
    return stream


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(0.1, 30), st.sampled_from([0.5, 1.0, 2.5]))
@settings(deadline=None, max_examples=40)
def test_each_group_is_summarised_as_if_it_were_alone(sizes, scale, temperature):
    z = drawn(3, sum(sizes), 6, scale=scale)
    label = torch.tensor([0, 5, 2])
    summary, loss = summarise_groups(z, sizes, label, temperature=temperature)
    for number, part in enumerate(z.split(sizes, dim=1)):
        stream = alone(part, temperature)
        torch.testing.assert_close(summary[number], stream.summary(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(loss[number], stream.loss(label), rtol=1e-9, atol=1e-9)


def test_single_precision_keeps_six_digits_at_a_thousand_classes():
    z = drawn(2, 20, 1000)
    summary, _ = summarise_groups(z.float() + 300, [16, 4])  # a common shift must not cost digits of the entropies
    fields = [SUMMARY.index(name) for name in ("total", "aleatoric", "epistemic", "confidence", "variation")]
    for number, part in enumerate(z.split([16, 4], dim=1)):
        torch.testing.assert_close(
            summary[number][:, fields].double(), alone(part).summary()[:, fields], rtol=0, atol=5e-5
        )


def test_members_that_agree_have_no_epistemic_part():
    z = drawn(3, 1, 7).float().expand(3, 9, 7)
    summary = summarise_groups(z, [9])[0][0]
    assert bool((summary[:, EPISTEMIC] <= 1e-6).all())
    assert bool((summary[:, EPISTEMIC] >= 0).all())
    assert torch.equal(summary[:, SUMMARY.index("variation")], torch.zeros(3))


def test_sure_members_that_disagree():
    far = torch.tensor([[[90.0, 0.0, 0.0], [0.0, 90.0, 0.0]]])  # probabilities that vanish in float32 add nothing
    summary, loss = summarise_groups(far, [2], torch.tensor([2]))
    assert float(summary[0, 0, EPISTEMIC]) == pytest.approx(math.log(2))
    assert float(summary[0, 0, SUMMARY.index("variation")]) == 0.5
    assert float(loss[0, 0]) == pytest.approx(90)


def test_the_loss_of_a_class_that_no_member_thinks_possible():
    # exp(-900) is no number of float32; the mean of exp(-900) and exp(-800) is exp(-800) / 2.
    z = torch.tensor([[[900.0, 0.0], [800.0, 0.0]]])
    assert summarise_groups(z, [2], torch.tensor([1]))[1].tolist() == [[pytest.approx(800 + math.log(2))]]
    assert summarise_groups(z, [2], torch.tensor([0]))[1].tolist() == [[0.0]]
    assert summarise_groups(z, [2])[1] is None


def test_tied_classes_vote_for_the_lowest():
    silent = torch.zeros(1, 4, 3)
    assert float(summarise_groups(silent, [4])[0][0, 0, SUMMARY.index("variation")]) == 0


def test_not_a_number_is_handed_on_and_not_hidden():
    z = drawn(2, 4, 3)
    z[1, 2, 0] = math.nan
    summary = summarise_groups(z, [4])[0][0]
    assert bool(summary[0].isfinite().all())
    assert bool(summary[1].isnan().any())


def test_groups_at_a_temperature_of_zero():
    with pytest.raises(ValueRangeError, match=r"temperature must be a number, above 0; got 0\.0"):
        summarise_groups(drawn(1, 2, 3), [2], temperature=0.0)
