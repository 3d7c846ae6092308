"""How far do members disagree? Entropies and mutual information of their probabilities p_m, one number per input.

    total = H(p̄)     aleatoric = Σ_m w_m H(p_m)     epistemic = I[Y; M] = Σ_m w_m KL(p_m || p̄) = total - aleatoric

with p̄ = Σ_m w_m p_m, equal weights by default (Kirsch 2024, eqs 2 to 5). Sub-ensembles k of members m, eqs 15 to 17:

    I[Y; K, M] = I[Y; K] + I[Y; M | K]          all members = between sub-ensembles + within them

Weights by the size of logits (B.1): the paper's steps weigh the members of each input, its formula pools over inputs,
and its "logit sum" may be a sum or a log-sum-exp; all four readings are here, none is called the paper's own. For
regression, `decompose_variance` splits the variance. All in nats and float64. Divergences are summed, instead of
subtracting two entropies, so that identical members have an epistemic part of zero, and no part is negative. For many
members of many classes, `dubito.metrics.streaming` takes members one by one.
"""

from typing import NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from dubito.choices import WeighedBy, WeighedOver
from dubito.errors import TableError, ValueRangeError
from dubito.metrics._arrays import Array
from dubito.table import to_tensor
from dubito.types import finite
from dubito.validate import check_choice

_NUMBERS = 1 << 19
"""Of a block of inputs: 4 MB."""
_TINY = torch.finfo(torch.float64).tiny
_ONE = 1e-3
"""How far the sum of a row's probabilities may be from one: what float16 leaves. In bfloat16 it is its own step."""


class Decomposition(NamedTuple):
    """Uncertainty of every input, in nats: total = aleatoric + epistemic."""

    total: Float64[Tensor, "n"]
    aleatoric: Float64[Tensor, "n"]
    epistemic: Float64[Tensor, "n"]


class ChainRule(NamedTuple):
    """Epistemic uncertainty of every input, in nats: total = between + within."""

    total: Float64[Tensor, "n"]
    between: Float64[Tensor, "n"]
    within: Float64[Tensor, "n"]


def decompose(probs: Array, weights: Array | None = None) -> Decomposition:
    """Total, aleatoric and epistemic uncertainty from the probabilities of members.

    Args:
        probs: (m, n, c), each row a distribution over classes. For logits, take their softmax over the last axis first.
        weights: (m) or (m, n), of any positive scale; equal by default.

    >>> total, aleatoric, epistemic = decompose([[[1.0, 0.0]], [[0.0, 1.0]]])  # two sure members that disagree
    >>> [round(float(part), 4) for part in (total, aleatoric, epistemic)]  # log 2, 0, log 2
    [0.6931, 0.0, 0.6931]
    """
    tensor = _tensor(probs, "decompose: probs", "m n c")
    m, n, c = tensor.shape
    w = _weights(weights, tensor)
    result = Decomposition(*torch.empty(3, n, dtype=torch.float64))
    size = min(n, max(1, _NUMBERS // (m * c)))
    buffers = torch.empty(3, m, size, c, dtype=torch.float64)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        p, *spare = buffers[:, :, : rows.stop - start]
        _normalise(p.copy_(tensor[:, rows]), tensor.dtype, "decompose", "m n c", first=start)
        for whole, part in zip(result, _decomposed(p, w[:, rows], *spare), strict=True):
            whole[rows] = part
    return result


def _decomposed(
    p: Float64[Tensor, "m n c"],
    w: Float64[Tensor, "m n"],
    logs: Float64[Tensor, "m n c"],
    spare: Float64[Tensor, "m n c"],
) -> Decomposition:
    """Of a few inputs; the last two are memory for intermediate results."""
    mean = torch.einsum("mn,mnc->nc", w, p)
    # A class with no probability adds nothing, in p_m or in the mean: no logarithm of zero, to multiply by zero.
    # numpy's logarithm takes a fifth of torch's time.
    np.log(torch.clamp(p, min=_TINY, out=logs).numpy(), out=logs.numpy())
    aleatoric = (w * torch.mul(p, logs, out=spare).sum(-1)).sum(0).abs()  # no logarithm is positive
    # Differences of every class instead of those of sums, which would cancel.
    logs -= mean.clamp_min(_TINY).log()
    divergence = torch.mul(p, logs, out=spare).sum(-1)
    return Decomposition(entropy_of(mean), aleatoric, (w * divergence).sum(0).clamp_min(0))


def chain_rule(probs: Array) -> ChainRule:
    """The epistemic uncertainty of all members, split into that between sub-ensembles and that within them.

    Args:
        probs: (k, m, n, c): k sub-ensembles of m members each; see `sub_ensembles` and `partitioned`.

    >>> parts = chain_rule([[[[1.0, 0.0]], [[0.0, 1.0]]], [[[1.0, 0.0]], [[0.0, 1.0]]]])  # two equal sub-ensembles
    >>> round(float(parts.between), 4), round(float(parts.within), 4)
    (0.0, 0.6931)
    """
    p = _probabilities(probs, "chain_rule", "k m n c")
    within = torch.stack([decompose(part).epistemic for part in p]).mean(0)
    return ChainRule(decompose(p.flatten(0, 1)).epistemic, decompose(p.mean(1)).epistemic, within)


def sub_ensembles(members: int) -> tuple[tuple[int, int], ...]:
    """Every way to cut members into at least two sub-ensembles of equal size, as (how many, of which size).

    >>> sub_ensembles(6)
    ((6, 1), (3, 2), (2, 3))
    """
    return tuple((members // size, size) for size in range(1, members // 2 + 1) if members % size == 0)


def partitioned(probs: Array, size: int) -> Float64[Tensor, "k m n c"]:
    """Members in sub-ensembles of a size, neighbours together.

    Args:
        probs: (m, n, c).
        size: Must divide the number of members.
    """
    p = _probabilities(probs, "partitioned", "m n c")
    if size < 1 or len(p) % size:
        fitting = ", ".join(str(size) for _, size in sub_ensembles(len(p)))
        raise ValueRangeError(
            f"partitioned: size must divide the {len(p)} members; got {size}. Choose among {fitting or '1'}."
        )
    return p.reshape(-1, size, *p.shape[1:])


def member_weights(
    logits: Array, *, by: WeighedBy = "logsumexp", over: WeighedOver = "input"
) -> Float64[Tensor, "m n"]:
    """How much each member counts, from the size of its logits l_mn: a softmax over members.

    Args:
        logits: (m, n, c).
        by: "logsumexp": l = log sum_c exp logit_c, the log of a member's unnormalised mass. "sum": l = sum_c logit_c.
        over: "input": w_mn = exp l_mn / sum_k exp l_kn. "pooled": w_m = sum_n exp l_mn / sum_kn exp l_kn, one for all
            inputs, as the paper's formula has it.
    """
    size = log_size(_tensor(logits, "member_weights: logits", "m n c").double(), by)
    check_choice(over, get_args(WeighedOver), by="member_weights", what="over")
    if over == "input":
        return size.softmax(0)
    return size.logsumexp(1).softmax(0)[:, None].expand_as(size)


def log_size(logits: Float[Tensor, "*m c"], by: WeighedBy) -> Float[Tensor, "*m"]:
    """L of `member_weights`: the logarithm of a member's weight, before it is made relative."""
    check_choice(by, get_args(WeighedBy), by="member_weights", what="by")
    return logits.logsumexp(-1) if by == "logsumexp" else logits.sum(-1)


def variation_ratio(probs: Array) -> Float64[Tensor, "n"]:
    """The share of members that do not vote for the class with most votes (Freeman 1965); tied classes: the lowest.

    >>> variation_ratio([[[0.9, 0.1]], [[0.8, 0.2]], [[0.2, 0.8]], [[0.7, 0.3]]]).tolist()
    [0.25]
    """
    p = _probabilities(probs, "variation_ratio", "m n c")
    votes = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1]).sum(0)
    return 1 - votes.amax(-1).double() / len(p)


def decompose_variance(means: Array, variances: Array | None = None) -> Decomposition:
    """The split of the variance for regression: total = mean of the variances + variance of the means.

    Args:
        means: (m, n) what each member predicts.
        variances: (m, n) the noise that each member expects; none by default.

    >>> decompose_variance([[1.0], [3.0]], [[0.5], [1.5]])  # 1 + 1
    Decomposition(total=tensor([2.], ...), aleatoric=tensor([1.], ...), epistemic=tensor([1.], ...))
    """
    mean = _tensor(means, "decompose_variance: means", "m n").double()
    noise = torch.zeros_like(mean)
    if variances is not None:
        noise = _tensor(variances, "decompose_variance: variances", "m n").double()
    if noise.shape != mean.shape or bool((noise < 0).any()):
        raise ValueRangeError(
            f"decompose_variance: variances must be {tuple(mean.shape)} and not negative; got {tuple(noise.shape)}, "
            f"the lowest {float(noise.min()):g}. Pass one variance for each mean."
        )
    aleatoric, epistemic = noise.mean(0), mean.var(0, correction=0)
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def entropy_of(probs: Float[Tensor, "*n c"]) -> Float[Tensor, "*n"]:
    """H(p) = -sum_c p_c log p_c, in nats; a class without probability adds nothing."""
    return -torch.xlogy(probs, probs).sum(-1)


def _probabilities(values: Array, by: str, axes: str) -> Float64[Tensor, "..."]:
    """A copy that is checked, and sums to one."""
    tensor = _tensor(values, f"{by}: probs", axes)
    return _normalise(tensor.to(torch.float64, copy=True), tensor.dtype, by, axes)


def _normalise(
    p: Float64[Tensor, "..."], dtype: torch.dtype, by: str, axes: str, *, first: int = 0
) -> Float64[Tensor, "..."]:
    """Bring sums to one to the last bit, in place, so that what is exact in theory is so in numbers.

    Args:
        p: Probabilities, which must sum to one already as closely as their type allows.
        dtype: That type.
        by: The function that the user called, for errors.
        axes: Names of the axes, for errors.
        first: The number of the first input, for errors.
    """
    tolerance = max(_ONE, torch.finfo(dtype).eps) if dtype.is_floating_point else _ONE
    sums = p.sum(-1)
    wrong = ((sums - 1).abs() > tolerance) | (p.amin(-1) < 0)
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        shown = (*where[:-1], where[-1] + first)
        place = ", ".join(f"{name} {index}" for name, index in zip(axes.split(), shown, strict=False))
        raise ValueRangeError(
            f"{by}: probabilities must sum to 1, none negative; those of {place} sum to {float(sums[where]):g}, "
            f"the lowest is {float(p[where].min()):g}. Pass the softmax of logits over the last axis."
        )
    return p.div_(sums[..., None])


def _weights(weights: Array | None, p: Shaped[Tensor, "m n c"]) -> Float64[Tensor, "m n"]:
    if weights is None:
        return torch.full(p.shape[:2], 1 / len(p), dtype=torch.float64)
    w = finite(to_tensor(weights, "decompose: weights").double(), "decompose: weights")
    w = w[:, None] if w.dim() == 1 else w
    if w.dim() != 2 or len(w) != len(p) or w.shape[1] not in (1, p.shape[1]):
        raise TableError(
            f"decompose: weights must be ({len(p)},) or {tuple(p.shape[:2])}; got {tuple(w.shape)}. "
            f"Pass one weight per member, or one for each member and input."
        )
    sums = w.sum(0)
    if bool((w < 0).any()) or bool((sums <= 0).any()):
        raise ValueRangeError(
            f"decompose: weights must not be negative, nor all zero for an input; the lowest is {float(w.min()):g}. "
            f"`member_weights` makes some that are not."
        )
    return (w / sums).expand(p.shape[:2])


def _tensor(values: Array, what: str, axes: str) -> Shaped[Tensor, "..."]:
    """Finite numbers with these axes, none of them empty."""
    if isinstance(values, list | tuple) and values:
        members = [to_tensor(part, what) for part in values]
        if len({member.shape for member in members}) > 1:
            shapes = ", ".join(str(tuple(member.shape)) for member in members)
            raise TableError(
                f"{what}: members must have equal inputs and classes; they have {shapes}. "
                f"Members of one ensemble share their classes, in one order."
            )
        values = torch.stack(members)
    tensor = to_tensor(values, what)
    if tensor.dim() != len(axes.split()) or 0 in tensor.shape:
        raise TableError(
            f"{what} must have the axes ({axes.replace(' ', ', ')}), none of them empty; got shape "
            f"{tuple(tensor.shape)}. m are the members, n the inputs, c the classes."
        )
    finite(tensor if tensor.is_floating_point() else tensor.double(), what)
    return tensor
