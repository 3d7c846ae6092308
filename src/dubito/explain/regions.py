"""Where must the feature of an OOD image fall to be detected? The valid OOD region of an uncertainty U.

    R = { z : P_train[ U(z) > U(z_train) ] > 1 - epsilon }      more uncertain than 1 - epsilon of the training data

Pearce et al. 2021 (arXiv 2106.04972), section 3 and A.2. For any U and any number of classes `exact_region` follows the
definition (def. 1): U(z) must exceed a quantile of U over training rows. The others are closed forms:

**Two classes, U_max and U_entropy** (theorem 1). Both fall with |s|, s(z) = (w_1 - w_2).z + b_1 - b_2, so R is the slab
|s| < t. With Gaussian classes, s is Gaussian in each, with m_i = s(mu_i) and v_i = (w_1 - w_2)^T S_i (w_1 - w_2), and t
solves

    sum_i pi_i P(|s| >= t | i) = 1 - epsilon,   P(|s| >= t | i) = F((m_i - t) / sqrt v_i) + F((-m_i - t) / sqrt v_i)

with F the normal distribution function: corollary 1.1 without its assumption that classes are separable, which leaves
out the far tails. Eq. 20, with its indices and a sign corrected, is for w = w_1 = -w_2 and a = 2 t / ||w_1 - w_2||^2

    pi_1 erf((w.mu_1 - w.(z_0 + a w)) / sqrt(2 w^T S_1 w))
        + pi_2 erf((w.(z_0 - a w) - w.mu_2) / sqrt(2 w^T S_2 w)) = 1 - 2 epsilon

**Any number of classes, U_max, linear** (def. 4). Let training data's quantile be U_max = -p. Between classes i and j,
walk along their boundary to infinity: all other classes vanish there, and p_i = 1 / (1 + exp(-s_ij)), with s_ij the
difference of the two logits. So p_i = p where s_ij = log(p / (1-p)) =: t, on both sides and for every pair: the offsets
are a_ij = t / ||w_i - w_j||^2, and eq. 28 (i or j is the largest logit, and |s_ij| < t, for some pair) says that the
two largest logits differ by less than t. Elsewhere other classes only take from p_i, so this is a subset of the exact
region (corollary 2.1); with K = 2 there are no others, and the two are equal (prop. 3).

**Density** (prop. 2): outside all ellipsoids (z - mu_i)^T S_i^-1 (z - mu_i) <= c_i. Eq. 23 prints S_i; its inverse is
meant. For one Gaussian this is exact, c the 1 - epsilon quantile of chi-square with d degrees of freedom. For several,
densities add where ellipsoids meet, and there are bounds instead: `ellipsoids` and `ellipsoid_bounds`.

**Fields**: in which direction does an uncertainty grow? Its gradient over the feature z,

    dU_max/dz      = p_i sum_j p_j (w_j - w_i),                        i = argmax p
    dU_entropy/dz  = sum_i p_i log p_i (m - w_i),                      m = sum_j p_j w_j
    dU_density/dz  = sum_i r_i S_i^-1 (z - mu_i),                      r_i = pi_i N(z; mu_i, S_i) / q(z)

with p = softmax(W z + b) and q a mixture of Gaussians (prop. 1, eqs 8-10). The `+ 1` of eq. 9 cancels, because
sum_i p_i (m - w_i) = 0. Eq. 10 is corrected: it leaves out 1 / sqrt(det S_i), a common factor only where all
determinants are equal. Fig. 8's caption says "maximum certainty", where eqs 8-10 point to more uncertainty.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from scipy.special import chdtri
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.explain.last_layer import Layer
from dubito.scores.density import Density
from dubito.types import finite
from dubito.validate import check_number

Uncertainty = Callable[[Tensor], Tensor]
"""From features (n, d) to uncertainties (n)."""


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
        singular = int(self.factor.isnan().flatten(1).any(1).sum())
        if len(self.covariance) not in (1, len(self.mean)) or singular:
            raise ValueRangeError(
                f"Gaussians need one covariance, or one for each of the {len(self.mean)} means, all positive definite; "
                f"got {len(self.covariance)}, {singular} of them not. Add a small number to their diagonals."
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

    @cached_property
    def factor(self) -> Float[Tensor, "m d d"]:
        """Cholesky factors in float64, as many as there are covariances; NaN where there is none."""
        factor, failed = torch.linalg.cholesky_ex(self.covariance.double())
        return torch.where(failed[:, None, None] == 0, factor, torch.nan)

    @property
    def log_peak(self) -> Float[Tensor, "k"]:
        """What each component adds to q at its own mean, as a logarithm: log pi_i N(mu_i; mu_i, S_i)."""
        log_det: Tensor = 2 * self.factor.diagonal(dim1=1, dim2=2).log().sum(1)
        return self.share.double().log() - (log_det + self.mean.shape[1] * math.log(2 * math.pi)) / 2

    def whitened(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "k n d"]:
        """L_i^-1 (z - mu_i), with S_i = L_i L_i^T."""
        return self._solved(z.double() - self.mean.double()[:, None], transposed=False)

    def _solved(self, rows: Float[Tensor, "k n d"], *, transposed: bool) -> Float[Tensor, "k n d"]:
        """L_i^-1 or L_i^-T times every row; a shared L solves all rows at once and is not copied."""
        columns = rows.reshape(len(self.factor), -1, rows.shape[2]).mT
        factor = self.factor.mT if transposed else self.factor
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
        for i, factor in enumerate(self.factor.expand(len(self.mean), -1, -1)):
            z[component == i] = self.mean[i].double() + noise[component == i] @ factor.T
        return z, component


class Region(NamedTuple):
    """All features whose uncertainty exceeds a threshold.

    Attributes:
        uncertainty: From features (n, d) to uncertainties (n).
        threshold: What the uncertainty must exceed.
    """

    uncertainty: Uncertainty
    threshold: float

    def contains(self, z: Float[Tensor, "n d"]) -> Bool[Tensor, "n"]:
        """Which rows lie in it."""
        return self.uncertainty(z) > self.threshold


def training_threshold(u: Float[Tensor, "n"], epsilon: float = 0.05) -> float:
    """What U must exceed to be larger than more than 1 - epsilon of the training rows' u."""
    _check_epsilon(epsilon, "training_threshold")
    hint = "Pass the uncertainties of the rows that it was trained on."
    check_number(len(u), "[1, inf)", by="training_threshold", what="the number of training rows", hint=hint)
    rank = math.floor((1 - epsilon) * len(u) + 1e-9)  # 0.9999999 of a row is rounding, not a share
    return float(finite(u, "training_threshold").double().sort().values[min(rank, len(u) - 1)])


def exact_region(uncertainty: Uncertainty, z: Float[Tensor, "n d"], epsilon: float = 0.05) -> Region:
    """The valid region of any uncertainty by its definition, from features of training images.

    >>> from dubito.scores.softmax import max_probability
    >>> layer = Layer(torch.tensor([[1.0], [-1.0]]), torch.zeros(2))
    >>> train = torch.tensor([[-3.0], [-2.0], [2.0], [1.0]])
    >>> region = exact_region(lambda z: max_probability(layer.logits(z)), train, epsilon=0.25)
    >>> region.contains(torch.tensor([[0.9], [1.1], [-9.0]])).tolist()
    [True, False, False]
    """
    return Region(uncertainty, training_threshold(uncertainty(z), epsilon))


def two_class_region(layer: Layer, gaussians: Gaussians, epsilon: float = 0.05) -> Region:
    """The valid region of U_max and U_entropy for two classes and a mixture of Gaussians; its threshold is -t."""
    _check_epsilon(epsilon, "two_class_region")
    if len(layer.weight) != 2:
        raise ValueRangeError(
            f"two_class_region: the layer must have 2 classes; got {len(layer.weight)}. Use exact_region."
        )
    normal = (layer.weight[0] - layer.weight[1]).double()
    if not bool(normal.any()):
        raise ValueRangeError("two_class_region: both weights are equal: no boundary is between them. Train the layer.")
    logits = layer.logits(gaussians.mean)
    mean = logits[:, 0] - logits[:, 1]
    deviation: Tensor = torch.linalg.vector_norm(gaussians.factor.transpose(1, 2) @ normal, dim=1)

    def outside(t: float) -> float:
        tails = torch.special.ndtr((mean - t) / deviation) + torch.special.ndtr((-mean - t) / deviation)
        return float(gaussians.share.double() @ tails)

    low, high = 0.0, float((mean.abs() + 40 * deviation).max())
    while low < (middle := (low + high) / 2) < high:  # by bisection, to the last digit
        low, high = (middle, high) if outside(middle) > 1 - epsilon else (low, middle)
    return Region(partial(_minus_lead, layer), -middle)


def linear_region(layer: Layer, confidence: float) -> Region:
    """Def. 4: the union of slabs around the decision boundaries, inside the exact region of U_max; its threshold is -t.

    Args:
        layer: Of two classes or more.
        confidence: p, the largest probability at the threshold, -U_max. Up to 1/2 the region is empty.
    """
    if len(layer.weight) < 2:
        raise ValueRangeError("linear_region: the layer must have 2 classes or more; got 1. It has no boundary.")
    saturated = "It is minus the threshold of max_probability; at 1 the softmax is saturated: scale the layer down."
    check_number(confidence, "(0, 1)", by="linear_region", what="confidence", hint=saturated)
    return Region(partial(_minus_lead, layer), math.log1p(-confidence) - math.log(confidence))


def _minus_lead(layer: Layer, z: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
    """By how much the largest logit exceeds the second, negative: level sets are slabs around the boundaries."""
    top = layer.logits(z).topk(2, dim=1).values
    return top[:, 1] - top[:, 0]


def ellipsoids(gaussians: Gaussians, epsilon: float = 0.05) -> Region:
    """Prop. 2: outside of every component's own ellipsoid of 1 - epsilon; its threshold is their squared radius.

    Together they hold at least 1 - epsilon of the training data, so the region holds at most epsilon of it: a row of
    component i is outside of all only if it is outside of its own. Equality for one component.
    """
    _check_epsilon(epsilon, "ellipsoids")
    squared_radius = float(chdtri(gaussians.mean.shape[1], epsilon))
    return Region(lambda z: gaussians.squared_distance(z).amin(1), squared_radius)


def ellipsoid_bounds(gaussians: Gaussians, threshold: float) -> tuple[Region, Region]:
    """A subset and a superset of the exact region -log q(z) > threshold, both outside of ellipsoids.

    q is at least each of its k parts pi_i N_i and at most k times the largest. So where every part is below
    exp(-threshold) / k the point is in the exact region, and where one is above exp(-threshold) it is not.
    """

    def largest_part(z: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        return (gaussians.squared_distance(z) / 2 - gaussians.log_peak).amin(1)

    return Region(largest_part, threshold + math.log(len(gaussians.mean))), Region(largest_part, threshold)


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
    return torch.einsum("nk,knd->nd", part, gaussians._solved(white, transposed=True))


def _check_epsilon(epsilon: float, by: str) -> None:
    hint = "It is the share of training data that may be more uncertain than an OOD image: the paper takes 0.05."
    check_number(epsilon, "(0, 1)", by=by, what="epsilon", hint=hint)
