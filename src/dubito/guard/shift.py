"""Are images like those that a guard was calibrated on? Its guarantee says nothing about others.

Three exact tests compare n new images with the N calibration images. Each rests on sets of images that are defined by
all N + n together, whoever they are. If new and calibration images are alike (exchangeable), the number X of new ones
among the K images of such a set is hypergeometric, whatever the model, the scores and the images:

    P(X = x) = C(K, x) C(N + n - K, n - x) / C(N + n, n),     p = min(1, 2 min(P(X <= x), P(X >= x)))

    acceptance   the 5, 25, 50, 75 and 95 % least uncertain; images that are refused as novel are the most uncertain
    density      the 5, 25, 50, 75 and 95 % with the most usual features
    classes      the images of each predicted class

Both directions count: images that are more usual than the calibration images, such as those that the model was trained
on, are not like them either. The threshold itself makes no set, because it was chosen with the calibration images in
view, and a test at such a threshold would not be exact; uncertainties at five levels hold for any threshold.

One test has several sets j, some of which are too small for a low p: min_j is the lowest p that set j allows. With p
the lowest over all sets,

    P = p |{j: min_j <= p}|

is a p-value of the test, since P(p_j <= x) <= x for every set, and P(p_j <= x) = 0 where min_j > x (Tarone 1990). The
tests are combined by Holm's procedure (1979): if all images are alike, an alarm is raised with probability `LEVEL` at
most, over calibration and new images, however few there are. Fewer than five new images are not tested.

Images must be independent: frames of one film differ from photographs in this, too. Of several runs with one guard,
each has its own level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int64
from scipy.stats import hypergeom

from dubito.guard.thresholds import Outcomes, percent
from dubito.result import Result
from dubito.types import Json

LEVEL = 0.01
"""The probability of an alarm where images are alike, over all tests together."""
_FEWEST = 5
_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
_TYPES = {
    "uncertainty": np.float64,
    "predicted": np.int64,
    "density": np.float64,
    "wrong": np.bool_,
    "loss": np.float64,
    "group": np.int64,
    "sketch": np.float32,
}
_MOST_CLASSES = 1 << 24
_NOT_ALIKE = "These images are not like those: the guarantee says nothing about them."

TestName = Literal["acceptance", "density", "classes"]


@final
@dataclass(frozen=True, eq=False)
class Observations:
    """What a guard observes of images, as arrays.

    Attributes:
        uncertainty: (n) what is compared with the threshold; infinite for images that are refused as novel, or because
            a class must not be missed.
        predicted: (n) the predicted class.
        density: (n) how rare the features are, as a score; None for a guard without a density.
        wrong: (n) which predictions are wrong; None where labels are not known.
        loss: (n) what predictions cost; None for a guarantee about something else.
        group: (n) places among the guard's groups, -1 for none of them; None for a guarantee about all images.
        sketch: (n, p) a few numbers of each image, to recognise it by; see `dubito.table.overlap`.
    """

    uncertainty: Float64[np.ndarray, "n"]
    predicted: Int64[np.ndarray, "n"]
    density: Float64[np.ndarray, "n"] | None = None
    wrong: Bool[np.ndarray, "n"] | None = None
    sketch: Float32[np.ndarray, "n p"] | None = None
    loss: Float64[np.ndarray, "n"] | None = None
    group: Int64[np.ndarray, "n"] | None = None

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Observations":
        """Back from `arrays`; ValueError where a guard could not use them."""
        n = len(arrays["uncertainty"])
        for name, values in arrays.items():
            dtype = _TYPES[name]
            if values.dtype != dtype or values.shape[:1] != (n,) or values.ndim != 1 + (name == "sketch") or not n:
                raise ValueError(f"{name} of the calibration images is {values.dtype} of shape {values.shape}")
            if np.isnan(values).any():
                raise ValueError(f"{name} of the calibration images is NaN")
        if not ((arrays["predicted"] >= 0) & (arrays["predicted"] < _MOST_CLASSES)).all():
            raise ValueError("predicted classes of the calibration images are out of range")
        return cls(**arrays)

    def __len__(self) -> int:
        return len(self.uncertainty)

    @property
    def outcomes(self) -> Outcomes:
        """Uncertainties and errors, as thresholds are tested on."""
        return self.uncertainty, self.wrong

    def arrays(self) -> dict[str, np.ndarray]:
        """Those that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


class ShiftTest(NamedTuple):
    """One of the tests.

    Attributes:
        name: What it compares.
        p: Its p-value, before Holm's procedure.
        rejected: Whether new and calibration images differ in this.
        finding: How they differ, as a sentence.
    """

    name: TestName
    p: float
    rejected: bool
    finding: str


@final
@dataclass(frozen=True)
class Shift(Result):
    """Whether images are like those that a guard was calibrated on.

    Attributes:
        images: How many new images there are.
        calibrated_on: How many calibration images there are.
        level: The probability of a false alarm, over all tests together.
        tests: The tests.
    """

    images: int
    calibrated_on: int
    level: float
    tests: tuple[ShiftTest, ...]

    @property
    def detected(self) -> bool:
        """Whether some test shows that the images are not alike."""
        return any(test.rejected for test in self.tests)

    def title(self) -> str:
        """The answer in one line."""
        answer = "not like" if self.detected else "no sign of a difference from"
        return f"{self.images:,} images: {answer} the {self.calibrated_on:,} calibration images"

    def records(self) -> list[dict[str, Any]]:
        """One row per test."""
        return [test._asdict() for test in self.tests]

    def cell(self, key: str, value: Any) -> str:
        """P-values with one digit."""
        return f"{value:.1g}" if key == "p" else super().cell(key, value)

    def findings(self) -> list[str]:
        """What follows for the guarantee, and how the images differ."""
        rejected = [f"{test.finding} ({_p_text(test.p)})." for test in self.tests if test.rejected]
        return [_NOT_ALIKE, *rejected] if rejected else []

    def to_dict(self) -> Json:
        """With the answer first."""
        return {"detected": self.detected, **super().to_dict()}


def find_shift(
    calibration: Observations,
    new: Observations,
    *,
    threshold: float | Float64[np.ndarray, "n"],
    before: float | Float64[np.ndarray, "N"] | None = None,
    classes: Sequence[str] | None = None,
    level: float = LEVEL,
) -> Shift:
    """Test whether new images are like the calibration images.

    Args:
        calibration: What the guard has observed of its calibration images.
        new: What it observes of the new ones.
        threshold: Up to which uncertainty images are accepted, for the words; of each new image, if not one for all.
        before: The same of the calibration images; by default the one for all.
        classes: Names of the classes, for the words.
        level: The probability of a false alarm, over all tests together.
    """
    tests: dict[TestName, tuple[float, str]] = {}
    if len(new) >= _FEWEST:
        p, text = _levels_test(calibration.uncertainty, new.uncertainty, "least uncertain", "most uncertain")
        at = threshold if before is None else before
        shares = [
            percent(float(np.mean(one.uncertainty <= limit))) for one, limit in ((new, threshold), (calibration, at))
        ]
        tests["acceptance"] = p, f"{shares[0]} of them and {shares[1]} of the calibration images are accepted; {text}"
        if calibration.density is not None and new.density is not None:
            p, text = _levels_test(calibration.density, new.density, "most usual", "rarest")
            tests["density"] = p, f"By their features, {text}"
        tests["classes"] = _classes_test(calibration.predicted, new.predicted, classes)
    rejected = _holm({name: p for name, (p, _) in tests.items()}, level)
    tested = tuple(ShiftTest(name, p, name in rejected, text) for name, (p, text) in tests.items())
    return Shift(len(new), len(calibration), level, tested)


def hypergeometric_p(x: Any, size: Any, new: int, images: int) -> Float64[np.ndarray, "j"]:
    """Two-sided p-values of x new images among the `size` images of a set; `new` of all `images` are new.

    >>> hypergeometric_p([2, 1], [2, 2], 2, 4).tolist()  # C(2, 2) C(2, 0) / C(4, 2) = 1 / 6, twice
    [0.333..., 1.0]
    """
    x, size = np.asarray(x), np.asarray(size)
    tail = np.minimum(hypergeom.cdf(x, images, size, new), hypergeom.sf(x - 1, images, size, new))
    return np.asarray(np.clip(2 * tail, np.finfo(np.float64).tiny, 1.0), dtype=np.float64)


def sets_p(x: Int[np.ndarray, "j"], size: Int[np.ndarray, "j"], new: int, images: int) -> tuple[float, int]:
    """The p-value over several sets, and the set that differs most; arguments are those of `hypergeometric_p`."""
    p = hypergeometric_p(x, size, new, images)
    fewest, most = np.maximum(0, new + size - images), np.minimum(new, size)
    least = np.minimum(hypergeometric_p(fewest, size, new, images), hypergeometric_p(most, size, new, images))
    best = int(np.argmin(p))
    return min(1.0, float(p[best]) * int((least <= p[best]).sum())), best


def _levels_test(
    calibration: Float64[np.ndarray, "n"], new: Float64[np.ndarray, "m"], low: str, high: str
) -> tuple[float, str]:
    """The p-value of a score at fixed shares of all images, and where it differs most; `low` and `high` name its ends.

    Of equal values, all or none are in a set.
    """
    pooled = np.sort(np.concatenate([calibration, new]))
    values = pooled[[math.ceil(share * len(pooled)) - 1 for share in _SHARES]]
    size = np.searchsorted(pooled, values, side="right")
    x = np.searchsorted(np.sort(new), values, side="right")
    p, best = sets_p(x, size, len(new), len(pooled))
    share, end, count = size[best] / len(pooled), low, x[best]
    if share > 0.5:
        share, end, count = 1 - share, high, len(new) - x[best]
    inside = round(share * len(pooled)) - count
    return p, (
        f"{percent(count / len(new))} of them and {percent(inside / len(calibration))} of the calibration images are "
        f"among the {end} {percent(share)} of both together"
    )


def _classes_test(
    calibration: Int64[np.ndarray, "n"], new: Int64[np.ndarray, "m"], classes: Sequence[str] | None
) -> tuple[float, str]:
    """The p-value of the predicted classes, and the class that differs most."""
    pooled = np.concatenate([calibration, new])
    predicted, size = np.unique(pooled, return_counts=True)
    x = np.bincount(np.searchsorted(predicted, new), minlength=len(predicted))
    p, best = sets_p(x, size, len(new), len(pooled))
    number = int(predicted[best])
    name = f"Class {number}" if classes is None else f"'{classes[number].partition(',')[0]}'"
    return p, (
        f"{name} is predicted for {percent(x[best] / len(new))} of them and for "
        f"{percent((size[best] - x[best]) / len(calibration))} of the calibration images"
    )


def _holm(p: dict[TestName, float], level: float) -> set[TestName]:
    """Names of the tests that are rejected: the lowest p at level / k, the next at level / (k - 1), while they pass."""
    rejected: set[TestName] = set()
    for place, name in enumerate(sorted(p, key=lambda name: p[name])):
        if p[name] > level / (len(p) - place):
            break
        rejected.add(name)
    return rejected


def _p_text(p: float) -> str:
    return f"p = {p:.1g}" if p > 1e-99 else "p < 1e-99"
