"""A guard as a folder: what is written, and which entries must agree for a guard that is read to decide by them.

Whoever can change the file can make its hash agree, so the hash is no reason to trust it: without these checks, a guard
whose thresholds of classes are missing would decide by another rule than the one that it states, and others would fail
at the first image.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from safetensors.numpy import load_file, save

from dubito.guard.conformal import PredictionSets
from dubito.guard.costs import CostMatrix
from dubito.guard.groups import GroupThreshold
from dubito.guard.guarantee import CLASS, Guarantee, GuaranteeKind
from dubito.guard.identity import class_counts
from dubito.guard.missed import GRID, MissedThreshold
from dubito.guard.selection import ScoreSelection
from dubito.guard.shift import Observations
from dubito.guard.thresholds import Threshold
from dubito.scores.registry import check_registered
from dubito.storage import COUNT, Place, SavedFolder, check_layout, write_file
from dubito.table.provenance import Provenance

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

FOLDER = SavedFolder(kind="guard", description="guard.json", format=5, parts=("parts",), how="Guard.save")
_OBSERVED, _COSTS = "observed.safetensors", "costs.safetensors"
_SETS = {
    "coverage": float,
    "method": str,
    "class_wise": bool,
    "rows": COUNT,
    "classes": COUNT,
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
_LAYOUT = {
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


def write_guard(guard: "Guard", folder: Place) -> None:
    """Write a guard into a folder: JSON and safetensors."""
    for score in guard.selection.scores.values():
        check_registered(score)
    described = {
        **guard.to_dict(),
        "scores": list(guard.selection.scores),
        "classes": None if guard.classes is None else list(guard.classes),
        "provenance": None if guard.provenance is None else guard.provenance.to_json(),
    }

    def write_parts(parts: Path) -> None:
        guard.selection.write(parts)
        if guard.costs is not None:
            write_file(parts / _COSTS, save({"costs": guard.costs.costs}))
        arrays = {name: np.ascontiguousarray(one) for name, one in guard.calibration.arrays().items()}
        write_file(parts / _OBSERVED, save(arrays))

    FOLDER.save(folder, lambda into: {**described, "parts": FOLDER.put_folder(into, "parts", write_parts)})


def read_guard(kind: "type[Guard]", folder: Place, described: Mapping[str, Any]) -> "Guard":
    """The guard that a description and its parts make."""
    check_layout(described, _LAYOUT)
    parts = FOLDER.part(folder, described["parts"])
    guarantee, costs = Guarantee.from_json(described["guarantee"]), None
    provenance = Provenance.from_json(described["provenance"], f"guard in '{folder}'")
    if guarantee.kind == "cost":
        matrix = load_file(parts / _COSTS)["costs"]
        costs = CostMatrix.of(matrix, len(matrix))
    guard = kind(
        guarantee=guarantee,
        threshold=Threshold(**described["threshold"]),
        selection=ScoreSelection.read(parts, described),
        calibration=Observations.from_arrays(load_file(parts / _OBSERVED)),
        sets=None if described["sets"] is None else PredictionSets.from_json(described["sets"], provenance),
        classes=described["classes"],
        provenance=provenance,
        rows=described["rows"],
        groups=tuple(GroupThreshold.from_json(one) for one in described.get("groups", ())),
        missed=tuple(MissedThreshold.from_json(one) for one in described.get("missed", ())),
        costs=costs,
    )
    _check_guard(guard)
    return guard


def _check_guard(guard: "Guard") -> None:
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
    yield "its classes", len(set(class_counts(guard))) <= 1


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
    yield "its missed classes", all(label < count for label in labels for count in class_counts(guard))
    for one in guard.missed:
        yield "a threshold of a missed class", one.value in GRID and one.missed <= one.of
