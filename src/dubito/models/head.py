"""Find the classifying head and the feature map of a module, by watching a forward pass from outside.

A TorchFunctionMode sees every torch function before it runs, so a pass can be recorded, ended early or handed other
values at one point, while the module itself is never touched. Watched are linear layers (also as a product of matrices,
an einsum or cosine similarities), 1x1 convolutions, global pools and the selection of one token. Calls are numbered; a
frozen model repeats their order.

A head is accepted only when it reproduces the module's own output:
    linear          W z + b                        == module(x)
    scaled          s (W z + b), s one number      == module(x)      (cosine: z and the rows of W have length one)
    several linear  mean_j (W_j z_j + b_j)         == module(x)      (distilled: z = [z_1 .. z_j])
    convolution     mean_t f(W z_t + b)            == module(x)      (SqueezeNet: 1x1 convolution, ReLU, pool)
A non-linear f is kept exact and the head linear by lifting the feature: f(a) = a + r with r = f(a) - a, so
    z' = [mean_t z_t, mean_t r_t],  logits = [W, I] z' + b.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.choices import nearest
from dubito.errors import ModelError
from dubito.models.frozen import frozen
from dubito.table import form_of

Output = Literal["logits", "probabilities", "log_probabilities", "features"]
Role = Literal["linear", "conv", "pool", "token"]

_LINEAR = {F.linear}
_MATMUL = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_PRODUCT = _MATMUL | {torch.addmm, Tensor.addmm, torch.einsum, torch.cosine_similarity}
"""What a linear layer may be written as: z W, b + z W, einsum("nd,cd->nc", z, W), cosine_similarity(z[:, None], W)."""
_CONV = {F.conv2d, torch.conv2d}
_POOL = {F.adaptive_avg_pool2d, F.avg_pool2d}
_MEAN = {torch.mean, Tensor.mean}
_INDEX = {Tensor.__getitem__}
_WATCHED = frozenset(_LINEAR | _PRODUCT | _CONV | _POOL | _MEAN | _INDEX)
_MOST_HEADS = 4


@dataclass
class Call:
    """One watched call: what it read, what it returned, and its number in the pass."""

    number: int
    role: Role
    source: Tensor
    output: Tensor
    before: Tensor | None = None
    version: int = 0
    weight: Tensor | None = None
    bias: Tensor | None = None
    reduced: tuple[int, ...] = ()

    def grid(self, patches: tuple[int, int] | None) -> tuple[int, int]:
        """Height and width of the tiles; patch tokens stand on the grid of the embedding, behind all other tokens."""
        first, *second = (self.source.shape[axis] for axis in self.reduced)
        if second:
            return first, second[0]
        if patches is None or patches[0] * patches[1] > first:
            raise ValueError(f"{first} tokens do not stand on a grid of patches")
        return patches

    def tiles_as_rows(self, patches: tuple[int, int] | None) -> Tensor:
        """What a pool reads, (n, .., tiles, ..), as (n * tiles, ..) in the shape of its own output."""
        if self.role == "token":
            h, w = self.grid(patches)
            return self.source[:, self.source.shape[1] - h * w :].flatten(0, 1)
        rest = [axis for axis in range(1, self.source.dim()) if axis not in self.reduced]
        tiles = self.source.permute(0, *self.reduced, *rest).flatten(0, len(self.reduced))
        return tiles.reshape(-1, *self.output.shape[1:])

    def result(self) -> Tensor:
        """The output as it was returned, computed again where something has been written into it since."""
        if self.weight is None or self.output._version == self.version:
            return self.output
        with torch.no_grad():
            return (F.linear if self.role == "linear" else F.conv2d)(self.source, self.weight, self.bias)

    def with_own_rows(self, n: int) -> Tensor:
        """The output, its first n rows as they come without tiles: a longer product may round otherwise."""
        if self.weight is None or len(self.source) <= n:
            return self.output
        layer = F.linear if self.role == "linear" else F.conv2d
        own = layer(self.source[:n], self.weight, self.bias)
        return torch.cat([own, self.output[n:]]) if own.shape[1:] == self.output.shape[1:] else self.output


class Spy(TorchFunctionMode):
    """Record watched calls, and end the pass after the last one that is needed.

    Args:
        keep: Which calls to keep, by number; None keeps all.
        stop_at: Leave the pass right after this call, by raising Reached; a linear layer is left before it computes.
    """

    def __init__(self, keep: set[int] | None = None, stop_at: int | None = None) -> None:
        super().__init__()
        self.calls: dict[int, Call] = {}
        self.patches: tuple[int, int] | None = None
        self._keep, self._stop_at = keep, stop_at
        self._replace: dict[int, Callable[[Call], Tensor]] = {}
        self._count = 0

    def replace(self, numbers: Iterable[int], give: Callable[[Call], Tensor]) -> None:
        """Hand on another tensor than the output of these calls."""
        self._replace |= dict.fromkeys(numbers, give)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and note it if it is one of those we watch."""
        if func not in _WATCHED:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if self._count == self._stop_at and (operands := _linear_operands(func, args, kwargs)):
            # A last layer is stopped at for what it reads: on every tile of a batch, its output is not for free.
            self.calls[self._count] = self._layer("linear", operands, {}, output=torch.empty(0))
            raise Reached
        output = func(*args, **kwargs)
        call = self._watch(func, args, kwargs, output)
        if call is None:
            return output
        self._count += 1
        if self._keep is None or call.number in self._keep:
            if call.role == "conv":
                call.before = output.clone()  # an in-place activation may overwrite it
            self.calls[call.number] = call
        if call.number in self._replace:
            output = self._replace[call.number](call)
        if call.number == self._stop_at:
            raise Reached
        return output

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Call | None:
        if func in _CONV:
            if self.patches is None and output.dim() == 4:
                self.patches = (output.shape[2], output.shape[3])
            call = self._layer("conv", args, kwargs, output)
            pointwise = call.weight is not None and call.weight.shape[1:] == (call.source.shape[1], 1, 1)
            return call if pointwise else None
        if func in _LINEAR or func in _PRODUCT:
            operands = _linear_operands(func, args, kwargs)
            return self._layer("linear", operands, {}, output) if operands else None
        if func in _INDEX:
            picked = _picks_token(args, output)
            return Call(self._count, "token", args[0], output, reduced=(1,)) if picked else None
        source: Tensor = args[0] if args else kwargs["input"]
        reduced = _reduced_axes(func, source, args, kwargs, output)
        return Call(self._count, "pool", source, output, reduced=reduced) if reduced else None

    def _layer(self, role: Role, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Call:
        bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        weight, bias = bound["weight"], bound.get("bias")
        return Call(self._count, role, bound["input"], output, version=output._version, weight=weight, bias=bias)


class Reached(BaseException):
    """The pass has come as far as it is needed. Not an Exception, so that no handler in a module swallows it."""


def _linear_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Input, weight (c, d) and bias of a call that is a linear layer, as F.linear takes them; None for any other."""
    if func in _LINEAR:
        bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return bound["input"], bound["weight"], bound.get("bias")
    if func is torch.cosine_similarity or func not in _PRODUCT or kwargs:
        return _cosine_operands(*args, **kwargs) if func is torch.cosine_similarity else None
    equation, *operands = args if func is torch.einsum else ("", *args)
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not all(isinstance(one, Tensor) for one in operands) or any(one.dim() != 2 for one in operands[-2:]):
        return None
    if func in _MATMUL and len(operands) == 2:
        return operands[0], operands[1].T, None
    if func not in _MATMUL and not equation and len(operands) == 3:
        return operands[1], operands[2].T, operands[0]
    return _einsum_operands(str(equation), operands) if equation and len(operands) == 2 else None


def _einsum_operands(equation: str, operands: list[Tensor]) -> tuple[Tensor, Tensor, None] | None:
    """Input and weight of an einsum of two matrices that sums over one axis, images first in its result."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if not arrow or len(names) != 2 or len(result) != 2:
        return None
    for (z, of_z), (weight, of_weight) in itertools.permutations(zip(operands, names, strict=True)):
        summed = set(of_z) - set(result)
        if len(summed) == 1 and set(of_z) == {result[0], *summed} and set(of_weight) == {result[1], *summed}:
            return z if of_z[0] == result[0] else z.T, weight if of_weight[0] == result[1] else weight.T, None
    return None


def _cosine_operands(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> tuple[Tensor, Tensor, None] | None:
    """Input and weight, at length one, of the cosine similarities of every image with every class."""
    if max(x1.dim(), x2.dim()) != 3:
        return None
    shape = np.broadcast_shapes(x1.shape, x2.shape)
    pair = [one.expand(shape).movedim(dim, -1) for one in (x1, x2)]
    for z, weight in itertools.permutations(pair):
        if _is_repeated(z, 1) and _is_repeated(weight, 0):
            return F.normalize(z[:, 0], eps=eps), F.normalize(weight[0], eps=eps), None
    return None


def _is_repeated(x: Tensor, axis: int) -> bool:
    return x.stride(axis) == 0 or x.shape[axis] == 1


def _picks_token(args: tuple[Any, ...], output: Any) -> bool:
    source, index = args[0], args[1]
    if source.dim() != 3 or not isinstance(index, tuple) or len(index) not in (2, 3):
        return False
    whole = all(isinstance(i, slice) and i == slice(None) for i in (index[0], *index[2:]))
    return whole and type(index[1]) is int and output.dim() == 2


def _reduced_axes(
    func: Any, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[int, ...]:
    """Which axes of the source a global pool averages away; empty for anything else."""
    if not isinstance(source, Tensor) or not isinstance(output, Tensor):
        return ()
    if func in _POOL:
        return (2, 3) if source.dim() == 4 and output.shape[2:] == (1, 1) else ()
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None:
        return ()
    axes = tuple(sorted(axis % source.dim() for axis in ([dim] if isinstance(dim, int) else dim)))
    return axes if (source.dim(), axes) in {(4, (2, 3)), (4, (1, 2)), (3, (1,))} else ()


def plain_layer(module: nn.Module, call: Call) -> nn.Linear | None:
    """The one nn.Linear whose weight the call used, if it is that and nothing cleverer."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear) and part.weight is call.weight]
    plain = [layer for layer in layers if type(layer).forward is nn.Linear.forward]
    return plain[0] if len(plain) == 1 else None


def read_input(layer: nn.Linear, run: Callable[[], Any]) -> Tensor | None:
    """The first input of a layer while `run` runs; None if it is not called with one tensor."""
    inputs: list[Tensor] = []

    def tap(_: nn.Module, received: tuple[Any, ...]) -> None:
        inputs.extend(received)
        raise Reached

    with layer.register_forward_pre_hook(tap), suppress(Reached):
        run()
    return inputs[0] if len(inputs) == 1 else None


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
        scale: What the head's output is multiplied by, such as the temperature of a cosine head.
    """

    heads: tuple[int, ...]
    pool: int | None = None
    pools: tuple[int, ...] = ()
    convolutional: bool = False
    lift: bool = False
    hidden: tuple[int, ...] = ()
    scale: float = 1.0

    @property
    def stop_at(self) -> int:
        """The last call that the features need: of a convolutional head, the pool, which reads every tile's logits."""
        return self.pool if self.convolutional and self.pool is not None else max(self.heads)

    def tile_features(self, calls: Mapping[int, Call]) -> Float[Tensor, "n t d"]:
        """What a convolutional head reads at every position, with the residual of the non-linearity behind it."""
        head = calls[self.heads[0]]
        parts = [head.source]
        if self.lift and head.before is not None:
            parts.append(calls[self.stop_at].source - head.before)
        return torch.cat(parts, dim=1).flatten(2).transpose(1, 2)


def make_plan(
    spy: Spy,
    outputs: Tensor,
    *,
    head: Tensor | None,
    output: Output,
    name: str,
    biases: Iterable[Tensor] = (),
) -> ForwardPlan:
    """The plan of a module, from the calls of one pass and its outputs (n, c).

    Args:
        spy: What watched the pass.
        outputs: What the module returned.
        head: The weight of the layer that the user named, which needs no proof.
        output: What the outputs are.
        name: How errors call the module.
        biases: Tensors of the module that may be added to a product of matrices.
    """
    calls = list(spy.calls.values())
    for plan in _candidates(calls, outputs, head):
        if plan.convolutional:
            logits = spy.calls[plan.stop_at].source.mean((2, 3))
        else:
            logits = torch.stack([spy.calls[number].result().flatten(1) for number in plan.heads]).mean(0)
        if head is not None or _agrees(logits, outputs, output):
            return plan if plan.convolutional else _with_pool(plan, calls)
    fitting = [bias for bias in biases if bias.shape == outputs.shape[1:]]
    if head is None and (scaled := _scaled_plan(calls, outputs, output, fitting)):
        return _with_pool(scaled, calls)
    raise ModelError(_explain(calls, outputs, head, output, name))


def _scaled_plan(calls: list[Call], outputs: Tensor, output: Output, biases: list[Tensor]) -> ForwardPlan | None:
    """The plan of a head whose output is multiplied by one number, or that adds its bias by itself; else None."""
    for call in reversed([call for call in calls if call.weight is not None and call.output.shape == outputs.shape]):
        for bias in [None, *biases] if call.bias is None else [None]:
            logits = call.result() if bias is None else call.result() + bias.detach()
            for scale in (1.0, _scale(logits, outputs, output)):
                if _agrees(scale * logits, outputs, output):
                    call.bias = bias if call.bias is None else call.bias
                    return ForwardPlan((call.number,), scale=scale)
    return None


def _scale(logits: Tensor, outputs: Tensor, output: Output) -> float:
    """The one number by which logits are to be multiplied to come closest to outputs."""
    if output != "logits":  # known up to a number per row
        outputs = outputs.log() if output == "probabilities" else outputs
        logits, outputs = (rows - rows.mean(-1, keepdim=True) for rows in (logits, outputs))
    return float((logits * outputs).sum() / (logits * logits).sum())


def _candidates(calls: list[Call], outputs: Tensor, head: Tensor | None) -> list[ForwardPlan]:
    if head is None:
        fits = [call for call in calls if call.weight is not None and len(call.weight) == outputs.shape[1]]
    else:
        fits = _named(calls, head)
    several = [call for call in fits if call.output.dim() not in (0, 1, 3)]  # a row alone is none of a batch
    rows = [call for call in several if call.output.flatten(1).shape == outputs.shape]
    maps = [call for call in fits if call not in rows and call.output.dim() == 4]
    most = min(len(rows), _MOST_HEADS)
    plans = [ForwardPlan(tuple(call.number for call in rows[-j:])) for j in range(1, most + 1)]
    for call in reversed(maps):
        for pool in calls:
            if pool.role == "pool" and pool.number > call.number and pool.source.shape == call.output.shape:
                untouched = pool.source.data_ptr() == call.output.data_ptr() and pool.source._version == call.version
                plans.append(ForwardPlan((call.number,), pool.number, convolutional=True, lift=not untouched))
    return plans


def _agrees(logits: Tensor, outputs: Tensor, output: Output) -> bool:
    if logits.shape != outputs.shape:
        return False
    scale = float(outputs[outputs.isfinite()].abs().amax().clamp(min=1)) if outputs.isfinite().any() else 1.0
    return torch.allclose(_as_output(logits, output), outputs, rtol=1e-4, atol=1e-5 * scale)


def _as_output(logits: Tensor, output: Output) -> Tensor:
    forms = {"probabilities": logits.softmax(-1), "log_probabilities": logits.log_softmax(-1)}
    return forms.get(output, logits)


def _with_pool(plan: ForwardPlan, calls: list[Call]) -> ForwardPlan:
    """Add the last pool before the head, and the others on the same tokens."""
    before = [call for call in calls if call.role in ("pool", "token") and call.number < plan.heads[0]]
    if not before:
        return plan
    last = before[-1]
    pools = tuple(call.number for call in before if call.source is last.source and call.role == last.role)
    behind = [call.number for call in calls if call.weight is not None and last.number < call.number < plan.stop_at]
    hidden = tuple(number for number in behind if number not in plan.heads)
    return replace(plan, pool=last.number, pools=pools, hidden=hidden)


def _named(calls: list[Call], head: Tensor) -> list[Call]:
    """The calls of the layer that the user named: by its memory, or by value where it is made anew for every pass."""
    alike = [(call, call.weight) for call in calls if call.weight is not None and call.weight.shape == head.shape]
    same = [call for call, weight in alike if weight.data_ptr() == head.data_ptr()]
    return same or [call for call, weight in alike if torch.equal(weight, head)]


def _explain(calls: list[Call], outputs: Tensor, head: Tensor | None, output: Output, name: str) -> str:
    """Why no head was accepted, and what to do."""
    n, c = outputs.shape
    candidates = calls if head is None else _named(calls, head)
    one_image = [call for call in candidates if call.role == "linear" and call.output.shape in ((c,), (1, c))]
    if head is not None and not one_image:
        return (
            f"head: the layer you named in {name} does not give its {c} outputs, as a linear layer or a "
            f"1x1 convolution before a pool. Name the layer that gives the logits."
        )
    if bool(outputs.isnan().any()):
        return f"{name}: its output for the first images is NaN. Look at its weights and at the scale of its inputs."
    last = [call for call in calls if call.role == "linear" and call.output.shape == outputs.shape]
    if last and head is None:
        gap = float((_as_output(last[-1].output, output) - outputs).abs().max())
        return (
            f"{name}: its {output} differ from those of its last linear layer (by up to {gap:.3g})."
            f"{_hint(last[-1].output, outputs)} To take one layer's output as logits, name that layer with head='...'."
        )
    if one_image:
        shape = tuple(one_image[-1].source.shape)
        return (
            f"{name}: its last linear layer must see all images of a batch at once, (n, {shape[-1]}); "
            f"for {n} images it was called {len(one_image)} times, with inputs of shape {shape}. "
            f"Write its forward without a loop over images."
        )
    return (
        f"{name}: no linear layer or 1x1 convolution before a pool gives its {c} outputs. Name the classifying layer "
        f"with head='...'; if it returns features and no logits, pass output='features'. A TorchScript module cannot "
        f"be watched: wrap the eager one."
    )


def _hint(logits: Tensor, outputs: Tensor) -> str:
    if _agrees(logits, outputs, "logits"):
        return ' It returns logits: pass output="logits".'
    form = form_of(outputs.cpu())
    if form == "probabilities":
        return ' Its rows sum to one: if it ends in a softmax, pass output="probabilities".'
    return ' It looks like log_softmax: pass output="log_probabilities".' if form else ""


def named_weight(module: nn.Module, head: str) -> Tensor:
    """The weight of the layer that a user named."""
    parts = dict(module.named_modules())
    if head not in parts:
        near = nearest(head, filter(None, parts), cutoff=0.3)
        raise ModelError(f"head: {type(module).__name__} has no layer '{head}'. Nearest: {', '.join(near)}.")
    with frozen(parts[head]):  # a parametrization may write where its weight is read
        weight = getattr(parts[head], "weight", None)
    if not isinstance(weight, Tensor):
        raise ModelError(
            f"head: layer '{head}' has no weight ({type(parts[head]).__name__}). Name a linear layer or a convolution."
        )
    return weight
