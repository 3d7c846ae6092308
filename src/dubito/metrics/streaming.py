"""What members say, taken in block by block and never kept: the same numbers as `information`, from sums over members.

    p̄ = Σ_m w_m p_m,   aleatoric = Σ_m w_m H(p_m),   epistemic = H(p̄) - aleatoric

For each of the three weightings (equal, by log-sum-exp, by sum of logits) one sum of probabilities (n, c) and one of
entropies (n) are kept; the weights exp(l_m - max l) are rescaled whenever a larger l comes. For sub-ensembles of
neighbouring members, sum and entropy of the one that is being filled. So memory does not grow with the members.
All in float64, whatever the logits are: a probability of exp(-150) is none in float32, and a loss of 150 is one.
"""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dubito.choices import WeighedBy
from dubito.errors import TableError, ValueRangeError
from dubito.metrics.information import entropy_of, log_size
from dubito.types import finite

SUMMARY = (
    "members",
    "total",
    "aleatoric",
    "epistemic",
    "weighted_logsumexp",
    "weighted_sum",
    "variation",
    "predicted",
    "confidence",
)
"""What is told of an ensemble, in the order of a summary column: the number of members; total, aleatoric and epistemic
uncertainty; the epistemic one with weights by input; the variation ratio; the class that the mean predicts, and its
probability."""

_WEIGHINGS: tuple[WeighedBy, ...] = ("logsumexp", "sum")


class MemberStream:
    """Takes the logits of members, block by block, and sums up.

    Args:
        temperature: Logits are divided by it.
        sizes: Of sub-ensembles, whose uncertainty between them is asked for; members are then given one by one.

    >>> stream = MemberStream()
    >>> stream.add(torch.tensor([[[40.0, 0.0]]]))
    >>> stream.add(torch.tensor([[[0.0, 40.0]]]))
    >>> round(float(stream.field("epistemic")), 4)
    0.6931
    """

    def __init__(self, *, temperature: float = 1.0, sizes: Sequence[int] = ()) -> None:
        self._temperature, self._sizes = check_temperature(temperature), tuple(sizes)
        self._members = 0

    def add(self, logits: Float[Tensor, "n b c"]) -> None:
        """The logits of some more members."""
        z = logits.to(summing_device(logits.device)).double() / self._temperature
        n, b, c = z.shape
        if self._members == 0:
            self._begin(n, c, z.device)
        elif (n, c) != (before := tuple(self._probs.shape[::2])):
            raise TableError(
                f"members must have equal inputs and classes; (n, c) was {before} at first and is {(n, c)} now. "
                f"Members of one ensemble share their classes, in one order."
            )
        log_p = z.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        weights = torch.stack(
            [torch.ones_like(entropy), *(self._weigh(z, by, i) for i, by in enumerate(_WEIGHINGS))], 1
        )
        self._probs += weights @ p
        self._entropies += (weights * entropy[:, None]).sum(-1)
        self._masses += weights.sum(-1)
        self._votes.scatter_add_(1, z.argmax(-1), torch.ones((), dtype=torch.long, device=z.device).expand(n, b))
        self._members += b
        for number, size in enumerate(self._sizes):
            self._fill(number, size, p)

    def field(self, name: str) -> Float64[Tensor, "n"]:
        """One of SUMMARY."""
        return self.summary()[:, SUMMARY.index(name)]

    def summary(self) -> Float64[Tensor, "n s"]:
        """All of SUMMARY, one row an input."""
        means = self._means()
        total, aleatoric = entropy_of(means), self._entropies / self._masses
        epistemic = (total - aleatoric).clamp_min(0)
        confidence, predicted = means[:, 0].max(-1)
        told = {
            "members": torch.full_like(confidence, self._members),
            "total": total[:, 0],
            "aleatoric": aleatoric[:, 0],
            "epistemic": epistemic[:, 0],
            **{f"weighted_{by}": epistemic[:, 1 + number] for number, by in enumerate(_WEIGHINGS)},
            "variation": 1 - self._votes.amax(-1).double() / self._members,
            "predicted": predicted.double(),
            "confidence": confidence,
        }
        return finite(torch.stack([told[name] for name in SUMMARY], 1), "uncertainty of members")

    def probs(self) -> Float64[Tensor, "n c"]:
        """The mean of the members' probabilities, which is what the ensemble says."""
        return self._means()[:, 0]

    def loss(self, label: Int[Tensor, "n"]) -> Float64[Tensor, "n"]:
        """-log p̄ of the label; a probability too small for float64 counts as the smallest one."""
        chosen = self.probs().gather(1, label.to(self._probs.device)[:, None])[:, 0]
        return -chosen.clamp_min(torch.finfo(torch.float64).tiny).log()

    def between(self) -> Float64[Tensor, "n q"]:
        """I[Y; K] for each of the sizes; the uncertainty within is the epistemic one less this."""
        whole = self.probs()
        counts = torch.tensor([self._members // size for size in self._sizes], dtype=torch.float64)
        if any(self._members % size for size in self._sizes):
            raise ValueRangeError(
                f"sizes of sub-ensembles must divide the {self._members} members; got {list(self._sizes)}. "
                f"`sub_ensembles` lists those that do."
            )
        inner = self._filled / counts.to(self._filled.device)
        return (entropy_of(whole)[:, None] - inner).clamp_min(0)

    def _begin(self, n: int, c: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        ways = 1 + len(_WEIGHINGS)
        self._probs, self._entropies, self._masses = zeros(n, ways, c), zeros(n, ways), zeros(n, ways)
        self._largest = zeros(n, len(_WEIGHINGS)) - torch.inf
        self._votes = torch.zeros(n, c, dtype=torch.long, device=device)
        self._filling, self._filled = zeros(len(self._sizes), n, c), zeros(n, len(self._sizes))

    def _weigh(self, z: Float64[Tensor, "n b c"], by: WeighedBy, number: int) -> Float64[Tensor, "n b"]:
        """Weights of these members, after those before were made smaller if a larger size has come."""
        size = log_size(z, by)
        largest = torch.maximum(self._largest[:, number], size.amax(1))
        shrink = (self._largest[:, number] - largest).exp()
        self._probs[:, 1 + number] *= shrink[:, None]
        self._entropies[:, 1 + number] *= shrink
        self._masses[:, 1 + number] *= shrink
        self._largest[:, number] = largest
        return (size - largest[:, None]).exp()

    def _fill(self, number: int, size: int, p: Float64[Tensor, "n b c"]) -> None:
        """Members to the sub-ensembles of one size, one after the other."""
        before = self._members - p.shape[1]
        for place in range(p.shape[1]):
            self._filling[number] += p[:, place]
            if (before + place + 1) % size == 0:
                self._filled[:, number] += entropy_of(self._filling[number] / size)
                self._filling[number] = 0

    def _means(self) -> Float64[Tensor, "n w c"]:
        if self._members == 0:
            raise TableError("no member was given. Add the logits of at least one.")
        return self._probs / self._masses[..., None]


def summing_device(device: torch.device) -> torch.device:
    """Where sums over members are kept: with the logits, but for Apple's GPUs, which have no float64.

    >>> summing_device(torch.device("mps")), summing_device(torch.device("cuda", 1))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    return torch.device("cpu") if device.type == "mps" else device


def check_temperature(temperature: float) -> float:
    """Raise ValueRangeError for what logits cannot be divided by."""
    if not 0 < temperature < float("inf"):
        raise ValueRangeError(
            f"temperature must be positive and finite; got {temperature}. 1 leaves logits as they are."
        )
    return temperature
