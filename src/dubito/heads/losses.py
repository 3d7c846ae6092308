"""The losses of a head: pure functions of its outputs u (n) and the task losses L (n) of the same images.

    ranking       mean_i max(0, m - s_i (u_2i - u_2i+1)), s = 1 if L_2i > L_2i+1 + l, -1 if L_2i + l < L_2i+1, else 0
    l2            mean (u - L)²                              eq. 2, loss prediction
    l1            mean |u - L|                               robust: u is the median
    log_l2        mean (log u - log (L + 1e-6))²             errors that span decades (Lahlou et al. 2023)
    variance_nll  mean (L / u + log u)                       u is the mean of L by likelihood (Laves et al. 2020)

Kirchhof et al., Pretrained Visual Uncertainties (2024). Eq. 3 as printed has the wrong sign; this is the corrected one.
Eq. 4 orders equal losses as if the second were higher; here a tie has no order (eq. 5 with l = 0). A pair without
order counts as the constant m and has no gradient.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import TableError
from dubito.validate import check_choice, check_number

HeadLoss = Callable[[Float[Tensor, "n"], Float[Tensor, "n"]], Float[Tensor, ""]]
_TINY = 1e-6


def ranking_loss(
    u: Float[Tensor, "n"], losses: Float[Tensor, "n"], *, margin: float = 0.1, leeway: float = 0.0
) -> Float[Tensor, ""]:
    """Of each pair of images, the one with the higher task loss should have the higher u, by a margin (eq. 3 to 5).

    Rows 2i and 2i + 1 are a pair; of an odd number, the last row is paired with the first.

    Args:
        u: The head's outputs.
        losses: The task losses; no gradient flows into them.
        margin: The margin m.
        leeway: The leeway l: losses that differ by no more than this have no order.

    >>> u, losses = torch.tensor([0.5, 0.45]), torch.tensor([2.0, 1.0])
    >>> round(ranking_loss(u, losses).item(), 3)  # the right order, but only by 0.05: 0.1 - 0.05
    0.05
    """
    if len(u) != len(losses) or len(u) < 2:
        raise TableError(
            f"ranking_loss needs u and losses of one length, at least 2; got {len(u)} and {len(losses)}. "
            f"A single image has no order."
        )
    check_number(leeway, "[0, inf)", by="ranking_loss", what="leeway", hint="With 0, only ties are equal.")
    if len(u) % 2:
        u, losses = torch.cat([u, u[:1]]), torch.cat([losses, losses[:1]])
    difference = losses.detach()[0::2] - losses.detach()[1::2]
    order = difference.sign() * (difference.abs() > leeway)
    return (margin - order * (u[0::2] - u[1::2])).clamp_min(0).mean()


def l2_loss(u: Float[Tensor, "n"], losses: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """Loss prediction: the head's output is the task loss itself, on its scale (eq. 2)."""
    return (u - losses.detach()).square().mean()


def l1_loss(u: Float[Tensor, "n"], losses: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """Like l2, but less sensitive to a few huge losses."""
    return (u - losses.detach()).abs().mean()


def log_l2_loss(u: Float[Tensor, "n"], losses: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """Predicts the logarithm of the loss."""
    return (u.log() - (losses.detach() + _TINY).log()).square().mean()


def variance_nll(u: Float[Tensor, "n"], losses: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """A proper score of the expected loss: lowest at u = E[L | z]."""
    return (losses.detach() / u + u.log()).mean()


DIRECT_LOSSES: Mapping[str, HeadLoss] = MappingProxyType(
    {"l2": l2_loss, "l1": l1_loss, "log_l2": log_l2_loss, "variance_nll": variance_nll}
)
"""The losses that predict the task loss itself, which must not be negative."""


def head_loss(name: str, *, margin: float = 0.1, leeway: float = 0.0, by: str) -> HeadLoss:
    """The loss of that name; margin and leeway are those of the ranking loss."""
    check_choice(name, ["ranking", *DIRECT_LOSSES], by=by, what="loss")
    return DIRECT_LOSSES.get(name) or partial(ranking_loss, margin=margin, leeway=leeway)
