"""One threshold for every predicted class, or for every group of images such as a camera: what holds in each of them.

Images of one group, conditional on how many there are, are independent draws from that group's images. So each group is
tested by itself, by the tests of `dubito.guard.thresholds`, with a share of delta: the K largest groups are tested
with delta / K each (Bonferroni), so all K thresholds keep the guarantee together with confidence 1 - delta. K is the
largest number for which the K largest groups all have enough images for delta / K, and of equally large groups, the
first are taken. So which groups are tested depends on their sizes and order alone, which say nothing about errors. A
group that is not tested, one in which no threshold passes, and one that was not there at the calibration, have no
threshold: their images are refused, with the reason. What holds for the accepted images of every group holds for all
accepted images together.

Groups are names or whole numbers, and are what they are: 1 and "1" are two groups, and so are two numbers of sixteen
digits that differ in the last.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped

from dubito.errors import GuardError, TableError
from dubito.guard.guarantee import CLASS, Guarantee
from dubito.guard.thresholds import Threshold
from dubito.table import Table
from dubito.types import Json

Group = str | int
_NAMED = 5
"""Groups that a sentence names."""


class GroupThreshold(NamedTuple):
    """The threshold of one predicted class or one group of images.

    Attributes:
        group: The predicted class as an index, or the group.
        value: Images up to it are accepted; minus infinity where all are refused.
        accepted: How many calibration images those were.
        errors: How many of these were wrong, or had a cost.
        of: How many calibration images the group had.
        reason: Why all are refused; empty where there is a threshold.
    """

    group: Group
    value: float
    accepted: int
    errors: int
    of: int
    reason: str = ""

    def to_json(self) -> Json:
        """As plain values; no threshold as null."""
        return {**self._asdict(), "value": self.value if math.isfinite(self.value) else None}

    @classmethod
    def from_json(cls, saved: Json) -> "GroupThreshold":
        """Read back what `to_json` returned."""
        return cls(**{**saved, "value": -math.inf if saved["value"] is None else float(saved["value"])})


def groups_in(table: Table, column: str, *, by: str) -> Shaped[np.ndarray, "n"]:
    """The group of every row: texts or whole numbers."""
    if column not in table:
        raise TableError(
            f"{by} needs the group of every image; {table.name} has no column '{column}'. Add it: "
            f"table.extended({column}=[...]), one name or whole number per row."
        )
    values = np.asarray(table.whole(column))
    if values.ndim != 1 or values.dtype.kind not in "Uiu":
        raise TableError(
            f"{by}: groups must be names or whole numbers, one per row; column '{column}' of {table.name} holds "
            f"{values.dtype} of shape {values.shape}. Use names, or cast them."
        )
    return values


def group_codes(values: Shaped[np.ndarray, "n"], groups: Sequence[Group]) -> Int64[np.ndarray, "n"]:
    """The place of every value among the groups; -1 of one that is not among them.

    >>> group_codes(np.array([2**53, 2**53 + 1, 7]), [2**53 + 1, 7]).tolist()
    [-1, 0, 1]
    """
    places = {group: place for place, group in enumerate(groups)}
    distinct, inverse = np.unique(values, return_inverse=True)
    known = np.array([places.get(one, -1) for one in distinct.tolist()], dtype=np.int64)
    return known[inverse.reshape(-1)] if len(values) else np.zeros(0, dtype=np.int64)


def some_groups(groups: Sequence[Group]) -> str:
    """The first of some groups, for a sentence.

    >>> some_groups(["left", "right"]), some_groups([7, 8, 9, 10, 11, 12, 13])
    ("'left', 'right'", '7, 8, 9, 10, 11 and 2 more')
    """
    named = ", ".join(map(repr, groups[:_NAMED]))
    return named if len(groups) <= _NAMED else f"{named} and {len(groups) - _NAMED:,} more"


def group_thresholds(
    guarantee: Guarantee,
    u: Float64[np.ndarray, "n"],
    loss: Bool[np.ndarray, "n"] | Float64[np.ndarray, "n"],
    codes: Int64[np.ndarray, "n"],
    groups: Sequence[Group],
) -> tuple[Threshold, tuple[GroupThreshold, ...]]:
    """What all thresholds do together, and the threshold of each group.

    Args:
        guarantee: What holds for each.
        u: Uncertainties of calibration images; infinite ones are never accepted.
        loss: Which are predicted wrong, or what they cost.
        codes: Their groups, as places among `groups`.
        groups: All groups.

    Raises:
        GuardError: Not one group has a threshold.
    """
    sizes = np.bincount(codes, minlength=len(groups))
    own, tested = _tested_together(guarantee, sizes)
    thresholds = tuple(
        _threshold(own, group, u[codes == place], loss[codes == place])
        if place in tested
        else GroupThreshold(group, -math.inf, 0, 0, int(sizes[place]), _why_not_tested(own, sizes, place, len(tested)))
        for place, group in enumerate(groups)
    )
    if all(one.reason for one in thresholds):
        of_classes, largest = guarantee.per == CLASS, max(thresholds, key=lambda one: one.of)
        what = "predicted class" if of_classes else f"group of '{guarantee.per}'"
        name = f"class {largest.group}" if of_classes else repr(largest.group)
        raise GuardError(
            f"no {what} has a threshold that keeps the guarantee: the largest, {name}, is refused, because "
            f"{largest.reason}. Pass more labelled images, choose a larger risk, or leave out per."
        )
    accepted, errors = (sum(getattr(one, name) for one in thresholds) for name in ("accepted", "errors"))
    return Threshold(max(one.value for one in thresholds), accepted, errors, len(u)), thresholds


def limits(thresholds: Sequence[GroupThreshold], codes: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """The threshold of every image, minus infinity for images of no known group."""
    values = np.array([*(one.value for one in thresholds), -math.inf])
    return np.asarray(values[codes], dtype=np.float64)


def _tested_together(guarantee: Guarantee, sizes: Int64[np.ndarray, "k"]) -> tuple[Guarantee, frozenset[int]]:
    """The guarantee of one group, with its share of delta, and which groups are tested: exactly as many as share it."""
    delta = 1 - guarantee.tested_at
    own = replace(guarantee, per=None, missed=(), confidence=1 - delta)
    largest_first = np.argsort(-sizes, kind="stable")
    for number, place in enumerate(largest_first, 1):
        shared = replace(own, confidence=1 - delta / number)
        if sizes[place] < shared.enough:
            return own, frozenset(largest_first[: number - 1].tolist())
        own = shared
    return own, frozenset(largest_first.tolist())


def _why_not_tested(own: Guarantee, sizes: Int64[np.ndarray, "k"], place: int, tested: int) -> str:
    has = f"it has {sizes[place]} calibration images"
    if sizes[place] < own.enough:
        return f"{has}, and at least {own.enough} are needed"
    largest = "the largest" if tested == 1 else f"the {tested} largest"
    return (
        f"{has}, and only {largest} of {len(sizes)} can be tested together, because they share the probability of an "
        f"error; with more images of each, more can be"
    )


def _threshold(
    guarantee: Guarantee,
    group: Group,
    u: Float64[np.ndarray, "m"],
    loss: Bool[np.ndarray, "m"] | Float64[np.ndarray, "m"],
) -> GroupThreshold:
    try:
        value, accepted, errors, of = guarantee.threshold((u, loss))
    except GuardError:
        reason = f"too many even of the most certain of its {len(u)} calibration images are wrong"
        return GroupThreshold(group, -math.inf, 0, 0, len(u), reason)
    return GroupThreshold(group, value, accepted, errors or 0, of)
