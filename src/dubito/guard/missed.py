"""Classes that are rarely missed: of the images of a class k, at most a share alpha is accepted as another class.

    alert(x) = predicted(x) != k  and  p_k(x) >= tau_k        such images are refused, however certain

Of the calibration images whose true class is k, let v = p_k where another class is predicted, and infinity where k is,
or where the image is refused as novel. With n_k of them and v_(1) <= v_(2) <= ..., and confidence 1 - delta_k,

    tau_k = v_(e + 1),     e the largest number with P(Bin(n_k, alpha) <= e) <= delta_k

F(v_(e + 1) -) is at most a Beta(e + 1, n_k - e) variable, so P(v < tau_k | k) <= alpha with confidence 1 - delta_k: the
order statistic that also guarantees a coverage. Whether an image is refused for its uncertainty, too, does not count,
so this holds with any threshold on the uncertainty. It takes `needed(alpha, 1 - delta_k)` images of the class.

The threshold on the uncertainty is tested on the same images, among those without an alert. For this, tau_k is rounded
down to one of `LEVELS` levels (0; 0.5 / 4^j, down to 7e-15; none), which misses fewer; the threshold's tests are valid
for each of the levels, and have the error delta / 2 / LEVELS, so they hold for whichever is taken. The other half of
delta is shared by the missed classes. Both rules are ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from scipy.stats import binom
from torch import Tensor

from dubito.errors import GuardError, ValueRangeError
from dubito.guard.thresholds import check_levels, needed
from dubito.table import Table
from dubito.types import Json
from dubito.validate import check_choice, check_number

if TYPE_CHECKING:
    from dubito.guard.guarantee import Guarantee

LEVELS = 26
"""How many levels thresholds are rounded to."""
GRID = np.concatenate([[0.0], 0.5 * 4.0 ** -np.arange(LEVELS - 2.0)[::-1], [np.inf]])
"""The levels: far apart, because probabilities of confident networks span many decades."""


@final
@dataclass(frozen=True)
class Missed:
    """A class that is rarely missed.

    Attributes:
        label: The class, as an index.
        level: The largest share of its images that is accepted as another class.
        name: Its name, for the words.
    """

    label: int
    level: float
    name: str

    def __post_init__(self) -> None:
        check_levels(missed=self.level)


class MissedThreshold(NamedTuple):
    """From which probability of a class on an image is refused, unless the class is predicted.

    Attributes:
        label: The class, as an index.
        value: The probability; infinite where no image has to be refused.
        missed: How many of the calibration images of this class are predicted as another, without an alert.
        of: How many calibration images have this class.
    """

    label: int
    value: float
    missed: int
    of: int

    def to_json(self) -> Json:
        """As plain values; an infinite threshold as null."""
        return {**self._asdict(), "value": self.value if math.isfinite(self.value) else None}

    @classmethod
    def from_json(cls, saved: Json) -> "MissedThreshold":
        """Read back what `to_json` returned."""
        return cls(**{**saved, "value": math.inf if saved["value"] is None else float(saved["value"])})


def missed_classes(missed: Any, classes: Sequence[str] | None, count: int, *, by: str) -> tuple[Missed, ...]:
    """The user's classes, by name (with or without synonyms) or by index, and their levels."""
    if not isinstance(missed, Mapping | None):
        raise ValueRangeError(
            f"{by}: missed must be a dictionary, by class the largest share that is missed; got {missed!r}. Pass "
            f'missed={{"crack": 0.01}}, for example.'
        )
    names = [] if classes is None else [name.partition(",")[0] for name in classes]
    chosen: list[Missed] = []
    for key, level in (missed or {}).items():
        check_levels(missed=level)
        if isinstance(key, str) and classes is None:
            raise ValueRangeError(
                f"{by}: missed names class {key!r}, but the table has no class names. Use numbers, such as "
                f"missed={{1: {level:g}}}, or set table.classes."
            )
        if isinstance(key, str):
            full = list(classes or ())
            check_choice(key, [*names, *(one for one in full if one not in names)], by=by, what="a class of missed")
            label = full.index(key) if key in full else names.index(key)
        else:
            check_number(key, f"[0, {count - 1}]", by=by, what="a class of missed", whole=True)
            label = int(key)
        if any(label == one.label for one in chosen):
            raise ValueRangeError(f"{by}: missed names class {label} twice, the second time as {key!r}. Name it once.")
        chosen.append(Missed(label, float(level), names[label] if names else str(label)))
    return tuple(chosen)


def missed_thresholds(
    guarantee: "Guarantee", table: Table, novel: Sequence[bool] | np.ndarray, *, by: str
) -> tuple[MissedThreshold, ...]:
    """The thresholds of all missed classes, from labelled images that nothing was chosen on.

    Raises:
        GuardError: A class has too few images; the message says how many it takes.
    """
    if not guarantee.missed:
        return ()
    label = table.label.numpy()
    confidence = 1 - (1 - guarantee.confidence) / 2 / len(guarantee.missed)
    p, predicted = class_probabilities(table, [one.label for one in guarantee.missed])
    thresholds = []
    for place, one in enumerate(guarantee.missed):
        own = label == one.label
        v = np.where((predicted == one.label) | np.asarray(novel), np.inf, p[:, place])[own]
        try:
            value = missed_threshold(v, one, confidence)
        except GuardError as error:
            raise GuardError(f"{by}: {error} {guarantee.shared(confidence)}") from error
        thresholds.append(MissedThreshold(one.label, value, int((v < value).sum()), len(v)))
    return tuple(thresholds)


def missed_threshold(v: Float64[np.ndarray, "n"], missed: Missed, confidence: float) -> float:
    """tau_k, rounded down to a level, from the values v of the images of one class.

    >>> v = np.append(np.linspace(0.01, 0.3, 30), np.full(970, np.inf))
    >>> missed_threshold(v, Missed(0, 0.03, "crack"), 0.95)  # e = 20: v_(21) = 0.21
    0.125
    """
    if len(v) < (enough := needed(missed.level, confidence)):
        share = math.ceil(1000 * (1 - (1 - confidence) ** (1 / max(1, len(v))))) / 1000
        feasible = f"a share of {share:g}" if len(v) and share < 1 else "no share"
        raise GuardError(
            f"to miss at most {missed.level:g} of the images of class {missed.name} with confidence {confidence:g} "
            f"takes at least {enough} calibration images of this class; there are {len(v)}, enough for {feasible}. "
            f"Pass more of them, or choose a larger share in missed=."
        )
    e = int(binom.ppf(1 - confidence, len(v), missed.level))
    e -= int(binom.cdf(e, len(v), missed.level) > 1 - confidence)
    exact = float(np.sort(v)[max(e, 0)])
    return float(GRID[np.searchsorted(GRID, exact, side="right") - 1])


def class_probabilities(
    table: Table, labels: Sequence[int]
) -> tuple[Float64[np.ndarray, "n k"], Int64[np.ndarray, "n"]]:
    """Probabilities of some classes for every row, and the predicted class."""
    p, predicted = [np.zeros((0, len(labels)))], [np.zeros(0, dtype=np.int64)]
    for batch in table.batches("logit"):
        p.append(batch.logit.double().softmax(-1)[:, list(labels)].numpy())
        predicted.append(batch.logit.argmax(-1).numpy())
    return np.concatenate(p), np.concatenate(predicted)


def alerts(thresholds: Sequence[MissedThreshold], table: Table) -> Int64[Tensor, "n"]:
    """Of every row, the class of the first alert; -1 where there is none."""
    alert = np.full(len(table), -1, dtype=np.int64)
    if thresholds:
        p, predicted = class_probabilities(table, [one.label for one in thresholds])
        for place, one in reversed(list(enumerate(thresholds))):
            alert[(predicted != one.label) & (p[:, place] >= one.value)] = one.label
    return torch.from_numpy(alert)
