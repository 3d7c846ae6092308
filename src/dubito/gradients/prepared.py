"""A model made ready for backward passes: stand-ins for its parameters, its plan, and the chosen layers."""

from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import ModelError
from dubito.gradients.borrowed import Borrowed, layer_of
from dubito.gradients.plan import make_plan, warn_slow, warn_unused
from dubito.gradients.sweep import Sweep
from dubito.models.wrap import eager
from dubito.types import Classifier, Json

Chooser = Callable[[Sequence[str]], Sequence[str]]
"""From the names of all layers, in order of depth, those to differentiate by."""


@final
class Prepared:
    """What is learned of a model from a first batch, and stays true while it and the shape of its inputs do.

    Args:
        model: The classifier.
        x: Some inputs.
        choose: Which layers to differentiate by; the graph of the others is not even built.

    Attributes:
        all: The names of all layers.
        layers: Those to differentiate by.
        head: The last layer's weight, where it is known.
        last: Its place among these layers, where it is a linear layer of its own.
    """

    def __init__(self, model: Classifier, x: Float[Tensor, "n ..."], choose: Chooser) -> None:
        self._of = _identity(model, x)
        self.borrowed = Borrowed(model)
        self.plan = make_plan(self.borrowed, x)
        self.all = self.plan.layers
        warn_unused(self.borrowed, self.plan)
        chosen = set(choose(self.all))
        if chosen != set(self.all):
            self.borrowed = Borrowed(model, chosen)
            self.plan = make_plan(self.borrowed, x)
        self.layers = self.plan.layers
        self.head = _head(model, x)
        self.last = self._last()
        warn_slow(self.borrowed, self.plan)

    def fits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> bool:
        """Whether it is about this model, with these parameters, and about inputs of this shape."""
        return self._of == _identity(model, x)

    def sweep(self, x: Float[Tensor, "rows ..."], images: int) -> Sweep:
        """A forward pass that gradients can be taken of."""
        self.borrowed.refresh()
        return Sweep(self.borrowed, self.plan, x, images)

    def _last(self) -> int | None:
        for name, leaf in self.borrowed.leaves.items():
            same = self.head is not None and leaf.shape == self.head.shape and torch.equal(leaf, self.head.to(leaf))
            if same and layer_of(name) in self.layers:
                return self.layers.index(layer_of(name))
        return None

    def notes(self) -> Json:
        """Names of layers, their places among all, and how many there are."""
        depth = {name: place for place, name in enumerate(self.all)}
        return {"layers": list(self.layers), "depth": [depth[name] for name in self.layers], "of": len(self.all)}


def _head(model: Classifier, x: Float[Tensor, "n ..."]) -> Float[Tensor, "c d"] | None:
    try:
        classes = model.logits(model.features(x[:1])).shape[1]
        weight = model.head()[0]
    except ModelError:
        return None
    return weight if len(weight) == classes else None


def _identity(model: Classifier, x: Float[Tensor, "n ..."]) -> tuple[object, ...]:
    """What must stay: the memory of parameters and buffers, in order, parameters as they are, and the look of inputs.

    A plan is proved with the parameters of its time: where a gradient was zero then, there was nothing to prove.
    """
    module = eager(model.module)
    tensors = (*module.named_parameters(), *module.named_buffers())
    memory = tuple((name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors)
    written = tuple(0 if tensor.is_inference() else tensor._version for tensor in module.parameters())
    return (id(model.module), memory, written, tuple(x.shape[1:]), x.dtype)
