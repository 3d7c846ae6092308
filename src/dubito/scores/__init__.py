"""Uncertainties from columns alone, one file a family; higher is always more uncertain."""

from dubito.scores.artefact import load_score, save_score
from dubito.scores.density import Density
from dubito.scores.head import UncertaintyHead
from dubito.scores.information import (
    ExpectedEntropy,
    MutualInformation,
    PredictiveEntropy,
    VariationRatio,
    WeightedMutualInformation,
)
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.mental import MentalModel
from dubito.scores.neighbours import Neighbours
from dubito.scores.registry import SCORES, make_score
from dubito.scores.softmax import Cool, Energy, Entropy, Margin, MaxLogit, MaxProbability
from dubito.scores.temperature import Temperature

__all__ = [
    "SCORES",
    "Cool",
    "Density",
    "Energy",
    "Entropy",
    "ExpectedEntropy",
    "Mahalanobis",
    "Margin",
    "MaxLogit",
    "MaxProbability",
    "MentalModel",
    "MutualInformation",
    "Neighbours",
    "PredictiveEntropy",
    "Temperature",
    "UncertaintyHead",
    "VariationRatio",
    "WeightedMutualInformation",
    "load_score",
    "make_score",
    "save_score",
]
