"""What a guard guarantees, and the thresholds that keep it, whatever the images are, with as many as there are.

    risk           of the accepted images, at most this share is wrong
    coverage       of all images, at least this share is accepted
    false_alarms   of the images that the model gets right, at most this share is refused

Each holds with a stated confidence over calibration sets, for images like those that it was calibrated on.

Images with u <= t are accepted. With risk r, confidence 1 - delta, and k accepted calibration images, e of them wrong:

    p(t)   = P(Bin(k, r) <= e)                         tests R(t) = P(wrong | u <= t) > r
    L_j    = a_j + L_(j-1) if t_(j-1) passed, else a_j         the level of the test of t_j;  sum_j a_j = delta

Candidates t_1 < t_2 < ... are tested in turn, t_j passes if p(t_j) <= L_j, and the last that passes is taken. This is
the fallback procedure of Wiens (2003); with a_1 = delta it is fixed-sequence testing, as in Learn then Test
(Angelopoulos et al. 2021). Selective risk is that of Geifman & El-Yaniv (2017).

Why P(R(t) > r) <= delta for the t taken. Candidates and levels come from other images, the selection split. For such a
t, the accepted calibration images are k independent images with u <= t, so that, given k, e is binomial with R(t), and
if R(t) > r, P(p(t) <= a | k) <= a for every a; hence also without k being given. Call t_j bad if R(t_j) > r. While no
bad one has passed, the level was 0 after the bad one before t_j, so L_j is at most A_j, the sum of the a after that one
up to a_j: a fixed number. So the first bad one to pass is t_j with probability A_j at most, and these sums share no a:
together they are delta at most. Nothing is paid for the number of candidates.

Where to begin is ours: at the very fewest, one unlucky image would end it. Seven tenths of delta lie where the test is
most likely to pass, as far as the selection split shows; two tenths where three fifths as many are accepted, and most
of the rest where two fifths are, in case that was too bold; a fiftieth lies on candidates far above, so that with many
images the best is found even if the error rate rises above r and falls again. A share that could not pass even without
an error goes to the likeliest. All of this rests on the selection split and on n, never on calibration images. No
candidate lies above the selection split: images more uncertain than all of them are refused, also where everything
in the selection split could be accepted.

Shares of images (coverage, refused correct predictions) are order statistics: P(F(u_(k)) >= c) = P(Bin(n, c) <= k - 1).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float64, Int
from scipy.stats import binom

from dubito.errors import GuardError, ValueRangeError
from dubito.metrics import proportion_bound
from dubito.validate import check_number

GuaranteeKind = Literal["risk", "coverage", "false_alarms"]
RISK = 0.05
Outcomes = tuple[Float64[np.ndarray, "_"], Bool[np.ndarray, "_"] | None]
"""Uncertainties of images, and which of them are predicted wrong, if that is known."""
PValue = Literal["binomial", "hoeffding_bentkus"]
"""Exact for wrong or right; or the bound of Learn then Test, which also serves losses between 0 and 1."""
Testing = Literal["fallback", "bonferroni"]
"""One after the other, levels handed on; or all at once, each at its share of the level."""
_CANDIDATES = 200
_LIKELY, _MOST_IMAGES = 0.8, 1e8
_SAFER = ((0.6, 0.2), (0.4, 0.08))
"""Where to begin, too: accepting so much of what the likeliest candidate accepts, with this share of the level."""
_FAR, _STRIDE = 0.02, 10
"""The share of the level on every tenth candidate above the likeliest."""


class Threshold(NamedTuple):
    """A threshold, and what it did on the images that it was calibrated on.

    Attributes:
        value: Images up to it are accepted.
        accepted: How many calibration images those were.
        errors: How many of these were wrong; None where labels are not known.
        of: How many calibration images there were.
    """

    value: float
    accepted: int
    errors: int | None
    of: int


@final
@dataclass(frozen=True)
class Guarantee:
    """One of the three, with its level and its confidence.

    >>> print(Guarantee("risk", 0.05, 0.95))
    Of images like those that it was calibrated on, at most 5 % of those accepted are wrong (confidence 95 %).
    """

    kind: GuaranteeKind
    level: float
    confidence: float

    def __post_init__(self) -> None:
        check_levels(**{self.kind: self.level}, confidence=self.confidence)

    @classmethod
    def of(cls, confidence: float, **levels: float | None) -> "Guarantee":
        """The one whose level is set; a risk of 0.05 where none is."""
        chosen = {kind: level for kind, level in levels.items() if level is not None} or {"risk": RISK}
        if len(chosen) > 1:
            raise ValueRangeError(
                f"guard: one threshold keeps one guarantee; got {' and '.join(chosen)}. Choose one of them."
            )
        ((kind, level),) = chosen.items()
        return cls(kind, level, confidence)  # type: ignore[arg-type]

    def threshold(self, selection: Outcomes, calibration: Outcomes) -> Threshold:
        """The threshold that keeps it, tested on images that nothing was chosen on; candidates are the selection's.

        Raises:
            GuardError: There is none; the message says why, and how many images it takes.
        """
        u, wrong = calibration
        tested, share, what = u, self.level, "calibration images"
        if self.kind != "coverage":
            if wrong is None or selection[1] is None:
                raise GuardError(
                    f"to guarantee {self.kind}, labels must show which predictions are wrong. Use coverage=... instead."
                )
            if self.kind == "risk":
                chosen = (selection[0], selection[1])
                return risk_threshold(chosen, (u, wrong), risk=self.level, confidence=self.confidence)
            tested, share, what = u[~wrong], 1 - self.level, "calibration images that the model gets right"
        value = share_threshold(tested, share=share, confidence=self.confidence, what=what).value
        inside = u <= value
        return Threshold(value, int(inside.sum()), None if wrong is None else int(wrong[inside].sum()), len(u))

    def feasible(self, selection: Outcomes, calibration: Outcomes, rows: int) -> str:
        """What could be guaranteed with these images instead, and how many it would take, where a risk cannot be.

        `rows` is the number of rows of the whole table, of which calibration images are a part.
        """
        if self.kind != "risk" or selection[1] is None or calibration[1] is None:
            return ""
        chosen, tested = (selection[0], selection[1]), (calibration[0], calibration[1])
        lowest = smallest_risk(chosen, tested, confidence=self.confidence, above=self.level)
        instead = "no risk is feasible" if lowest is None else f"risk={lowest:g} is feasible"
        enough = images_needed(tested, risk=self.level, confidence=self.confidence)
        if enough is None:
            repair = "More images of this kind may not help: even of the most certain ones, more are wrong."
        else:
            table = float(f"{enough * rows / len(tested[0]):.2g}")
            repair = f"A risk of {self.level:g} would take about {table:,.0f} images like these (an estimate)."
        return f"With these images, {instead} at confidence {self.confidence:g}. {repair}"

    def sentence(self, images: int | None = None) -> str:
        """What holds, for which images, with what confidence; `images` is the number of calibration images."""
        like = "those" if images is None else f"the {images:,}"
        text = {
            "risk": "at most {} of those accepted are wrong",
            "coverage": "at least {} are accepted",
            "false_alarms": "at most {} of those predicted correctly are refused",
        }[self.kind]
        held = text.format(f"{100 * self.level:g} %")
        return f"Of images like {like} that it was calibrated on, {held} (confidence {100 * self.confidence:g} %)."

    def __str__(self) -> str:
        return self.sentence()


def needed(level: float, confidence: float) -> int:
    """How many images without a fault show, with this confidence, that faults are rarer than level.

    >>> needed(0.05, 0.95), needed(0.01, 0.95)  # 0.95^59 = 0.0485, 0.99^299 = 0.0495
    (59, 299)
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - level) - 1e-9)


def risk_threshold(
    selection: tuple[Float64[np.ndarray, "s"], Bool[np.ndarray, "s"]],
    calibration: tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]],
    *,
    risk: float,
    confidence: float,
    testing: Testing = "fallback",
    p_value: PValue = "binomial",
    candidates: int = _CANDIDATES,
) -> Threshold:
    """The largest threshold whose accepted images are wrong at most at rate `risk`, with this confidence.

    Args:
        selection: Uncertainties and errors that candidates come from; infinite ones are never accepted.
        calibration: Uncertainties and errors of other images, which the tests count.
        risk: The error rate among accepted images.
        confidence: With which probability over calibration sets it is kept.
        testing: How several thresholds are tested.
        p_value: Of one threshold.
        candidates: How many thresholds at most.

    Raises:
        GuardError: No threshold passes; the message says whether more images would help.
    """
    check_levels(risk=risk, confidence=confidence)
    u, wrong = calibration
    if len(u) < (enough := needed(risk, confidence)):
        raise GuardError(
            f"an error rate of at most {risk:g} with confidence {confidence:g} needs at least {enough} calibration "
            f"images that are all accepted and correct (probability (1 - {risk:g})^{enough}, below "
            f"{1 - confidence:.3g}); there are {len(u)}. Pass more labelled images, or choose a larger risk."
        )
    values = np.sort(selection[0][np.isfinite(selection[0])])
    if len(values) == 0:
        raise GuardError("there is no selection image to take thresholds from. Pass more labelled images.")
    ranks = np.ceil(np.arange(1, candidates + 1) * len(values) / candidates).astype(int)
    thresholds = np.unique(values[ranks - 1])
    accepted, errors = _counts(u, wrong, thresholds)
    p = _P_VALUES[p_value](errors, accepted, risk)
    levels, start = _levels(*_counts(*selection, thresholds), len(selection[0]), len(u), risk, 1 - confidence)
    if testing == "bonferroni":
        levels = np.full(len(p), (1 - confidence) / len(p))
    passing = fallback(p, levels) if testing == "fallback" else bonferroni(p, 1 - confidence)
    if passing is None:
        seen = int(accepted[start]), int(errors[start])
        raise GuardError(_why_none(*seen, risk=risk, confidence=confidence, level=float(levels[start])))
    return Threshold(float(thresholds[passing]), int(accepted[passing]), int(errors[passing]), len(u))


def smallest_risk(
    selection: tuple[Float64[np.ndarray, "s"], Bool[np.ndarray, "s"]],
    calibration: tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]],
    *,
    confidence: float,
    above: float = 0.0,
) -> float | None:
    """The smallest risk above another that some threshold keeps, to a thousandth; None if there is none.

    Where a larger risk fails and a smaller one passes, which tests at different candidates allow, it may be missed.
    """
    low, high = math.floor(1000 * above), 1000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            risk_threshold(selection, calibration, risk=middle / 1000, confidence=confidence)
            high = middle
        except GuardError:
            low = middle
    return None if high == 1000 else high / 1000


def images_needed(
    calibration: tuple[Float64[np.ndarray, "n"], Bool[np.ndarray, "n"]], *, risk: float, confidence: float
) -> int | None:
    """An estimate of how many calibration images a risk takes; None where even the most certain have more errors.

    With so many images and the error rates of these, the test of the best threshold passes four times out of five. Half
    an error is added to those counted, so that a handful of right answers is not taken for certainty.
    """
    u, wrong = calibration
    finite = np.sort(u[np.isfinite(u)])
    thresholds = np.unique(finite[:: max(1, len(finite) // _CANDIDATES)])
    accepted, errors = _counts(u, wrong, thresholds)
    rate = (errors + 0.5) / (accepted + 1)
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
        raise GuardError(
            f"{share:g} of all images cannot be accepted: {int(np.isinf(u).sum())} of {n} {what} are unlike the "
            f"in-distribution ones and always refused. Choose a smaller share, or refuse fewer of them (novel=0)."
        )
    return Threshold(value, int((u <= value).sum()), None, n)


def binomial_p(errors: Int[np.ndarray, "t"], accepted: Int[np.ndarray, "t"], risk: float) -> Float64[np.ndarray, "t"]:
    """P(Bin(k, r) <= e); 1 where nothing is accepted.

    >>> binomial_p(np.array([0, 1]), np.array([2, 2]), 0.5).tolist()
    [0.25, 0.75]
    """
    return np.asarray(binom.cdf(errors, accepted, risk), dtype=np.float64)


def hoeffding_bentkus_p(
    errors: Int[np.ndarray, "t"], accepted: Int[np.ndarray, "t"], risk: float
) -> Float64[np.ndarray, "t"]:
    """min(exp(-k h(e/k, r)), e P(Bin(k, r) <= e)) with h the binary relative entropy (Bates et al. 2021)."""
    rate = np.minimum(errors / np.maximum(accepted, 1), risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        h = np.where(rate > 0, rate * np.log(rate / risk), 0.0) + (1 - rate) * np.log((1 - rate) / (1 - risk))
    bentkus = math.e * binomial_p(errors, accepted, risk)
    return np.where(accepted > 0, np.minimum(np.exp(-accepted * h), bentkus).clip(max=1.0), 1.0)


_P_VALUES = {"binomial": binomial_p, "hoeffding_bentkus": hoeffding_bentkus_p}


def fallback(p: Float64[np.ndarray, "t"], levels: Float64[np.ndarray, "t"]) -> int | None:
    """The last test that passes at its own level and those handed on by an unbroken run before it; None if none does.

    >>> fallback(np.array([0.04, 0.02, 0.2, 0.01]), np.array([0.04, 0.0, 0.0, 0.01]))
    3
    """
    level, last = 0.0, None
    for place, (value, own) in enumerate(zip(p.tolist(), levels.tolist(), strict=True)):
        level += own
        if level > 0 and value <= level:
            last = place
        else:
            level = 0.0
    return last


def bonferroni(p: Float64[np.ndarray, "t"], delta: float) -> int | None:
    """The last test that passes at its equal share of the level; None if none does."""
    passing = np.nonzero(p <= delta / len(p))[0]
    return int(passing[-1]) if len(passing) else None


def percent(share: float) -> str:
    """A share for a sentence: with a digit where it matters; none but all of it is rounded to 100 %, none but 0 to 0 %.

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


def _counts(
    u: Float64[np.ndarray, "n"], wrong: Bool[np.ndarray, "n"], thresholds: Float64[np.ndarray, "t"]
) -> tuple[Int[np.ndarray, "t"], Int[np.ndarray, "t"]]:
    """Accepted and, among them, wrong images at every threshold."""
    order = np.argsort(u)
    accepted = np.searchsorted(u[order], thresholds, side="right")
    return accepted, np.append(0, np.cumsum(wrong[order]))[accepted]


def _levels(
    accepted: Int[np.ndarray, "t"], errors: Int[np.ndarray, "t"], of: int, n: int, risk: float, delta: float
) -> tuple[Float64[np.ndarray, "t"], int]:
    """The level of each candidate, and the one most likely to pass on n images, by what selection images show.

    A test passes with at most c errors among k, c the largest number with P(Bin(k, r) <= c) <= delta. One error is
    added to those seen, so that a handful of right answers is not taken for certainty.
    """
    k = np.rint(accepted / of * n).astype(int)
    c = binom.ppf(delta, k, risk)
    c = np.where(binom.cdf(c, k, risk) <= delta, c, c - 1)
    likeliest = int(np.argmax(binom.logcdf(c, k, (errors + 1) / (accepted + 1))))
    if np.all(c < 0):  # so few images that none may be wrong, and even then some more must be accepted than expected
        likeliest = len(k) - 1
    far = np.arange(likeliest + _STRIDE, len(k), _STRIDE)
    shares = [(int(np.searchsorted(accepted, part * accepted[likeliest])), share) for part, share in _SAFER]
    shares += [(int(place), _FAR / len(far)) for place in far]
    levels = np.zeros(len(k))
    for place, share in shares:
        if (1 - risk) ** k[place] <= share * delta:
            levels[place] += share * delta
    levels[likeliest] += delta - levels.sum()
    return levels, likeliest


def _why_none(accepted: int, errors: int, *, risk: float, confidence: float, level: float) -> str:
    observed = (
        f"of the {accepted} most certain calibration images, {errors} are wrong" if accepted else "none is accepted"
    )
    shown = proportion_bound(errors, accepted, 1 - level)  # at the level of that very test
    bound = f", which only shows a rate below {shown:.3g}" if shown < 1 else ""
    return (
        f"no threshold keeps the error rate at or below {risk:g} with confidence {confidence:g}: where that was most "
        f"likely, {observed}{bound}. Pass more labelled images, or choose a larger risk."
    )
