"""The linear layers of a module: which of them a pass calls, which follow each other, masks on them, smaller ones.

Two modes of torch's function overrides do the work, and the module is never changed. `LinkRecorder` notes calls and
links:

    layer A  ->  f, dropout, ...  ->  layer B

A unit that is masked out of A or B then disappears from both; one that A drops and B keeps gives B the constant f(0),
which moves into its bias. An output that anything but a known element-wise function takes links no layers.

`Masked` applies the masks of all members in one pass: the rows of a batch are divided among them in equal parts, first
those of member 0, so that one matrix product serves all. Parameters are detached: autograd then computes gradients for
the masks alone, which saves a third of the work of training.

`sub_model` copies the module for one member, whose masked layers are smaller dense ones:

    W' = r W c over the rows and columns that are kept,   b' = r b

Between two linked layers, units = rows of the first AND columns of the second, so both shrink and nothing lies between
them. Elsewhere the layer picks its columns from a full vector and puts its rows into one that is zero otherwise, which
is what masks do (`SubLinear`).
"""

import copy
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.choices import nearest
from dubito.ensembles.masks import LayerMasks, Spans
from dubito.errors import ModelError

_NAMES = (
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish"),
    *("hardtanh", "tanh", "tanh_", "sigmoid", "sigmoid_", "hardsigmoid", "logsigmoid", "softplus", "softsign"),
    *("dropout", "alpha_dropout", "feature_alpha_dropout"),
)
_ELEMENTWISE = frozenset(
    getattr(place, name) for place in (F, torch, Tensor) for name in _NAMES if hasattr(place, name)
)
"""Functions of one input and settings; dropout does nothing, because the module is in eval mode."""


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers by name; of those that share a weight, the first."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    first = {id(layer.weight): name for name, layer in reversed(layers.items())}
    return {name: layers[name] for name in layers if name in first.values()}


def chosen_layers(
    module: nn.Module, names: Sequence[str] | None, called: Container[str], where: str
) -> dict[str, nn.Linear]:
    """The layers to mask, in the order of the module.

    Args:
        module: The model.
        names: Names or patterns ("blocks.*.mlp.fc?"); None takes all that are called.
        called: Names of the layers that a pass calls as linear functions.
        where: What errors call the model.
    """
    layers = linear_layers(module)
    patterns = [names] if isinstance(names, str) else names
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in layers):
            near = ", ".join(nearest(pattern, layers, cutoff=0.3))
            raise ModelError(f"layers: {where} has no linear layer '{pattern}'. Nearest: {near or 'it has none'}.")
    wanted = called if patterns is None else [name for one in patterns for name in layers if fnmatchcase(name, one)]
    chosen = {name: layer for name, layer in layers.items() if name in wanted}
    if not chosen:
        raise ModelError(
            f"{where} calls no nn.Linear that could be masked. Masks are for linear layers; for a convolutional model "
            f"use tiles (dubito.probes.Tiles), or mask its last layer from a cache (HeadMasks)."
        )
    silent = [name for name in chosen if name not in called]
    if silent:
        raise ModelError(
            f"layers: {where} does not call '{silent[0]}' as a linear layer (it may be part of a fused attention, or "
            f"unused), so it cannot be masked. Leave it out."
        )
    return chosen


def spans_of(layers: Mapping[str, nn.Linear], classes: int) -> Spans:
    """Rows and columns of each layer. A layer with one row per class keeps all rows: no class may vanish."""
    spans = {}
    for name, layer in layers.items():
        if layer.out_features != classes:
            spans[name, "rows"] = layer.out_features
        spans[name, "columns"] = layer.in_features
    return spans


class Link(NamedTuple):
    """The layer that follows another one, and the value that the functions between them give zero."""

    to: str
    at_zero: float


@dataclass
class _Flow:
    """A tensor on its way from a layer; kept alive, so that its id is not used again."""

    layer: str
    tensor: Tensor
    zero: Tensor
    taken: bool = False


class LinkRecorder(TorchFunctionMode):
    """While active, notes which layers are called and which of them follow each other."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._links: dict[str, Link] = {}
        self._flows: dict[int, _Flow] = {}
        self._broken: set[str] = set()

    @property
    def links(self) -> dict[str, Link]:
        """From each layer that another one follows to that one; both are called once in the pass."""
        return {
            name: link
            for name, link in self._links.items()
            if name not in self._broken and self.called[name] == self.called[link.to] == 1
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and follow tensors through it."""
        kwargs = kwargs or {}
        flows = [flow for value in _flat([*args, *kwargs.values()]) if (flow := self._flows.get(id(value)))]
        output = func(*args, **kwargs)
        if func is F.linear:
            self._note_layer(dict(zip(("input", "weight"), args, strict=False)) | kwargs, flows, output)
        elif flows and func in _ELEMENTWISE and len(flows) == 1 and isinstance(output, Tensor):
            flow = flows[0]
            self._take(flow, unless=output is flow.tensor)
            rest = {key: value for key, value in kwargs.items() if not isinstance(value, Tensor)}
            zero = func(flow.zero.clone(), *(value for value in args if not isinstance(value, Tensor)), **rest)
            self._flows[id(output)] = _Flow(flow.layer, output, zero)
        elif any(isinstance(value, Tensor) for value in _flat([output])):
            self._broken |= {flow.layer for flow in flows}
        return output

    def _note_layer(self, arguments: dict[str, Any], flows: list[_Flow], output: Tensor) -> None:
        name = self._names.get(id(arguments["weight"]))
        for flow in flows:
            self._take(flow)
            if name is None or flow.tensor is not arguments["input"]:
                self._broken.add(flow.layer)
            else:
                self._links[flow.layer] = Link(name, float(flow.zero))
        if name is not None:
            self.called[name] += 1
            self._flows[id(output)] = _Flow(name, output, output.new_zeros(()))

    def _take(self, flow: _Flow, *, unless: bool = False) -> None:
        """Break the link of a tensor that is used twice."""
        if flow.taken:
            self._broken.add(flow.layer)
        flow.taken = not unless


class Masked(TorchFunctionMode):
    """While active, the chosen layers are masked.

    Args:
        layers: The chosen layers by name.
        masks: Their masks for m members; every tensor that reaches a chosen layer has its rows in m equal parts.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], masks: Mapping[str, LayerMasks]) -> None:
        super().__init__()
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._masks = masks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function on detached parameters, with masks if it is one of the chosen layers."""
        kwargs = kwargs or {}
        if func is F.linear:
            arguments = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            name = self._names.get(id(arguments["weight"]))
            if name is not None:
                x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
                return masked_linear(x, weight, bias, self._masks[name], name)
        return func(*map(_detached, args), **{key: _detached(value) for key, value in kwargs.items()})


def masked_linear(
    x: Float[Tensor, "r ... i"],
    weight: Float[Tensor, "o i"],
    bias: Float[Tensor, "o"] | None,
    masks: LayerMasks,
    name: str,
) -> Float[Tensor, "r ... o"]:
    """The layer r * (W (c * x) + b), rows in m equal parts; gradients flow to the masks and to x, not to the weights.

    Masks take the precision of what they multiply, which halves the memory traffic under autocast.
    """
    members = len(masks.columns)
    if x.shape[0] % members:
        raise ModelError(
            f"layer '{name}' gets {x.shape[0]} rows, which {members} members cannot share equally: the module does "
            f"not keep the images of a batch along its first axis. Leave this layer out: layers=[...]."
        )
    parts = x.reshape(members, -1, x.shape[-1]) * masks.columns[:, None].to(x.dtype)
    y = F.linear(parts.flatten(0, 1), weight.detach(), None if bias is None else bias.detach())
    if masks.rows is not None:
        y = (y.view(members, -1, y.shape[-1]) * masks.rows[:, None].to(y.dtype)).flatten(0, 1)
    return y.view(*x.shape[:-1], y.shape[-1])


@final
class SubLinear(nn.Module):
    """A small dense layer that reads some columns of its input and fills some rows of its output.

    Args:
        linear: The dense layer.
        columns: The columns of its input that it reads; None reads all.
        rows: The positions of its outputs; None puts them one after the other.
        width: Width of the output, with zeros in all other positions.
    """

    def __init__(
        self, linear: nn.Linear, columns: Int[Tensor, "i"] | None, rows: Int[Tensor, "o"] | None, width: int
    ) -> None:
        super().__init__()
        self.linear, self.width = linear, width
        self.register_buffer("columns", columns)
        self.register_buffer("rows", rows)

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        """The dense layer's weight: some modules look at the type of a layer's weight."""
        return self.linear.weight

    @property
    def bias(self) -> Float[Tensor, "o"] | None:
        """The dense layer's bias."""
        return self.linear.bias

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Select columns, multiply, place rows."""
        columns, rows = self._buffers["columns"], self._buffers["rows"]
        y: Tensor = self.linear(x if columns is None else x.index_select(-1, columns))
        return y if rows is None else y.new_zeros(*y.shape[:-1], self.width).index_copy(-1, rows, y)


def sub_model(
    module: nn.Module, layers: Mapping[str, nn.Linear], masks: Mapping[str, LayerMasks], links: Mapping[str, Link]
) -> nn.Module:
    """A copy of the module with smaller layers; whatever is not masked is shared with the module, not copied.

    Args:
        module: The whole model, which is left as it is.
        layers: Its masked layers by name.
        masks: Their masks for one member: (1, out) and (1, in).
        links: Links between them, from `LinkRecorder`; the result is the same without them, only larger.
    """
    linked = {name: link for name, link in links.items() if name in layers and link.to in layers}
    memo: dict[int, object] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    with torch.no_grad():
        for name, layer in layers.items():
            memo[id(layer)] = _smaller(name, layer, masks, linked)
    return copy.deepcopy(module, memo)


def _smaller(name: str, layer: nn.Linear, masks: Mapping[str, LayerMasks], links: Mapping[str, Link]) -> nn.Module:
    before, after = next((one for one, link in links.items() if link.to == name), None), links.get(name)
    whole, columns = layer.weight.detach(), masks[name].columns[0].to(layer.weight)
    own_rows = masks[name].rows
    rows = whole.new_ones(len(whole)) if own_rows is None else own_rows[0].to(whole)
    out, into = rows > 0, columns > 0
    bias = None if layer.bias is None else layer.bias.detach()
    if before is not None:
        first_rows, at_zero = masks[before].rows, links[before].at_zero
        lives = into if first_rows is None else into & (first_rows[0] > 0).to(into.device)
        if at_zero and bool((into & ~lives).any()):
            constant = whole[:, into & ~lives] @ (columns[into & ~lives] * at_zero)
            bias = constant if bias is None else bias + constant
        into = lives
    if after is not None:
        out = out & (masks[after.to].columns[0] > 0).to(out.device)
    weight = rows[out, None] * whole[out][:, into] * columns[into]
    # Built with one unit and then filled: initialising an empty layer, where nothing is kept, would warn.
    dense = nn.Linear(1, 1, bias=bias is not None)
    dense.out_features, dense.in_features = weight.shape
    dense.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        dense.bias = nn.Parameter((rows * bias)[out].contiguous())
    dense.requires_grad_(layer.weight.requires_grad).train(layer.training)
    picked = None if before is not None or bool(into.all()) else into.nonzero()[:, 0]
    put = None if after is not None or bool(out.all()) else out.nonzero()[:, 0]
    if picked is None and put is None:
        return dense
    return SubLinear(dense, picked, put, layer.out_features).train(layer.training)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, nn.Parameter) else value


def _flat(values: list[Any]) -> list[Any]:
    """Values, and those in lists among them."""
    return [part for value in values for part in (_flat([*value]) if isinstance(value, list | tuple) else [value])]
