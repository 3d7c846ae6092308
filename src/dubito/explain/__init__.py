"""Why softmax fails: causes, collapse of ensembles, geometry of the last layer."""

from dubito.explain.causes import Diagnosis, diagnose
from dubito.explain.collapse import EnsembleDiagnosis, diagnose_ensemble
from dubito.explain.fields import Gaussians, density_field, entropy_field, max_probability_field
from dubito.explain.filtering import Filtering, filtering
from dubito.explain.last_layer import Layer, last_layer
from dubito.explain.literal_filter import LiteralFilter, literal_filter
from dubito.explain.patterns import Patterns, patterns
from dubito.explain.regions import (
    LinearRegion,
    ellipsoid_bounds,
    ellipsoids,
    exact_region,
    training_threshold,
    two_class_region,
)
from dubito.explain.simplex import STRUCTURES, layer, simplex
from dubito.explain.structure import Structure, structure

__all__ = [
    "STRUCTURES",
    "Diagnosis",
    "EnsembleDiagnosis",
    "Filtering",
    "Gaussians",
    "Layer",
    "LinearRegion",
    "LiteralFilter",
    "Patterns",
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
    "literal_filter",
    "max_probability_field",
    "patterns",
    "simplex",
    "structure",
    "training_threshold",
    "two_class_region",
]
