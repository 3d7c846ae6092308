"""Every score by name: made, listed, saved and loaded.

A saved score is a folder. score.json says which and how, state.safetensors holds learned tensors; nothing is pickled:

    {"format": 1, "score": "temperature", "settings": {...}, "learned": {"temperature_": 1.3}}

Since there are such, score.json also has a hash of state.safetensors, and one of all that it says itself.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from dubito.errors import ArtefactError, TableError, ValueRangeError
from dubito.heads.recipe import as_recipe
from dubito.heads.score import UncertaintyHead
from dubito.scores.ash import ASH
from dubito.scores.density import Density
from dubito.scores.deup import DEUP
from dubito.scores.fdbd import FDBD
from dubito.scores.gen import GEN
from dubito.scores.gradient import PredictedGradient, REGrad
from dubito.scores.information import (
    ExpectedEntropy,
    MutualInformation,
    PerturbationVariance,
    PredictiveEntropy,
    VariationRatio,
    WeightedMutualInformation,
)
from dubito.scores.kl_matching import KLMatching
from dubito.scores.laplace import Laplace
from dubito.scores.last_layer_gradient import GradNorm, LastLayerGradient
from dubito.scores.layer_mahalanobis import LayerMahalanobis
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.mahalanobis_pp import MahalanobisPP
from dubito.scores.mental import MentalModel
from dubito.scores.nci import NCI
from dubito.scores.neighbours import Neighbours
from dubito.scores.nnguide import NNGuide
from dubito.scores.prototypes import Prototypes
from dubito.scores.react import ReAct
from dubito.scores.residual import Residual
from dubito.scores.scale import SCALE
from dubito.scores.softmax import Energy, Entropy, Margin, MaxLogit, MaxProbability, ScaledEntropy
from dubito.scores.temperature import Temperature
from dubito.scores.vbll import VBLL
from dubito.scores.vim import ViM
from dubito.storage import Place, parse_json, reading, to_place, unsealed, write_file, write_sealed, writing
from dubito.table import Provenance
from dubito.types import Json, Score
from dubito.validate import check_choice

_FAMILIES: tuple[tuple[type[Score], ...], ...] = (
    (MaxProbability, Entropy, ScaledEntropy, Margin, MaxLogit, Energy, Temperature),
    (Neighbours, Density, Mahalanobis, MentalModel),
    (GEN, KLMatching, Residual, ViM, FDBD, NCI, ReAct, SCALE, ASH),
    (MahalanobisPP, LayerMahalanobis, NNGuide, Prototypes),
    (MutualInformation, WeightedMutualInformation, ExpectedEntropy, PredictiveEntropy, VariationRatio),
    (REGrad, PredictedGradient, LastLayerGradient, GradNorm, PerturbationVariance, UncertaintyHead),
    (Laplace, VBLL, DEUP),
)
"""A new score is one more name in this list."""
SCORES = {score.name: score for family in _FAMILIES for score in family}
FORMAT = 1
_DESCRIPTION, _STATE = "score.json", "state.safetensors"


def make_score(name: str, **settings: Any) -> Score:
    """A score by its name.

    >>> make_score("scaled_entropy", scale=0.2)
    ScaledEntropy(scale=0.2)
    """
    check_choice(name, SCORES, by="make_score", what="score")
    try:
        return SCORES[name](**settings)
    except TypeError as error:
        raise ValueRangeError(
            f"score '{name}' does not take these settings ({error}). Look at help({SCORES[name].__name__})."
        ) from error


def by_name(scores: object, *, by: str, arrays: bool = True) -> dict[str, Any]:
    """Scores by name, from a mapping, one score, or several; the name of a registered score stands for it.

    Args:
        scores: The scores.
        by: The function that the user called, for errors.
        arrays: Whether a mapping may hold the uncertainties themselves, too.

    >>> by_name(["entropy", ScaledEntropy(scale=0.2)], by="evaluate")
    {'entropy': Entropy(), 'scaled_entropy': ScaledEntropy(scale=0.2)}
    """
    if isinstance(scores, Mapping):
        return {name: _made(score, by=by, arrays=arrays, named=True) for name, score in scores.items()}
    named: dict[str, Any] = {}
    for one in scores if isinstance(scores, Sequence) and not isinstance(scores, str) else [scores]:
        score = _made(one, by=by, arrays=arrays, named=False)
        if score.name in named:
            raise TableError(
                f"{by}: scores in a list must have different names; two are called '{score.name}'. "
                f"Pass a mapping: {{'one': ..., 'other': ...}}."
            )
        named[score.name] = score
    return named


def save_score(score: Score, to: str | Place) -> Place:
    """Write a score of dubito's own, fitted or not, into a folder."""
    check_registered(score)
    folder = to_place(to)
    learned = {name: getattr(score, name) for name in score.learned if hasattr(score, name)}
    tensors = {name: value.contiguous() for name, value in learned.items() if isinstance(value, Tensor)}
    described = {
        "format": FORMAT,
        **_plain(score),
        "learned": {name: value for name, value in learned.items() if name not in tensors},
        "provenance": None if score.provenance_ is None else score.provenance_.to_json(),
    }
    with writing("the score", folder):
        folder.mkdir(parents=True, exist_ok=True)
        data = save(tensors)
        write_file(folder / _STATE, data)
        write_sealed(folder / _DESCRIPTION, {**described, "state_file": _hash(data)})
    return folder


def check_registered(score: Score, *, hint: str = "Use a registered score.") -> None:
    """Raise ArtefactError for a score that could not be loaded again."""
    for one in (score, getattr(score, "score_of", score)):
        if type(one) is not SCORES.get(one.name):
            raise ArtefactError(
                f"score '{one.name}' ({type(one).__name__}) cannot be saved: it is not one of dubito's own, so it "
                f"could not be loaded again. {hint}"
            )


def load_score(path: str | Place) -> Score:
    """Read back what save_score wrote."""
    folder, saved = to_place(path), f"saved score in '{path}'"
    for file in (_DESCRIPTION, _STATE):
        if not (folder / file).is_file():
            raise ArtefactError(f"no saved score in '{folder}': {file} is not there. Save one with dubito.save_score.")
    with reading(saved, "Save it again."):
        described: Any = parse_json((folder / _DESCRIPTION).read_bytes())
        data = (folder / _STATE).read_bytes()
        kind, name = (described.get(key) if isinstance(described, dict) else None for key in ("format", "score"))
        if kind != FORMAT or name not in [*SCORES]:
            raise ArtefactError(
                f"{saved} is of a kind that this dubito does not know (format {kind}, score {name}). "
                f"Update dubito, or save the score again."
            )
        if "digest" in described:  # the first scores have none
            described = unsealed(described, _DESCRIPTION)
            if described["state_file"] != _hash(data):
                raise ValueError(f"{_STATE} is not the file that {_DESCRIPTION} was written with")
        tensors = load(data)
        score = _restored(described)
        for name, value in {**described["learned"], **tensors}.items():
            if name not in score.learned:
                raise ArtefactError(f"{saved} holds '{name}', which {score.name} does not learn. Save it again.")
            setattr(score, name, value)
        score.provenance_, score.from_file_ = Provenance.from_json(described.get("provenance"), saved), True
    return score


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _made(score: Any, *, by: str, arrays: bool, named: bool) -> Any:
    """A score, made from its name if need be; under a name of the user's, an array will do."""
    if isinstance(score, str):
        return make_score(score)
    if isinstance(score, type) or not (isinstance(score, Score) or (arrays and named)):
        got = f"the class {score.__name__}" if isinstance(score, type) else type(score).__name__
        raise TableError(
            f"{by}: scores must be scores, such as dubito.Entropy(), or names of them; got {got}."
            + (" Pass arrays by name: {'mine': array}." if arrays else " Leave them out for all that there are.")
        )
    return score


def _plain(value: Any) -> Any:
    """A setting as JSON: of a score or a recipe, its own settings."""
    if isinstance(value, Score):
        settings = {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.init}  # type: ignore[arg-type]
        return {"score": value.name, "settings": settings}
    return value.to_json() if hasattr(value, "to_json") else value


def _restored(described: Json) -> Score:
    """Back from `_plain`."""
    if described["score"] not in [*SCORES]:
        raise ValueError(f"this dubito has no score '{described['score']}'")
    settings = dict(described["settings"])
    for name, value in settings.items():
        if name == "recipe":
            settings[name] = as_recipe(value)
        elif isinstance(value, dict) and "score" in value:
            settings[name] = _restored(value)
    return make_score(described["score"], **settings)
