"""Ensembles that are hidden in one model: members by masks on its linear layers, or on its last layer from a cache."""

from dubito.ensembles.extract import extract_members
from dubito.ensembles.head_masks import HeadMasks
from dubito.ensembles.implicit import ImplicitEnsemble
from dubito.ensembles.masks import mask_diversity
from dubito.ensembles.training import MaskRecipe

__all__ = ["HeadMasks", "ImplicitEnsemble", "MaskRecipe", "extract_members", "mask_diversity"]
