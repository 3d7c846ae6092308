"""Saved scores: score.json says which and how, state.safetensors holds learned tensors. Nothing is pickled.

{"format": 1, "score": "temperature", "settings": {...}, "learned": {"temperature_": 1.3}}
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dubito.errors import ArtefactError, DubitoError
from dubito.heads.recipe import as_recipe
from dubito.scores.registry import SCORES, make_score
from dubito.storage import write_file, write_json, writing
from dubito.table import Provenance
from dubito.types import Json, Score

FORMAT = 1
_DESCRIPTION, _STATE = "score.json", "state.safetensors"


def save_score(score: Score, to: str | Path) -> Path:
    """Write a score of dubito's own, fitted or not, into a folder."""
    check_registered(score)
    folder = Path(to)
    learned = {name: getattr(score, name) for name in score.learned if hasattr(score, name)}
    tensors = {name: value.contiguous() for name, value in learned.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in learned.items() if name not in tensors}
    described = {
        "format": FORMAT,
        **_plain(score),
        "learned": plain,
        "provenance": None if score.provenance_ is None else score.provenance_.to_json(),
    }
    with writing("the score", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / _STATE, save(tensors))
        write_json(folder / _DESCRIPTION, described)
    return folder


def check_registered(score: Score, *, hint: str = "Use a registered score.") -> None:
    """Raise ArtefactError for a score that could not be loaded again."""
    for one in (score, getattr(score, "score_of", score)):
        if type(one) is not SCORES.get(one.name):
            raise ArtefactError(
                f"score '{one.name}' ({type(one).__name__}) cannot be saved: it is not one of dubito's own, so it "
                f"could not be loaded again. {hint}"
            )


def load_score(path: str | Path) -> Score:
    """Read back what save_score wrote."""
    folder = Path(path)
    for file in (_DESCRIPTION, _STATE):
        if not (folder / file).is_file():
            raise ArtefactError(f"no saved score in '{folder}': {file} is not there. Save one with dubito.save_score.")
    try:
        described: Any = json.loads((folder / _DESCRIPTION).read_text())
        tensors = load_file(folder / _STATE)
    except (ValueError, OSError, SafetensorError) as error:
        raise ArtefactError(f"saved score in '{folder}' cannot be read ({error}). Save it again.") from error
    kind, name = (described.get(key) if isinstance(described, dict) else None for key in ("format", "score"))
    if kind != FORMAT or name not in [*SCORES]:
        raise ArtefactError(
            f"saved score in '{folder}' is of a kind that this dubito does not know (format {kind}, score {name}). "
            f"Update dubito or save it again."
        )
    try:
        score = _restored(described)
        learned = {**described["learned"], **tensors}
    except (AttributeError, KeyError, TypeError, DubitoError) as error:
        raise ArtefactError(f"saved score in '{folder}' cannot be restored ({error}). Save it again.") from error
    for name, value in learned.items():
        if name not in score.learned:
            raise ArtefactError(f"saved score in '{folder}' holds '{name}', which {score.name} does not learn.")
        setattr(score, name, value)
    score.provenance_ = Provenance.from_json(described.get("provenance"), f"saved score in '{folder}'")
    return score


def _plain(value: Any) -> Any:
    """A setting as JSON: of a score or a recipe, its own settings."""
    if isinstance(value, Score):
        settings = {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.init}  # type: ignore[arg-type]
        return {"score": value.name, "settings": settings}
    return value.to_json() if hasattr(value, "to_json") else value


def _restored(described: Json) -> Score:
    """Back from `_plain`."""
    settings = dict(described["settings"])
    for name, value in settings.items():
        if name == "recipe":
            settings[name] = as_recipe(value)
        elif isinstance(value, dict) and "score" in value:
            settings[name] = _restored(value)
    return make_score(described["score"], **settings)
