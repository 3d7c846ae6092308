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
from torch import Tensor

from dubito.errors import NotFittedError, TableError
from dubito.guard._logistic import fit_logistic
from dubito.table import Table
from dubito.table.overlap import sketch
from dubito.table.provenance import Provenance, check_provenance
from dubito.types import finite_batches
from dubito.validate import SHARED, check_number, check_rows, check_same_model, warn_shared

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
        provenance_: Which model the features of the source are of, if known; tables of another one are refused.
    """

    def __init__(self, ridge: float = 1e-2) -> None:
        check_number(ridge, "(0, inf)", by="DensityRatio", what="ridge")
        self.ridge = ridge
        self.weight_: Float64[Tensor, "d"] | None = None
        self.bias_ = 0.0
        self.provenance_: Provenance | None = None
        self._source: Table | None = None

    def fit(self, source: Table, target: Table) -> "DensityRatio":
        """Learn to tell images of the target from those of the source; labels are not read.

        Args:
            source: Images like the calibration images, but others.
            target: Images like those to come, or these themselves.
        """
        for what, one in {"source": source, "target": target}.items():
            check_rows(one, by="DensityRatio.fit", least=2, what=what)
            one.require("feature", by="DensityRatio.fit")
        check_same_model(source.select("feature"), {"target": target.select("feature")}, by="DensityRatio.fit")
        batches = [
            batch.feature.double().numpy()
            for one in (source, target)
            for batch in finite_batches(one.batches("feature"), one.name, by="DensityRatio.fit")
        ]
        z = np.concatenate(batches)
        of_target = np.repeat([False, True], [len(source), len(target)])
        mean, scale = z.mean(0), np.maximum(z.std(0), 1e-12)
        bias, weight = fit_logistic((z - mean) / scale, of_target, ridge=self.ridge)
        weight /= scale
        self.weight_ = torch.from_numpy(weight)
        self.bias_ = float(bias - mean @ weight + np.log(len(source) / len(target)))
        self.provenance_, self._source = source.provenance, _sketched(source)
        return self

    def weights(self, table: Table) -> Float64[np.ndarray, "n"]:
        """The weight w of every row. Images of the source are warned of: sets must not be calibrated on them."""
        if self.weight_ is None:
            raise NotFittedError("DensityRatio: fit(source, target) comes first, with images of both.")
        table.require("feature", by="DensityRatio")
        if (width := table.shape("feature")[1]) != len(self.weight_):
            raise TableError(
                f"DensityRatio: features must be {len(self.weight_)} wide, as in fit; those of {table.name} are "
                f"{width} wide. Use a table of the same model."
            )
        both = f"{table.name} and the source that DensityRatio was fitted on"
        check_provenance(table.provenance, self.provenance_, by="DensityRatio", of=both, logits=False)
        batches = finite_batches(table.batches("feature"), table.name, by="DensityRatio")
        parts = [torch.zeros(0, dtype=torch.float64)]
        parts += [batch.feature.double() @ self.weight_ + self.bias_ for batch in batches]
        self._warn_of_source(table)
        return np.asarray(torch.cat(parts).clamp(-_LARGEST, _LARGEST).exp().numpy())

    def _warn_of_source(self, table: Table) -> None:
        """Warn of images that the ratio was fitted on as those of the source."""
        if self._source is not None and (here := _sketched(table)) is not None:
            harm = (
                "Their weights are fitted to them, and those of new images are not, so sets that are calibrated with "
                "them may not have the stated coverage. Fit the ratio on one half of them, and calibrate on the other."
            )
            warn_shared(here, self._source, by="DensityRatio.weights", what="the source", harm=harm, allowed=SHARED)


def _sketched(table: Table) -> Table | None:
    """What recognises the images of a table, without the table; None where features are too narrow."""
    drawn = sketch(table.select("feature"))
    return None if drawn is None else Table(feature=drawn, name=table.name)
