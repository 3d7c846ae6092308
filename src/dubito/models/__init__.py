"""Classifiers from anywhere: by name (`load`) or from a module in hand (`wrap`)."""

from dubito.models.load import load as load
from dubito.models.wrap import WrappedClassifier as WrappedClassifier
from dubito.models.wrap import wrap as wrap
