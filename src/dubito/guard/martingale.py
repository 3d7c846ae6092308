"""Tests that may be looked at after every image: is what arrives like the calibration images, and is a rate too high?

**Like the calibration images.** A statistic of an image falls into one of several bins that do not depend on any
calibration or new image. With all images so far, the calibration images first, N in number,

    p_n = (images in higher bins + U_n images in the same bin) / N           U_n uniform; the image itself counts

If new images are exchangeable with the calibration images, p_1, p_2, ... are independent and uniform (Vovk, Gammerman &
Shafer 2005, chapter 8). So whatever density f_n on [0, 1] is chosen before p_n is known, E f_n(p_n) = 1: a bet at fair
odds. The bets b are kappa p^(kappa - 1) and the same of 1 - p for strong changes, 1 + e (p - 1/2) for weak ones,
densities that are learned from earlier p-values, and 1.

**A rate.** x_n >= 0 has a mean of at most r, whatever came before: a bet is f_n = 1 + l (x_n - r), with 0 <= l < 1 / r.
Of m images, k may be drawn and labelled (`label_draws`): x = y / pi for these, and 0 for the others. If all pi are
k / m, the best bet for a rate q is l = (k / m) (q - r) / (r (1 - r k / m)). If the label of a drawn image is missing, y
is 0, which makes f_n no larger than the true y does.

**Where a rate lies.** With x <= h, and a > 0, 0 < b < 1, the means of (1 + a x k / m) / (1 + a r k / m) and of
(1 - b x / h) / (1 - b r / h) are 1 if r is the mean of x. The first falls with r and the second rises, and so do their
products over all images and the mean of these over a and over b, which are at most 2 / alpha at all times at once, with
the probability 1 - alpha: between the two r where they are, lies the mean of x. Draws of k < m count with the bounds
(1 + a r k / m)^m <= exp(a r k) and (1 - b r / h)^m <= exp(-b r m / h). A missing y is 0 in the first, and 1 in the
second.

**When does it begin?** Nobody knows, so capital is spread over all starts t, with weights pi_t = S(t) - S(t + 1),
S(t) = log 20 / log(20 + t). After each image, a share J = 0.003 of the capital is spread over all bets anew, as in the
simple jumper (ibid.), because a change may go on changing. With B bets,

    R_b <- (R_b + pi_t / B) f_b,t,     M_t = S(t + 1) + sum_b R_b,     R_b <- (1 - J) R_b + J / B sum_b R_b

M begins at 1 and cannot be expected to grow: P(M_t >= 1 / alpha for any t) <= alpha (Ville 1939). S falls slowly: a
change after a million images costs 14 units of log-capital more than one at the first image.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Float64, Int64

from dubito.types import Json

_POWERS = (0.2, 0.5, 0.8)
_WINDOWS = (30, 300)
"""Images that a learned density remembers."""
_PARTS = 20
"""Steps of a learned density."""
_SLOPES = (-1.0, -0.5, 0.5, 1.0)
_JUMP = 0.003
_DELAY = 20
_RATIOS = (1.25, 1.5, 2.0, 4.0)
"""Rates that bets are best for, as multiples of the bound."""
_LOW_BETS = 0.01 * 2.0 ** np.arange(11)
_HIGH_BETS = 1 - 1 / (1 + _LOW_BETS)
"""Bets a and b on where a rate lies."""


class Outcomes(NamedTuple):
    """What is known of images: y of those that were drawn, with their weights.

    Attributes:
        weight: (k) 1 / pi.
        low: (k) y, and 0 where it is missing.
        high: (k) y, and 1 where it is missing.
        images: m, how many the k were drawn from.
        largest: h, an upper bound of 1 / pi.
    """

    weight: Float64[np.ndarray, "k"]
    low: Float64[np.ndarray, "k"]
    high: Float64[np.ndarray, "k"]
    images: int
    largest: float

    @classmethod
    def of(
        cls,
        y: Sequence[bool | None],
        weight: Sequence[float] | None = None,
        *,
        images: int | None = None,
        largest: float = 1.0,
    ) -> "Outcomes":
        """From y, None where it is missing; without weights, those of images that were all drawn."""
        low, high = (np.array([missing if one is None else float(one) for one in y]) for missing in (0.0, 1.0))
        weights = np.ones(len(y)) if weight is None else np.array(weight, dtype=np.float64)
        return cls(weights, low, high, len(y) if images is None else images, largest)

    @property
    def share(self) -> float:
        """The share that was drawn."""
        return len(self.weight) / self.images


@final
class Capital:
    """The capital of several bets over all starts, as logarithms.

    Attributes:
        seen: How many bets have been settled.
        log_total: The logarithm of M: at or above log(1 / alpha), the hypothesis is refuted at alpha.
        log_r: (b) log R of every bet.
        cusum: (b) log-capital since the best start.
        start: (b) the place of that start.
    """

    def __init__(self, bets: int) -> None:
        self.seen, self.log_total = 0, 0.0
        self.log_r = np.full(bets, -np.inf)
        self.cusum, self.start = np.zeros(bets), np.zeros(bets, dtype=np.int64)

    def settle(self, log_f: Float64[np.ndarray, "b"], at: int | None = None, count: int = 1) -> None:
        """Take one outcome of every bet, or the product of `count`; `at` is its place, by default its number."""
        before, self.seen = self.seen, self.seen + count
        bets = len(log_f)
        weight = (_survival(before) - _survival(self.seen)) / bets
        grown = np.logaddexp(self.log_r, math.log(weight)) + log_f
        together = float(np.logaddexp.reduce(grown))
        self.log_total = float(np.logaddexp(math.log(_survival(self.seen)), together))
        self.log_r = np.logaddexp(math.log(1 - _JUMP) + grown, math.log(_JUMP / bets) + together)
        fresh = self.cusum <= 0
        self.start = np.where(fresh, before if at is None else at, self.start)
        self.cusum = np.where(fresh, 0.0, self.cusum) + log_f

    @property
    def since(self) -> int:
        """Where a change has most likely begun."""
        return int(self.start[int(np.argmax(self.cusum))])

    def to_json(self) -> Json:
        """As plain values; minus infinity is None."""
        return {
            "seen": self.seen,
            "log_total": self.log_total,
            "log_r": [None if one == -np.inf else one for one in self.log_r.tolist()],
            "cusum": self.cusum.tolist(),
            "start": self.start.tolist(),
        }

    @classmethod
    def from_json(cls, saved: Json) -> "Capital":
        """What `to_json` returned."""
        capital = cls(len(saved["log_r"]))
        capital.seen, capital.log_total = int(saved["seen"]), float(saved["log_total"])
        capital.log_r = np.array([-np.inf if one is None else one for one in saved["log_r"]], dtype=np.float64)
        capital.cusum = np.array(saved["cusum"], dtype=np.float64)
        capital.start = np.array(saved["start"], dtype=np.int64)
        return capital


@final
class ExchangeabilityTest:
    """Whether a statistic of new images is exchangeable with that of the calibration images.

    Args:
        counts: How many calibration images are in each bin.
        ordered: Whether bins have an order; classes have none.
    """

    def __init__(self, counts: Int64[np.ndarray, "k"], *, ordered: bool = True) -> None:
        self.counts, self.ordered = counts.astype(np.int64), ordered
        self.capital = Capital(1 + len(_WINDOWS) + (2 * len(_POWERS) + len(_SLOPES)) * ordered)
        self.learned = np.ones((len(_WINDOWS), _PARTS))

    def update(self, bin_: int, u: float) -> float:
        """Take one image, by its bin and a number that is uniform on (0, 1); returns its p-value."""
        if bin_ >= len(self.counts):  # a class that no calibration image was predicted to be
            self.counts = np.pad(self.counts, (0, bin_ + 1 - len(self.counts)))
        self.counts[bin_] += 1
        p = float((self.counts[bin_ + 1 :].sum() + u * self.counts[bin_]) / self.counts.sum())
        self.capital.settle(self.log_bets(p))
        self.learned = 1 + (self.learned - 1) * (1 - 1 / np.array(_WINDOWS)[:, None])
        self.learned[:, _part(p)] += 1
        return p

    def log_bets(self, p: float) -> Float64[np.ndarray, "b"]:
        """The logarithm of every density at a p-value; half of a learned one is uniform."""
        shares = self.learned[:, _part(p)] / self.learned.sum(1)
        log_f = [np.zeros(1), np.log(0.5 + 0.5 * _PARTS * shares)]
        if self.ordered:
            powers = np.array(_POWERS)
            log_f += [np.log(powers) + (powers - 1) * math.log(max(one, 1e-300)) for one in (p, 1 - p)]
            log_f.append(np.log1p(np.array(_SLOPES) * (p - 0.5)))
        return np.concatenate(log_f)

    def to_json(self) -> Json:
        """As plain values."""
        return {
            "counts": self.counts.tolist(),
            "ordered": self.ordered,
            "learned": self.learned.tolist(),
            "capital": self.capital.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Json) -> "ExchangeabilityTest":
        """What `to_json` returned."""
        test = cls(np.array(saved["counts"], dtype=np.int64), ordered=bool(saved["ordered"]))
        test.learned, test.capital = np.array(saved["learned"]), Capital.from_json(saved["capital"])
        return test


@final
class RateTest:
    """Whether a rate exceeds its bound.

    Args:
        bound: The bound r.

    Attributes:
        capital: What bets on a higher rate have won.
        interval: Where the rate lies.
        known: How many outcomes are known, without those that are missing.
        images: How many images outcomes stand for.
        total: The sum of x.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._rates = np.array([rate for ratio in _RATIOS if (rate := min(ratio * bound, (1 + bound) / 2)) > bound])
        self.capital, self.interval = Capital(len(self._rates)), RateInterval()
        self.known, self.images, self.total = 0, 0, 0.0

    def update(self, outcomes: Outcomes, at: int | None = None) -> None:
        """Take outcomes; `at` is what counts as their place, such as the number of images before them."""
        r, share, x = self.bound, outcomes.share, outcomes.weight * outcomes.low
        self.known += int((outcomes.low == outcomes.high).sum())
        self.images, self.total = self.images + outcomes.images, self.total + float(x.sum())
        bets = share * (self._rates - r) / (r * (1 - share * r))
        log_f = np.log1p(bets[:, None] * (x - r)).sum(1) + (outcomes.images - len(x)) * np.log1p(-bets * r)
        self.capital.settle(log_f, at, len(x))
        self.interval.update(outcomes)

    @property
    def observed(self) -> float | None:
        """The mean of x, which may exceed 1 where weights differ, and is cut there; too low if outcomes are missing."""
        return min(1.0, self.total / self.images) if self.known else None

    def needed(self, alpha: float) -> tuple[int, float]:
        """About how many more outcomes would refute the bound, at which rate: the observed one, or twice the bound.

        Capital grows by KL(rate, bound) per outcome.
        """
        r, rate = self.bound, self.observed or 0.0
        rate = min(rate if rate > 1.05 * r else 2 * r, (1 + r) / 2)
        growth = rate * math.log(rate / r) + (1 - rate) * math.log((1 - rate) / (1 - r))
        return max(1, math.ceil((math.log(1 / alpha) - self.capital.log_total) / growth)), rate

    def to_json(self) -> Json:
        """As plain values."""
        sums = {"bound": self.bound, "known": self.known, "images": self.images, "total": self.total}
        return {**sums, "capital": self.capital.to_json(), "interval": self.interval.to_json()}

    @classmethod
    def from_json(cls, saved: Json) -> "RateTest":
        """What `to_json` returned."""
        test = cls(float(saved["bound"]))
        test.known, test.images, test.total = int(saved["known"]), int(saved["images"]), float(saved["total"])
        test.capital, test.interval = Capital.from_json(saved["capital"]), RateInterval.from_json(saved["interval"])
        return test


@final
class RateInterval:
    """Where a rate lies, at all numbers of outcomes at once.

    Attributes:
        log_low: (b) sum of log(1 + a x k / m).
        log_high: (b) sum of log(1 - b x / h).
        complete: How many images are of draws of all images, k = m.
        sampled: How many were drawn from others, k < m.
        exposure: Sum of m / h over the draws of k < m.
    """

    def __init__(self) -> None:
        self.log_low, self.log_high = np.zeros(len(_LOW_BETS)), np.zeros(len(_HIGH_BETS))
        self.complete, self.sampled, self.exposure = 0, 0, 0.0

    def update(self, outcomes: Outcomes) -> None:
        """Take outcomes."""
        low, high = outcomes.weight * outcomes.low, outcomes.weight * outcomes.high
        self.log_low += np.log1p(_LOW_BETS[:, None] * outcomes.share * low).sum(1)
        self.log_high += np.log1p(-_HIGH_BETS[:, None] / outcomes.largest * high).sum(1)
        if outcomes.share == 1:
            self.complete += outcomes.images
        else:
            self.sampled, self.exposure = self.sampled + len(low), self.exposure + outcomes.images / outcomes.largest

    def at(self, alpha: float) -> tuple[float, float]:
        """The interval that the rate is ever outside of with the probability alpha at most."""
        most = math.log(2 / alpha)

        def too_low(r: float) -> float:
            log_f = self.log_low - self.complete * np.log1p(_LOW_BETS * r) - _LOW_BETS * r * self.sampled
            return float(np.logaddexp.reduce(log_f)) - math.log(len(log_f)) - most

        def too_high(r: float) -> float:
            log_f = self.log_high - self.complete * np.log1p(-_HIGH_BETS * r) + _HIGH_BETS * r * self.exposure
            return most + math.log(len(log_f)) - float(np.logaddexp.reduce(log_f))

        return _last_positive(too_low, 0.0), _last_positive(too_high, 1.0)

    def to_json(self) -> Json:
        """As plain values."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, saved: Json) -> "RateInterval":
        """What `to_json` returned."""
        interval = cls()
        interval.log_low, interval.log_high = np.array(saved["log_low"]), np.array(saved["log_high"])
        interval.complete, interval.sampled = int(saved["complete"]), int(saved["sampled"])
        interval.exposure = float(saved["exposure"])
        return interval


def _last_positive(falling: Callable[[float], float], otherwise: float) -> float:
    """Where a falling function of [0, 1] crosses 0."""
    from scipy.optimize import brentq  # noqa: PLC0415 (slow to import)

    if falling(0.0) <= 0 or falling(1.0) >= 0:
        return otherwise
    return float(brentq(falling, 0.0, 1.0, xtol=1e-9))


def _part(p: float) -> int:
    return min(int(p * _PARTS), _PARTS - 1)


def _survival(t: int) -> float:
    return math.log(_DELAY) / math.log(_DELAY + t)


def tie_breakers(seed: int, n: int, count: int) -> list[float]:
    """Uniform numbers for the n-th image, whatever was drawn before: a test that is read from disk continues alike."""
    drawn: list[float] = np.random.Generator(np.random.Philox(key=seed, counter=n)).random(count).tolist()
    return drawn
