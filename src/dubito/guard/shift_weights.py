"""Weights for prediction sets under a covariate shift: how much likelier an image is in the target than here.

    w(x) = p_target(x) / p_source(x)

With known w, and p(y | x) the same in both, weighted conformal sets cover the true class in the target as often as
stated (Tibshirani et al. 2019, corollary 1): see `PredictionSets.fit(table, weights=...)`. A ratio that is estimated
costs coverage by as much as it is off; that is not part of the guarantee. `DensityRatio` estimates it from features by
a logistic regression between source and target images: w = odds of the target, times the ratio of their numbers.
It must learn from images other than those that sets are calibrated on: otherwise, the weights of these are fitted to
them, and those of new images are not.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor

from dubito.errors import NotFittedError
from dubito.table import Table
from dubito.validate import check_number, check_rows

_LARGEST = 30.0
"""Of log w."""


@final
class DensityRatio:
    """w(x) by a logistic regression on features.

    Args:
        ridge: Penalty of the coefficients, for features of mean 0 and variance 1.

    Attributes:
        weight_: (d) coefficients, once fitted.
        bias_: What is added to them.
    """

    def __init__(self, ridge: float = 1e-2) -> None:
        check_number(ridge, "(0, inf)", by="DensityRatio", what="ridge")
        self.ridge = ridge
        self.weight_: Float64[Tensor, "d"] | None = None
        self.bias_ = 0.0

    def fit(self, source: Table, target: Table) -> "DensityRatio":
        """Learn to tell images of the target from those of the source; labels are not read.

        Args:
            source: Images like the calibration images, but others.
            target: Images like those to come.
        """
        for what, one in {"source": source, "target": target}.items():
            check_rows(one, by="DensityRatio.fit", least=2, what=what)
            one.require("feature", by="DensityRatio.fit")
        z = torch.cat([source.feature, target.feature]).double().numpy()
        y = np.repeat([0.0, 1.0], [len(source), len(target)])
        mean, scale = z.mean(0), np.maximum(z.std(0), 1e-12)
        x = (z - mean) / scale

        def loss(b: Float64[np.ndarray, "k"]) -> tuple[float, Float64[np.ndarray, "k"]]:
            logit = b[0] + x @ b[1:]
            gap = (expit(logit) - y) / len(y)
            value = np.mean(np.logaddexp(0, logit) - y * logit) + self.ridge / 2 * (b[1:] ** 2).sum()
            return float(value), np.append(gap.sum(), gap @ x + self.ridge * b[1:])

        b = minimize(loss, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B").x
        weight = b[1:] / scale
        self.weight_ = torch.from_numpy(weight)
        self.bias_ = float(b[0] - mean @ weight + np.log(len(source) / len(target)))
        return self

    def weights(self, table: Table) -> Float64[np.ndarray, "n"]:
        """The weight w of every row."""
        if self.weight_ is None:
            raise NotFittedError("DensityRatio: fit(source, target) comes first, with images of both.")
        table.require("feature", by="DensityRatio")
        parts = [torch.zeros(0, dtype=torch.float64)]
        parts += [batch.feature.double() @ self.weight_ + self.bias_ for batch in table.batches("feature")]
        return np.asarray(torch.cat(parts).clamp(-_LARGEST, _LARGEST).exp().numpy())
