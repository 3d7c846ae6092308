"""Probes run the model on images and write columns."""

from dubito.probes.dropout import Dropout
from dubito.probes.forward import Forward, base_probe
from dubito.probes.gradient import Gradient
from dubito.probes.layers import Layers
from dubito.probes.members import EnsembleProbe, Members
from dubito.probes.pre_activation import PreActivation
from dubito.probes.registry import PROBES, make_probe, probe_settings, probes_for
from dubito.probes.tiles import Tiles
from dubito.probes.views import Noise, Views

__all__ = [
    "PROBES",
    "Dropout",
    "EnsembleProbe",
    "Forward",
    "Gradient",
    "Layers",
    "Members",
    "Noise",
    "PreActivation",
    "Tiles",
    "Views",
    "base_probe",
    "make_probe",
    "probe_settings",
    "probes_for",
]
