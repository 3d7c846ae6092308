"""A guard as a folder: JSON and safetensors. Nothing is pickled, and nothing in it is executed.

guard.json                         guarantee, threshold, weights, prediction sets, provenance; sealed, replaced last
parts-SIZE-CRC/state.safetensors   quantiles of the selection images
parts-SIZE-CRC/00_NAME/            each score, as `save_score` writes it
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save

from dubito.errors import ArtefactError
from dubito.guard.combination import Combination
from dubito.guard.conformal import PredictionSets
from dubito.guard.guarantee import Guarantee
from dubito.guard.selection import Roles
from dubito.guard.thresholds import Threshold
from dubito.scores import SCORES, load_score, save_score
from dubito.scores.temperature import Temperature
from dubito.storage import SavedFolder, write_file
from dubito.table.provenance import Provenance
from dubito.types import Score

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

FOLDER = SavedFolder(kind="guard", description="guard.json", format=2, parts=("parts",), how="Guard.save")
_STATE, _UNCERTAINTY = "state.safetensors", "uncertainty"


def write_guard(guard: "Guard", folder: Path) -> None:
    """Replace the guard in a folder, or put the first one there."""
    for name, score in guard.scores.items():
        _check_registered(name, score)
    places = {name: f"{number:02d}_{re.sub(r'[^a-zA-Z0-9_.-]', '_', name)}" for number, name in enumerate(guard.scores)}

    def fill(part: Path) -> None:
        for name, place in places.items():
            save_score(guard.scores[name], part / place)
        reference = {f"score.{name}": grid for name, grid in guard.reference_quantiles.items()}
        write_file(part / _STATE, save({_UNCERTAINTY: guard.uncertainty_quantiles, **reference}))

    def write(into: Path) -> dict[str, Any]:
        return {
            **guard.to_dict(),
            "classes": None if guard.classes is None else list(guard.classes),
            "provenance": None if guard.provenance is None else guard.provenance.to_json(),
            "scores": places,
            "parts": FOLDER.put_folder(into, "parts", fill),
        }

    FOLDER.save(folder, write)


def read_guard(folder: Path) -> "Guard":
    """Read back what `write_guard` wrote, without its model; every part is checked before it is used."""
    return FOLDER.load(folder, lambda described: _read(folder, described))


def _read(folder: Path, described: Mapping[str, Any]) -> "Guard":
    from dubito.guard.guard import Guard  # noqa: PLC0415 (which calls this)

    parts = FOLDER.part(folder, described["parts"])
    state = load_file(parts / _STATE)
    guard = Guard(
        guarantee=Guarantee(**described["guarantee"]),
        threshold=Threshold(**described["threshold"]),
        combination=Combination(described["weights"], described["aurc"]),
        scores={name: load_score(_place(parts, place)) for name, place in described["scores"].items()},
        reference_quantiles={name: state[f"score.{name}"] for name in described["scores"]},
        uncertainty_quantiles=state[_UNCERTAINTY],
        roles=Roles(**described["roles"]),
        gate=described["gate"],
        sets=None if described["sets"] is None else PredictionSets.from_json(described["sets"]),
        classes=described["classes"],
        provenance=Provenance.from_json(described["provenance"], f"guard in '{folder}'"),
        rows=described["rows"],
    )
    if not math.isfinite(guard.threshold.value):
        raise ValueError(f"a threshold of {guard.threshold.value}")
    unknown = [name for name in (*guard.combination.weights, *guard.roles.names) if name not in guard.scores]
    if unknown or not guard.combination.weights:
        raise ArtefactError(f"guard in '{folder}' lacks the score '{(unknown or ['any'])[0]}'. Save it again.")
    return guard


def _check_registered(name: str, score: Score) -> None:
    if type(score) is not SCORES.get(score.name):
        raise ArtefactError(
            f"the guard cannot be saved: its score '{name}' ({type(score).__name__}) is not one of dubito's own, so it "
            f"could not be read back. Fit the guard with registered scores."
        )
    if isinstance(score, Temperature):
        _check_registered(name, score.score_of)


def _place(parts: Path, place: Any) -> Path:
    """A score's folder, which must lie inside the guard's."""
    if not isinstance(place, str) or not re.fullmatch(r"\d\d_[\w.-]+", place):
        raise ArtefactError(f"guard in '{parts.parent}' names a score's folder {place!r}. Save it again.")
    return parts / place
