"""Matrix scaling: a linear map of all logits (Guo et al. 2017), held back by ODIR (Kull et al. 2019, section 4).

    p = softmax(W z / T + b)

Off-diagonal weights and intercepts are penalised (off-diagonal and intercept regularisation), as strongly as is best on
rows that are held out. `_affine.py` has the objective. With c² + c parameters it
is for tens of classes: at 1,000 a step takes 4 c² n operations, seconds for 50,000 rows, and some 300 MB.
"""

from dataclasses import dataclass
from typing import final

from dubito.calibration._affine import MixingScaling


@final
@dataclass
class MatrixScaling(MixingScaling):
    """A linear map of the logits: c² + c parameters."""

    name = "matrix"
