"""Which linear layers does a pass call, and which of them follow each other with only element-wise functions between?

    layer A  ->  f, dropout, ...  ->  layer B

A unit that is masked out of A, or of B, is then of no use at all: it disappears from both. One that A drops and B keeps
gives B the constant f(0), which moves into the bias of B. What is followed is each tensor that a layer gives, until
something else than a known element-wise function takes it: then the two layers are not joined.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NAMES = (
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish"),
    *("hardtanh", "tanh", "tanh_", "sigmoid", "sigmoid_", "hardsigmoid", "logsigmoid", "softplus", "softsign"),
    *("dropout", "alpha_dropout", "feature_alpha_dropout"),
)
_ELEMENTWISE = frozenset(
    getattr(place, name) for place in (F, torch, Tensor) for name in _NAMES if hasattr(place, name)
)
"""With settings alone besides their input; dropout does nothing, as the module is in eval mode."""


class Link(NamedTuple):
    """The layer that comes next, and what the functions between make of zero."""

    to: str
    at_zero: float


@dataclass
class _Flow:
    """A tensor on its way from a layer; kept alive, so that its identity is not used again."""

    source: str
    tensor: Tensor
    zero: Tensor
    taken: bool = False


class Watch(TorchFunctionMode):
    """Notes the calls of linear layers, and links between them."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._links: dict[str, Link] = {}
        self._flows: dict[int, _Flow] = {}
        self._spoilt: set[str] = set()

    @property
    def links(self) -> dict[str, Link]:
        """From each layer that another one follows to that one; both are called once in the pass."""
        return {
            name: link
            for name, link in self._links.items()
            if name not in self._spoilt and self.called[name] == self.called[link.to] == 1
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and follow tensors through it."""
        kwargs = kwargs or {}
        given = [self._flows.get(id(value)) for value in _flat([*args, *kwargs.values()])]
        flows = [flow for flow in given if flow is not None]
        output = func(*args, **kwargs)
        if func is F.linear:
            self._note_layer(dict(zip(("input", "weight"), args, strict=False)) | kwargs, flows, output)
        elif flows and func in _ELEMENTWISE and len(flows) == 1 and isinstance(output, Tensor):
            flow = flows[0]
            self._take(flow, unless=output is flow.tensor)
            rest = {key: value for key, value in kwargs.items() if not isinstance(value, Tensor)}
            zero = func(flow.zero.clone(), *(value for value in args if not isinstance(value, Tensor)), **rest)
            self._flows[id(output)] = _Flow(flow.source, output, zero)
        elif any(isinstance(value, Tensor) for value in _flat([output])):
            self._spoilt |= {flow.source for flow in flows}
        return output

    def _note_layer(self, given: dict[str, Any], flows: list[_Flow], output: Tensor) -> None:
        name = self._names.get(id(given["weight"]))
        for flow in flows:
            self._take(flow)
            if name is None or flow.tensor is not given["input"]:
                self._spoilt.add(flow.source)
            else:
                self._links[flow.source] = Link(name, float(flow.zero))
        if name is not None:
            self.called[name] += 1
            self._flows[id(output)] = _Flow(name, output, output.new_zeros(()))

    def _take(self, flow: _Flow, *, unless: bool = False) -> None:
        """A tensor that is taken twice goes two ways."""
        if flow.taken:
            self._spoilt.add(flow.source)
        flow.taken = not unless


def _flat(values: list[Any]) -> list[Any]:
    """Values, and those in lists among them."""
    return [part for value in values for part in (_flat([*value]) if isinstance(value, list | tuple) else [value])]
