"""Gaussian mixtures: log-densities of rows, and expectation maximisation that streams over them.

    log pi_k N(z; mu_k, Sigma_k) = log pi_k - d/2 log 2 pi + log |P_k| - 1/2 || P_k^T (z - mu_k) ||^2

P_k is the Cholesky factor of the precision, Sigma_k^-1 = P_k P_k^T, so that a distance is one product of matrices.
All in float64. With full covariances, a row is compared with a component coordinate by coordinate, in chunks: P_k is
upper triangular, so the first chunks alone give the distance among the first coordinates, which the rest can only
enlarge. A component that falls behind the best one of a row by more than `NEGLIGIBLE` is left there.

    r_ik  = pi_k N(z_i; mu_k, Sigma_k) / q(z_i)                                   expectation
    pi_k  = n_k / n,  n_k = sum_i r_ik,  mu_k = sum_i r_ik z_i / n_k              maximisation
    Sigma_k = sum_i r_ik (z_i - mu_k) (z_i - mu_k)^T / n_k + regularisation I

Both steps share one reading of the rows; neither responsibilities nor rows are kept. Sums are taken around the means of
the iteration before. Rows whose r_ik is below 1e-14 are left out of component k: where clusters are apart, an iteration
costs n d^2 and not k n d^2. A component that loses all its rows keeps its mean and covariance, at weight 0.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from dubito.choices import Covariance
from dubito.errors import ValueRangeError
from dubito.heads.linear_logits import add_gram, mirrored

NEGLIGIBLE = 1e-14
"""A share of a row's density that is not counted: float64 would keep two of its digits."""
CHUNK = 128
_CUT = -math.log(NEGLIGIBLE)
_LOST = 1e-6
"""A component with less than a millionth of a row has lost its rows."""

Blocks = Callable[[], Iterator[Tensor]]
"""Reads the rows anew: (n, d) float64 at a time."""


@final
@dataclass(frozen=True)
class Mixture:
    """k Gaussians in d dimensions.

    Attributes:
        covariance: What the factors are.
        weights: (k), of sum one.
        means: (k, d).
        factors: P_k: full (k, d, d), tied (d, d); or one over the deviations: diagonal (k, d), spherical (k).
    """

    covariance: Covariance
    weights: Float64[Tensor, "k"]
    means: Float64[Tensor, "k d"]
    factors: Float64[Tensor, "..."]

    def log_joint(self, z: Float64[Tensor, "n d"]) -> Float64[Tensor, "n k"]:
        """Of every row under every component, log pi_k N(z; mu_k, Sigma_k); minus infinity where negligible."""
        if self.covariance == "full":
            return _full(z, self)
        return self._constants() - 0.5 * self._distances(z)

    def log_density(self, z: Float64[Tensor, "n d"]) -> Float64[Tensor, "n"]:
        """Of every row, log q(z)."""
        return self.log_joint(z).logsumexp(1)

    def covariances(self) -> Float64[Tensor, "..."]:
        """Sigma, in the shape of the factors."""
        if self.covariance in ("diagonal", "spherical"):
            return self.factors**-2
        identity = torch.eye(self.means.shape[1], dtype=torch.float64).expand_as(self.factors)
        # P = L^-T, and Sigma = L L^T.
        lower: Tensor = torch.linalg.solve_triangular(self.factors, identity, upper=True)
        return lower.mT @ lower

    def _constants(self) -> Float64[Tensor, "k"]:
        d = self.means.shape[1]
        matrices = self.covariance in ("full", "tied")
        log = (self.factors.diagonal(dim1=-2, dim2=-1) if matrices else self.factors).log()
        log_det = d * log if self.covariance == "spherical" else log.sum(-1)
        return self.weights.log() + log_det - 0.5 * d * math.log(2 * math.pi)

    def _distances(self, z: Float64[Tensor, "n d"]) -> Float64[Tensor, "n k"]:
        if self.covariance == "tied":
            return squared_distances(z, self.means, self.factors)
        precision, middle = self.factors.square(), self.means.mean(0)
        if self.covariance == "spherical":
            return squared_distances(z, self.means) * precision
        rows, means = z - middle, self.means - middle
        distances = rows.square() @ precision.T - 2 * rows @ (means * precision).T + (means.square() * precision).sum(1)
        return distances.clamp(min=0)


def squared_distances(
    z: Float64[Tensor, "n d"], means: Float64[Tensor, "k d"], factor: Float64[Tensor, "d d"] | None = None
) -> Float64[Tensor, "n k"]:
    """Of every row to every mean: Euclidean, or Mahalanobis with factor factor^T = Sigma^-1.

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> squared_distances(5 * one, 2 * one, one / 3).item()  # three away, at a deviation of three
    1.0
    """
    # Around the middle of the means, so that (a - b)^2 = a^2 - 2 a b + b^2 loses no digits to a common offset.
    a, b = z - means.mean(0), means - means.mean(0)
    if factor is not None:
        a, b = a @ factor, b @ factor
    distances: Tensor = a.square().sum(1)[:, None] - 2 * a @ b.T + b.square().sum(1)
    return distances.clamp_(min=0)


def precision_factor(
    covariance: Float64[Tensor, "d d"], *, whose: str, regularisation: float
) -> Float64[Tensor, "d d"]:
    """P with (covariance + regularisation I)^-1 = P P^T, upper triangular; ValueRangeError where there is none."""
    covariance = covariance.clone()
    covariance.diagonal().add_(regularisation)
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if int(failed) or not bool(torch.isfinite(lower).all()):
        raise ValueRangeError(
            f"{whose} is singular, even with regularisation {regularisation:g} on its diagonal: some features are "
            f"constant, or combinations of others, or there are fewer rows than features. Raise regularisation."
        )
    identity = torch.eye(len(lower), dtype=torch.float64)
    factor: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False).T.contiguous()
    return factor


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
            for k, mean in enumerate(self.around):
                rows = (shares[:, k] > NEGLIGIBLE).nonzero()[:, 0]
                near, share = z[rows] - mean, shares[rows, k]
                self._firsts[k] += share @ near
                add_gram(self._seconds[k], near.mul_(share.sqrt()[:, None]))
            return
        z = z - self._middle
        self._firsts.addmm_(shares.T, z)
        if self.covariance == "tied":
            add_gram(self._seconds, z * shares.sum(1, keepdim=True).sqrt())
        else:
            self._seconds.addmm_(shares.T, z.square())

    def mixture(self, before: Mixture | None = None) -> Mixture:
        """The most likely mixture; components without rows stay as before."""
        counts, lost = self._counts.clamp(min=_LOST), self._counts < _LOST
        shifts = self._firsts / counts[:, None]
        weights = torch.where(lost, 0.0, self._counts)
        if self.covariance == "full":
            factors = self._seconds  # in place, because they are large
            for k, products in enumerate(factors):
                if before is not None and bool(lost[k]):
                    products.copy_(before.factors[k])
                    continue
                covariance = mirrored(products).div_(counts[k]).sub_(torch.outer(shifts[k], shifts[k]))
                products.copy_(self._factor(covariance, f"component {k}"))
        elif self.covariance == "tied":
            between = (shifts * self._counts[:, None]).T @ shifts
            covariance = (mirrored(self._seconds) - between).div_(self._counts.sum())
            factors = self._factor(covariance, "all components")
        else:
            variances = (self._seconds / counts[:, None] - shifts.square()).clamp_(min=0) + self.regularisation
            variances = variances.mean(1) if self.covariance == "spherical" else variances
            factors = variances.rsqrt()
            if before is not None:
                factors[lost] = before.factors[lost]
            # A precision must be a number; without regularisation a constant feature has none.
            if not bool(factors.isfinite().all()):
                singular = int((~factors.isfinite()).nonzero()[0, 0])
                self._factor(torch.zeros(1, 1, dtype=torch.float64), f"component {singular}")
        origin = self.around if self.covariance == "full" else self._middle
        means = torch.where(lost[:, None], self.around, origin + shifts)
        return Mixture(self.covariance, weights / weights.sum(), means, factors)

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
    import faiss  # noqa: PLC0415 (slow to import; most scores need none of it)

    middle, generator = sample.mean(0), torch.Generator().manual_seed(seed)
    rows = sample - middle
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    distance = torch.full((len(rows),), torch.inf)
    for _ in range(k - 1):
        distance = torch.minimum(distance, (rows - rows[chosen[-1]]).square().sum(1))
        # Each with the square of its distance; where all rows are taken already, as with duplicates, any will do.
        chances = distance if bool((distance > 0).any()) else torch.ones(len(rows))
        cumulative = chances.double().cumsum(0)
        draw = torch.rand(1, generator=generator, dtype=torch.float64) * cumulative[-1]
        chosen.append(min(int(torch.searchsorted(cumulative, draw, right=True)), len(rows) - 1))
    clusters = faiss.Kmeans(sample.shape[1], k, niter=25, seed=seed, min_points_per_centroid=1)
    clusters.train(rows.numpy(), init_centroids=rows[chosen].numpy())
    return torch.from_numpy(clusters.centroids).double() + middle.double()


def _full(z: Float64[Tensor, "n d"], mixture: Mixture) -> Float64[Tensor, "n k"]:
    """Every row's likely component first; then the others, as far as they can still matter."""
    factors, means, first = mixture.factors, mixture.means, min(CHUNK, z.shape[1])
    middle = means.mean(0)
    z, shifts = z - middle, torch.bmm((means - middle)[:, None], factors)[:, 0]
    pairs = list(zip(factors, shifts, strict=True))
    columns = [(z[:, :first] @ factor[:first, :first]).sub_(shift[:first]).square_().sum(1) for factor, shift in pairs]
    partial = torch.stack(columns, dim=1)
    # The first chunk is the density of the first coordinates by themselves: a good guess at the component.
    early = mixture.weights.log() + factors.diagonal(dim1=-2, dim2=-1)[:, :first].log().sum(1) - 0.5 * partial
    guess = early.argmax(1)
    joint = mixture._constants() - 0.5 * partial
    floor = torch.full_like(joint[:, 0], -torch.inf)
    for guessed in (True, False):
        for k, (factor, shift) in enumerate(pairs):
            rows = ((guess == k) if guessed else (guess != k) & (joint[:, k] > floor)).nonzero()[:, 0]
            values, chosen = joint[rows, k], z[rows]
            # Through all further chunks, as long as a row stays above its floor.
            for start in range(CHUNK, z.shape[1], CHUNK):
                stop = min(start + CHUNK, z.shape[1])
                part = (chosen[:, :stop] @ factor[:stop, start:stop]).sub_(shift[start:stop])
                values = values - 0.5 * part.square_().sum(1)
                stays = values > floor[rows]
                if not bool(stays.all()):
                    values, chosen, rows = values[stays], chosen[stays], rows[stays]
            if not guessed:
                joint[:, k].masked_fill_(guess != k, -torch.inf)
            joint[rows, k] = values
            floor[rows] = torch.maximum(floor[rows], values - _CUT)
    return joint
