"""Exact tests against rational numbers and by hand."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.audit.finding import below, binomial_tail, paired_gain


@given(n=st.integers(1, 400), share=st.floats(0, 1), p=st.floats(0.001, 0.999))
@settings(max_examples=60, deadline=None)
def test_binomial_tail_is_the_exact_sum(n, share, p):
    """In rational numbers: far out in the tail, scipy itself is off by more than one in 10^8."""
    k, exact = round(share * n), Fraction(p)
    terms = (math.comb(n, i) * exact**i * (1 - exact) ** (n - i) for i in range(k, n + 1))
    assert binomial_tail(k, n, p) == pytest.approx(float(sum(terms)), rel=1e-10, abs=1e-300)


def test_binomial_tail_at_its_ends():
    assert binomial_tail(0, 5, 0.3) == 1
    assert binomial_tail(6, 5, 0.3) == 0
    assert binomial_tail(1, 5, 0.0) == 0
    assert binomial_tail(5, 5, 1.0) == 1


def test_paired_gain_by_hand():
    # Ten discordant images of twenty, nine for the new one: (C(10,9) + C(10,10)) / 2^10 = 11 / 1024; six alternatives.
    before, after = torch.arange(20) >= 9, (torch.arange(20) != 9)
    assert paired_gain(before, after) == pytest.approx((8 / 20, 11 / 1024))
    assert paired_gain(before, after, tests=6) == pytest.approx((8 / 20, 66 / 1024))
    assert paired_gain(before, before) == (0, 1)
    assert below(0.0) == "p < 1e-98"
