"""Uncertainties from columns alone, one file per family; higher is always more uncertain."""

from dubito.heads.score import UncertaintyHead
from dubito.scores.ash import ASH
from dubito.scores.available import AvailableScores, available_scores
from dubito.scores.density import Density, default_density
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
from dubito.scores.registry import SCORES, load_score, make_score, save_score
from dubito.scores.residual import Residual
from dubito.scores.scale import SCALE
from dubito.scores.softmax import Energy, Entropy, Margin, MaxLogit, MaxProbability, ScaledEntropy
from dubito.scores.temperature import Temperature
from dubito.scores.tune import tune_regrad
from dubito.scores.vbll import VBLL
from dubito.scores.vim import ViM

__all__ = [
    "ASH",
    "DEUP",
    "FDBD",
    "GEN",
    "NCI",
    "SCALE",
    "SCORES",
    "VBLL",
    "AvailableScores",
    "Density",
    "Energy",
    "Entropy",
    "ExpectedEntropy",
    "GradNorm",
    "KLMatching",
    "Laplace",
    "LastLayerGradient",
    "LayerMahalanobis",
    "Mahalanobis",
    "MahalanobisPP",
    "Margin",
    "MaxLogit",
    "MaxProbability",
    "MentalModel",
    "MutualInformation",
    "NNGuide",
    "Neighbours",
    "PerturbationVariance",
    "PredictedGradient",
    "PredictiveEntropy",
    "Prototypes",
    "REGrad",
    "ReAct",
    "Residual",
    "ScaledEntropy",
    "Temperature",
    "UncertaintyHead",
    "VariationRatio",
    "ViM",
    "WeightedMutualInformation",
    "available_scores",
    "default_density",
    "load_score",
    "make_score",
    "save_score",
    "tune_regrad",
]
