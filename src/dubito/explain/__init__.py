"""Why softmax fails: causes, collapse of ensembles, geometry of the last layer."""

from dubito.explain.collapse import EnsembleDiagnosis, diagnose_ensemble
from dubito.explain.diagnosis import Diagnosis, diagnose
from dubito.explain.filtering import Filtering, filtering
from dubito.explain.last_layer import STRUCTURES, Layer, last_layer, layer, simplex
from dubito.explain.literal_filter import LiteralFilter, literal_filter
from dubito.explain.patterns import Patterns, patterns
from dubito.explain.regions import (
    Gaussians,
    Region,
    density_field,
    ellipsoid_bounds,
    ellipsoids,
    entropy_field,
    exact_region,
    linear_region,
    max_probability_field,
    training_threshold,
    two_class_region,
)
from dubito.explain.structure import Structure, structure

__all__ = [
    "STRUCTURES",
    "Diagnosis",
    "EnsembleDiagnosis",
    "Filtering",
    "Gaussians",
    "Layer",
    "LiteralFilter",
    "Patterns",
    "Region",
    "Structure",
    "density_field",
    "diagnose",
    "diagnose_ensemble",
    "ellipsoid_bounds",
    "ellipsoids",
    "entropy_field",
    "exact_region",
    "filtering",
    "last_layer",
    "layer",
    "linear_region",
    "literal_filter",
    "max_probability_field",
    "patterns",
    "simplex",
    "structure",
    "training_threshold",
    "two_class_region",
]
