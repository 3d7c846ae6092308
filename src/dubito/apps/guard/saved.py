"""A guard as a folder: JSON and safetensors. Nothing is pickled, and nothing in it is executed.

guard.json            promise, threshold, weights, prediction sets, the model's fingerprint; the hashes of all other
                      files, so that they belong together, and its own
state.safetensors     quantiles of the selection images
scores/00_NAME/       each score, as `save_score` writes it

Hashes tell what was damaged, exchanged or left half written; they are no signature: whoever changes a guard on purpose
can compute them, too.
"""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dubito.apps.guard.candidates import Roles
from dubito.apps.guard.combine import Combination
from dubito.apps.guard.conformal import PredictionSets
from dubito.apps.guard.promise import Promise
from dubito.apps.guard.thresholds import Threshold
from dubito.cache.shard import is_leftover, write_file
from dubito.errors import ArtefactError, DubitoError
from dubito.scores import load_score, save_score
from dubito.types import Json

if TYPE_CHECKING:
    from dubito.apps.guard.guard import Guard

FORMAT = 1
_DESCRIPTION, _STATE, _SCORES, _KNOWN = "guard.json", "state.safetensors", "scores", "known"


def write_guard(guard: "Guard", to: str | Path) -> Path:
    """Write a guard into a folder; each file is replaced in one step, guard.json last."""
    folder = Path(to)
    state = save({_KNOWN: guard.known, **{f"grid.{name}": grid for name, grid in guard.grids.items()}})
    places = {name: f"{number:02d}_{re.sub(r'[^a-zA-Z0-9_.-]', '_', name)}" for number, name in enumerate(guard.scores)}
    described = {
        "format": FORMAT,
        **guard.to_json(),
        "roles": {
            "aleatoric": guard.roles.aleatoric,
            "epistemic": guard.roles.epistemic,
            "density": guard.roles.density,
        },
        "classes": None if guard.classes is None else list(guard.classes),
        "maker": guard.maker,
        "scores": places,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, place in places.items():
            save_score(guard.scores[name], folder / _SCORES / place)
        write_file(folder / _STATE, state)
        described["files"] = {name: _digest((folder / name).read_bytes()) for name in _parts(folder, places)}
        # As it will be read: tuples are lists there, and keys are texts.
        plain = json.loads(json.dumps(described, allow_nan=False))
        write_file(folder / _DESCRIPTION, (json.dumps(sealed(plain), indent=1) + "\n").encode())
    except OSError as error:
        raise ArtefactError(f"'{folder}' cannot be written ({error.strerror}). Give another place.") from error
    return folder


def read_guard(path: str | Path) -> "Guard":
    """Read back what write_guard wrote, without its model; every part is checked before it is used."""
    from dubito.apps.guard.guard import Guard  # noqa: PLC0415 (which calls this)

    folder = Path(path)
    described, state = _read(folder)
    try:
        promise, found = Promise(**described["promise"]), Threshold(**described["threshold"])
        if not math.isfinite(found.value):
            raise ValueError(f"a threshold of {found.value}")
        guard = Guard(
            promise=promise,
            threshold=found,
            combination=Combination(described["weights"], described["aurc"]),
            scores={name: load_score(_place(folder, place)) for name, place in described["scores"].items()},
            grids={name: state[f"grid.{name}"] for name in described["scores"]},
            known=state[_KNOWN],
            roles=Roles(**described["roles"]),
            gate=described["gate"],
            sets=None if described["sets"] is None else PredictionSets.from_json(described["sets"]),
            classes=described["classes"],
            maker=described["maker"],
            rows=described["rows"],
        )
    except ArtefactError:
        raise
    except (DubitoError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"guard in '{folder}' cannot be restored ({error!r}). Save it again.") from error
    unknown = [name for name in (*guard.combination.weights, *guard.roles.names) if name not in guard.scores]
    if unknown or not guard.combination.weights:
        raise ArtefactError(f"guard in '{folder}' lacks the score '{(unknown or ['any'])[0]}'. Save it again.")
    return guard


def _read(folder: Path) -> tuple[Json, dict[str, Tensor]]:
    for file in (_DESCRIPTION, _STATE):
        if not (folder / file).is_file():
            raise ArtefactError(f"no guard in '{folder}': {file} is not there. Give a folder that Guard.save wrote.")
    try:
        described: Any = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        state = load((folder / _STATE).read_bytes())
    except (ValueError, OSError, SafetensorError) as error:
        raise ArtefactError(f"guard in '{folder}' cannot be read ({error}). Copy it again.") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        came = described.get("format") if isinstance(described, dict) else type(described).__name__
        raise ArtefactError(
            f"guard in '{folder}' must be of format {FORMAT}; {came} came. Update dubito, or fit the guard again."
        )
    _check_hashes(folder, described)
    return described, state


def _check_hashes(folder: Path, described: Json) -> None:
    if described.get("digest") != sealed(described)["digest"]:
        raise ArtefactError(
            f"guard in '{folder}': {_DESCRIPTION} was changed after it was written, so that nobody can tell what it "
            f"promises. Copy the whole folder again, or fit the guard again."
        )
    files = described.get("files")
    for name, digest in files.items() if isinstance(files, dict) else [(_STATE, None)]:
        file = folder / name
        if not file.is_file() or _digest(file.read_bytes()) != digest:
            raise ArtefactError(
                f"guard in '{folder}': {name} is not the file that {_DESCRIPTION} was written with; it was damaged or "
                f"replaced, or saving was broken off. Copy the whole folder again, or save the guard again."
            )


def sealed(described: Json) -> Json:
    """With the hash of everything that it says."""
    said = {key: value for key, value in described.items() if key != "digest"}
    return {**said, "digest": _digest(json.dumps(said, sort_keys=True).encode())}


def _parts(folder: Path, places: dict[str, str]) -> list[str]:
    """All files but the description, and but what killed writers left behind."""
    of_scores = [file for place in places.values() for file in sorted((folder / _SCORES / place).iterdir())]
    return [_STATE, *(file.relative_to(folder).as_posix() for file in of_scores if not is_leftover(file))]


def _place(folder: Path, place: Any) -> Path:
    """A score's folder, which must lie inside the guard's."""
    if not isinstance(place, str) or not re.fullmatch(r"\d\d_[\w.-]+", place):
        raise ArtefactError(f"guard in '{folder}' names a score's folder {place!r}. Save it again.")
    return folder / _SCORES / place


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
