"""Linear classifiers on features: how they are fitted, and losses for a backbone that has no classifying layer.

    W, b = argmin  sum_i CE(W x_i + b, y_i) + strength / 2 ||W - W0||^2,     x = (z - mean) / scale

mean and scale are those of all images: one scale for all features, the root of their mean variance, so that their
geometry stays. The problem is convex and solved by L-BFGS from W0.

An uncertainty head learns from losses. Without logits they are those of two such classifiers, each fitted on half of
the images, at most 20,000, and read on the other half: on its own images a classifier would seem too certain.
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from dubito.errors import TableError
from dubito.table import Table
from dubito.table.folds import images_of
from dubito.table.table import Exact, take
from dubito.table.views import Computed
from dubito.types import finite

_STEPS = 500
_MOST = 20_000
"""Rows that a classifier of losses learns from."""
_STRENGTH = 1.0
_BLOCK = 4096


def fit_linear(
    x: Float64[np.ndarray, "n d"], label: Int64[np.ndarray, "n"], prior: Float64[np.ndarray, "d c"], strength: float
) -> Float64[np.ndarray, "e c"]:
    """Weights, the biases in the last row: (d + 1, c).

    Args:
        x: The features.
        label: The class of every row.
        prior: The weights that the penalty pulls to; the number of classes may exceed the largest label.
        strength: The strength of the penalty.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 (slow to import)

    (n, d), classes = x.shape, prior.shape[1]
    start = np.vstack([prior, np.zeros((1, classes))])
    own = np.arange(n), label
    wide = np.hstack([x, np.ones((n, 1))])

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        theta = flat.reshape(d + 1, classes)
        logit = wide @ theta
        logit -= logit.max(axis=1, keepdims=True)
        p = np.exp(logit)
        total = p.sum(axis=1, keepdims=True)
        p /= total
        moved = theta[:d] - start[:d]
        value = (np.log(total[:, 0]) - logit[own]).sum() + strength / 2 * np.square(moved).sum()
        p[own] -= 1
        slope = wide.T @ p
        slope[:d] += strength * moved
        return float(value), slope.ravel()

    options = {"maxiter": _STEPS, "gtol": 1e-6 * n}
    weights: np.ndarray = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options=options).x
    return weights.reshape(d + 1, classes)


def fit_folds(
    x: Float64[np.ndarray, "n d"], label: Int64[np.ndarray, "n"], fold: Int64[np.ndarray, "n"], classes: int
) -> list[Float64[np.ndarray, "e c"]]:
    """By fold, the weights of a classifier that was fitted on all the others."""
    prior = np.zeros((x.shape[1], classes))
    others = [fold != one for one in range(int(fold.max()) + 1)]
    return [fit_linear(x[rows], label[rows], prior, _STRENGTH) for rows in others]


def with_probe_losses(table: Table, *, seed: int = 0) -> Table:
    """A table of features and labels with the column `loss`, computed as rows are read; see above."""
    table.require("feature", "label", by="train")
    label, image = table.label.numpy().astype(np.int64), images_of(table).numpy()
    rng = np.random.default_rng(seed)
    half = rng.permutation(int(image.max()) + 1)[image] % 2  # crops of one image stay together
    if (label < 0).any() or any(len(np.unique(label[half == one])) < 2 for one in (0, 1)):
        raise TableError(
            f"train: {table.name} has no logits, so losses are to come from linear classifiers on its features, each "
            f"fitted on half of the images: these need a label from 0 on for every image, and two classes in either "
            f"half; got labels {label.min()} to {label.max()} of {len(label)} rows. Leave out images without a label, "
            f"or extract with a model that classifies."
        )
    mean, scale = pool_scale(table, by="train")
    rows = np.sort(rng.permutation(len(label))[: 2 * _MOST])
    x = (table.select("feature").rows(torch.from_numpy(rows)).feature.double() - mean).numpy() / scale
    weights = torch.from_numpy(np.stack(fit_folds(x, label[rows], half[rows], int(label.max()) + 1)))
    target, feature = torch.from_numpy(label), table.column("feature")

    def losses(chosen: Exact) -> Float[Tensor, "k"]:
        parts = torch.split(torch.arange(len(label))[chosen], _BLOCK)
        return torch.cat([block(part) for part in parts])

    def block(chosen: Int64[Tensor, "k"]) -> Float[Tensor, "k"]:
        z = (take(feature, chosen).double() - mean) / scale
        logit = torch.einsum("nd,hdc->hnc", z, weights[:, :-1]) + weights[:, None, -1]
        own = logit[torch.from_numpy(half)[chosen], torch.arange(len(z))]
        return F.cross_entropy(own, target[chosen], reduction="none").float()

    return table.extended(loss=Computed((len(label),), losses))


def pool_scale(table: Table, *, by: str) -> tuple[Float64[Tensor, "d"], float]:
    """Mean of the features, and their common scale, the root of their mean variance."""
    total = squares = torch.zeros((), dtype=torch.float64)
    for batch in table.batches("feature"):
        z = finite(batch.feature.double(), f"{by}: features of {table.name}")
        total, squares = total + z.sum(0), squares + z.square().sum(0)
    mean = total / len(table)
    variance = float((squares / len(table) - mean.square()).clamp(min=0).mean())
    return mean, variance**0.5 or 1.0
