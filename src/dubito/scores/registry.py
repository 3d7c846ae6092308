"""Every score by name: what the command line, `dubito list` and saved artefacts know."""

from difflib import get_close_matches
from typing import Any

from dubito.errors import DubitoError
from dubito.scores.density import Density
from dubito.scores.gradient import PredictedGradient, REGrad
from dubito.scores.head import UncertaintyHead
from dubito.scores.information import (
    ExpectedEntropy,
    MutualInformation,
    PredictiveEntropy,
    VariationRatio,
    WeightedMutualInformation,
)
from dubito.scores.last_layer_gradient import GradNorm, LastLayerGradient
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.mental import MentalModel
from dubito.scores.neighbours import Neighbours
from dubito.scores.perturbation import PerturbationVariance
from dubito.scores.softmax import Cool, Energy, Entropy, Margin, MaxLogit, MaxProbability
from dubito.scores.temperature import Temperature
from dubito.types import Score

SCORES: dict[str, type[Score]] = {
    score.name: score
    for score in (
        MaxProbability,
        Entropy,
        Cool,
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
"""A new score is one more name in this line-up."""


def make_score(name: str, **settings: Any) -> Score:
    """A score by its name.

    >>> make_score("cool", scale=0.2)
    Cool(scale=0.2)
    """
    if name not in SCORES:
        near = get_close_matches(name, SCORES, n=3, cutoff=0.4)
        raise DubitoError(
            f"score: there is no '{name}'. "
            + (f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(SCORES)}.")
        )
    try:
        return SCORES[name](**settings)
    except TypeError as error:
        raise DubitoError(f"score '{name}' does not take these settings ({error}).") from error
