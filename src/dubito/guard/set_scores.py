"""Conformity scores: how badly each class fits an image; a prediction set has all classes up to a quantile of them.

    lac    1 - p_y
    aps    the sum of p over all classes at least as likely as y
    raps   aps + lambda max(0, rank(y) - k)
    saps   p_max + lambda (rank(y) - 1)

LAC is Sadinle et al. 2019, APS Romano et al. 2020, RAPS Angelopoulos et al. 2021, and SAPS Huang et al. 2024, which
keeps the largest probability alone and counts ranks in place of the others. The papers draw a
uniform u per image, to cross the boundary of a set by lot; ours is u = 1. Any fixed score is valid, so the coverage
holds as it does with lots; without them, sets are somewhat larger, and the same image always gets the same set. lambda
and k are fixed numbers, and not fitted to the calibration images, which would cost the guarantee. Classes that are
equally likely have the same score: that of the last of them.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import SetMethod

PENALTY = {"raps": 0.01, "saps": 0.1}
"""lambda, by method."""
FREE_RANKS = 5
"""k: as many classes have no penalty."""


def set_scores(
    logits: Float[Tensor, "n c"], method: SetMethod, *, penalty: float | None = None, free_ranks: int = FREE_RANKS
) -> Float64[Tensor, "n c"]:
    """s(x, y) of every class; of equally likely classes, the same.

    Args:
        logits: Logits.
        method: Which score.
        penalty: lambda of raps and saps; by default 0.01 and 0.1.
        free_ranks: k of raps.

    >>> set_scores(torch.tensor([[0.5, 0.3, 0.2]]).log(), "aps")[0, :2].tolist()
    [0.5..., 0.8...]
    >>> set_scores(torch.tensor([[0.5, 0.3, 0.2]]).log(), "saps")[0].tolist()  # 0.5, 0.5 + 0.1, 0.5 + 0.2
    [0.5..., 0.6..., 0.7...]
    """
    p = logits.double().softmax(-1)
    if method == "lac":
        return 1 - p
    weight = PENALTY.get(method, 0.0) if penalty is None else penalty
    ordered, order = p.sort(-1, descending=True)
    # Where classes tie, all of them have the rank and the sum of the last.
    last_of_ties = torch.searchsorted(-ordered, -ordered, right=True) - 1
    if method == "saps":
        scores = ordered[:, :1] + weight * last_of_ties
    else:
        scores = ordered.cumsum(-1).gather(-1, last_of_ties)
        if method == "raps":
            scores = scores + weight * (last_of_ties + 1 - free_ranks).clamp(min=0)
    return torch.empty_like(p).scatter_(-1, order, scores)
