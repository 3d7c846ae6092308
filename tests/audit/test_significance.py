"""Exact tests against scipy and by hand."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from dubito.audit.significance import below, binomial_tail, paired_p, upper_bound


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


@pytest.mark.parametrize(("k", "n"), [(0, 30), (1, 100), (15, 20), (499, 500)])
def test_upper_bound_is_that_of_clopper_and_pearson(k, n):
    assert upper_bound(k, n, 0.01) == pytest.approx(beta.ppf(0.99, k + 1, n - k), rel=1e-9)
    assert upper_bound(n, n, 0.01) == 1


def test_paired_p_by_hand():
    # Ten discordant images, nine for the new one: (C(10,9) + C(10,10)) / 2^10 = 11 / 1024; six alternatives.
    assert paired_p(9, 1) == pytest.approx(11 / 1024)
    assert paired_p(9, 1, tests=6) == pytest.approx(66 / 1024)
    assert paired_p(0, 0) == 1
    assert below(0.0) == "p < 1e-98"
