"""Several ensembles side by side, all members at hand: the summaries of `streaming`, in few passes over the logits.

    members  [ first ensemble | second | ... ]   (n, m, c), m = the sum of their sizes
    p̄_gw = Σ_m w_gwm p_m                         one product for all ensembles g and weightings w

For members that come out of one pass anyway, such as tiles of an image, where telling costs as much as computing them.
With s = logit - max, p = softmax(s) and log Σ exp s = -log max p, an entropy is -Σ p s - log max p: one softmax gives
all that is needed, and nothing large is subtracted. All in the precision of the logits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.metrics.streaming import SUMMARY, check_temperature


class Told(NamedTuple):
    """What ensembles say of n inputs: the fields of SUMMARY and, where labels are known, -log p̄ of the label."""

    summary: Float[Tensor, "g n s"]
    loss: Float[Tensor, "g n"] | None


class Groups:
    """Sums up ensembles that lie side by side.

    Args:
        sizes: How many members each has, in order.
        temperature: Logits are divided by it.

    >>> groups = Groups([2, 1])
    >>> told = groups.tell(torch.tensor([[[40.0, 0.0], [0.0, 40.0], [40.0, 0.0]]]))
    >>> [round(float(value), 4) for value in told.summary[:, 0, SUMMARY.index("epistemic")]]
    [0.6931, 0.0]
    """

    def __init__(self, sizes: Sequence[int], *, temperature: float = 1.0) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueRangeError(f"sizes must be one or more members each; got {list(sizes)}. Give one size a group.")
        self.sizes, self._temperature = tuple(sizes), check_temperature(temperature)
        self._group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(self.sizes))
        self._mine = self._group == torch.arange(len(sizes))[:, None]

    def tell(self, logits: Float[Tensor, "n m c"], label: Int[Tensor, "n"] | None = None) -> Told:
        """Summary and, with labels, loss of every ensemble."""
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        z = z if self._temperature == 1 else z / self._temperature
        largest = z.amax(-1)
        shifted = z - largest[..., None]
        p = shifted.softmax(-1)
        log_sum = -p.amax(-1).log()
        entropy = log_sum - torch.linalg.vecdot(p, shifted)
        weights = self._weights(largest + log_sum, z.sum(-1))
        means = (weights.flatten(1, 2) @ p).view(*weights.shape[:3], p.shape[-1])
        aleatoric = (weights * entropy[:, None, None]).sum(-1)
        total = -torch.linalg.vecdot(means, means.clamp_min(torch.finfo(p.dtype).tiny).log())
        epistemic = (total - aleatoric).clamp_min(0)
        confidence, predicted = means[:, :, 0].max(-1)
        told = {
            "members": torch.tensor(self.sizes).to(total).expand_as(confidence),
            "total": total[..., 0],
            "aleatoric": aleatoric[..., 0],
            "epistemic": epistemic[..., 0],
            "weighted_logsumexp": epistemic[..., 1],
            "weighted_sum": epistemic[..., 2],
            "variation": self._variation(shifted),
            "predicted": predicted.to(total),
            "confidence": confidence,
        }
        loss = None if label is None else self._loss(shifted, log_sum, label)
        return Told(torch.stack([told[name] for name in SUMMARY], -1).transpose(0, 1), loss)

    def _weights(self, log_sum: Float[Tensor, "n m"], plain_sum: Float[Tensor, "n m"]) -> Float[Tensor, "n g w m"]:
        """Equal, by log-sum-exp and by sum of logits: a softmax over each ensemble's members, zero for all others."""
        size = torch.stack([torch.zeros_like(log_sum), log_sum, plain_sum], 1)
        others = ~self._mine.to(size.device)
        return size[:, None].masked_fill(others[:, None], -torch.inf).softmax(-1)

    def _loss(
        self, z: Float[Tensor, "n m c"], log_sum: Float[Tensor, "n m"], label: Int[Tensor, "n"]
    ) -> Float[Tensor, "g n"]:
        """From the logarithms of the members' probabilities: one that vanishes in p still has its loss."""
        log_p = z[torch.arange(len(z)), :, label.to(z.device)] - log_sum
        parts = torch.split(log_p, list(self.sizes), dim=1)
        return torch.stack([(math.log(part.shape[1]) - part.logsumexp(1)).clamp_min(0) for part in parts])

    def _variation(self, z: Float[Tensor, "n m c"]) -> Float[Tensor, "n g"]:
        """The share of members that do not vote for the class with most votes."""
        n, _, c = z.shape
        place = z.argmax(-1) + c * self._group.to(z.device)
        votes = z.new_zeros(n, len(self.sizes) * c).scatter_add_(1, place, z.new_ones(()).expand_as(place))
        most = votes.view(n, len(self.sizes), c).amax(-1)
        return 1 - most / torch.tensor(self.sizes).to(most)
