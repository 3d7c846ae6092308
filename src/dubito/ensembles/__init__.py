"""Ensembles that are hidden in one model: members by masks on its linear layers, or on its last layer from a cache."""

from dubito.ensembles.head_masks import HeadMasks
from dubito.ensembles.implicit import ImplicitEnsemble, extract_members
from dubito.ensembles.masks import MaskRecipe, mask_diversity

__all__ = ["HeadMasks", "ImplicitEnsemble", "MaskRecipe", "extract_members", "mask_diversity"]
