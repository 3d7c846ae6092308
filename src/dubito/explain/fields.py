"""In which direction does an uncertainty grow? Gradients of U_max, U_entropy and U_density over the feature z.

    dU_max/dz      = p_i sum_j p_j (w_j - w_i),                        i = argmax p
    dU_entropy/dz  = sum_i p_i log p_i (m - w_i),                      m = sum_j p_j w_j
    dU_density/dz  = sum_i r_i S_i^-1 (z - mu_i),                      r_i = pi_i N(z; mu_i, S_i) / q(z)

with p = softmax(W z + b) and q a mixture of Gaussians. Pearce et al. 2021 (arXiv 2106.04972), prop. 1, eqs 8-10. Eqs 8
and 9 agree with automatic differentiation as they stand; the `+ 1` of eq. 9 cancels, because sum_i p_i (m - w_i) = 0.
Eq. 10 is corrected: it leaves out 1 / sqrt(det S_i), which is a common factor only where all determinants are equal; if
not, its direction is wrong. And Fig. 8's caption says "maximum certainty", where eqs 8-10 point to more uncertainty.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.explain.last_layer import Layer
from dubito.scores.density import Density


@final
@dataclass(frozen=True)
class Gaussians:
    """A mixture of Gaussians in features, as regions and fields need it.

    Attributes:
        share: (k) how much of the data each component holds; sums to one.
        mean: (k, d).
        covariance: (k, d, d), positive definite; or (1, d, d), one that all share.
    """

    share: Float[Tensor, "k"]
    mean: Float[Tensor, "k d"]
    covariance: Float[Tensor, "m d d"]

    def __post_init__(self) -> None:
        if bool((self.share <= 0).any()) or abs(float(self.share.double().sum()) - 1) > 1e-6:
            raise ValueRangeError(
                f"Gaussians: share must be positive and sum to one; got {self.share.tolist()}. Divide it by its sum."
            )
        if len(self.covariance) not in (1, len(self.mean)):
            raise ValueRangeError(
                f"Gaussians: there must be one covariance, or one for each of the {len(self.mean)} means; got "
                f"{len(self.covariance)}. Give (k, d, d) or (1, d, d)."
            )
        if bool(self._factor.isnan().any()):
            raise ValueRangeError(
                "Gaussians: every covariance must be positive definite; one is not. Add a small number to its diagonal."
            )

    @classmethod
    def of(cls, density: Density) -> "Gaussians":
        """The mixture of a fitted density score, without components that lost all their rows."""
        density.check_fitted()
        k, d = density.means_.shape
        if density.space != "z" or d != density.width_ or density.nonlinearity != "after":
            raise ValueRangeError(
                f"Gaussians.of: the density must be fitted on z itself, with all features; got "
                f"space='{density.space}', nonlinearity='{density.nonlinearity}' and {d} of {density.width_} "
                f"features. Fit it with space='z', nonlinearity='after' and neurons=None."
            )
        covariance = density.mixture.covariances()
        kept = density.weights_ > 0
        if density.covariance in ("diagonal", "spherical"):
            covariance = torch.diag_embed(covariance.view(k, -1).expand(k, d))
        covariance = covariance[None] if density.covariance == "tied" else covariance[kept]
        return cls(density.weights_[kept], density.means_[kept], covariance)

    @property
    def factor(self) -> Float[Tensor, "k d d"]:
        """Cholesky factors of the covariances, in float64; a shared one is kept once."""
        return self._factor.expand(len(self.mean), -1, -1)

    @cached_property
    def _factor(self) -> Float[Tensor, "m d d"]:
        """As many as there are covariances; NaN where there is none."""
        factor, failed = torch.linalg.cholesky_ex(self.covariance.double())
        return torch.where(failed[:, None, None] == 0, factor, torch.nan)

    @property
    def log_peak(self) -> Float[Tensor, "k"]:
        """What each component adds to q at its own mean, as a logarithm: log pi_i N(mu_i; mu_i, S_i)."""
        log_det: Tensor = 2 * self._factor.diagonal(dim1=1, dim2=2).log().sum(1)
        return self.share.double().log() - (log_det + self.mean.shape[1] * math.log(2 * math.pi)) / 2

    def whitened(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "k n d"]:
        """L_i^-1 (z - mu_i), with S_i = L_i L_i^T."""
        centred = z.double()[None] - self.mean.double()[:, None]
        return self._solved(centred, transposed=False)

    def unwhitened(self, white: Float[Tensor, "k n d"]) -> Float[Tensor, "k n d"]:
        """L_i^-T of whitened rows: S_i^-1 (z - mu_i)."""
        return self._solved(white, transposed=True)

    def _solved(self, rows: Float[Tensor, "k n d"], *, transposed: bool) -> Float[Tensor, "k n d"]:
        """L_i^-1 or L_i^-T times every row; a shared L solves all rows at once and is not copied."""
        columns = rows.reshape(len(self._factor), -1, rows.shape[2]).mT
        factor = self._factor.mT if transposed else self._factor
        solved: Tensor = torch.linalg.solve_triangular(factor, columns, upper=transposed)
        return solved.mT.reshape(rows.shape)

    def squared_distance(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """The squared Mahalanobis distance to every component."""
        return self.whitened(z).square().sum(-1).T

    def uncertainty(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        """U_density = -log q(z), eq. 3."""
        return -(self.log_peak - self.squared_distance(z) / 2).logsumexp(1)

    def sample(self, n: int, seed: int = 0) -> tuple[Float[Tensor, "n d"], Int[Tensor, "n"]]:
        """Random rows, and the component of each."""
        draw = torch.Generator().manual_seed(seed)
        component = torch.multinomial(self.share.double(), n, replacement=True, generator=draw)
        noise = torch.randn(n, self.mean.shape[1], dtype=torch.float64, generator=draw)
        z = torch.empty_like(noise)
        for i, (mean, factor) in enumerate(zip(self.mean.double(), self.factor, strict=True)):
            z[component == i] = mean + noise[component == i] @ factor.T
        return z, component


def max_probability_field(layer: Layer, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The gradient of U_max = -max p, eq. 8; where two classes share the first place, that of the first of them."""
    p, weight = layer.logits(z).softmax(1), layer.weight.double()
    top, i = p.max(1)
    return top[:, None] * (p @ weight - weight[i])


def entropy_field(layer: Layer, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The gradient of U_entropy = H(p), eq. 9."""
    log_p, weight = layer.logits(z).log_softmax(1), layer.weight.double()
    p = log_p.exp()
    plog = p * log_p
    return plog.sum(1, keepdim=True) * (p @ weight) - plog @ weight


def density_field(gaussians: Gaussians, z: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """The gradient of U_density = -log q(z), eq. 10 with the determinants."""
    white = gaussians.whitened(z)
    part = (gaussians.log_peak - white.square().sum(-1).T / 2).softmax(1)
    return torch.einsum("nk,knd->nd", part, gaussians.unwhitened(white))
