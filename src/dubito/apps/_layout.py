"""Features laid out in the plane: principal components first, then t-SNE or UMAP, always the same for one seed.

t-SNE (van der Maaten & Hinton 2008) is openTSNE's where that is installed, else scikit-learn's; UMAP (McInnes et al.
2018, 1802.03426) is umap-learn's. Both run in one thread: several would sum in another order each time.
"""

import warnings
from importlib import import_module
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from dubito.errors import MissingPackageError, ValueRangeError
from dubito.table import Table
from dubito.types import finite

_EXACT = 20_000
"""Rows up to which neighbours are found exactly."""
_FEW = 5
"""Rows below which there is nothing to lay out but the principal components."""
_SPREAD = 1e-4
"""t-SNE begins at components of that standard deviation, as its authors advise."""


def laid_out(
    table: Table, method: str, *, perplexity: float = 30.0, neighbours: int = 15, components: int = 50, seed: int = 0
) -> Float64[np.ndarray, "n 2"]:
    """Two coordinates of every row; a perplexity, or neighbours, that the rows do not allow become fewer.

    Args:
        table: With features.
        method: "tsne" or "umap".
        perplexity: Of t-SNE; at most a third of the other rows.
        neighbours: Of UMAP; at most the other rows.
        components: Principal components that are kept.
        seed: Of the layout.
    """
    if perplexity <= 0 or neighbours < 2 or components < 2:
        raise ValueRangeError(
            f"map: perplexity must be above 0, neighbours and components at least 2; perplexity={perplexity}, "
            f"neighbours={neighbours}, components={components} came. 30, 15 and 50 are usual."
        )
    x = principal_components(table, components)
    if len(x) < _FEW or not x.any():
        return np.ascontiguousarray(x[:, :2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads and defaults of these packages
        if method == "umap":
            found = _umap(x, min(neighbours, len(x) - 1), seed)
        else:
            found = _tsne(x, min(perplexity, (len(x) - 1) / 3), seed)
    return finite(torch.from_numpy(np.asarray(found, dtype=np.float64)), f"map: the layout of {table.name}").numpy()


def principal_components(table: Table, components: int) -> Float64[np.ndarray, "n k"]:
    """The first principal components of the features, at least two, from their covariance in one pass over blocks."""
    n, d = table.shape("feature")
    total, product = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    for batch in table.batches("feature"):
        z = finite(batch.feature.double(), f"map: features of {table.name}")
        total += z.sum(0)
        product += z.T @ z
    mean = total / n
    values, vectors = torch.linalg.eigh(product / n - torch.outer(mean, mean))
    basis = vectors.flip(1)[:, : min(components, d)]
    # An eigenvector has no sign of its own: its largest entry is made positive.
    basis = basis * basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()
    basis = basis * (values.flip(0)[: basis.shape[1]] > 1e-12 * values.abs().max().clamp(min=1e-300))
    x = torch.cat([(batch.feature.double() - mean) @ basis for batch in table.batches("feature")])
    wide = x if x.shape[1] >= 2 else torch.cat([x, torch.zeros(n, 2 - x.shape[1], dtype=torch.float64)], 1)
    return wide.numpy()


def _tsne(x: Float64[np.ndarray, "n k"], perplexity: float, seed: int) -> Any:
    start = x[:, :2] / x[:, 0].std() * _SPREAD
    try:
        fast = import_module("openTSNE")
    except ModuleNotFoundError:
        from sklearn import manifold  # noqa: PLC0415 (half a second to import)

        slow = manifold.TSNE(perplexity=perplexity, init=start.astype(np.float32), random_state=seed)
        return slow.fit_transform(x)
    near = "exact" if len(x) <= _EXACT else "auto"
    return fast.TSNE(perplexity=perplexity, initialization=start, random_state=seed, neighbors=near, n_jobs=1).fit(x)


def _umap(x: Float64[np.ndarray, "n k"], neighbours: int, seed: int) -> Any:
    try:
        umap = import_module("umap")
    except ModuleNotFoundError as error:
        raise MissingPackageError("method='umap' is umap-learn's. pip install 'dubito[maps]'") from error
    start = x[:, :2] / np.abs(x[:, :2]).max() * 10
    return umap.UMAP(n_neighbors=neighbours, init=start.astype(np.float32), random_state=seed, n_jobs=1).fit_transform(
        x
    )
