"""Uncertainties from columns alone, one file per family; higher is always more uncertain."""

from dubito.heads.score import UncertaintyHead
from dubito.scores.available import AvailableScores, available_scores
from dubito.scores.density import Density, default_density
from dubito.scores.deup import DEUP
from dubito.scores.gradient import PredictedGradient, REGrad
from dubito.scores.information import (
    ExpectedEntropy,
    MutualInformation,
    PerturbationVariance,
    PredictiveEntropy,
    VariationRatio,
    WeightedMutualInformation,
)
from dubito.scores.laplace import Laplace
from dubito.scores.last_layer_gradient import GradNorm, LastLayerGradient
from dubito.scores.mahalanobis import Mahalanobis
from dubito.scores.mental import MentalModel
from dubito.scores.neighbours import Neighbours
from dubito.scores.registry import SCORES, load_score, make_score, save_score
from dubito.scores.softmax import Energy, Entropy, Margin, MaxLogit, MaxProbability, ScaledEntropy
from dubito.scores.temperature import Temperature
from dubito.scores.tune import tune_regrad
from dubito.scores.vbll import VBLL

__all__ = [
    "DEUP",
    "SCORES",
    "VBLL",
    "AvailableScores",
    "Density",
    "Energy",
    "Entropy",
    "ExpectedEntropy",
    "GradNorm",
    "Laplace",
    "LastLayerGradient",
    "Mahalanobis",
    "Margin",
    "MaxLogit",
    "MaxProbability",
    "MentalModel",
    "MutualInformation",
    "Neighbours",
    "PerturbationVariance",
    "PredictedGradient",
    "PredictiveEntropy",
    "REGrad",
    "ScaledEntropy",
    "Temperature",
    "UncertaintyHead",
    "VariationRatio",
    "WeightedMutualInformation",
    "available_scores",
    "default_density",
    "load_score",
    "make_score",
    "save_score",
    "tune_regrad",
]
