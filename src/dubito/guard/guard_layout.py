"""What guard.json must look like, and which of its entries must agree, for a guard to decide by it.

Whoever can change the file can make its hash agree, so the hash is no reason to trust it: without these checks, a guard
whose thresholds of classes are missing would decide by another rule than the one that it states, and others would fail
at the first image.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from dubito.guard.missed import GRID
from dubito.guard.thresholds import CLASS, GuaranteeKind
from dubito.storage import COUNT

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

_SETS = {
    "coverage": float,
    "method": str,
    "class_wise": bool,
    "rows": COUNT,
    "thresholds": [float | None, ...],
    "per?": str,
    "clusters?": COUNT,
    "penalty?": float,
    "free_ranks?": COUNT,
    "seed?": COUNT,
    "groups?": [(int, str), ...],
    "marginal?": [COUNT, ...],
}
_GROUP = {
    "group": (int, str),
    "value": float | None,
    "accepted": COUNT,
    "errors": COUNT,
    "of": COUNT,
    "reason": str,
}
LAYOUT = {
    "guarantee": {
        "kind": str,
        "level": float,
        "confidence": float,
        "per?": str,
        "largest?": float,
        "two_costs?": bool,
        "missed?": [{"label": COUNT, "level": float, "name": str}, ...],
    },
    "groups?": [_GROUP, ...],
    "missed?": [{"label": COUNT, "value": float | None, "missed": COUNT, "of": COUNT}, ...],
    "threshold": {"value": float, "accepted": COUNT, "errors": (None, COUNT), "of": COUNT},
    "scores": [str, ...],
    "weights": {str: float},
    "aurc": {str: float},
    "gate": float | None,
    "roles": {"aleatoric": str | None, "epistemic": str | None, "density": str | None},
    "sets": (None, _SETS),
    "classes": (None, [str, ...]),
    "rows": dict.fromkeys(("table", "train", "reference", "calibrate", "novel"), COUNT),
}
"""Of guard.json."""


def check_guard(guard: "Guard") -> None:
    """Raise ValueError unless the parts of a guard that was read agree with each other."""
    for what, agrees in _checks(guard):
        if not agrees:
            raise ValueError(f"{what} cannot be those of this guarantee")


def _checks(guard: "Guard") -> Iterator[tuple[str, bool]]:
    """What is checked, and whether it is as it should be."""
    guarantee, seen, whole = guard.guarantee, guard.calibration, guard.threshold
    yield "its kind and level", guarantee.kind in get_args(GuaranteeKind)
    yield "its labels", seen.wrong is not None or not guarantee.needs_labels
    yield "counts of the threshold", (whole.errors or 0) <= whole.accepted <= whole.of == len(seen)
    yield "its prediction sets", guard.sets is None or guard.sets.thresholds_ is not None
    yield from _checks_of_groups(guard)
    yield from _checks_of_missed(guard)
    costs, loss = guard.costs, seen.loss
    yield "its costs", (costs is not None) == (loss is not None) == (guarantee.kind == "cost")
    if costs is not None and loss is not None:
        yield "its costs", (costs.largest, costs.two_costs) == (guarantee.largest, guarantee.two_costs)
        yield "costs of the calibration images", bool(((loss >= 0) & (loss <= costs.largest)).all())
    yield "its classes", len(set(_class_counts(guard))) <= 1


def _checks_of_groups(guard: "Guard") -> Iterator[tuple[str, bool]]:
    groups, codes, per = guard.groups, guard.calibration.group, guard.guarantee.per
    yield "thresholds of groups", (len(groups) > 0) == (codes is not None) == (per is not None)
    names = [one.group for one in groups]
    yield "its groups", len(set(names)) == len(names) and (per != CLASS or names == list(range(len(names))))
    yield "groups of the calibration images", codes is None or bool(((codes >= 0) & (codes < len(groups))).all())
    for one in groups:
        yield "counts of a group", one.errors <= one.accepted <= one.of
        yield "a threshold of a group", (one.value == -float("inf")) == bool(one.reason)


def _checks_of_missed(guard: "Guard") -> Iterator[tuple[str, bool]]:
    labels = [one.label for one in guard.guarantee.missed]
    yield "thresholds of missed classes", [one.label for one in guard.missed] == labels
    yield "its missed classes", len(set(labels)) == len(labels)
    yield "its missed classes", all(label < count for label in labels for count in _class_counts(guard))
    for one in guard.missed:
        yield "a threshold of a missed class", one.value in GRID and one.missed <= one.of


def _class_counts(guard: "Guard") -> Iterator[int]:
    """How many classes there are, by every part that shows it."""
    if guard.classes is not None:
        yield len(guard.classes)
    if guard.guarantee.per == CLASS:
        yield len(guard.groups)
    if guard.costs is not None:
        yield len(guard.costs.costs)
