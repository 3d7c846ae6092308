"""A guard in words: how it decides, what it did on its calibration images, and why its rules refuse an image."""

import math
from typing import TYPE_CHECKING, Any

from jaxtyping import Float64
from torch import Tensor

from dubito.guard.groups import groups_in, some_groups
from dubito.guard.guarantee import CLASS
from dubito.guard.missed import alerts
from dubito.guard.shift import Observations
from dubito.guard.thresholds import NO_LIMIT
from dubito.guard.verdict import class_name
from dubito.table import Table

if TYPE_CHECKING:
    from dubito.guard.conformal import PredictionSets
    from dubito.guard.guard import Guard

_NAMED = 3
"""Refused classes or groups that are named."""


def facts(guard: "Guard") -> dict[str, str]:
    """How a guard decides, and what it did on the calibration images."""
    of, novel = guard.threshold.of, guard.rows["novel"]
    novelty = f"{novel} of {of} calibration images are refused as unlike the others"
    words = {
        "uncertainty": str(guard.selection.combination),
        "calibration": _calibration(guard),
        "kinds": str(guard.selection.roles),
        "novelty": "not checked" if guard.selection.gate is None else novelty,
    }
    if guard.groups:
        words["classes" if guard.guarantee.per == CLASS else "groups"] = _groups(guard)
    if guard.missed:
        words["alerts"] = _alerts(guard)
    if guard.sets is not None:
        words["sets"] = _sets(guard.sets)
    return words


def rule_reasons(
    guard: "Guard", table: Table, observed: Observations, limits: Float64[Tensor, "n"]
) -> dict[int, tuple[str, str]]:
    """Of rows that are refused however certain they are, the kind of the reason, and the reason."""
    reasons: dict[int, tuple[str, str]] = {}
    per, places = guard.guarantee.per, observed.group
    if per is not None and places is not None:
        what, numbered = "predicted class" if per == CLASS else per, per == CLASS and guard.classes is None
        values = groups_in(table, per, by="guard") if (places < 0).any() else places
        for row in limits.isneginf().nonzero()[:, 0].tolist():
            words = _refused_group(guard, int(places[row]), values[row])
            reasons[row] = f"{what} without a threshold", f"{'predicted' if numbered else what} {words}"
    alert = alerts(guard.missed, table)
    levels = {one.label: one.level for one in guard.guarantee.missed}
    for row in (alert >= 0).nonzero()[:, 0].tolist():
        label = int(alert[row])
        kind = f"may be {class_name(guard.classes, label)}"
        reasons[row] = kind, f"{kind}, of which at most {100 * levels[label]:g} % may be missed"
    return reasons


def _refused_group(guard: "Guard", place: int, value: Any) -> str:
    if place >= 0:
        return f"{group_name(guard, place)} is refused: {guard.groups[place].reason}"
    known = some_groups([one.group for one in guard.groups])
    return f"{some_groups([value.item()])} is refused: it has no calibration images; the guard knows {known}"


def group_name(guard: "Guard", place: int) -> str:
    """The name of a class or group by its place among the guard's."""
    group = guard.groups[place].group
    return class_name(guard.classes, int(group)) if guard.guarantee.per == CLASS else str(group)


def _calibration(guard: "Guard") -> str:
    threshold = guard.threshold
    words = f"{threshold.accepted} of {threshold.of} accepted ({threshold.accepted / threshold.of:.1%})"
    if threshold.errors is not None:
        rate = threshold.errors / max(1, threshold.accepted)
        words += f", {threshold.errors} of them {'wrong' if guard.costs is None else 'at a cost'} ({rate:.1%})"
    if threshold.value == NO_LIMIT and not guard.groups:
        words += "; no image is refused for its uncertainty"
    return words


def _groups(guard: "Guard") -> str:
    """How many have a threshold, and the first of those that do not."""
    refused = [place for place, one in enumerate(guard.groups) if one.reason]
    words = f"{len(guard.groups) - len(refused)} of {len(guard.groups)} have a threshold"
    if refused:
        first = [f"{group_name(guard, place)} ({guard.groups[place].reason})" for place in refused[:_NAMED]]
        more = f" and {len(refused) - _NAMED:,} more" if len(refused) > _NAMED else ""
        words += f"; refused are {', '.join(first)}{more}"
    return words


def _alerts(guard: "Guard") -> str:
    words = []
    for one in guard.missed:
        name, verb = class_name(guard.classes, one.label), "is" if one.missed == 1 else "are"
        refused = f"refused as 'may be {name}' from a probability of {one.value:.2g} on"
        alert = f"no image is refused as 'may be {name}'" if math.isinf(one.value) else refused
        words.append(f"{alert}; {one.missed} of {one.of} calibration images of {name} {verb} missed")
    return "; ".join(words)


def _sets(sets: "PredictionSets") -> str:
    kind = "of every class" if sets.class_wise else "of images"
    kind = f"of every group of '{sets.per}'" if sets.per is not None else kind
    kind = f"of every cluster of classes, {sets.clusters} at most," if sets.clusters else kind
    kind += f" (of all images for {len(sets.marginal_)} classes)" if sets.marginal_ else ""
    return f"contain the true class for {100 * sets.coverage:g} % {kind} ({sets.method})"
