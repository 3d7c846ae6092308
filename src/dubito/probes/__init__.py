"""Questions to the model: a probe sees images and writes columns."""

from dubito.probes.forward import Forward, base_probe
from dubito.probes.gradient import Gradient
from dubito.probes.members import Members
from dubito.probes.pre_activation import PreActivation
from dubito.probes.tiles import Tiles

__all__ = ["Forward", "Gradient", "Members", "PreActivation", "Tiles", "base_probe"]
