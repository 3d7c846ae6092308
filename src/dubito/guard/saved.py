"""A guard as a folder: JSON and safetensors. Nothing is pickled, and nothing in it is executed.

guard.json                        promise, threshold, weights, prediction sets, the model's fingerprint; the hashes of
                                  all other files, so that they belong together, and its own; replaced last
parts-HASH/state.safetensors      quantiles of the selection images
parts-HASH/00_NAME/               each score, as `save_score` writes it

New parts never overwrite old ones, so that a kill at any instant leaves the old guard or the new one; parts that
guard.json does not name are swept away after it. `saving` writes it.

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
from safetensors.torch import load
from torch import Tensor

from dubito.errors import ArtefactError, DubitoError
from dubito.guard.candidates import Roles
from dubito.guard.combine import Combination
from dubito.guard.conformal import PredictionSets
from dubito.guard.promise import Guarantee
from dubito.guard.thresholds import Threshold
from dubito.scores import load_score
from dubito.table import Provenance
from dubito.types import Json

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

FORMAT = 1
DESCRIPTION, STATE, KNOWN = "guard.json", "state.safetensors", "known"
PARTS = re.compile(r"parts-[0-9a-f]{32}")


def read_guard(path: str | Path) -> "Guard":
    """Read back what write_guard wrote, without its model; every part is checked before it is used."""
    from dubito.guard.guard import Guard  # noqa: PLC0415 (which calls this)

    folder = Path(path)
    described, state, parts = _read(folder)
    try:
        promise, found = Guarantee(**described["promise"]), Threshold(**described["threshold"])
        if not math.isfinite(found.value):
            raise ValueError(f"a threshold of {found.value}")
        guard = Guard(
            promise=promise,
            threshold=found,
            combination=Combination(described["weights"], described["aurc"]),
            scores={name: load_score(_place(parts, place)) for name, place in described["scores"].items()},
            grids={name: state[f"grid.{name}"] for name in described["scores"]},
            known=state[KNOWN],
            roles=Roles(**described["roles"]),
            gate=described["gate"],
            sets=None if described["sets"] is None else PredictionSets.from_json(described["sets"]),
            classes=described["classes"],
            provenance=Provenance.from_json(described["provenance"], f"guard in '{folder}'"),
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


def _read(folder: Path) -> tuple[Json, dict[str, Tensor], Path]:
    """What guard.json says, the quantiles, and where the scores are."""
    if not (folder / DESCRIPTION).is_file():
        raise ArtefactError(f"no guard in '{folder}': {DESCRIPTION} is not there. Give a folder that Guard.save wrote.")
    try:
        described: Any = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArtefactError(f"guard in '{folder}' cannot be read ({error}). Copy it again.") from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        came = described.get("format") if isinstance(described, dict) else type(described).__name__
        raise ArtefactError(
            f"guard in '{folder}' must be of format {FORMAT}; {came} came. Update dubito, or fit the guard again."
        )
    parts = _checked_parts(folder, described)
    try:
        return described, load((parts / STATE).read_bytes()), parts
    except (OSError, SafetensorError) as error:
        raise ArtefactError(f"guard in '{folder}' cannot be read ({error}). Copy it again.") from error


def _checked_parts(folder: Path, described: Json) -> Path:
    """Where the other files are: each of them as it was when guard.json was written."""
    if described.get("digest") != sealed(described)["digest"]:
        raise ArtefactError(
            f"guard in '{folder}': {DESCRIPTION} was changed after it was written, so that nobody can tell what it "
            f"promises. Copy the whole folder again, or fit the guard again."
        )
    named, files = described.get("parts"), described.get("files")
    if not PARTS.fullmatch(str(named)) or not isinstance(files, dict):
        raise ArtefactError(f"guard in '{folder}' does not tell which files are its own. Save it again.")
    found = digests(folder / str(named))
    for name, expected in files.items():
        if found.get(name) != expected:
            raise ArtefactError(
                f"guard in '{folder}': {named}/{name} is not the file that {DESCRIPTION} was written with; it is "
                f"missing, damaged or replaced. Copy the whole folder again, or save the guard again."
            )
    return folder / str(named)


def sealed(described: Json) -> Json:
    """With the hash of everything that it says."""
    said = {key: value for key, value in described.items() if key != "digest"}
    return {**said, "digest": digest(json.dumps(said, sort_keys=True).encode())}


def told_in(folder: Path) -> Json:
    """What guard.json says, unchecked; nothing if there is none."""
    try:
        found = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _place(parts: Path, place: Any) -> Path:
    """A score's folder, which must lie inside the guard's."""
    if not isinstance(place, str) or not re.fullmatch(r"\d\d_[\w.-]+", place):
        raise ArtefactError(f"guard in '{parts.parent}' names a score's folder {place!r}. Save it again.")
    return parts / place


def digests(folder: Path) -> dict[str, str]:
    """Of every file in it, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder).as_posix(): digest(file.read_bytes()) for file in files}


def digest(data: bytes) -> str:
    """The hash of some bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
