"""A module with stand-ins for its parameters: its gradients can be taken, and nothing about the user's own changes.

The stand-ins share the parameters' memory. They require gradients whatever the parameters say, and never get a `.grad`.
They are put into a copy of everything else about the module, so that what a forward pass writes down (counters, tables
that are computed once) is written there. A module that cannot be copied is lent the stand-ins for each pass.
"""

import copy
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from dubito.errors import ModelError
from dubito.models.wrap import eager, frozen, kept_buffers, output_of, sample_of
from dubito.types import Classifier

_TINY = 1e-38
"""A probability of zero has no logarithm."""


class Borrowed:
    """A classifier's module, to be differentiated.

    Args:
        model: The classifier.
        layers: Whose parameters to differentiate by, named as `layer_of` does; None: all.

    Attributes:
        leaves: The stand-ins by name; shared parameters have one.
    """

    def __init__(self, model: Classifier, layers: Collection[str] | None = None) -> None:
        own = eager(model.module)
        self.name = model.name
        self.leaves: dict[str, Tensor] = {}
        memo: dict[int, Any] = {}
        for name, parameter in own.named_parameters():
            values = (parameter.clone() if parameter.is_inference() else parameter).detach()
            trained = values.is_floating_point() and (layers is None or layer_of(name) in layers)
            memo[id(parameter)] = stand_in = nn.Parameter(values, requires_grad=trained)
            if values.is_floating_point():
                self.leaves[name] = stand_in
        if not self.leaves:
            raise ModelError(
                f"gradient: {model.name} has no parameters to differentiate by. Use a score of logits or features."
            )
        self._own = self.module = own
        with suppress(Exception):  # whatever a module holds that has no copy: locks, files, tensors with a graph
            copied = copy.deepcopy(own, dict(memo))
            if {id(parameter) for parameter in copied.parameters()} <= {id(stand_in) for stand_in in memo.values()}:
                self.module = copied
        self._copied = self.module is not own
        self._output = getattr(model, "output", "logits")

    def refresh(self) -> None:
        """Take over what may have changed since: parameters share their memory, buffers of a copy do not."""
        theirs = dict(self._own.named_buffers())
        with torch.no_grad():
            for name, buffer in self.module.named_buffers() if self._copied else ():
                if name in theirs:  # a forward pass may have made further ones
                    buffer.copy_(theirs[name])

    def inputs(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Where the module is, in its precision, and not the user's own: a module may write into it."""
        like = sample_of(self.module)
        with torch.inference_mode(False):
            return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype, copy=True).detach()

    def logits(self, x: Float[Tensor, "n ..."], instead: Mapping[str, Tensor] | None = None) -> Float[Tensor, "n c"]:
        """The logits of inputs, with their graph; of probabilities, their logarithm.

        With other stand-ins for some parameters, only those are differentiated by.
        """
        leaves = self.leaves if instead is None else {name: leaf.detach() for name, leaf in self.leaves.items()}
        if self._copied:
            self.module.train().eval()  # what a module has computed once and kept, it forgets when it is trained
        with frozen(self.module), torch.enable_grad():
            with kept_buffers(self.module):
                out = functional_call(self.module, {**leaves, **(instead or {})}, (x,))
            output = output_of(out, len(x), self.name)
            return output.clamp_min(_TINY).log() if self._output == "probabilities" else output


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to: the module that holds it, or itself where the whole model does.

    >>> layer_of("layer1.0.conv1.weight"), layer_of("cls_token"), layer_of("fc.parametrizations.weight.original0")
    ('layer1.0.conv1', 'cls_token', 'fc')
    """
    owner, parametrized, _ = parameter.partition(".parametrizations.")
    return owner if parametrized else parameter.rpartition(".")[0] or parameter
