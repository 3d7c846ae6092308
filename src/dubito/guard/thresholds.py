"""Exact tests of thresholds: which one keeps a guarantee, whatever the images are, with as many as there are.

With risk r, confidence 1 - delta, and calibration images in the order of their uncertainty, u_(1) < u_(2) < ... :

    e_k    wrong ones among the first k
    p_k    = P(Bin(k, r) <= e_k)         tests R(u_(k+1)) > r,  where R(t) = P(wrong | u < t)

k = s, s + 1, ..., m are tested in turn until p_k > delta, where m of the images have a finite u, and u_(m+1) is
infinite; the last k that passed gives the threshold: images with u < u_(k+1) are accepted. If that is k = m, all are,
except for those whose u is infinite, such as novel ones. This is fixed-sequence testing, as in Learn then Test
(Angelopoulos et al. 2021), but the thresholds are the calibration images' own, so all of them count, and none is spent
on choosing candidates. Selective risk is that of Geifman & El-Yaniv (2017).

Why P(R(t) > r) <= delta for the t taken. Let finite u have a continuous distribution (ties are ordered by lot). R is
continuous, up to R(infinity) = P(wrong | u is finite), so the t with R(t) > r form intervals, with R = r at both ends
(the first may begin below all images; the last may reach infinity, and then contains it). Fix how many calibration
images lie between these ends, which fixes m, too. Those below an end are then wrong at rate r exactly, because R = r
at every end below it, too. Suppose that s lies outside the intervals. To take a t in one, the tests must pass at
k = the number of images below the lower end of the first interval behind s, be it m: there e_k is Bin(k, r), so they do
with probability delta at most. Suppose that s lies inside one, that is R(u_(s+1)) > r: of the s images below u_(s+1),
those below the interval's lower end are wrong at rate r, the others at a higher one, so p_s <= delta has probability
delta at most. Both cases hold for whatever numbers were fixed, hence without fixing them. Nothing is paid for the
number of tests.

Equal values are accepted all or none: t is then where they begin, with k' images below it, s <= k' <= k, whose tests
have passed, too. If such a t lies in an interval and u_(s+1) behind its upper end, then k' = s images lie below that
end, e_s is Bin(s, r) again, and whatever is taken, the test at s must pass. Images of infinite u are equal, too, and
lie above all others; they begin at t = infinity.

Of costs, l_i / (the largest) in [0, 1] takes the place of errors, and the bets of `dubito.guard.losses` that of the
binomial tail, unless all costs are 0 or the largest. The proof is the same: given u_(s+1), the s images below it are
independent with a mean loss of R(u_(s+1)), so where that is above r, the test passes with probability delta at most.

Where to begin is ours: at the very fewest, one unlucky image would end it. s is the smallest number of images that may
have eight errors, or fewer errors where s would be more than half of the images; it depends on n, r and delta alone.

Shares of images (coverage, refused correct predictions) are order statistics: P(F(u_(k)) >= c) = P(Bin(n, c) <= k - 1).
"""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int
from scipy.stats import binom, nbinom

from dubito.errors import GuardError
from dubito.guard.losses import fewest_images, log_evidence
from dubito.metrics import proportion_bound
from dubito.validate import check_number

NO_LIMIT = sys.float_info.max
"""The threshold that accepts every image whose uncertainty is finite: the largest number."""
Losses = Bool[np.ndarray, "_"] | Float64[np.ndarray, "_"]
"""Which images are predicted wrong, or what they cost."""
Outcomes = tuple[Float64[np.ndarray, "_"], Losses | None]
"""Uncertainties of images, and which of them are predicted wrong, or what they cost, if that is known."""
_ERRORS, _BELOW = 8, 0.5
"""The tests begin where so many errors are allowed, or fewer where that took more than this share of the images."""
_LIKELY, _MOST_IMAGES, _STEPS = 0.8, 1e8, 200


class Threshold(NamedTuple):
    """A threshold, and what it did on the images that it was calibrated on.

    Attributes:
        value: Images up to it are accepted; `NO_LIMIT` where all are whose uncertainty is finite.
        accepted: How many calibration images those were.
        errors: How many of these were wrong; None where labels are not known.
        of: How many calibration images there were.
    """

    value: float
    accepted: int
    errors: int | None
    of: int


def needed(level: float, confidence: float) -> int:
    """How many images without a fault show, with this confidence, that faults are rarer than level.

    >>> needed(0.05, 0.95), needed(0.01, 0.95)  # 0.95^59 = 0.0485, 0.99^299 = 0.0495
    (59, 299)
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - level) - 1e-9)


def risk_threshold(
    u: Float64[np.ndarray, "n"], wrong: Bool[np.ndarray, "n"], *, risk: float, confidence: float, seed: int = 0
) -> Threshold:
    """A threshold whose accepted images are wrong at most at rate `risk`, with this confidence.

    Args:
        u: Uncertainties of calibration images; infinite ones are never accepted.
        wrong: Which of them are predicted wrong.
        risk: The error rate among accepted images.
        confidence: With which probability over calibration sets it is kept.
        seed: Seed of the lots that order equal uncertainties. Of these, all or none are accepted.

    Raises:
        GuardError: No threshold passes; the message says what the images show.
    """
    check_levels(risk=risk, confidence=confidence)
    if len(u) < (enough := needed(risk, confidence)):
        raise GuardError(
            f"an error rate of at most {risk:g} with confidence {confidence:g} needs at least {enough} calibration "
            f"images, all correct (probability (1 - {risk:g})^{enough}, below {1 - confidence:.3g}); there are "
            f"{len(u)}. Pass more labelled images, or choose a larger risk."
        )
    start = first_test(len(u), risk, confidence)

    def passed(wrong: Bool[np.ndarray, "n"], k: Int[np.ndarray, "t"]) -> Bool[np.ndarray, "t"]:
        return np.asarray(binomial_p(np.cumsum(wrong)[k - 1], k, risk) <= 1 - confidence)

    threshold, first = _tested_in_sequence(u, wrong, start, passed, seed)
    if threshold is None:
        raise GuardError(_why_none(start, int(first.sum()), risk=risk, confidence=confidence))
    return threshold


def cost_threshold(
    u: Float64[np.ndarray, "n"],
    loss: Float64[np.ndarray, "n"],
    *,
    cost: float,
    confidence: float,
    largest: float = 1.0,
    seed: int = 0,
) -> Threshold:
    """A threshold whose accepted images have a mean loss of at most `cost`, with this confidence.

    Args:
        u: Uncertainties of calibration images; infinite ones are never accepted.
        loss: The loss of each prediction, in [0, largest].
        cost: The mean loss of accepted images.
        confidence: With which probability over calibration sets it is kept.
        largest: The largest loss.
        seed: Seed of the lots that order equal uncertainties. Of these, all or none are accepted.

    Raises:
        GuardError: No threshold passes; the message says what the images show.
    """
    mean = cost / largest
    check_levels(cost=mean, confidence=confidence)
    if len(u) < (enough := fewest_images(mean, confidence, 0)):
        raise GuardError(
            f"a mean cost of at most {cost:g}, where the largest is {largest:g}, needs at least {enough} calibration "
            f"images for confidence {confidence:g}, all of them without a cost; there are {len(u)}. Pass more labelled "
            f"images, or choose a larger risk."
        )
    starts = [fewest_images(mean, confidence, full) for full in range(_ERRORS + 1)]
    start = max(one for one in starts if one <= max(_BELOW * len(u), enough))

    def passed(loss: Float64[np.ndarray, "n"], k: Int[np.ndarray, "t"]) -> Bool[np.ndarray, "t"]:
        return np.asarray(log_evidence(loss / largest, mean)[k] >= -math.log(1 - confidence))

    threshold, first = _tested_in_sequence(u, loss, start, passed, seed)
    if threshold is None:
        raise GuardError(
            f"no threshold keeps the mean cost at or below {cost:g} with confidence {confidence:g}: the {start} most "
            f"certain calibration images, where the tests begin, cost {first.mean():.3g} on average. Pass more "
            f"labelled images, or choose a larger risk."
        )
    return threshold


def first_test(n: int, risk: float, confidence: float) -> int:
    """How many of n images the first test is about: the fewest that may have 8 errors, or as many as there is room for.

    >>> first_test(2000, 0.05, 0.95), first_test(2000, 0.1, 0.95), first_test(100, 0.05, 0.95)
    (286, 142, 59)
    """
    errors = np.arange(_ERRORS + 1)
    # P(Bin(k, r) <= e) <= delta: the (e + 1)-th error comes after the k-th image with a probability of delta at most.
    fewest = (nbinom.ppf(confidence, errors + 1, risk) + errors + 1).astype(int)
    fewest += binom.cdf(errors, fewest, risk) > 1 - confidence
    return min(n, int(fewest[fewest <= max(_BELOW * n, fewest[0])].max()))


def images_needed(
    u: Float64[np.ndarray, "n"], wrong: Bool[np.ndarray, "n"], *, risk: float, confidence: float
) -> int | None:
    """An estimate of how many calibration images a risk takes; None where even the most certain have more errors.

    With so many images and the error rates of these, the test of the best threshold passes four times out of five. Half
    an error is added to those counted, so that a handful of right answers is not taken for certainty.
    """
    order = np.argsort(u)[: np.isfinite(u).sum()]
    ends = np.append(np.nonzero(np.diff(u[order]))[0], len(order) - 1)  # equal ones are accepted together
    ends = ends[:: max(1, len(ends) // _STEPS)] if len(order) else ends[:0]
    accepted, rate = ends + 1, (np.cumsum(wrong[order])[ends] + 0.5) / (ends + 2)
    accepted, rate = accepted[rate < risk], rate[rate < risk]
    n = 1.1 * len(u)
    while len(rate) and n < _MOST_IMAGES:
        k = np.rint(accepted / len(u) * n).astype(int)
        c = binom.ppf(1 - confidence, k, risk)
        c = np.where(binom.cdf(c, k, risk) <= 1 - confidence, c, c - 1)
        if np.max(binom.cdf(c, k, rate)) >= _LIKELY:
            return math.ceil(n)
        n *= 1.1
    return None


def share_threshold(u: Float64[np.ndarray, "n"], *, share: float, confidence: float, what: str) -> Threshold:
    """The smallest threshold that accepts at least `share` of all images like these, with this confidence.

    Args:
        u: Calibration uncertainties: of all images (coverage), or of those that are right (false alarms).
        share: To accept.
        confidence: With which probability over calibration sets.
        what: The images, for errors: "calibration images".
    """
    check_levels(share=share, confidence=confidence)
    if (n := len(u)) < (enough := needed(1 - share, confidence)):
        raise GuardError(
            f"accepting {share:g} of them with confidence {confidence:g} needs at least {enough} {what}; there are "
            f"{n}, enough for {math.floor(1000 * (1 - confidence) ** (1 / n)) / 1000 if n else 0:g}. Pass more images, "
            f"or choose a smaller share."
        )
    # With exactly as many as are needed, rounding may put k one above n.
    k = min(int(binom.ppf(confidence, n, share)) + 1, n)
    value = float(np.sort(u)[k - 1])
    if not math.isfinite(value):
        refused = int(np.isinf(u).sum())
        most = math.floor(1000 * (1 - proportion_bound(refused, n, confidence))) / 1000
        raise GuardError(
            f"a share of {share:g} cannot be accepted: {refused} of {n} {what} are refused whatever their uncertainty, "
            f"so {most:g} is the most. Choose a smaller share, or refuse fewer of them."
        )
    return Threshold(value, int((u <= value).sum()), None, n)


def counted(value: float, u: Float64[np.ndarray, "n"], wrong: Bool[np.ndarray, "n"] | None) -> Threshold:
    """A threshold with what it does on calibration images."""
    inside = u <= value
    return Threshold(value, int(inside.sum()), None if wrong is None else int(wrong[inside].sum()), len(u))


def binomial_p(errors: Int[np.ndarray, "t"], accepted: Int[np.ndarray, "t"], risk: float) -> Float64[np.ndarray, "t"]:
    """P(Bin(k, r) <= e); 1 where nothing is accepted.

    >>> binomial_p(np.array([0, 1]), np.array([2, 2]), 0.5).tolist()
    [0.25, 0.75]
    """
    return np.asarray(binom.cdf(errors, accepted, risk), dtype=np.float64)


def percent(share: float) -> str:
    """A share for a sentence, with a decimal near 0 and 1: nothing but 1 reads 100 %, and nothing but 0 reads 0 %.

    >>> percent(0.003), percent(0.5), percent(1.0), percent(0.0), percent(0.9999)
    ('0.3 %', '50 %', '100 %', '0 %', '99.9 %')
    """
    value = 100 * share
    if value in (0, 100) or 10 <= value <= 90:
        return f"{value:.0f} %"
    return f"{min(max(value, 0.1), 99.9):.1f} %"


def check_levels(**levels: Any) -> None:
    """Raise ValueRangeError for a share that is not strictly between 0 and 1."""
    for name, value in levels.items():
        check_number(value, "(0, 1)", by="guard", what=name)


def _tested_in_sequence(
    u: Float64[np.ndarray, "n"],
    loss: Losses,
    start: int,
    passed: Callable[[Any, Int[np.ndarray, "t"]], Bool[np.ndarray, "t"]],
    seed: int,
) -> tuple[Threshold | None, Losses]:
    """The threshold by tests of the first k images, k = start, ...; None if there is none. And the first losses."""
    order = np.lexsort((np.random.default_rng(seed).permutation(len(u)), u))
    k = np.arange(start, np.isfinite(u).sum() + 1)
    value = _below_the_next(u[order], k, passed(loss[order], k))
    some = np.count_nonzero(u <= value) >= start  # else none passed, or all that did are equal to the next one
    return counted(value, u, loss > 0) if some else None, loss[order[:start]]


def _below_the_next(ordered: Float64[np.ndarray, "n"], k: Int[np.ndarray, "t"], passed: Bool[np.ndarray, "t"]) -> float:
    """The largest number below u_(k+1), with the last k before a test fails; minus infinity if that is the first.

    >>> u, k = np.array([1.0, 2.0]), np.arange(3)
    >>> [_below_the_next(u, k, k < fails) for fails in (0, 1, 3)]  # u_(3) is infinite
    [-inf, 0.999..., 1.797...e+308]
    """
    tests = len(passed) if passed.all() else int(passed.argmin())
    return float(np.nextafter(np.append(ordered, np.inf)[k[tests - 1]], -np.inf)) if tests else -math.inf


def _why_none(accepted: int, errors: int, *, risk: float, confidence: float) -> str:
    shown = proportion_bound(errors, accepted, confidence)
    return (
        f"no threshold keeps the error rate at or below {risk:g} with confidence {confidence:g}: of the {accepted} "
        f"most certain calibration images, where the tests begin, {errors} are wrong, which only shows a rate below "
        f"{shown:.3g}. Pass more labelled images, or choose a larger risk."
    )
