"""The layers probe: pooled outputs of several layers, from the pass that also gives the features.

    layers = [p_1, ..., p_l]   (n, d_1 + ... + d_l),   p_j the mean of layer j's output over all places of the image

Lee et al. 2018 average the outputs of every block of a network over space, for a Mahalanobis distance at each. A place
is a pixel of (n, c, h, w), a pixel of channels-last (n, h, w, c), or a token of (n, t, d); an output (n, d) is taken as
it is. Which axis holds the channels is read from the layer's own weights: it is as long as one of them has outputs.

By default, layers are the blocks of the network: modules inside a container (`nn.Sequential`, `nn.ModuleList`) that
have parts and weights, of a class that occurs more than once, or beside such; of nested ones the outermost. These are
the residual blocks of a ResNet, the encoder blocks of a transformer, the stages of a hierarchical one. Where no class
occurs twice, all modules of that kind count; a network without any has its convolutions and linear layers, but for the
last layer. The names and widths of the layers are in the notes of the probe.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, final, get_args
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.choices import Precision, suggestion
from dubito.errors import ModelError, ValueRangeError
from dubito.probes.forward import stored
from dubito.threads import one_at_a_time
from dubito.types import Classifier, Inputs, Json, Targets
from dubito.validate import check_choice

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_SEEN: "WeakSet[Any]" = WeakSet()
"""Models that have analysed themselves. Not in the probe, which is pickled for other processes."""


@final
@dataclass(frozen=True)
class Layers:
    """The mean over all places of the output of several layers, in the column `layers`.

    Attributes:
        layers: Names of modules, as of `named_modules`; None for every block.
        dtype: Precision on disk. float16 keeps three digits and values up to 65,504.
    """

    layers: Sequence[str] | None = None
    dtype: Precision = "float16"
    _notes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    name = "layers"
    price = "1 forward pass, the same as the forward probe's"
    uses_labels = False

    def __post_init__(self) -> None:
        check_choice(self.dtype, get_args(Precision), by="layers", what="dtype")
        if self.layers is None:
            return
        if isinstance(self.layers, str) or not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueRangeError(
                f"layers: layers must be a list of different names of modules; got {self.layers!r}. "
                f"Leave it out for every block."
            )
        object.__setattr__(self, "layers", tuple(self.layers))

    def run(self, model: Classifier, x: Inputs, label: Targets | None) -> Mapping[str, Tensor]:
        """The column `layers` (n, d_1 + ... + d_l)."""
        return self.run_and_share(model, x, label)[0]

    def run_and_share(
        self,
        model: Classifier,
        x: Inputs,
        label: Targets | None,  # noqa: ARG002
    ) -> tuple[Mapping[str, Tensor], Float[Tensor, "n d"]]:
        """The column, and the features of the same pass."""
        with one_at_a_time:  # from hooks to the end of the pass: another thread's would be seen, too
            if model not in _SEEN:
                model.features(x[:1])  # a model that has not seen a batch yet analyses itself first, in further passes
                _SEEN.add(model)
            parts = self._parts(model)
            pooled: dict[str, Tensor] = {}
            with ExitStack() as hooks:
                for name, part in parts.items():
                    hooks.callback(part.register_forward_hook(_pool_into(pooled, name, len(x))).remove)
                z = model.features(x)
        known = {name: pooled[name] for name in parts if name in pooled}
        self._check(model, known, parts)
        self._notes.update(layers=[*known], widths=[one.shape[1] for one in known.values()])
        column = torch.cat([*known.values()], dim=1)
        return {"layers": stored(column, self.dtype, "layers: values", "Layers(dtype='float32')")}, z

    def notes(self) -> Json:
        """Of the model that ran last: names and widths of the layers, in the order of the column."""
        return dict(self._notes)

    def settings(self) -> Json:
        """The settings themselves."""
        return {"layers": None if self.layers is None else list(self.layers), "dtype": self.dtype}

    def _parts(self, model: Classifier) -> dict[str, nn.Module]:
        """The modules to watch by name."""
        known = blocks(model.module, getattr(model, "layer", None))
        if self.layers is None:
            return known
        modules = dict(model.module.named_modules())
        for name in self.layers:
            if not name or name not in modules:
                raise ModelError(
                    f"layers: {model.name} has no layer '{name}'.{suggestion(name, modules)} Its blocks are "
                    f"{', '.join(known) or 'none'}."
                )
        return {name: modules[name] for name in self.layers}

    def _check(self, model: Classifier, known: Mapping[str, Tensor], parts: Mapping[str, nn.Module]) -> None:
        missing = [name for name in parts if name not in known]
        if self.layers is not None and missing:
            raise ModelError(
                f"layers: layer '{missing[0]}' of {model.name} does not return a tensor with a row per image in the "
                f"pass that gives the features. Choose another layer, such as a block that contains it."
            )
        if not known:
            raise ModelError(
                f"layers: {model.name} has no blocks, convolutions or linear layers before its last layer. Choose "
                f"layers by name: Layers(layers=[...])."
            )


def blocks(module: nn.Module, last: nn.Module | None = None) -> dict[str, nn.Module]:
    """The blocks of a network by name, in order; of one without blocks, convolutions and linear layers.

    Args:
        module: The network.
        last: Its last layer, which is left out.

    >>> body = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU())
    >>> network = nn.Sequential(body, nn.Linear(3, 2))
    >>> list(blocks(network, last=network[1]))
    ['0.0', '0.2']
    """
    contained = [(name, part) for name, part in _contained(module) if part is not last]
    kinds = Counter(type(part) for _, part in contained)
    # Beside repeated ones, a block may be of a class of its own, such as the first of an EfficientNet.
    depths = {name.count(".") for name, part in contained if kinds[type(part)] > 1}
    chosen: dict[str, nn.Module] = {}
    for name, part in contained:
        taken = not depths or kinds[type(part)] > 1 or name.count(".") in depths
        if taken and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = part
    weighted: dict[str, nn.Module] = {
        name: part for name, part in module.named_modules() if isinstance(part, _WEIGHTED) and part is not last
    }
    return chosen or weighted


def _contained(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parts and weights inside a container, without the containers themselves."""
    for outer, container in module.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        for name, part in container.named_children():
            plain = type(part) in _CONTAINERS or next(part.children(), None) is None
            if not plain and next(part.parameters(), None) is not None:
                yield f"{outer}.{name}" if outer else name, part


def _pool_into(pooled: dict[str, Tensor], name: str, n: int) -> Any:
    """A hook that keeps a layer's output, pooled: of one that is called several times, the last."""

    def hook(part: nn.Module, _: Any, output: Any) -> None:
        while isinstance(output, tuple | list | Mapping) and output:
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1 and len(output) == n:
            places = [axis for axis in range(1, output.dim()) if axis != _channels(output, part)]
            # At once: a later operation may write into the output.
            pooled[name] = output.detach().float().mean(places) if places else output.detach().float().clone()

    return hook


def _channels(output: Tensor, part: nn.Module) -> int:
    """The axis of the channels: as long as the outputs of the layer's own weights."""
    if output.dim() == 2:
        return 1
    first, last = set(), set()
    for one in part.modules():
        if isinstance(one, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            first.add(one.out_channels)
        elif isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            first.add(one.num_features)
        elif isinstance(one, nn.Linear):
            last.add(one.out_features)
        elif isinstance(one, nn.LayerNorm):
            last.add(int(one.normalized_shape[-1]))
    if output.shape[1] in first:
        return 1
    if output.shape[-1] in last or output.dim() == 3:
        return output.dim() - 1
    return 1
