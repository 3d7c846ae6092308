"""Expectation maximisation for Gaussian mixtures, streaming: rows are read block by block, again in every iteration.

    r_ik  = pi_k N(z_i; mu_k, Sigma_k) / q(z_i)                                   expectation
    pi_k  = n_k / n,  n_k = sum_i r_ik,  mu_k = sum_i r_ik z_i / n_k              maximisation
    Sigma_k = sum_i r_ik (z_i - mu_k) (z_i - mu_k)^T / n_k + regularisation I

Both steps share one reading of the rows; neither responsibilities nor rows are kept. Sums are in float64, around the
means of the iteration before. Rows whose r_ik is below 1e-14 are left out of component k: where clusters are apart, an
iteration costs n d^2 and not k n d^2. A component that loses all its rows keeps its mean and covariance, at weight 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import faiss
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from dubito.choices import Covariance
from dubito.scores._gaussians import CHUNK, NEGLIGIBLE, Mixture, precision_factor, squared_distances

Blocks = Callable[[], Iterator[Tensor]]
"""Reads the rows anew: (n, d) float64 at a time."""
_LOST = 1e-6
"""A component with less than a millionth of a row has lost its rows."""


@final
@dataclass
class Maximiser:
    """Collects weighted rows, and makes the mixture that explains them best.

    Attributes:
        around: (k, d) means of the iteration before, or of the start.
        covariance: Full, tied, diagonal or spherical.
        regularisation: Added to every variance.
    """

    around: Float64[Tensor, "k d"]
    covariance: Covariance
    regularisation: float

    def __post_init__(self) -> None:
        k, d = self.around.shape
        shape = {"full": (k, d, d), "tied": (d, d)}.get(self.covariance, (k, d))
        self._counts = torch.zeros(k, dtype=torch.float64)
        self._firsts = torch.zeros(k, d, dtype=torch.float64)
        self._seconds = torch.zeros(shape, dtype=torch.float64)
        self._middle = self.around.mean(0)

    def add(self, z: Float64[Tensor, "n d"], shares: Float64[Tensor, "n k"]) -> None:
        """Count rows, each shared out among the components."""
        self._counts += shares.sum(0)
        if self.covariance == "full":
            for k in range(len(self.around)):
                rows = (shares[:, k] > NEGLIGIBLE).nonzero()[:, 0]
                self._add_to(k, z[rows], shares[rows, k])
            return
        z = z - self._middle
        self._firsts.addmm_(shares.T, z)
        if self.covariance == "tied":
            _add_products(self._seconds, z * shares.sum(1, keepdim=True).sqrt())
        else:
            self._seconds.addmm_(shares.T, z.square())

    def mixture(self, before: Mixture | None = None) -> Mixture:
        """The most likely mixture; components without rows stay as before."""
        counts = self._counts
        lost = counts < _LOST
        shifts = self._firsts / counts.clamp(min=_LOST)[:, None]
        origin = self.around if self.covariance == "full" else self._middle
        means = torch.where(lost[:, None], self.around, origin + shifts)
        weights = torch.where(lost, 0.0, counts)
        factors = self._factors(shifts, counts.clamp(min=_LOST), lost, before)
        return Mixture(self.covariance, weights / weights.sum(), means, factors)

    def _add_to(self, k: int, z: Float64[Tensor, "m d"], shares: Float64[Tensor, "m"]) -> None:
        z = z - self.around[k]
        self._firsts[k] += shares @ z
        _add_products(self._seconds[k], z.mul_(shares.sqrt()[:, None]))

    def _factors(
        self,
        shifts: Float64[Tensor, "k d"],
        counts: Float64[Tensor, "k"],
        lost: Bool[Tensor, "k"],
        before: Mixture | None,
    ) -> Float64[Tensor, "..."]:
        """The second moments become factors, in place where they are large; those without rows stay as before."""
        if self.covariance == "full":
            for k, products in enumerate(self._seconds):
                if before is not None and bool(lost[k]):
                    products.copy_(before.factors[k])
                    continue
                covariance = _mirrored(products).div_(counts[k]).sub_(torch.outer(shifts[k], shifts[k]))
                products.copy_(self._factor(covariance, f"component {k}"))
            return self._seconds
        if self.covariance == "tied":
            between = (shifts * self._counts[:, None]).T @ shifts
            covariance = (_mirrored(self._seconds) - between).div_(self._counts.sum())
            return self._factor(covariance, "all components")
        variances = (self._seconds / counts[:, None] - shifts.square()).clamp_(min=0)
        variances = variances + self.regularisation
        if self.covariance == "spherical":
            variances = variances.mean(1)
        if before is not None:
            variances[lost] = before.factors[lost] ** -2
        # A precision must be a number; without regularisation a constant feature has none.
        if not bool((variances > 0).all()):
            self._factor(torch.zeros(1, 1, dtype=torch.float64), f"component {int((variances <= 0).nonzero()[0, 0])}")
        factors: Tensor = variances.rsqrt()
        if before is not None:
            factors[lost] = before.factors[lost]  # to the last bit
        return factors

    def _factor(self, covariance: Float64[Tensor, "d d"], whose: str) -> Float64[Tensor, "d d"]:
        whose = f"density.fit: the covariance of {whose}"
        return precision_factor(covariance, whose=whose, regularisation=self.regularisation)


def maximise(
    pairs: Iterator[tuple[Tensor, Tensor]],
    around: Float64[Tensor, "k d"],
    covariance: Covariance,
    regularisation: float,
) -> Mixture:
    """The closed-form mixture of rows that belong to one component each: pairs are (n, d) rows and (n) components."""
    sums = Maximiser(around, covariance, regularisation)
    for z, component in pairs:
        sums.add(z, torch.nn.functional.one_hot(component, len(around)).double())
    return sums.mixture()


def improve(
    blocks: Blocks, mixture: Mixture, *, regularisation: float, max_iterations: int, tolerance: float
) -> tuple[Mixture, list[float]]:
    """EM from a mixture on, until the mean log-likelihood changes by less than tolerance; all those likelihoods."""
    likelihoods: list[float] = []
    for _ in range(max_iterations):
        sums = Maximiser(mixture.means, mixture.covariance, regularisation)
        total, n = 0.0, 0
        for z in blocks():
            joint = mixture.log_joint(z)
            density = joint.logsumexp(1)
            sums.add(z, joint.sub_(density[:, None]).exp_())
            total, n = total + float(density.sum()), n + len(z)
        mixture = sums.mixture(mixture)
        likelihoods.append(total / n)
        if len(likelihoods) > 1 and abs(likelihoods[-1] - likelihoods[-2]) < tolerance:
            break
    return mixture, likelihoods


def kmeans(sample: Float32[Tensor, "n d"], k: int, seed: int) -> Float64[Tensor, "k d"]:
    """Centres of k clusters by faiss, from the start of k-means++ (Arthur and Vassilvitskii 2007)."""
    middle = sample.mean(0)
    rows = sample - middle
    clusters = faiss.Kmeans(sample.shape[1], k, niter=25, seed=seed, min_points_per_centroid=1)
    clusters.train(rows.numpy(), init_centroids=_spread(rows, k, seed).numpy())
    return torch.from_numpy(clusters.centroids).double() + middle.double()


def _spread(rows: Float32[Tensor, "n d"], k: int, seed: int) -> Float32[Tensor, "k d"]:
    """So many of the rows, each drawn with the square of its distance to those before."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    distance = torch.full((len(rows),), torch.inf)
    for _ in range(k - 1):
        distance = torch.minimum(distance, (rows - rows[chosen[-1]]).square().sum(1))
        # Where all rows are taken already, as with duplicates, any will do.
        chances = distance if bool((distance > 0).any()) else torch.ones(len(rows))
        cumulative = chances.double().cumsum(0)
        draw = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
        chosen.append(min(int(torch.searchsorted(cumulative, draw, right=True)), len(rows) - 1))
    return rows[chosen]


def nearest_centre(z: Float64[Tensor, "n d"], centres: Float64[Tensor, "k d"]) -> Int64[Tensor, "n"]:
    """Which centre every row is nearest to."""
    middle = centres.mean(0)
    nearest: Tensor = squared_distances(z - middle, centres - middle).argmin(1)
    return nearest


def _add_products(sums: Float64[Tensor, "d d"], z: Float64[Tensor, "n d"]) -> None:
    """Add z^T z, its upper part alone: the lower one is the same."""
    for start in range(0, z.shape[1], CHUNK):
        stop = min(start + CHUNK, z.shape[1])
        sums[:stop, start:stop].addmm_(z[:, :stop].T, z[:, start:stop])


def _mirrored(sums: Float64[Tensor, "d d"]) -> Float64[Tensor, "d d"]:
    """Both parts, from the upper one."""
    upper: Tensor = sums.triu()
    return upper + upper.triu(1).T
