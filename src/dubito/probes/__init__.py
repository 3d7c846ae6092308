"""Questions to the model: a probe sees images and writes columns."""

from dubito.probes.before import Before
from dubito.probes.forward import Forward

__all__ = ["Before", "Forward"]
