"""Understand a module from one forward pass: which calls are its classifying head, and which pools its feature map.

A head is accepted only when it reproduces the module's own output:
    linear          W z + b                        == module(x)
    several linear  mean_j (W_j z_j + b_j)         == module(x)      (distilled: z = [z_1 .. z_j])
    convolution     mean_t f(W z_t + b)            == module(x)      (SqueezeNet: 1x1 convolution, ReLU, pool)
A non-linear f is kept exact and the head linear by lifting the feature: f(a) = a + r with r = f(a) - a, so
    z' = [mean_t z_t, mean_t r_t],  logits = [W, I] z' + b.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from torch import Tensor, nn

from dubito.errors import ModelError
from dubito.models._spy import Call, Spy
from dubito.validate import nearest

Output = Literal["logits", "probabilities", "log_probabilities"]
_MOST_HEADS = 4


@dataclass(frozen=True)
class ForwardPlan:
    """Where the head reads (call numbers), and how its feature is put together.

    Attributes:
        heads: The calls of the classifying layer: one, or several that are averaged.
        pool: The call that averages tiles or picks the class token, if there is one.
        pools: All calls that pick from the same tokens as `pool`: they are replaced together.
        convolutional: The head is a 1x1 convolution on the map, and the pool comes after it.
        lift: A non-linearity follows the convolution: the feature carries its residual.
        hidden: The calls with weights between the pool and the head.
    """

    heads: tuple[int, ...]
    pool: int | None
    pools: tuple[int, ...]
    convolutional: bool
    lift: bool
    hidden: tuple[int, ...] = ()

    @property
    def stop_at(self) -> int:
        """The last call that the features need."""
        if self.convolutional and self.pool is not None:
            return self.pool
        return max(self.heads)


def make_plan(spy: Spy, answer: Tensor, *, head: Tensor | None, output: Output, name: str) -> ForwardPlan:
    """The plan of a module from the calls of one pass and its answer (n, c); `head` is a weight that the user named."""
    calls = list(spy.calls.values())
    for candidate in _candidates(calls, answer, head):
        heads = [spy.calls[number] for number in candidate.heads]
        logits = _replay(heads, candidate, spy)
        if head is not None or _agrees(logits, answer, output):
            return candidate if candidate.convolutional else _with_pool(candidate, calls)
    raise ModelError(_explain(calls, answer, head, output, name))


def _candidates(calls: list[Call], answer: Tensor, head: Tensor | None) -> list[ForwardPlan]:
    if head is None:
        fits = [call for call in calls if call.weight is not None and len(call.weight) == answer.shape[1]]
    else:
        fits = _named(calls, head)
    several = [call for call in fits if call.output.dim() not in (0, 1, 3)]  # a row alone is none of a batch
    rows = [call for call in several if call.output.flatten(1).shape == answer.shape]
    maps = [call for call in fits if call not in rows and call.output.dim() == 4]
    plans = []
    for j in range(1, min(len(rows), _MOST_HEADS) + 1):
        heads = tuple(call.number for call in rows[-j:])
        plans.append(ForwardPlan(heads, None, (), convolutional=False, lift=False))
    for call in reversed(maps):
        for pool in calls:
            if pool.role == "pool" and pool.number > call.number and pool.source.shape == call.output.shape:
                untouched = pool.source.data_ptr() == call.output.data_ptr() and pool.source._version == call.version
                plans.append(ForwardPlan((call.number,), pool.number, (), convolutional=True, lift=not untouched))
    return plans


def _replay(heads: list[Call], plan: ForwardPlan, spy: Spy) -> Tensor:
    if plan.convolutional and plan.pool is not None:
        return spy.calls[plan.pool].source.mean((2, 3))
    return torch.stack([call.output.flatten(1) for call in heads]).mean(0)


def _agrees(logits: Tensor, answer: Tensor, output: Output) -> bool:
    if logits.shape != answer.shape:
        return False
    expected = _as_output(logits, output)
    scale = float(answer[answer.isfinite()].abs().amax().clamp(min=1)) if answer.isfinite().any() else 1.0
    return torch.allclose(expected, answer, rtol=1e-4, atol=1e-5 * scale)


def _with_pool(plan: ForwardPlan, calls: list[Call]) -> ForwardPlan:
    """Add the last pool before the head, and its sisters on the same tokens."""
    before = [call for call in calls if call.role in ("pool", "token") and call.number < plan.heads[0]]
    if not before:
        return plan
    last = before[-1]
    sisters = [call.number for call in before if call.source is last.source and call.role == last.role]
    behind = [call.number for call in calls if call.weight is not None and last.number < call.number < plan.stop_at]
    hidden = tuple(number for number in behind if number not in plan.heads)
    return replace(plan, pool=last.number, pools=tuple(sisters), hidden=hidden)


def _as_output(logits: Tensor, output: Output) -> Tensor:
    forms = {"probabilities": logits.softmax(-1), "log_probabilities": logits.log_softmax(-1)}
    return forms.get(output, logits)


def _named(calls: list[Call], head: Tensor) -> list[Call]:
    """The calls of the layer that the user named: by its memory, or by value where it is made anew for every pass."""
    alike = [(call, call.weight) for call in calls if call.weight is not None and call.weight.shape == head.shape]
    same = [call for call, weight in alike if weight.data_ptr() == head.data_ptr()]
    return same or [call for call, weight in alike if torch.equal(weight, head)]


def _explain(calls: list[Call], answer: Tensor, head: Tensor | None, output: Output, name: str) -> str:
    alone = _alone(calls if head is None else _named(calls, head), answer.shape[1])
    if head is not None and not alone:
        return (
            f"head: the layer you named in {name} does not give its {answer.shape[1]} outputs, as a linear layer or a "
            f"1x1 convolution before a pool. Name the layer that gives the logits."
        )
    if bool(answer.isnan().any()):
        return f"{name}: its output for the first images is NaN. Look at its weights and at the scale of its inputs."
    last = [call for call in calls if call.role == "linear" and call.output.shape == answer.shape]
    if last and head is None:
        gap = float((_as_output(last[-1].output, output) - answer).abs().max())
        return (
            f"{name}: its {output} differ from those of its last linear layer (by up to {gap:.3g})."
            f"{_hint(last[-1].output, answer)} To take one layer's output as logits, name that layer with head='...'."
        )
    if alone:
        shape = tuple(alone[-1].source.shape)
        return (
            f"{name}: its last linear layer must see all images of a batch at once, (n, {shape[-1]}); "
            f"for {len(answer)} images it was called {len(alone)} times, with inputs of shape {shape}. "
            f"Write its forward without a loop over images."
        )
    return (
        f"{name}: no linear layer or 1x1 convolution before a pool gives its {answer.shape[1]} outputs. "
        f"Name the classifying layer with head='...'; a TorchScript module cannot be watched, wrap the eager one."
    )


def _alone(calls: list[Call], width: int) -> list[Call]:
    """Calls of a linear layer with one image of several."""
    return [call for call in calls if call.role == "linear" and call.output.shape in ((width,), (1, width))]


def _hint(logits: Tensor, answer: Tensor) -> str:
    if _agrees(logits, answer, "logits"):
        return ' It returns logits: pass output="logits".'
    if bool(answer.min() >= 0) and bool((answer.sum(-1) - 1).abs().max() < 1e-3):
        return ' Its rows sum to one: if it ends in a softmax, pass output="probabilities".'
    if bool((answer.exp().sum(-1) - 1).abs().max() < 1e-3):
        return ' It looks like log_softmax: pass output="log_probabilities".'
    return ""


def named_weight(module: nn.Module, head: str) -> Tensor:
    """The weight of the layer that a user named."""
    parts = dict(module.named_modules())
    if head not in parts:
        near = nearest(head, filter(None, parts), cutoff=0.3)
        raise ModelError(f"head: {type(module).__name__} has no layer '{head}'. Nearest: {', '.join(near)}.")
    weight = getattr(parts[head], "weight", None)
    if not isinstance(weight, Tensor):
        raise ModelError(
            f"head: layer '{head}' has no weight ({type(parts[head]).__name__}). Name a linear layer or a convolution."
        )
    return weight


def logit_map(calls: dict[int, Call], plan: ForwardPlan) -> Float[Tensor, "n c h w"]:
    """The logits of a convolutional head at every position, which are pooled to the module's output."""
    if plan.pool is None:
        raise AssertionError("a convolutional head always has a pool behind it")
    return calls[plan.pool].source


def tile_features(calls: dict[int, Call], plan: ForwardPlan) -> Float[Tensor, "n t d"]:
    """What a convolutional head reads at every position, with the residual of the non-linearity behind it."""
    head = calls[plan.heads[0]]
    parts = [head.source]
    if plan.lift and head.before is not None:
        parts.append(logit_map(calls, plan) - head.before)
    return torch.cat(parts, dim=1).flatten(2).transpose(1, 2)


def tiles_as_rows(call: Call, patches: tuple[int, int] | None) -> Tensor:
    """(n, .., tiles, ..) to (n * tiles, ..) in the shape of the pool's own output."""
    if call.role == "token":
        h, w = grid_of(call, patches)
        return call.source[:, call.source.shape[1] - h * w :].flatten(0, 1)
    axes = call.reduced
    rest = [axis for axis in range(1, call.source.dim()) if axis not in axes]
    tiles = call.source.permute(0, *axes, *rest).flatten(0, len(axes))
    return tiles.reshape(-1, *call.output.shape[1:])


def grid_of(call: Call, patches: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width of the tiles; patch tokens stand on the grid of the embedding, behind all other tokens."""
    if len(call.grid) == 2:
        return call.grid[0], call.grid[1]
    count = call.grid[0]
    if patches is None or patches[0] * patches[1] > count:
        raise ValueError(f"{count} tokens do not stand on a grid of patches")
    return patches


def with_own_rows(call: Call, n: int) -> Tensor:
    """A hidden layer's output, its first n rows as they come without tiles: a longer product may round otherwise."""
    if call.weight is None or len(call.source) <= n:
        return call.output
    layer = F.linear if call.role == "linear" else F.conv2d
    own = layer(call.source[:n], call.weight, call.bias)
    return torch.cat([own, call.output[n:]]) if own.shape[1:] == call.output.shape[1:] else call.output
