"""Writes a guard into a folder (see `saved`): parts first, guard.json that names them last, then the sweep.

One writer at a time; what a failed one has written is taken away at once, so that a full disk has its space again.
"""

import contextlib
import errno
import json
import re
import shutil
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.torch import save

from dubito.errors import ArtefactError, DiskFullError, DubitoError
from dubito.guard.guard import Guard
from dubito.guard.saved import DESCRIPTION, FORMAT, KNOWN, PARTS, STATE, digest, digests, sealed, told_in
from dubito.scores import SCORES, save_score
from dubito.scores.temperature import Temperature
from dubito.storage import write_file
from dubito.types import Score

_LOCK, _UNFINISHED = ".lock", "parts.part"


def write_guard(guard: Guard, to: str | Path) -> Path:
    """Replace the guard in a folder, or put the first one there."""
    folder = Path(to)
    for name, score in guard.scores.items():
        _check_known(name, score)
    check_place(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / _LOCK, timeout=0):
            try:
                _write_all(guard, folder)
            finally:  # what a failed writer has written is taken away, too
                with contextlib.suppress(OSError):
                    _sweep(folder)
    except Timeout as error:
        raise ArtefactError(
            f"somebody else is saving a guard in '{folder}'. Wait until they have, or give another folder."
        ) from error
    except (OSError, DiskFullError) as error:
        raise _told(error, folder) from error
    return folder


def check_place(folder: Path) -> None:
    """Raise for a folder of other things, such as photographs: a guard there would lie among them."""
    try:
        names = {path.name for path in folder.iterdir()} - {_LOCK} if folder.exists() else set()
    except OSError as error:
        raise _told(error, folder) from error
    ours = {name for name in names if _is_ours(name)}
    strangers = sorted(names - ours - ({DESCRIPTION} if ours else set()))
    if strangers and "promise" not in told_in(folder):
        raise ArtefactError(
            f"the guard cannot be saved in '{folder}': it holds other things ({', '.join(strangers[:3])}) and no "
            f"guard. Give a new or empty folder, or that of a guard to replace."
        )


def _write_all(guard: Guard, folder: Path) -> None:
    places = {name: f"{number:02d}_{re.sub(r'[^a-zA-Z0-9_.-]', '_', name)}" for number, name in enumerate(guard.scores)}
    parts = _write_parts(guard, folder, places)
    described = {
        "format": FORMAT,
        **guard.to_json(),
        "roles": {
            "aleatoric": guard.roles.aleatoric,
            "epistemic": guard.roles.epistemic,
            "density": guard.roles.density,
        },
        "classes": None if guard.classes is None else list(guard.classes),
        "provenance": None if guard.provenance is None else guard.provenance.to_json(),
        "scores": places,
        "parts": parts.name,
        "files": digests(parts),
    }
    # As it will be read: tuples are lists there, and keys are texts.
    plain = json.loads(json.dumps(described, allow_nan=False))
    write_file(folder / DESCRIPTION, (json.dumps(sealed(plain), indent=1) + "\n").encode())


def _write_parts(guard: Guard, folder: Path, places: dict[str, str]) -> Path:
    """Scores and quantiles in a folder of their own, named by its content."""
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for name, place in places.items():
        save_score(guard.scores[name], unfinished / place)
    state = save({KNOWN: guard.known, **{f"grid.{name}": grid for name, grid in guard.grids.items()}})
    write_file(unfinished / STATE, state)
    found = digests(unfinished)
    parts = folder / f"parts-{digest(json.dumps(found).encode())}"
    if not parts.is_dir() or digests(parts) != found:
        shutil.rmtree(parts, ignore_errors=True)  # damaged: it was no use to anybody
        unfinished.replace(parts)
    return parts


def _sweep(folder: Path) -> None:
    """Remove our own parts that guard.json does not name: those before it, and those of writers that were killed."""
    named = told_in(folder).get("parts")
    for path in folder.iterdir():
        if _is_ours(path.name) and path.name != named:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_ours(name: str) -> bool:
    return name in (_UNFINISHED, f"{DESCRIPTION}.part") or PARTS.fullmatch(name) is not None


def _check_known(name: str, score: Score) -> None:
    if type(score) is not SCORES.get(score.name):
        raise ArtefactError(
            f"the guard cannot be saved: its score '{name}' ({type(score).__name__}) is none of dubito's own, so that "
            f"it could not be read back. Fit the guard with registered scores."
        )
    if isinstance(score, Temperature):
        _check_known(name, score.score_of)


def _told(error: OSError | DiskFullError, folder: Path) -> DubitoError:
    if isinstance(error, DiskFullError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"no space left for the guard in '{folder}'. The guard in memory is safe, and so is what was saved there "
            f"before: free some space and save again."
        )
    return ArtefactError(f"the guard cannot be saved in '{folder}' ({error.strerror or error}). Give another place.")
