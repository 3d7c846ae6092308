"""What to differentiate: directions in the space of logits, whose gradients together give the Fisher trace.

    grad log p_y = J^T (e_y - p)
    tr(F J J^T)  = sum_y p_y ||J^T (e_y - p)||^2,   F = diag(p) - p p^T

    exact       e_y - p for every class y: c backward passes
    top         the same for the k most likely classes of each image
    signs       c = sum_y v_y sqrt(p_y) (e_y - p), v_y = +-1 at random: E ||J^T c||^2 is the trace, for any J
    combined    the k most likely classes T exactly, and signs over all others, less the error that is known of them

What signs get wrong is mostly the length of the gradient where it enters the network: ||W^T c||^2, W the last layer, of
which the right mean is known. How a layer's norm goes with that length is seen from the exact classes:

    rest_l = mean_s ||J_l^T c_s||^2 - b_l (||W^T c_s||^2 - sum_{y not in T} p_y ||W^T (e_y - p)||^2)
    b_l    = sum_{y in T} p_y ||J_l^T (e_y - p)||^2 / sum_{y in T} p_y ||W^T (e_y - p)||^2

For the last layer itself, W is the identity, and the estimate exact. No sign enters b, so the mean stays right. It is
ours, and halves the error or better. An estimate may be below zero where the rest is next to nothing.

Signs depend on seed, draw and class alone, not on the image: a row does not change with its batch, and images are
compared under the same signs. What the classes outside of `top` add has no bound that fewer passes than classes could
prove, so theirs is a bound of confidence: with Gaussian v, sum_s ||J^T c_s||^2 / trace is a mixture of chi-squares
whose lower tail is never heavier than that of one with as many degrees of freedom as draws (Roosta-Khorasani & Ascher
2015, arXiv 1308.2475), so that the trace is below  sum_s ||J^T c_s||^2 / q  with q a small quantile of that one.

With copies r of an image, p_y is that of the image itself, and log p_y is differentiated at every copy: e_y - p_r.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64, Int
from scipy.special import chdtri
from torch import Tensor

from dubito.errors import ModelError, ValueRangeError

LEVEL = 0.95
"""How sure a bound on the rest is, for each image and layer."""


class Cotangents:
    """What a model predicts for images and their copies, in float64.

    Args:
        logits: Of an image and its copies, the image first.
        head: The last layer's weight, or any matrix with one row per class; None: the identity.

    Attributes:
        p: Probabilities of every class for each image.
        order: Classes, the most likely first.
    """

    def __init__(self, logits: Float64[Tensor, "n r c"], head: Float[Tensor, "c d"] | None = None) -> None:
        self._rows = logits.softmax(2)
        self._head = None if head is None else head.to(self._rows)
        self.p = self._rows[:, 0]
        self.order: Int[Tensor, "n c"] = logits[:, 0].argsort(dim=1, descending=True, stable=True)

    def towards(self, classes: Int[Tensor, "n"]) -> Float64[Tensor, "rows c"]:
        """e_y - p for one class per image, at every copy."""
        where = classes[:, None, None].expand(-1, self._rows.shape[1], 1)
        others = self._rows.scatter(2, where, 0.0).sum(2, keepdim=True)  # 1 - p_y has no digits where p_y is 1
        return (-self._rows).scatter(2, where, others).flatten(0, 1)

    def probability(self, classes: Int[Tensor, "n"]) -> Float64[Tensor, "n 1"]:
        """p_y for one class per image."""
        return self.p.gather(1, classes[:, None])

    def mixture(self, v: Float64[Tensor, "c"], beyond: int = 0) -> Float64[Tensor, "rows c"]:
        """sum_y v_y sqrt(p_y) (e_y - p) over the classes beyond the most likely ones, at every copy."""
        weights = (v * self.p.sqrt()).scatter(1, self.order[:, :beyond], 0.0)[:, None].expand_as(self._rows)
        mixed = weights - self._rows * weights.sum(2, keepdim=True)
        # Of the likeliest class y, w_y (1 - p_y) - p_y sum of the other w: else there are no digits where p_y is 1.
        first = self._rows.argmax(2, keepdim=True)
        own, p = weights.gather(2, first), self._rows.gather(2, first)
        other_p, other_w = (all_of.scatter(2, first, 0.0).sum(2, keepdim=True) for all_of in (self._rows, weights))
        return mixed.scatter(2, first, own * other_p - p * other_w).flatten(0, 1)

    def known_error(
        self, mixtures: Sequence[Float64[Tensor, "rows c"]], exact: int, *, entering: bool = True
    ) -> Float64[Tensor, "n 1"]:
        """By how much mixtures of the classes beyond are too long on average, as a share of the exact classes' length.

        Args:
            mixtures: Of `mixture`.
            exact: How many classes are not in them.
            entering: Measured where they enter the network, W^T c; False: c itself.
        """
        head = self._head if entering else None
        likely = [self.order[:, rank] for rank in range(exact)]
        known = torch.stack([self.probability(y) * self._length(self.towards(y), head) for y in likely]).sum(0)
        observed = torch.stack([self._length(mixture, head) for mixture in mixtures]).mean(0)
        return torch.where(known > 0, (observed - self._mean_length(exact, head)) / known, 0.0).cpu()

    def _length(self, cotangent: Float64[Tensor, "rows c"], head: Tensor | None) -> Float64[Tensor, "n 1"]:
        """||W^T c||^2, averaged over copies before the norm, as gradients are."""
        mean = cotangent.view_as(self._rows).mean(1)
        return (mean if head is None else mean @ head).square().sum(1, keepdim=True)

    def _mean_length(self, beyond: int, head: Tensor | None) -> Float64[Tensor, "n 1"]:
        """What the lengths of mixtures are on average: sum of p_y ||W^T (e_y - p)||^2 over the classes beyond."""
        p = self._rows.mean(1)
        if head is None:
            each = (1 - p).square() + p.square().sum(1, keepdim=True) - p.square()
        else:
            centre = p @ head
            each = head.square().sum(1) - 2 * centre @ head.T + centre.square().sum(1, keepdim=True)
        return (self.p * each).scatter(1, self.order[:, :beyond], 0.0).sum(1, keepdim=True)

    def from_uniform(self) -> Float64[Tensor, "rows c"]:
        """P - 1/c: the gradient of KL(uniform || p) by logits, at every copy."""
        return (self._rows - 1 / self._rows.shape[2]).flatten(0, 1)


def signs(draws: int, classes: int, seed: int) -> Float64[Tensor, "s c"]:
    """+1 or -1 at random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (draws, classes), generator=generator).double() * 2 - 1


def normals(draws: int, classes: int, seed: int) -> Float64[Tensor, "s c"]:
    """Of a standard normal distribution."""
    return torch.randn(draws, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound_factor(draws: int, level: float = LEVEL) -> float:
    """What the sum over draws is multiplied by to be a bound: 1 / quantile of a chi-square."""
    return 1 / float(chdtri(draws, level))  # without scipy.stats, which takes seconds to import


def check_logits(logits: Float[Tensor, "rows c"], model: str, *, copies: int = 1, start: int = 0) -> None:
    """Raise where there is nothing to choose from, or no number to differentiate."""
    if logits.shape[1] < 2:
        raise ModelError(
            f"gradient: {model} has one class, which is always certain: its gradients are zero. "
            f"Give a yes-or-no model a second logit of zero."
        )
    bad = ~logits.isfinite().all(1)
    if bad.any():
        row = start + int(bad.nonzero()[0, 0]) // copies
        raise ValueRangeError(
            f"gradient: {model} gives NaN or infinite logits for image {row} of the batch, which have no gradient. "
            f"Look at its weights, at the transform and at that image."
        )
