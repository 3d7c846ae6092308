"""Conformity scores: how badly each class fits an image; a prediction set has all classes up to a quantile of them.

    lac    1 - p_y
    aps    0 for the most likely class; of others, the sum of p over all classes at least as likely as y
    raps   aps + lambda max(0, rank(y) - k), 0 for the most likely class
    saps   p_max + lambda (rank(y) - 1), 0 for the most likely class

LAC is Sadinle et al. 2019, APS Romano et al. 2020, RAPS Angelopoulos et al. 2021, and SAPS Huang et al. 2024, which
keeps the largest probability alone and counts ranks in place of the others. The papers draw a uniform u per image, to
cross the boundary of a set by lot. Ours draws none, so that the same image always gets the same set; and the most
likely class is in every set, which its score of 0 states. With the papers' score for it (u = 1), images that the model
is certain of, and right about, would have the largest scores of all and raise the quantile: sets would be several times
as large. Any fixed score is valid, so the coverage holds as it does with lots. lambda and k are fixed numbers, and not
fitted to the calibration images, which would cost the guarantee. Other classes that are equally likely have the same
score: that of the last of them.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from dubito.choices import SetMethod
from dubito.metrics.shifted import softmax_blocks

PENALTY = {"raps": 0.01, "saps": 0.1}
"""lambda, by method."""
FREE_RANKS = 5
"""k: as many classes have no penalty."""


def set_scores(
    logits: Float[Tensor, "n c"], method: SetMethod, *, penalty: float | None = None, free_ranks: int = FREE_RANKS
) -> Float64[Tensor, "n c"]:
    """s(x, y) of every class.

    Args:
        logits: Logits.
        method: Which score.
        penalty: lambda of raps and saps; by default 0.01 and 0.1.
        free_ranks: k of raps.

    >>> set_scores(torch.tensor([[0.5, 0.3, 0.2]]).log(), "aps")[0, :2].tolist()
    [0.0, 0.8...]
    >>> set_scores(torch.tensor([[0.5, 0.3, 0.2]]).log(), "saps")[0].tolist()  # 0, 0.5 + 0.1, 0.5 + 0.2
    [0.0, 0.6..., 0.7...]
    """
    scores = torch.empty(logits.shape, dtype=torch.float64)
    for rows, p in softmax_blocks(logits):
        if method == "lac":
            torch.sub(1, p, out=scores[rows])
            continue
        ordered, order = p.sort(-1, descending=True)
        # Where classes tie, all of them have the rank and the sum of the last.
        last_of_ties = torch.searchsorted(-ordered, -ordered, right=True) - 1
        by_rank = _by_rank(ordered, method, penalty, free_ranks).gather(-1, last_of_ties)
        scores[rows] = torch.empty_like(p).scatter_(-1, order, by_rank)
        scores[rows].scatter_(-1, logits[rows].argmax(-1, keepdim=True), 0.0)
    return scores


def label_scores(
    logits: Float[Tensor, "n c"],
    label: Int64[Tensor, "n"],
    method: SetMethod,
    *,
    penalty: float | None = None,
    free_ranks: int = FREE_RANKS,
) -> Float64[Tensor, "n"]:
    """`set_scores` of the labels alone, for which probabilities need no order of classes.

    >>> label_scores(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([1]), "aps").tolist()
    [0.8...]
    """
    scores = torch.empty(len(logits), dtype=torch.float64)
    for rows, p in softmax_blocks(logits):
        own = p.gather(1, label[rows, None])
        if method == "lac":
            scores[rows] = 1 - own[:, 0]
        else:
            last_of_ties = (p >= own).sum(1, keepdim=True) - 1
            by_rank = _by_rank(_ordered(p), method, penalty, free_ranks).gather(1, last_of_ties)[:, 0]
            scores[rows] = by_rank.masked_fill_(logits[rows].argmax(1) == label[rows], 0.0)
    return scores


def sets_up_to(
    q: Float64[Tensor, "r 1"],
    logits: Float[Tensor, "n c"],
    method: SetMethod,
    *,
    penalty: float | None = None,
    free_ranks: int = FREE_RANKS,
) -> Bool[Tensor, "n c"]:
    """`set_scores` <= q, with one q for all classes of a row, for all rows (r = 1) or for each (r = n).

    Scores rise with the rank, so the set of a row ends at a probability.

    >>> sets_up_to(torch.tensor([[0.85]]).double(), torch.tensor([[0.5, 0.3, 0.2]]).log(), "aps").tolist()
    [[True, True, False]]
    """
    inside = torch.empty(logits.shape, dtype=torch.bool)
    for rows, p in softmax_blocks(logits):
        largest = q if len(q) == 1 else q[rows]
        if method == "lac":
            torch.le(p.neg_().add_(1), largest, out=inside[rows])
            continue
        ordered = _ordered(p)
        size = (_by_rank(ordered, method, penalty, free_ranks) <= largest).sum(1, keepdim=True)
        first_outside = ordered.gather(1, size.clamp(max=p.shape[1] - 1))
        torch.gt(p, first_outside.masked_fill_(size == p.shape[1], -1), out=inside[rows])
        inside[rows].scatter_(1, logits[rows].argmax(1, keepdim=True), True)
    return inside


def _ordered(p: Float64[Tensor, "b c"]) -> Float64[Tensor, "b c"]:
    """The same, falling; numpy sorts values without their places, several times as fast as torch."""
    return torch.from_numpy(np.sort(p.numpy(), axis=1)).flip(1)


def _by_rank(
    ordered: Float64[Tensor, "b c"], method: SetMethod, penalty: float | None, free_ranks: int
) -> Float64[Tensor, "b c"]:
    """Scores from the most likely class on, for probabilities that fall."""
    weight, rank = PENALTY.get(method, 0.0) if penalty is None else penalty, torch.arange(ordered.shape[1])
    if method == "saps":
        return ordered[:, :1] + weight * rank
    total = ordered.cumsum(1)
    return total.add_(weight * (rank + 1 - free_ranks).clamp(min=0)) if method == "raps" else total
