"""Calibrated probabilities: methods that map logits, and which of them is best for a model."""

from dubito.calibration.choice import CalibrationChoice, MethodQuality, calibrate
from dubito.calibration.dirichlet import DirichletScaling
from dubito.calibration.histogram import Histogram
from dubito.calibration.isotonic import ClassWiseIsotonic, Isotonic
from dubito.calibration.matrix import MatrixScaling
from dubito.calibration.method import Calibration
from dubito.calibration.registry import METHODS, load_calibration, make_calibration, save_calibration
from dubito.calibration.temperature import TemperatureScaling
from dubito.calibration.vector import VectorScaling
from dubito.calibration.venn_abers import VennAbers

__all__ = [
    "METHODS",
    "Calibration",
    "CalibrationChoice",
    "ClassWiseIsotonic",
    "DirichletScaling",
    "Histogram",
    "Isotonic",
    "MatrixScaling",
    "MethodQuality",
    "TemperatureScaling",
    "VectorScaling",
    "VennAbers",
    "calibrate",
    "load_calibration",
    "make_calibration",
    "save_calibration",
]
