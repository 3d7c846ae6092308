"""Every score by name, for the command line, `dubito list` and saved scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from dubito.errors import TableError, ValueRangeError
from dubito.heads.score import UncertaintyHead
from dubito.scores.density import Density
from dubito.scores.gradient import PredictedGradient, REGrad
from dubito.scores.information import (
    ExpectedEntropy,
    MutualInformation,
    PerturbationVariance,
    PredictiveEntropy,
    VariationRatio,
    WeightedMutualInformation,
)
from dubito.scores.last_layer_gradient import GradNorm, LastLayerGradient
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.mental import MentalModel
from dubito.scores.neighbours import Neighbours
from dubito.scores.softmax import Energy, Entropy, Margin, MaxLogit, MaxProbability, ScaledEntropy
from dubito.scores.temperature import Temperature
from dubito.types import Score
from dubito.validate import check_choice

SCORES: dict[str, type[Score]] = {
    score.name: score
    for score in (
        MaxProbability,
        Entropy,
        ScaledEntropy,
        Margin,
        MaxLogit,
        Energy,
        Temperature,
        Neighbours,
        Density,
        Mahalanobis,
        MentalModel,
        MutualInformation,
        WeightedMutualInformation,
        ExpectedEntropy,
        PredictiveEntropy,
        VariationRatio,
        REGrad,
        PredictedGradient,
        LastLayerGradient,
        GradNorm,
        PerturbationVariance,
        UncertaintyHead,
    )
}
"""A new score is one more name in this list."""


def make_score(name: str, **settings: Any) -> Score:
    """A score by its name.

    >>> make_score("scaled_entropy", scale=0.2)
    ScaledEntropy(scale=0.2)
    """
    check_choice(name, SCORES, by="make_score", what="score")
    try:
        return SCORES[name](**settings)
    except TypeError as error:
        raise ValueRangeError(f"score '{name}' does not take these settings ({error}).") from error


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
                f"Give them by name: {{'one': ..., 'other': ...}}."
            )
        named[score.name] = score
    return named


def _made(score: Any, *, by: str, arrays: bool, named: bool) -> Any:
    """A score, made from its name if need be; under a name of the user's, an array will do."""
    if isinstance(score, str):
        return make_score(score)
    if isinstance(score, type) or not (isinstance(score, Score) or (arrays and named)):
        got = f"the class {score.__name__}" if isinstance(score, type) else type(score).__name__
        raise TableError(
            f"{by}: scores must be scores, such as dubito.Entropy(), or names of them; got {got}."
            + (" Give arrays by name: {'mine': array}." if arrays else " Leave them out for all that there are.")
        )
    return score
