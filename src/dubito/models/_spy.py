"""Watch a forward pass from outside, without hooks: every linear, 1x1 convolution and pooling that the module calls.

A TorchFunctionMode sees each torch function before it runs, so a pass can be recorded, ended early or handed other
values at one point, while the module itself is never touched. Calls are numbered; a frozen model repeats their order.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Role = Literal["linear", "conv", "pool", "token"]

_LINEAR = {F.linear}
_CONV = {F.conv2d, torch.conv2d}
_POOL = {F.adaptive_avg_pool2d, F.avg_pool2d}
_MEAN = {torch.mean, Tensor.mean}
_INDEX = {Tensor.__getitem__}
_WATCHED = frozenset(_LINEAR | _CONV | _POOL | _MEAN | _INDEX)


@dataclass
class Call:
    """One watched call: what it read, what it gave, and its number in the pass."""

    number: int
    role: Role
    source: Tensor
    output: Tensor
    before: Tensor | None = None
    version: int = 0
    weight: Tensor | None = None
    bias: Tensor | None = None
    reduced: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes that a pool reduces."""
        return tuple(self.source.shape[axis] for axis in self.reduced)


class Spy(TorchFunctionMode):
    """Record watched calls, and end the pass once the last one of interest is known.

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
        if func in _LINEAR and self._count == self._stop_at:
            # A last layer is stopped at for what it reads: on every tile of a batch, its output is not for free.
            self.calls[self._count] = self._layer("linear", args, kwargs, output=torch.empty(0))
            raise Reached
        output = func(*args, **kwargs)
        call = self._watch(func, args, kwargs, output)
        if call is None:
            return output
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
        call = None
        if func in _CONV:
            self._note_patches(output)
        if func in _LINEAR or (func in _CONV and _is_pointwise(args, kwargs)):
            call = self._layer("linear" if func in _LINEAR else "conv", args, kwargs, output)
        elif func in _INDEX and _picks_token(args, output):
            call = Call(self._count, "token", args[0], output, reduced=(1,))
        elif func in _POOL or func in _MEAN:
            source: Tensor = args[0] if args else kwargs["input"]
            reduced = _reduced_axes(func, source, args, kwargs, output)
            call = Call(self._count, "pool", source, output, reduced=reduced) if reduced else None
        self._count += call is not None
        return call

    def _layer(self, role: Role, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Call:
        bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        call = Call(self._count, role, bound["input"], output, weight=bound["weight"], bias=bound.get("bias"))
        call.version = output._version
        return call

    def _note_patches(self, output: Tensor) -> None:
        if self.patches is None and output.dim() == 4:
            self.patches = (output.shape[2], output.shape[3])


class Reached(BaseException):
    """The pass has come as far as it is needed. Not an Exception, so that no handler in a module swallows it."""


def _is_pointwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    weight: Tensor = kwargs["weight"] if "weight" in kwargs else args[1]
    source: Tensor = kwargs["input"] if "input" in kwargs else args[0]
    return weight.shape[2:] == (1, 1) and weight.shape[1] == source.shape[1]


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
    layers = [
        part
        for part in module.modules()
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and part.weight is call.weight
    ]
    return layers[0] if len(layers) == 1 else None


def read_input(layer: nn.Linear, run: Callable[[], Any]) -> Tensor | None:
    """The first input of a layer while `run` runs; None if it is not called with one tensor."""
    inputs: list[Tensor] = []

    def tap(_: nn.Module, received: tuple[Any, ...]) -> None:
        inputs.extend(received)
        raise Reached

    handle = layer.register_forward_pre_hook(tap)
    try:
        run()
    except Reached:
        pass
    finally:
        handle.remove()
    return inputs[0] if len(inputs) == 1 else None
