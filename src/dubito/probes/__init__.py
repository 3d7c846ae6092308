"""Probes run the model on images and write columns."""

from dubito.probes.forward import Forward, base_probe
from dubito.probes.gradient import Gradient
from dubito.probes.members import Members
from dubito.probes.pre_activation import PreActivation
from dubito.probes.registry import PROBES, make_probe, probe_settings, probes_for
from dubito.probes.tiles import Tiles

__all__ = [
    "PROBES",
    "Forward",
    "Gradient",
    "Members",
    "PreActivation",
    "Tiles",
    "base_probe",
    "make_probe",
    "probe_settings",
    "probes_for",
]
