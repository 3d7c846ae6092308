"""Vector scaling: every class has a weight and an intercept of its own (Guo et al. 2017, section 4.2).

    p = softmax(w * z / T + b)

Guo et al. have no penalty; ours is a prior around temperature scaling (`_affine.py`), without which a class that does
not occur in the calibration set would have an intercept of minus infinity, and 1,000 classes would be fitted to noise.
`deviation=float("inf")` is theirs.
"""

from dataclasses import dataclass
from typing import final

from dubito.calibration._affine import AffineScaling


@final
@dataclass
class VectorScaling(AffineScaling):
    """A weight and an intercept for every class: 2 c parameters."""

    name = "vector"
