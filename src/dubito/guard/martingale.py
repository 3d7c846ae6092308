"""Tests that may be looked at after every image: is what arrives like the calibration images, and is a rate too high?

**Like the calibration images.** A statistic of an image falls into one of several bins that do not depend on any
calibration or new image. With all images so far, the calibration images first, N in number,

    p_n = (images in higher bins + U_n images in the same bin) / N           U_n uniform; the image itself counts

If new images are exchangeable with the calibration images, p_1, p_2, ... are independent and uniform (Vovk, Gammerman &
Shafer 2005, chapter 8). So whatever density f_n on [0, 1] is chosen before p_n is known, E f_n(p_n) = 1: a bet at fair
odds. The bets b are kappa p^(kappa - 1) and the same of 1 - p for strong changes, 1 + e (p - 1/2) for weak ones,
densities that are learned from earlier p-values, and 1.

**A rate.** x_n >= 0 has a mean of at most r, whatever came before: a bet is f_n = 1 + l (x_n - r), with 0 <= l < 1 / r.

**When does it begin?** Nobody knows, so capital is spread over all starts t, with weights pi_t = S(t) - S(t + 1),
S(t) = log 20 / log(20 + t). After each image, a share J = 0.003 of the capital is spread over all bets anew, as in the
simple jumper (ibid.), because a change may go on changing. With B bets,

    R_b <- (R_b + pi_t / B) f_b,t,     M_t = S(t + 1) + sum_b R_b,     R_b <- (1 - J) R_b + J / B sum_b R_b

M begins at 1 and cannot be expected to grow: P(M_t >= 1 / alpha for any t) <= alpha (Ville 1939). S falls slowly: a
change after a million images costs 14 units of log-capital more than one at the first image.
"""

import math
from typing import final

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

    def settle(self, log_f: Float64[np.ndarray, "b"], at: int | None = None) -> None:
        """Take one outcome of every bet; `at` is what counts as its place, by default its number."""
        before, self.seen = self.seen, self.seen + 1
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
    """Whether a rate exceeds its bound, from outcomes that are 0 or 1.

    Args:
        bound: The bound r.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        rates = [rate for ratio in _RATIOS if (rate := min(ratio * bound, (1 + bound) / 2)) > bound]
        self._bets = np.array([(rate - bound) / (bound * (1 - bound)) for rate in rates])
        self.capital = Capital(len(rates))
        self.total = 0

    def update(self, x: bool, at: int | None = None) -> None:
        """Take one outcome; `at` is what counts as its place, such as the number of images before it."""
        self.total += x
        self.capital.settle(np.log1p(self._bets * (x - self.bound)), at)

    @property
    def observed(self) -> float | None:
        """The mean of all outcomes."""
        return self.total / self.capital.seen if self.capital.seen else None

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
        return {"bound": self.bound, "total": self.total, "capital": self.capital.to_json()}

    @classmethod
    def from_json(cls, saved: Json) -> "RateTest":
        """What `to_json` returned."""
        test = cls(float(saved["bound"]))
        test.total, test.capital = int(saved["total"]), Capital.from_json(saved["capital"])
        return test


def _part(p: float) -> int:
    return min(int(p * _PARTS), _PARTS - 1)


def _survival(t: int) -> float:
    return math.log(_DELAY) / math.log(_DELAY + t)


def tie_breakers(seed: int, n: int, count: int) -> list[float]:
    """Uniform numbers for the n-th image, whatever was drawn before: a test that is read from disk continues alike."""
    drawn: list[float] = np.random.Generator(np.random.Philox(key=seed, counter=n)).random(count).tolist()
    return drawn
