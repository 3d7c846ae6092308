"""Classifiers from anywhere: by name (`load`) or from a module in hand (`wrap`)."""

from dubito.models.load import load
from dubito.models.transform import Preprocess
from dubito.models.wrap import WrappedClassifier, wrap

__all__ = ["Preprocess", "WrappedClassifier", "load", "wrap"]
