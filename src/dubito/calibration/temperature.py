"""Temperature scaling: one number divides all logits (Guo et al. 2017).

    p = softmax(z / T),      T = argmin  mean_i -log p_i[y_i]

No prediction changes. The fit is that of the score `temperature` (`dubito.scores.temperature`).
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Float64
from torch import Tensor

from dubito.calibration.method import Calibration
from dubito.scores.temperature import fit_temperature
from dubito.table import Table


@final
@dataclass
class TemperatureScaling(Calibration):
    """Logits divided by one number.

    Attributes:
        temperature_: T, once fitted; above one where the model is over-confident.
    """

    name = "temperature"
    learned = ("temperature_",)
    keeps_predictions = True

    def learn(self, table: Table) -> None:
        """Fit T on the labels."""
        self.temperature_ = fit_temperature(table)

    def calibrated(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """Logits divided by T."""
        return logits.double() / self.temperature_
