"""Gaussian mixtures: log-densities of rows under components with full, tied, diagonal or spherical covariances.

    log pi_k N(z; mu_k, Sigma_k) = log pi_k - d/2 log 2 pi + log |P_k| - 1/2 || P_k^T (z - mu_k) ||^2

P_k is the Cholesky factor of the precision, Sigma_k^-1 = P_k P_k^T, so that a distance is one product of matrices.
All in float64. With full covariances, a row is compared with a component coordinate by coordinate, in chunks: P_k is
upper triangular, so the first chunks alone give the distance among the first coordinates, which the rest can only
enlarge. A component that falls behind the best one of a row by more than `NEGLIGIBLE` is left there.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from dubito.choices import Covariance
from dubito.errors import ValueRangeError

NEGLIGIBLE = 1e-14
"""A share of a row's density that is not counted: float64 would keep two of its digits."""
CHUNK = 128
_CUT = -math.log(NEGLIGIBLE)


@final
@dataclass(frozen=True)
class Mixture:
    """k Gaussians in d dimensions.

    Attributes:
        covariance: What the factors are.
        weights: (k), of sum one.
        means: (k, d).
        factors: P_k, upper triangular: full (k, d, d), tied (d, d); one over the deviations: diagonal (k, d),
            spherical (k).
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
        density: Tensor = self.log_joint(z).logsumexp(1)
        return density

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
        log_det = {
            "full": lambda: self.factors.diagonal(dim1=-2, dim2=-1).log().sum(-1),
            "tied": lambda: self.factors.diagonal().log().sum(),
            "diagonal": lambda: self.factors.log().sum(1),
            "spherical": lambda: d * self.factors.log(),
        }[self.covariance]()
        constants: Tensor = self.weights.log() + log_det - 0.5 * d * math.log(2 * math.pi)
        return constants

    def _distances(self, z: Float64[Tensor, "n d"]) -> Float64[Tensor, "n k"]:
        # Around the middle of the means, so that (a - b)^2 = a^2 - 2 a b + b^2 loses no digits to a common offset.
        middle = self.means.mean(0)
        rows, means = z - middle, self.means - middle
        if self.covariance == "tied":
            return squared_distances(rows @ self.factors, means @ self.factors)
        if self.covariance == "spherical":
            return squared_distances(rows, means) * self.factors.square()
        precision = self.factors.square()
        distances = rows.square() @ precision.T - 2 * rows @ (means * precision).T + (means.square() * precision).sum(1)
        return distances.clamp(min=0)


def squared_distances(a: Float64[Tensor, "n d"], b: Float64[Tensor, "k d"]) -> Float64[Tensor, "n k"]:
    """Euclidean, of every row to every other; they should lie around zero."""
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


def _full(z: Float64[Tensor, "n d"], mixture: Mixture) -> Float64[Tensor, "n k"]:
    """Every row's likely component first; then the others, as far as they can still matter."""
    factors, means, first = mixture.factors, mixture.means, min(CHUNK, z.shape[1])
    middle = means.mean(0)
    z, shifts = z - middle, torch.bmm((means - middle)[:, None], factors)[:, 0]
    partial = torch.stack(
        [
            (z[:, :first] @ factor[:first, :first]).sub_(shift[:first]).square_().sum(1)
            for factor, shift in zip(factors, shifts, strict=True)
        ],
        dim=1,
    )
    # The first chunk is the density of the first coordinates by themselves: a good guess at the component.
    early = mixture.weights.log() + factors.diagonal(dim1=-2, dim2=-1)[:, :first].log().sum(1) - 0.5 * partial
    guess = early.argmax(1)
    joint = mixture._constants() - 0.5 * partial
    floor = torch.full_like(joint[:, 0], -torch.inf)
    for guessed in (True, False):
        for k, (factor, shift) in enumerate(zip(factors, shifts, strict=True)):
            rows = ((guess == k) if guessed else (guess != k) & (joint[:, k] > floor)).nonzero()[:, 0]
            values, rows = _completed(z, joint[:, k], rows, floor, factor=factor, shift=shift)
            if not guessed:
                joint[:, k].masked_fill_(guess != k, -torch.inf)
            joint[rows, k] = values
            floor[rows] = torch.maximum(floor[rows], values - _CUT)
    return joint


def _completed(
    z: Float64[Tensor, "n d"],
    joint: Float64[Tensor, "n"],
    rows: Int64[Tensor, "r"],
    floor: Float64[Tensor, "n"],
    *,
    factor: Float64[Tensor, "d d"],
    shift: Float64[Tensor, "d"],
) -> tuple[Float64[Tensor, "s"], Int64[Tensor, "s"]]:
    """The joint of those rows that stay above their floor through all further chunks, and which rows they are."""
    values, chosen, floor = joint[rows], z[rows], floor[rows]
    for start in range(CHUNK, z.shape[1], CHUNK):
        stop = min(start + CHUNK, z.shape[1])
        part = (chosen[:, :stop] @ factor[:stop, start:stop]).sub_(shift[start:stop])
        values = values - 0.5 * part.square_().sum(1)
        stays = values > floor
        if not bool(stays.all()):
            values, chosen, floor, rows = values[stays], chosen[stays], floor[stays], rows[stays]
    return values, rows
