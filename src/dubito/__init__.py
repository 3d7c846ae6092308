"""dubito: how far can a pretrained vision model be trusted on each image, and why not?

>>> import dubito
>>> table = dubito.Table(logit=[[4.0, 0.0, 0.0], [1.0, 0.9, 0.8]], label=[0, 1])
>>> dubito.MaxProbability().score(table).argmax().item()  # the second image is the doubtful one
1
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dubito import metrics as metrics
    from dubito.active import Acquire as Acquire
    from dubito.active import add_labels as add_labels
    from dubito.active import find_label_issues as find_label_issues
    from dubito.audit.audit import audit as audit
    from dubito.cache import extract as extract
    from dubito.cache import open_cache
    from dubito.data import Augment as Augment
    from dubito.data import open_images as open_images
    from dubito.ensembles import HeadMasks as HeadMasks
    from dubito.ensembles import extract_members as extract_members
    from dubito.errors import DubitoError as DubitoError
    from dubito.evaluate.compare import compare as compare
    from dubito.evaluate.evaluate import evaluate as evaluate
    from dubito.evaluate.rejection import rejection_study as rejection_study
    from dubito.explain.causes import diagnose as diagnose
    from dubito.explain.collapse import diagnose_ensemble as diagnose_ensemble
    from dubito.explain.filtering import filtering as filtering
    from dubito.explain.literal_filter import literal_filter as literal_filter
    from dubito.explain.patterns import patterns as patterns
    from dubito.explain.simplex import simplex as simplex
    from dubito.explain.structure import structure as structure
    from dubito.guard import Guard as Guard
    from dubito.guard import PredictionSets as PredictionSets
    from dubito.heads import Recipe as Recipe
    from dubito.heads import joint_loss as joint_loss
    from dubito.heads import with_expected_loss as with_expected_loss
    from dubito.heads import with_uncertainty as with_uncertainty
    from dubito.heads.training import train as train
    from dubito.models import load as load
    from dubito.models import wrap as wrap
    from dubito.models.transform import Preprocess as Preprocess
    from dubito.probes import Forward as Forward
    from dubito.probes import Gradient as Gradient
    from dubito.probes import Members as Members
    from dubito.probes import PreActivation as PreActivation
    from dubito.probes import Tiles as Tiles
    from dubito.protocols.benchmarks import open_benchmark as open_benchmark
    from dubito.protocols.corruption_curve import corruption_curve as corruption_curve
    from dubito.protocols.human_ambiguity import human_ambiguity as human_ambiguity
    from dubito.protocols.ood import ood_auroc_by_dataset as ood_auroc_by_dataset
    from dubito.protocols.transfer import transfer as transfer
    from dubito.report.map import Map as Map
    from dubito.report.map_page import draw_map as draw_map
    from dubito.scores import Density as Density
    from dubito.scores import Energy as Energy
    from dubito.scores import Entropy as Entropy
    from dubito.scores import ExpectedEntropy as ExpectedEntropy
    from dubito.scores import GradNorm as GradNorm
    from dubito.scores import LastLayerGradient as LastLayerGradient
    from dubito.scores import Mahalanobis as Mahalanobis
    from dubito.scores import Margin as Margin
    from dubito.scores import MaxLogit as MaxLogit
    from dubito.scores import MaxProbability as MaxProbability
    from dubito.scores import MentalModel as MentalModel
    from dubito.scores import MutualInformation as MutualInformation
    from dubito.scores import Neighbours as Neighbours
    from dubito.scores import PerturbationVariance as PerturbationVariance
    from dubito.scores import PredictedGradient as PredictedGradient
    from dubito.scores import PredictiveEntropy as PredictiveEntropy
    from dubito.scores import REGrad as REGrad
    from dubito.scores import ScaledEntropy as ScaledEntropy
    from dubito.scores import Temperature as Temperature
    from dubito.scores import UncertaintyHead as UncertaintyHead
    from dubito.scores import VariationRatio as VariationRatio
    from dubito.scores import WeightedMutualInformation as WeightedMutualInformation
    from dubito.scores import load_score as load_score
    from dubito.scores import save_score as save_score
    from dubito.scores import tune_regrad as tune_regrad
    from dubito.search import SafeIndex as SafeIndex
    from dubito.table import Table as Table
    from dubito.table.views import concat as concat
    from dubito.table.views import ensemble as ensemble

    open = open_cache  # noqa: A001 (read as dubito.open)

__version__ = "0.1.0"

_HOMES = {
    "load": "dubito.models",
    "wrap": "dubito.models",
    "Preprocess": "dubito.models.transform",
    "open_images": "dubito.data",
    "open_benchmark": "dubito.protocols.benchmarks",
    "Augment": "dubito.data",
    "extract": "dubito.cache",
    "open": "dubito.cache:open_cache",
    "Table": "dubito.table",
    "concat": "dubito.table.views",
    "ensemble": "dubito.table.views",
    "PreActivation": "dubito.probes",
    "Forward": "dubito.probes",
    "Members": "dubito.probes",
    "Tiles": "dubito.probes",
    "Gradient": "dubito.probes",
    "MaxProbability": "dubito.scores",
    "Entropy": "dubito.scores",
    "ScaledEntropy": "dubito.scores",
    "Margin": "dubito.scores",
    "MaxLogit": "dubito.scores",
    "Energy": "dubito.scores",
    "Temperature": "dubito.scores",
    "Neighbours": "dubito.scores",
    "Density": "dubito.scores",
    "Mahalanobis": "dubito.scores",
    "MentalModel": "dubito.scores",
    "MutualInformation": "dubito.scores",
    "WeightedMutualInformation": "dubito.scores",
    "ExpectedEntropy": "dubito.scores",
    "PredictiveEntropy": "dubito.scores",
    "VariationRatio": "dubito.scores",
    "REGrad": "dubito.scores",
    "PredictedGradient": "dubito.scores",
    "LastLayerGradient": "dubito.scores",
    "GradNorm": "dubito.scores",
    "PerturbationVariance": "dubito.scores",
    "tune_regrad": "dubito.scores",
    "UncertaintyHead": "dubito.scores",
    "Recipe": "dubito.heads",
    "train": "dubito.heads.training",
    "with_expected_loss": "dubito.heads",
    "with_uncertainty": "dubito.heads",
    "joint_loss": "dubito.heads",
    "extract_members": "dubito.ensembles",
    "HeadMasks": "dubito.ensembles",
    "save_score": "dubito.scores",
    "load_score": "dubito.scores",
    "metrics": "dubito.metrics:",
    "evaluate": "dubito.evaluate.evaluate",
    "compare": "dubito.evaluate.compare",
    "Acquire": "dubito.active",
    "add_labels": "dubito.active",
    "find_label_issues": "dubito.active",
    "Map": "dubito.report.map",
    "draw_map": "dubito.report.map_page",
    "transfer": "dubito.protocols.transfer",
    "human_ambiguity": "dubito.protocols.human_ambiguity",
    "corruption_curve": "dubito.protocols.corruption_curve",
    "ood_auroc_by_dataset": "dubito.protocols.ood",
    "SafeIndex": "dubito.search",
    "rejection_study": "dubito.evaluate.rejection",
    "Guard": "dubito.guard",
    "PredictionSets": "dubito.guard",
    "audit": "dubito.audit.audit",
    "diagnose": "dubito.explain.causes",
    "diagnose_ensemble": "dubito.explain.collapse",
    "structure": "dubito.explain.structure",
    "simplex": "dubito.explain.simplex",
    "filtering": "dubito.explain.filtering",
    "patterns": "dubito.explain.patterns",
    "literal_filter": "dubito.explain.literal_filter",
    "DubitoError": "dubito.errors",
}
"""Where each public name lives. They are imported on first use, so that `dubito --help` does not wait for torch."""

__all__ = [name for name in _HOMES if name != "open"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dubito' has no attribute '{name}'; it has {', '.join(_HOMES)}")
    module, colon, attribute = _HOMES[name].partition(":")
    home = import_module(module)
    return home if colon and not attribute else getattr(home, attribute or name)


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]


class _FrontDoor(ModuleType):
    """Keeps public functions that are named like their room: importing `dubito.evaluate.x` must not replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOMES and _HOMES[name][-1:] != ":"):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
