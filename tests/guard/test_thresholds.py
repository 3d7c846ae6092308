import re
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.thresholds import (
    Guarantee,
    binomial_p,
    bonferroni,
    check_levels,
    fallback,
    hoeffding_bentkus_p,
    images_needed,
    needed,
    risk_threshold,
    share_threshold,
    smallest_risk,
)


def draw(n: int, seed: int, steep: float = 4.0) -> tuple[np.ndarray, np.ndarray]:
    """u uniform in [0, 1], wrong with probability u^steep / 2."""
    rng = np.random.default_rng(seed)
    u = rng.random(n)
    return u, rng.random(n) < u**steep / 2


def threshold(*parts: tuple[np.ndarray, np.ndarray], **settings: Any) -> float:
    """Nothing is accepted where nothing can be guaranteed."""
    try:
        return risk_threshold(*parts, **settings).value
    except GuardError:
        return 0.0


def true_risk(t: float, steep: float = 4.0) -> float:
    """The mean of u^steep / 2 over [0, t]."""
    return t**steep / (2 * (steep + 1))


@pytest.mark.parametrize(("level", "confidence"), [(0.05, 0.95), (0.01, 0.95), (0.1, 0.9), (0.5, 0.5)])
def test_needed_is_the_smallest_number_that_shows_it(level: float, confidence: float) -> None:
    k = needed(level, confidence)
    assert (1 - level) ** k <= 1 - confidence + 1e-12
    assert (1 - level) ** (k - 1) > 1 - confidence


def test_p_values_by_hand() -> None:
    # P(Bin(3, 1/2) <= 1) = (1 + 3) / 8
    assert binomial_p(np.array([1, 0]), np.array([3, 0]), 0.5).tolist() == [0.5, 1.0]


def test_the_exact_p_value_is_never_above_hoeffding_and_bentkus() -> None:
    accepted = np.arange(1, 200)
    for rate in (0.0, 0.02, 0.1, 0.5):
        errors = np.floor(rate * accepted).astype(int)
        exact, bound = binomial_p(errors, accepted, 0.1), hoeffding_bentkus_p(errors, accepted, 0.1)
        assert (exact <= bound + 1e-12).all()
    # Without errors, Hoeffding's exp(-k h(0, r)) is (1 - r)^k itself.
    assert hoeffding_bentkus_p(np.array([0]), np.array([20]), 0.1)[0] == pytest.approx(0.9**20)
    assert hoeffding_bentkus_p(np.array([0]), np.array([0]), 0.1)[0] == 1.0


@pytest.mark.parametrize(
    ("levels", "last"),
    [
        ([0, 0.05, 0, 0, 0], 2),  # a fixed sequence from the second on: 0.2 ends it
        ([0.05, 0, 0, 0, 0], None),  # its first test fails
        ([0, 0.02, 0.03, 0, 0], 2),  # 0.01 <= 0.02, then 0.04 <= 0.02 + 0.03
        ([0, 0.005, 0.03, 0, 0], None),  # 0.01 > 0.005, then 0.04 > 0.03: nothing was handed on
        ([0, 0.04, 0, 0, 0.01], 4),  # begins anew at the last
    ],
)
def test_fallback_hands_levels_on_while_tests_pass(levels: list[float], last: int | None) -> None:
    p = np.array([0.3, 0.01, 0.04, 0.2, 0.0001])
    assert fallback(p, np.array(levels)) == last


def test_bonferroni_shares_the_level() -> None:
    p = np.array([0.3, 0.01, 0.04, 0.2, 0.0001])
    assert bonferroni(p, 0.05) == 4  # those at or below 0.01
    assert bonferroni(p[:4], 0.05) == 1
    assert bonferroni(p[:1], 0.05) is None


@pytest.mark.parametrize("testing", ["fallback", "bonferroni"])
def test_the_guarantee_holds_in_as_many_draws_as_it_states(testing: str) -> None:
    """At risk 0.06, 400 draws of 60 + 240: at most 5 % may be too risky; 2.6 standard errors are added."""
    broken = 0
    for seed in range(400):
        t = threshold(draw(60, seed), draw(240, 10_000 + seed), risk=0.06, confidence=0.95, testing=testing)
        broken += true_risk(t) > 0.06
    assert broken / 400 <= 0.05 + 2.6 * (0.05 * 0.95 / 400) ** 0.5


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


def test_with_many_images_a_rise_in_between_is_jumped() -> None:
    result = risk_threshold(gap(2_000, 0), gap(20_000, 1), risk=0.05, confidence=0.95)
    assert 0.79 < result.value <= 0.8 + 0.02 / 0.95  # (0.02 + t - 0.8) / t <= 0.05


def test_the_guarantee_holds_where_the_rate_rises_and_falls() -> None:
    broken = 0
    for seed in range(400):
        t = threshold(gap(100, seed), gap(400, 10_000 + seed), risk=0.05, confidence=0.95)
        rate = (0.2 * (min(max(t, 0.2), 0.3) - 0.2) + max(t - 0.8, 0.0)) / max(t, 1e-9)
        broken += rate > 0.05
    assert broken / 400 <= 0.05 + 2.6 * (0.05 * 0.95 / 400) ** 0.5


def test_fallback_accepts_more_than_bonferroni() -> None:
    covered = {"fallback": 0.0, "bonferroni": 0.0}
    for seed in range(60):
        for testing in covered:
            parts = draw(200, seed), draw(800, 10_000 + seed)
            covered[testing] += threshold(*parts, risk=0.03, confidence=0.95, testing=testing) / 60
    best = (2 * 5 * 0.03) ** 0.25  # true_risk(t) = 0.03
    assert covered["bonferroni"] + 0.02 < covered["fallback"] < best
    assert covered["fallback"] > 0.8 * best


def test_counts_are_those_of_the_calibration_images() -> None:
    selection, (u, wrong) = draw(100, 0), draw(500, 1)
    result = risk_threshold(selection, (u, wrong), risk=0.05, confidence=0.9)
    assert result.value in selection[0]
    assert (result.accepted, result.errors, result.of) == (
        (u <= result.value).sum(),
        wrong[u <= result.value].sum(),
        500,
    )
    assert binom.cdf(result.errors, result.accepted, 0.05) <= 0.1


def test_candidates_are_at_most_so_many_ranks_of_the_selection_images() -> None:
    right = np.zeros(300, dtype=bool)
    selection = np.array([0.1, 0.2, 0.6, 0.8]), np.array([False, False, True, True])
    result = risk_threshold(selection, (np.linspace(0, 1, 300), right), risk=0.1, confidence=0.9, candidates=2)
    assert result.value in (0.2, 0.8)  # ranks 2 and 4 of four


def test_nothing_beyond_the_selection_images_is_accepted() -> None:
    right = np.zeros(300, dtype=bool)
    result = risk_threshold(
        (np.linspace(0, 1, 50), right[:50]), (np.linspace(0, 2, 300), right), risk=0.1, confidence=0.9
    )
    assert result.value == 1.0
    assert result.accepted == 150


def test_infinite_uncertainties_are_never_accepted() -> None:
    u = np.append(np.linspace(0, 1, 200), np.full(50, np.inf))
    result = risk_threshold((u, np.zeros(250, bool)), (u, np.zeros(250, bool)), risk=0.1, confidence=0.9)
    assert (result.value, result.accepted) == (1.0, 200)


def test_equal_uncertainties_are_accepted_together() -> None:
    u = np.repeat([0.0, 1.0], 100)
    wrong = np.repeat([False, True], 100)
    result = risk_threshold((u, wrong), (u, wrong), risk=0.1, confidence=0.95)
    assert (result.value, result.accepted, result.errors) == (0.0, 100, 0)


def test_too_few_images_are_reported_with_the_number_that_is_needed() -> None:
    u, wrong = np.arange(7.0), np.zeros(7, bool)
    with pytest.raises(GuardError, match=r"needs at least 59 calibration images.*there are 7\. Pass more labelled"):
        risk_threshold((u, wrong), (u, wrong), risk=0.05, confidence=0.95)


def test_all_wrong_says_that_more_images_may_not_help() -> None:
    u, wrong = np.arange(100.0), np.ones(100, bool)
    with pytest.raises(GuardError, match=r"no threshold keeps .* at or below 0.05 .*, or choose a larger risk\."):
        risk_threshold((u, wrong), (u, wrong), risk=0.05, confidence=0.95)
    feasible = Guarantee("risk", 0.05, 0.95).feasible((u, wrong), (u, wrong), 100)
    assert feasible.startswith(
        "With these images, no risk is feasible at confidence 0.95. More images of this kind may not"
    )


def test_almost_enough_images_ask_for_more() -> None:
    rng = np.random.default_rng(0)
    u, wrong = rng.random(100), rng.permutation(100) < 3
    with pytest.raises(GuardError, match=r"3 are wrong, which only shows a rate below 0.0\d+\. Pass more labelled"):
        risk_threshold((u, wrong), (u, wrong), risk=0.05, confidence=0.95)


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
    with pytest.raises(GuardError, match=r"0.9 of all images cannot be accepted: 20 of 100 images are unlike"):
        share_threshold(u, share=0.9, confidence=0.95, what="images")


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, float("nan"), "0.05", None])
def test_levels_are_shares(bad: Any) -> None:
    with pytest.raises(ValueRangeError, match=r"risk must be a number in \(0, 1\)"):
        check_levels(risk=bad)


def test_exactly_as_many_as_are_needed_suffice() -> None:
    """59 images that are all accepted and correct show 0.05 at 0.95: the level is not divided where that would fail."""
    known, right = np.linspace(0, 1, 15), np.zeros(59, bool)
    result = risk_threshold((known, right[:15]), (np.linspace(0, 1, 59), right), risk=0.05, confidence=0.95)
    assert (result.accepted, result.errors) == (59, 0)


def test_with_so_few_images_it_begins_where_most_are_accepted() -> None:
    """Of 20 reference images one is novel, so 57 of 60 are expected below: too few. In fact all 60 are, and 59 do."""
    known, right = np.append(np.linspace(0, 1, 19), np.inf), np.zeros(60, bool)
    result = risk_threshold((known, right[:20]), (np.linspace(0, 1, 60), right), risk=0.05, confidence=0.95)
    assert (result.accepted, result.errors) == (60, 0)


def test_the_smallest_feasible_risk_passes_and_the_next_does_not() -> None:
    rng = np.random.default_rng(0)
    u = rng.random(600)
    wrong = rng.random(600) < 0.3 * u
    parts = (u[:120], wrong[:120]), (u[120:], wrong[120:])
    lowest = smallest_risk(*parts, confidence=0.95)
    assert lowest is not None
    assert risk_threshold(*parts, risk=lowest, confidence=0.95).accepted > 0
    with pytest.raises(GuardError):
        risk_threshold(*parts, risk=lowest - 0.001, confidence=0.95)
    assert smallest_risk((u, wrong | True), (u, wrong | True), confidence=0.95) is None


def test_how_many_images_a_risk_takes() -> None:
    """Of 100 accepted images, 1 is wrong, counted as 1.5 of 101. At risk 0.05 and confidence 0.95, k images may have c
    errors, P(Bin(k, 0.05) <= c) <= 0.05; the first k with P(Bin(k, 1.5 / 101) <= c) >= 0.8 is looked for."""
    u, wrong = np.zeros(100), np.arange(100) < 1
    enough = images_needed((u, wrong), risk=0.05, confidence=0.95)
    k = np.arange(100, 1000)
    likely = binom.cdf(binom.ppf(0.05, k, 0.05) - 1, k, 1.5 / 101) >= 0.8
    assert enough is not None
    assert k[likely][0] <= enough <= 1.1 * k[~likely][-1] + 2  # from the first such number to where all are
    assert images_needed((u, wrong), risk=0.01, confidence=0.95) is None  # more of them are wrong
    assert Guarantee("risk", 0.01, 0.95).feasible((u, wrong), (u, wrong), 200).endswith("more are wrong.")


def test_a_refusal_never_reports_a_rate_that_would_do() -> None:
    """The bound in the message is that of the test's own level, so that it lies above the risk that was refused."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        u, wrong = rng.random(300), rng.random(300) < 0.035
        try:
            risk_threshold((u[:60], wrong[:60]), (u[60:], wrong[60:]), risk=0.05, confidence=0.95)
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


def test_the_guarantee_holds_with_ties() -> None:
    """u takes four values, wrong with 0, 2, 20 and 60 %: R is 0.01 up to 1, and 0.0733 up to 2, which is too much."""
    broken = accepted = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        u = rng.integers(0, 4, 360).astype(float)
        wrong = rng.random(360) < np.array([0.0, 0.02, 0.2, 0.6])[u.astype(int)]
        t = threshold((u[:60], wrong[:60]), (u[60:], wrong[60:]), risk=0.06, confidence=0.95)
        broken, accepted = broken + (t >= 2), accepted + (t >= 1)
    assert broken / 400 <= 0.05 + 2.6 * (0.05 * 0.95 / 400) ** 0.5
    assert accepted > 300
