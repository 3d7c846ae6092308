"""Dirichlet calibration: a linear map of log-probabilities, with ODIR (Kull et al. 2019, eq. 9).

    p = softmax(W log softmax(z) / T + b)

It is the posterior where the probabilities of every class follow a Dirichlet distribution. Unlike matrix scaling it
does not change if a constant is added to all logits. `_affine.py` has the objective.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Float64
from torch import Tensor

from dubito.calibration._affine import MixingScaling


@final
@dataclass
class DirichletScaling(MixingScaling):
    """A linear map of the log-probabilities: c² + c parameters."""

    name = "dirichlet"

    @staticmethod
    def inputs(logits: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        """Log-probabilities."""
        return logits.log_softmax(-1)

    def calibrated(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """The logarithm of softmax(W x + b): x has lost the size of the logits."""
        return super().calibrated(logits).log_softmax(-1)
