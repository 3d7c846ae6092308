"""Where the images of a table lie on a map: similar ones together.

Principal components are laid out by t-SNE (van der Maaten & Hinton 2008), openTSNE's where that is installed and else
scikit-learn's, or by UMAP (McInnes et al. 2018, 1802.03426), umap-learn's. One seed gives one map: both run in one
thread, as several would sum in another order each time. Another machine or another release of these packages may still
round differently and arrange the same neighbours in another way.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import Layout
from dubito.errors import MissingPackageError
from dubito.table import Table
from dubito.types import finite
from dubito.validate import check_number, check_seed

METHODS = {"tsne": "t-SNE", "umap": "UMAP"}
Progress = Callable[[float], None]
"""Called now and then with the share of a layout that is done."""
_EXACT = 20_000
"""Rows up to which neighbours are found exactly."""
_FEWEST = 5
"""Fewer rows are placed by their first two principal components."""
_SPREAD = 1e-4
"""Standard deviation of the coordinates that t-SNE starts from, as its authors advise."""
_JITTER = 0.01
"""Noise on the starting point, in standard deviations: equal rows, or rows on one line, could not part otherwise."""
_WIDE = 2048
"""Wider features have too large a covariance; a subspace is iterated instead."""
_ROUNDS, _MORE = 6, 10
_ITERATIONS = 750
"""Of t-SNE: 250 of them with exaggerated neighbourhoods."""
_REPORTED = 25


@final
@dataclass(frozen=True)
class Components:
    """The first principal components of features.

    Attributes:
        mean: (d) of the features.
        basis: (d, k), one direction per column; directions of no variance are zero.
    """

    mean: Float[Tensor, "d"]
    basis: Float[Tensor, "d k"]

    @classmethod
    def of(cls, table: Table, count: int, *, seed: int = 0) -> "Components":
        """Those of a table's features, in passes over blocks of rows.

        Up to 2,048 features they come from the covariance, exactly; of wider ones from a seeded subspace iteration
        (Halko et al. 2011, 0909.4061, Algorithm 4.4), whose memory grows with the width and not with its square.
        """
        check_number(count, "[2, inf)", by="map", what="components", whole=True, hint="50 is usual.")
        n, d = table.shape("feature")
        mean: Any = sum(finite(z, f"map: features of {table.name}").sum(0) for z in _blocks(table)) / n
        k = min(count, d)
        if d <= _WIDE:
            # The covariance of centred rows: from squares less the squared mean, small variances would be lost.
            covariance: Any = sum((z - mean).T @ (z - mean) for z in _blocks(table)) / n
            values, vectors = torch.linalg.eigh(covariance)
            basis, size = vectors.flip(1)[:, :k], values.flip(0)[:k].clamp(min=0).sqrt()
        else:
            basis, size = _subspace(table, mean, k, seed)
        # An eigenvector has no sign of its own: its largest entry is made positive. Directions of no variance are
        # dropped, as rows that are all alike differ from their mean by rounding.
        basis = basis * basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()
        return cls(mean, basis * (size > 1e-6 * size.max()) * bool(size.max() > 1e-12 * mean.abs().max()))

    def project(self, features: Float[Tensor, "b d"]) -> Float64[np.ndarray, "b k"]:
        """Coordinates of some rows, at least two."""
        x = (features.double() - self.mean) @ self.basis
        return np.pad(x.numpy(), ((0, 0), (0, max(0, 2 - x.shape[1]))))


def principal_components(table: Table, components: int, *, seed: int = 0) -> Float64[np.ndarray, "n k"]:
    """The first principal components of every row, at least two."""
    fitted = Components.of(table, components, seed=seed)
    return np.concatenate([fitted.project(z) for z in _blocks(table)])


def lay_out(
    x: Float64[np.ndarray, "n k"],
    method: Layout,
    *,
    perplexity: float = 30.0,
    neighbours: int = 15,
    seed: int = 0,
    name: str = "table",
    progress: Progress | None = None,
) -> Float64[np.ndarray, "n 2"]:
    """Two coordinates per row of principal components.

    Args:
        x: Principal components.
        method: "tsne" or "umap", which requires umap-learn.
        perplexity: Perplexity of t-SNE, at least 1; at most a third of the other rows is used.
        neighbours: Number of neighbours of UMAP; at most the number of other rows is used.
        seed: Seed of the layout.
        name: What errors call the table.
        progress: Called as t-SNE proceeds; UMAP and scikit-learn do not report.
    """
    check_number(perplexity, "[1, inf)", by="map", what="perplexity", hint="30 is usual.")
    check_number(neighbours, "[2, inf)", by="map", what="neighbours", whole=True, hint="15 is usual.")
    check_seed(seed, by="map")
    if len(x) < _FEWEST or not x.any():
        return np.ascontiguousarray(x[:, :2])
    x = x / x[:, 0].std()  # neither layout knows a scale, and their sums of squares could overflow
    start = x[:, :2] + _JITTER * np.random.default_rng(seed).normal(size=(len(x), 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads and defaults of these packages
        if method == "umap":
            points = _umap(x, start, min(neighbours, len(x) - 1), seed)
        else:
            points = _tsne(x, start, min(perplexity, (len(x) - 1) / 3), seed, progress)
    return finite(torch.from_numpy(np.asarray(points, dtype=np.float64)), f"map: the layout of {name}").numpy()


def _subspace(
    table: Table, mean: Float[Tensor, "d"], components: int, seed: int
) -> tuple[Float[Tensor, "d k"], Float[Tensor, "k"]]:
    """The leading directions of wide features and the standard deviations along them."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(len(mean), min(components + _MORE, len(mean)), dtype=torch.float64, generator=draw)
    for _ in range(_ROUNDS):
        turned: Any = sum((z - mean).T @ ((z - mean) @ q) for z in _blocks(table))
        q = torch.linalg.qr(turned)[0]
    along = [(z - mean) @ q for z in _blocks(table)]
    inner: Any = sum(one.T @ one for one in along)
    values, turn = torch.linalg.eigh(inner / len(table))
    return (q @ turn).flip(1)[:, :components], values.flip(0)[:components].clamp(min=0).sqrt()


def _blocks(table: Table) -> Iterator[Float[Tensor, "b d"]]:
    return (batch.feature.double() for batch in table.batches("feature"))


def _tsne(
    x: Float64[np.ndarray, "n k"],
    start: Float64[np.ndarray, "n 2"],
    perplexity: float,
    seed: int,
    progress: Progress | None,
) -> Any:
    initial = start * _SPREAD
    try:
        fast = import_module("openTSNE")
    except ModuleNotFoundError:
        from sklearn import manifold  # noqa: PLC0415 (half a second to import)

        slow = manifold.TSNE(perplexity=perplexity, init=initial.astype(np.float32), random_state=seed)
        return slow.fit_transform(x)
    done = 0

    def report(_: int, __: float, ___: Any) -> None:
        nonlocal done
        done += _REPORTED
        if progress is not None:
            progress(min(1.0, done / _ITERATIONS))

    near = "exact" if len(x) <= _EXACT else "auto"
    watched = {"callbacks": report, "callbacks_every_iters": _REPORTED}
    return fast.TSNE(
        perplexity=perplexity, initialization=initial, random_state=seed, neighbors=near, n_jobs=1, **watched
    ).fit(x)


def _umap(x: Float64[np.ndarray, "n k"], start: Float64[np.ndarray, "n 2"], neighbours: int, seed: int) -> Any:
    try:
        umap = import_module("umap")
    except ModuleNotFoundError as error:
        raise MissingPackageError("method='umap' requires umap-learn: pip install 'dubito[maps]'") from error
    initial = (start / np.abs(start).max() * 10).astype(np.float32)
    return umap.UMAP(n_neighbors=neighbours, init=initial, random_state=seed, n_jobs=1).fit_transform(x)
