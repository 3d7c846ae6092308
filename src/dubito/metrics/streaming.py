"""Uncertainties of ensembles without keeping their members: the same numbers as `information`, from running sums.

    p̄ = Σ_m w_m p_m,   aleatoric = Σ_m w_m H(p_m),   epistemic = H(p̄) - aleatoric
    variance = Σ_c Var_m p_mc = mean_m ||p_m - p̄||_2^2

`MemberStream` takes members block by block. For each of the three weightings (equal, by log-sum-exp, by sum of logits)
it keeps one sum of probabilities (n, c) and one of entropies (n); the weights exp(l_m - max l) are rescaled whenever a
larger l arrives. For sub-ensembles of neighbouring members it keeps sum and entropy of the one that is being filled. So
memory does not grow with the members. All in float64, whatever the logits are: a probability of exp(-150) is 0 in
float32, but its loss is 150.

`VarianceStream` sums deviations from the running mean (Welford 1962), which keeps small variances of confident inputs.
The variance is that of the members at hand, with 1/m.

`summarise_groups` is for several ensembles whose members come out of one pass anyway, such as tiles of an image: one
product for all ensembles and weightings, in the precision of the logits. With s = logit - max, p = softmax(s) and log Σ
exp s = -log max p, an entropy is -Σ p s - log max p: one softmax gives everything, and nothing large is subtracted.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dubito.choices import WeighedBy
from dubito.errors import TableError, ValueRangeError
from dubito.metrics.information import entropy_of, log_size
from dubito.types import finite
from dubito.validate import check_number

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
"""The summary of an ensemble, in order: the number of members; total, aleatoric, epistemic uncertainty; the epistemic
one with weights by input; the variation ratio; the class that the mean predicts, and its probability."""

_WEIGHINGS: tuple[WeighedBy, ...] = ("logsumexp", "sum")


class MemberStream:
    """Sums up the logits of members, block by block.

    Args:
        temperature: Logits are divided by it.
        sizes: Sizes of sub-ensembles, for the uncertainty `between` them.

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
        """Add the logits of some more members."""
        z = logits.to(summing_device(logits.device)).double() / self._temperature
        n, b, c = z.shape
        if self._members == 0:
            self._begin(n, c, z.device)
        else:
            _check_alike(tuple(self._probs.shape[::2]), (n, c))
        log_p = z.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        by_size = (self._weigh(z, by, i) for i, by in enumerate(_WEIGHINGS))
        weights = torch.stack([torch.ones_like(entropy), *by_size], 1)
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
        """All of SUMMARY, one row per input."""
        means = self._means()
        variation = 1 - self._votes.amax(-1).double() / self._members
        summary = _summary(self._members, variation, means, entropy_of(means), self._entropies / self._masses)
        return finite(summary, "uncertainty of members")

    def probs(self) -> Float64[Tensor, "n c"]:
        """The mean of the members' probabilities, which is the ensemble's prediction."""
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
        """Weights of these members, after earlier ones were scaled down if a larger size has arrived."""
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
            raise TableError("there are no members. Add the logits of at least one.")
        return self._probs / self._masses[..., None]


class VarianceStream:
    """Sums up how far the probabilities of members scatter, block by block of their logits.

    Args:
        temperature: Logits are divided by it.

    >>> stream = VarianceStream()
    >>> stream.add(torch.tensor([[[80.0, 0.0], [0.0, 80.0]]]))
    >>> stream.variance().tolist()  # both classes are 1 for one member and 0 for the other: 1/4 + 1/4
    [0.5]
    """

    def __init__(self, *, temperature: float = 1.0) -> None:
        self._temperature = check_temperature(temperature)
        self._members = 0

    def add(self, logits: Float[Tensor, "n b c"]) -> None:
        """Add the logits of some more members."""
        p = (logits.to(summing_device(logits.device)).double() / self._temperature).softmax(-1)
        if self._members == 0:
            self._mean, self._squares = torch.zeros_like(p[:, 0]), torch.zeros_like(p[:, 0, 0])
        else:
            _check_alike(tuple(self._mean.shape), tuple(p[:, 0].shape))
        for one in p.unbind(1):
            self._members += 1
            away = one - self._mean
            self._mean += away / self._members
            self._squares += (away * (one - self._mean)).sum(-1)

    def variance(self) -> Float64[Tensor, "n"]:
        """The variance over members, summed over classes."""
        if self._members == 0:
            raise TableError("there are no members. Add the logits of at least one.")
        return finite(self._squares.clamp_min(0) / self._members, "variance of members")


def summarise_groups(
    logits: Float[Tensor, "n m c"],
    sizes: Sequence[int],
    label: Int[Tensor, "n"] | None = None,
    *,
    temperature: float = 1.0,
) -> tuple[Float[Tensor, "g n s"], Float[Tensor, "g n"] | None]:
    """SUMMARY of ensembles that lie side by side and, with labels, their losses -log p̄ of the label.

    Args:
        logits: Logits of all members.
        sizes: Number of members of each ensemble, in order.
        label: True classes.
        temperature: Logits are divided by it.

    >>> summary, _ = summarise_groups(torch.tensor([[[40.0, 0.0], [0.0, 40.0], [40.0, 0.0]]]), [2, 1])
    >>> [round(float(value), 4) for value in summary[:, 0, SUMMARY.index("epistemic")]]
    [0.6931, 0.0]
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z if temperature == 1 else z / check_temperature(temperature)
    largest = z.amax(-1)
    shifted = z - largest[..., None]
    p = shifted.softmax(-1)
    log_sum = -p.amax(-1).log()
    entropy = log_sum - torch.linalg.vecdot(p, shifted)
    # Equal, by log-sum-exp and by sum of logits: a softmax over each ensemble's members, zero for all others.
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(z.device)
    others = group != torch.arange(len(sizes), device=z.device)[:, None]
    log_weights = torch.stack([torch.zeros_like(log_sum), largest + log_sum, z.sum(-1)], 1)
    weights = log_weights[:, None].masked_fill(others[:, None], -torch.inf).softmax(-1)
    means = (weights.flatten(1, 2) @ p).view(*weights.shape[:3], p.shape[-1])
    aleatoric = (weights * entropy[:, None, None]).sum(-1)
    total = -torch.linalg.vecdot(means, means.clamp_min(torch.finfo(p.dtype).tiny).log())
    n, _, c = z.shape
    place = shifted.argmax(-1) + c * group
    votes = z.new_zeros(n, len(sizes) * c).scatter_add_(1, place, z.new_ones(()).expand_as(place))
    members = torch.tensor(sizes).to(z)
    variation = 1 - votes.view(n, len(sizes), c).amax(-1) / members
    summary = _summary(members, variation, means, total, aleatoric).transpose(0, 1)
    if label is None:
        return summary, None
    # From the logarithms of the members' probabilities: one that vanishes in p still has its loss.
    log_p = shifted[torch.arange(len(z)), :, label.to(z.device)] - log_sum
    parts = torch.split(log_p, list(sizes), dim=1)
    return summary, torch.stack([(math.log(part.shape[1]) - part.logsumexp(1)).clamp_min(0) for part in parts])


def summing_device(device: torch.device) -> torch.device:
    """Where sums over members are kept: with the logits, but for Apple's GPUs, which have no float64.

    >>> summing_device(torch.device("mps")), summing_device(torch.device("cuda", 1))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    return torch.device("cpu") if device.type == "mps" else device


def check_temperature(temperature: float, *, by: str = "members") -> float:
    """The temperature; ValueRangeError for one that logits cannot be divided by."""
    check_number(temperature, "(0, inf)", by=by, what="temperature", hint="1 leaves logits as they are.")
    return temperature


def _summary(
    members: int | Float[Tensor, "g"],
    variation: Float[Tensor, "*n"],
    means: Float[Tensor, "*n w c"],
    total: Float[Tensor, "*n w"],
    aleatoric: Float[Tensor, "*n w"],
) -> Float[Tensor, "*n s"]:
    """All of SUMMARY; the three weightings of w are equal, by log-sum-exp and by sum."""
    epistemic = (total - aleatoric).clamp_min(0)
    top, predicted = means[..., 0, :].max(-1)
    count, total, aleatoric = torch.as_tensor(members).to(total).expand_as(top), total[..., 0], aleatoric[..., 0]
    return torch.stack([count, total, aleatoric, *epistemic.unbind(-1), variation, predicted.to(total), top], -1)


def _check_alike(before: tuple[int, ...], now: tuple[int, ...]) -> None:
    if before != now:
        raise TableError(
            f"members must have equal inputs and classes; (n, c) was {before} at first and is {now} now. "
            f"Members of one ensemble share their classes, in one order."
        )
