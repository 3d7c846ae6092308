import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.thresholds import (
    NO_LIMIT,
    binomial_p,
    check_levels,
    first_test,
    images_needed,
    needed,
    risk_threshold,
    share_threshold,
)


def draw(n: int, seed: int, steep: float = 4.0) -> tuple[np.ndarray, np.ndarray]:
    """u uniform in [0, 1], wrong with probability u^steep / 2."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    return u, rng.random(n) < u**steep / 2


def threshold(u: np.ndarray, wrong: np.ndarray, **settings: Any) -> float:
    """Nothing is accepted where nothing can be guaranteed."""
    try:
        return risk_threshold(u, wrong, **settings).value
    except GuardError:
        return -np.inf


def true_risk(t: float, steep: float = 4.0) -> float:
    """The mean of u^steep / 2 over [0, t], or over all images."""
    return min(max(t, 0.0), 1.0) ** steep / (2 * (steep + 1))


@pytest.mark.parametrize(("level", "confidence"), [(0.05, 0.95), (0.01, 0.95), (0.1, 0.9), (0.5, 0.5)])
def test_needed_is_the_smallest_number_that_shows_it(level: float, confidence: float) -> None:
    k = needed(level, confidence)
    assert (1 - level) ** k <= 1 - confidence + 1e-12
    assert (1 - level) ** (k - 1) > 1 - confidence


def test_p_values_by_hand() -> None:
    # P(Bin(3, 1/2) <= 1) = (1 + 3) / 8
    assert binomial_p(np.array([1, 0]), np.array([3, 0]), 0.5).tolist() == [0.5, 1.0]


@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.01, 0.9), (0.3, 0.99)])
def test_the_first_test_is_about_the_fewest_images_that_may_have_eight_errors(risk: float, confidence: float) -> None:
    k = first_test(100_000, risk, confidence)
    assert binom.cdf(8, k, risk) <= 1 - confidence < binom.cdf(8, k - 1, risk)


def test_with_few_images_the_first_test_is_about_half_of_them_at_most() -> None:
    # At risk 0.05, 59, 93, 124 and 153 images may have 0, 1, 2 and 3 errors.
    assert [first_test(n, 0.05, 0.95) for n in (60, 118, 186, 247, 248)] == [59, 59, 93, 93, 124]


def exceeded(true: Callable[[float], float], drawn: Callable[..., Any], n: int, risk: float, draws: int = 500) -> float:
    """The share of draws whose threshold is too risky, without 2.6 standard errors of 5 %."""
    values = [threshold(*drawn(n, seed), risk=risk, confidence=0.95) for seed in range(draws)]
    return sum(true(t) > risk for t in values) / draws - 2.6 * (0.05 * 0.95 / draws) ** 0.5


@pytest.mark.parametrize("n", [60, 240, 1000])
def test_the_guarantee_holds_in_as_many_draws_as_it_states(n: int) -> None:
    assert exceeded(true_risk, draw, n, 0.06) <= 0.05


def evenly_wrong(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Wrong at rate 0.0502, whatever u is; one in ten is novel."""
    rng = np.random.default_rng(seed)
    u = np.where(rng.random(n) < 0.1, np.inf, rng.random(n))
    return u, rng.random(n) < 0.0502


@pytest.mark.parametrize("n", [60, 150, 600])
def test_the_guarantee_holds_where_all_images_together_are_just_too_risky(n: int) -> None:
    """All of them are wrong at rate 0.1, and at 0.0502: what must not be accepted is nearly all, or all at once."""
    assert exceeded(true_risk, draw, n, 0.0995) <= 0.05
    assert exceeded(lambda t: 0.0502 if t > 0 else 0.0, evenly_wrong, n, 0.05) <= 0.05


def test_if_all_images_may_be_accepted_they_are() -> None:
    values = [threshold(*draw(600, seed), risk=0.14, confidence=0.95) for seed in range(100)]
    assert values.count(NO_LIMIT) > 80


def test_taking_the_best_looking_threshold_breaks_it() -> None:
    """What is prevented: the largest threshold whose own error rate looks right is too risky half of the time."""
    broken = 0
    for seed in range(200):
        u, wrong = draw(240, 10_000 + seed)
        order = np.argsort(u)
        rate = np.cumsum(wrong[order]) / np.arange(1, 241)
        broken += true_risk(u[order][np.nonzero(rate <= 0.06)[0][-1]]) > 0.06
    assert broken / 200 > 0.25


def gap(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Wrong with probability 0.2 for u in [0.2, 0.3], 1 above 0.8, else 0: the rate is above 0.05 from 0.27 to 0.4."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    return u, rng.random(n) < np.select([(u > 0.2) & (u < 0.3), u > 0.8], [0.2, 1.0], 0.0)


def gap_risk(t: float) -> float:
    """Its rate below t."""
    t = min(t, 1.0)
    return (0.2 * (min(max(t, 0.2), 0.3) - 0.2) + max(t - 0.8, 0.0)) / max(t, 1e-9)


@pytest.mark.parametrize("n", [100, 400, 1500])
def test_the_guarantee_holds_where_the_rate_rises_and_falls(n: int) -> None:
    assert exceeded(gap_risk, gap, n, 0.05) <= 0.05


def coarse(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """u has ten values only, at each of which a tenth of the images ties."""
    u, wrong = draw(n, seed)
    return np.floor(10 * u), wrong


@pytest.mark.parametrize("n", [100, 400, 1500])
def test_the_guarantee_holds_where_uncertainties_tie(n: int) -> None:
    assert exceeded(lambda t: true_risk((np.floor(t) + 1) / 10), coarse, n, 0.03) <= 0.05


def test_coverage_comes_close_to_the_best() -> None:
    best = (2 * 5 * 0.03) ** 0.25  # true_risk(t) = 0.03
    covered = np.mean([min(threshold(*draw(1000, seed), risk=0.03, confidence=0.95), 1.0) for seed in range(60)])
    assert 0.85 * best < covered < best


def test_the_threshold_is_where_the_first_test_fails() -> None:
    """By brute force: tests of 59, 60, ... images until one fails; the next image's uncertainty is not accepted."""
    u, wrong = draw(500, 1)
    order = np.argsort(u)
    k = first_test(500, 0.05, 0.9)
    while binom.cdf(wrong[order[:k]].sum(), k, 0.05) <= 0.1:
        k += 1
    result = risk_threshold(u, wrong, risk=0.05, confidence=0.9)
    assert (result.accepted, result.errors, result.of) == (k - 1, wrong[order[: k - 1]].sum(), 500)
    assert u[order[k - 2]] <= result.value < u[order[k - 1]]


def test_if_all_calibration_images_are_right_no_image_is_refused_for_its_uncertainty() -> None:
    result = risk_threshold(np.linspace(0, 2, 300), np.zeros(300, bool), risk=0.1, confidence=0.9)
    assert result == (NO_LIMIT, 300, 0, 300)
    assert 1e300 <= result.value < np.inf


def test_the_last_test_is_about_all_images() -> None:
    """P(Bin(300, 0.1) <= e) is 0.07 for e = 22 and 0.102 for e = 23: one more error at the end makes the difference."""
    u, wrong = np.arange(300.0), np.zeros(300, bool)
    wrong[277:299] = True
    assert risk_threshold(u, wrong, risk=0.1, confidence=0.9).value == NO_LIMIT
    wrong[299] = True
    assert risk_threshold(u, wrong, risk=0.1, confidence=0.9)[:3] == (np.nextafter(299.0, 0), 299, 22)


def test_infinite_uncertainties_are_never_accepted() -> None:
    u = np.append(np.linspace(0, 1, 200), np.full(50, np.inf))
    result = risk_threshold(u, np.zeros(250, bool), risk=0.1, confidence=0.9)
    assert (result.value, result.accepted) == (NO_LIMIT, 200)
    # P(Bin(199, 0.12) <= 19) = 0.17, P(Bin(200, 0.12) <= 20) = 0.23
    wrong = (np.arange(250) >= 180) & (np.arange(250) < 200)
    assert risk_threshold(u, wrong, risk=0.12, confidence=0.8)[1:3] == (199, 19)


def test_equal_uncertainties_are_accepted_together() -> None:
    u = np.repeat([0.0, 1.0], 100)
    wrong = np.repeat([False, True], 100)
    result = risk_threshold(u, wrong, risk=0.1, confidence=0.95)
    assert (result.accepted, result.errors, 0 <= result.value < 1) == (100, 0, True)


def test_if_all_uncertainties_are_equal_all_are_accepted_or_none() -> None:
    assert risk_threshold(np.zeros(500), np.zeros(500, bool), risk=0.1, confidence=0.95)[:2] == (NO_LIMIT, 500)
    with pytest.raises(GuardError, match="no threshold keeps"):
        risk_threshold(np.zeros(500), np.arange(500) % 9 == 0, risk=0.1, confidence=0.95)


def test_too_few_images_are_reported_with_the_number_that_is_needed() -> None:
    u, wrong = np.arange(7.0), np.zeros(7, bool)
    with pytest.raises(GuardError, match=r"needs at least 59 calibration images.*there are 7\. Pass more labelled"):
        risk_threshold(u, wrong, risk=0.05, confidence=0.95)


def test_if_all_are_wrong_no_threshold_keeps_a_risk() -> None:
    u, wrong = np.arange(100.0), np.ones(100, bool)
    with pytest.raises(GuardError, match=r"no threshold keeps .* at or below 0.05 .*, or choose a larger risk\."):
        risk_threshold(u, wrong, risk=0.05, confidence=0.95)


def test_almost_enough_images_ask_for_more() -> None:
    rng = np.random.default_rng(0)
    u, wrong = rng.random(100), rng.permutation(100) < 3
    with pytest.raises(GuardError, match=r"2 are wrong, which only shows a rate below 0.10\d*\. Pass more labelled"):
        risk_threshold(u, wrong, risk=0.05, confidence=0.95)


@pytest.mark.parametrize(("n", "share"), [(100, 0.8), (59, 0.95), (400, 0.5)])
def test_share_is_the_smallest_order_statistic_that_keeps_it(n: int, share: float) -> None:
    u = np.random.default_rng(0).permutation(n).astype(float)
    k = share_threshold(u, share=share, confidence=0.95, what="images").accepted
    # The k-th smallest of n lies above the quantile with probability P(Bin(n, share) <= k - 1).
    assert binom.cdf(k - 1, n, share) >= 0.95
    assert binom.cdf(k - 2, n, share) < 0.95


def test_share_needs_so_many() -> None:
    with pytest.raises(GuardError, match=r"accepting 0.9 of them .* needs at least 29 right images; there are 28"):
        share_threshold(np.arange(28.0), share=0.9, confidence=0.95, what="right images")


def test_share_that_novel_images_make_impossible() -> None:
    u = np.append(np.arange(80.0), np.full(20, np.inf))
    with pytest.raises(GuardError, match=r"0\.9 cannot be accepted: 20 of 100 images are refused .* so 0\.722 is"):
        share_threshold(u, share=0.9, confidence=0.95, what="images")
    assert share_threshold(u, share=0.722, confidence=0.95, what="images").accepted == 80
    with pytest.raises(GuardError, match="cannot be accepted"):
        share_threshold(u, share=0.723, confidence=0.95, what="images")


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, float("nan"), "0.05", None])
def test_levels_are_shares(bad: Any) -> None:
    with pytest.raises(ValueRangeError, match=r"risk must be a number in \(0, 1\)"):
        check_levels(risk=bad)


def test_exactly_as_many_as_are_needed_suffice() -> None:
    """59 images that are accepted and correct show 0.05 at 0.95."""
    result = risk_threshold(np.linspace(0, 1, 59), np.zeros(59, bool), risk=0.05, confidence=0.95)
    assert result == (NO_LIMIT, 59, 0, 59)
    with pytest.raises(GuardError, match=r"at least 59 calibration images.* there are 58"):
        risk_threshold(np.linspace(0, 1, 58), np.zeros(58, bool), risk=0.05, confidence=0.95)


@pytest.mark.parametrize(("risk", "confidence", "n"), [(0.9, 0.9, 1), (0.5, 0.75, 2), (0.1, 0.19, 2)])
def test_rounding_asks_for_one_more_image_at_most(risk: float, confidence: float, n: int) -> None:
    """(1 - risk)^n = 1 - confidence but for rounding."""
    assert needed(risk, confidence) == n
    assert threshold(np.arange(float(n)), np.zeros(n, bool), risk=risk, confidence=confidence) in (NO_LIMIT, -np.inf)
    assert risk_threshold(np.arange(n + 1.0), np.zeros(n + 1, bool), risk=risk, confidence=confidence).errors == 0


def test_how_many_images_a_risk_takes() -> None:
    """Of 100 accepted images, 1 is wrong, counted as 1.5 of 101. At risk 0.05 and confidence 0.95, k images may have c
    errors, P(Bin(k, 0.05) <= c) <= 0.05; the first k with P(Bin(k, 1.5 / 101) <= c) >= 0.8 is looked for."""
    u, wrong = np.zeros(100), np.arange(100) < 1
    enough = images_needed(u, wrong, risk=0.05, confidence=0.95)
    k = np.arange(100, 1000)
    likely = binom.cdf(binom.ppf(0.05, k, 0.05) - 1, k, 1.5 / 101) >= 0.8
    assert enough is not None
    assert k[likely][0] <= enough <= 1.1 * k[~likely][-1] + 2  # from the first such number to where all are
    assert images_needed(u, wrong, risk=0.01, confidence=0.95) is None  # more of them are wrong


def test_a_refusal_never_reports_a_rate_that_would_do() -> None:
    """The bound in the message is that of the test's own level, so that it lies above the risk that was refused."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        u, wrong = rng.random(300), rng.random(300) < 0.035
        try:
            risk_threshold(u, wrong, risk=0.05, confidence=0.95)
        except GuardError as error:
            message = re.search(r"only shows a rate below ([\d.]+)\. Pass more labelled", str(error))
            assert message is None or float(message[1]) > 0.05


@pytest.mark.parametrize(("share", "confidence", "n"), [(0.9, 0.19, 2), (0.9, 0.271, 3), (0.8, 0.36, 2)])
def test_share_with_exactly_as_many_as_are_needed(share: float, confidence: float, n: int) -> None:
    """share^n = 1 - confidence but for rounding, which must not ask for the image after the last."""
    assert needed(1 - share, confidence) == n
    result = share_threshold(np.arange(float(n)), share=share, confidence=confidence, what="images")
    assert (result.value, result.accepted) == (n - 1, n)


def test_shares_hold_with_ties() -> None:
    """u is 0, 1 or 2 with chances 0.5, 0.3, 0.2: at least 0.7 are accepted only from 1 on."""
    kept = 0
    for seed in range(300):
        u = np.random.default_rng(seed).choice(3, 40, p=[0.5, 0.3, 0.2]).astype(float)
        kept += share_threshold(u, share=0.7, confidence=0.9, what="images").value >= 1
    assert kept / 300 >= 0.9 - 2.6 * (0.9 * 0.1 / 300) ** 0.5
