"""Ensembles side by side: each as if it were alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.metrics.groups import Groups
from dubito.metrics.streaming import SUMMARY, MemberStream

EPISTEMIC = SUMMARY.index("epistemic")


def drawn(n: int, m: int, c: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, m, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(logits: Tensor, temperature: float = 1.0) -> MemberStream:
    stream = MemberStream(temperature=temperature)
    stream.add(logits)
    return stream


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(0.1, 30), st.sampled_from([0.5, 1.0, 2.5]))
@settings(deadline=None, max_examples=40)
def test_each_is_told_as_if_it_were_alone(sizes, scale, temperature):
    z = drawn(3, sum(sizes), 6, scale)
    label = torch.tensor([0, 5, 2])
    told = Groups(sizes, temperature=temperature).tell(z, label)
    assert told.loss is not None
    for number, part in enumerate(z.split(sizes, dim=1)):
        stream = alone(part, temperature)
        torch.testing.assert_close(told.summary[number], stream.summary(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(told.loss[number], stream.loss(label), rtol=1e-9, atol=1e-9)


def test_single_precision_keeps_six_digits_at_a_thousand_classes():
    z = drawn(2, 20, 1000)
    told = Groups([16, 4]).tell(z.float() + 300)  # a common shift must not cost digits of the entropies
    fields = [SUMMARY.index(name) for name in ("total", "aleatoric", "epistemic", "confidence", "variation")]
    for number, part in enumerate(z.split([16, 4], dim=1)):
        torch.testing.assert_close(
            told.summary[number][:, fields].double(), alone(part).summary()[:, fields], rtol=0, atol=5e-5
        )


def test_members_that_agree_have_nothing_to_tell():
    z = drawn(3, 1, 7).float().expand(3, 9, 7)
    summary = Groups([9]).tell(z).summary[0]
    assert bool((summary[:, EPISTEMIC] <= 1e-6).all())
    assert bool((summary[:, EPISTEMIC] >= 0).all())
    assert torch.equal(summary[:, SUMMARY.index("variation")], torch.zeros(3))


def test_sure_members_that_disagree():
    far = torch.tensor([[[90.0, 0.0, 0.0], [0.0, 90.0, 0.0]]])  # probabilities that vanish in float32 add nothing
    told = Groups([2]).tell(far, torch.tensor([2]))
    assert float(told.summary[0, 0, EPISTEMIC]) == pytest.approx(math.log(2))
    assert float(told.summary[0, 0, SUMMARY.index("variation")]) == 0.5
    assert told.loss is not None
    assert float(told.loss[0, 0]) == pytest.approx(90)


def test_the_loss_of_a_class_that_no_member_thinks_possible():
    # exp(-900) is no number of float32; the mean of exp(-900) and exp(-800) is exp(-800) / 2.
    z = torch.tensor([[[900.0, 0.0], [800.0, 0.0]]])
    assert Groups([2]).tell(z, torch.tensor([1])).loss.tolist() == [[pytest.approx(800 + math.log(2))]]
    assert Groups([2]).tell(z, torch.tensor([0])).loss.tolist() == [[0.0]]
    assert Groups([2]).tell(z).loss is None


def test_tied_classes_vote_for_the_lowest():
    silent = torch.zeros(1, 4, 3)
    assert float(Groups([4]).tell(silent).summary[0, 0, SUMMARY.index("variation")]) == 0


def test_not_a_number_is_handed_on_and_not_hidden():
    z = drawn(2, 4, 3)
    z[1, 2, 0] = math.nan
    summary = Groups([4]).tell(z).summary[0]
    assert bool(summary[0].isfinite().all())
    assert bool(summary[1].isnan().any())


@pytest.mark.parametrize("sizes", [[], [2, 0]])
def test_no_members(sizes):
    with pytest.raises(ValueRangeError, match=r"sizes must be one or more members each"):
        Groups(sizes)


def test_a_temperature_of_zero():
    with pytest.raises(ValueRangeError, match=r"temperature must be positive and finite; got 0\.0"):
        Groups([2], temperature=0.0)
