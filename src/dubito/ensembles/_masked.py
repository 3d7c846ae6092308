"""A forward pass with masked linear layers, from outside: the module is never touched.

A TorchFunctionMode sees every call of a linear layer before it runs. Those whose weight is one of the chosen get
their masks; the rows of the batch are shared out among the members in equal parts, first those of member 0, so that one
product of matrices serves all of them. All parameters are handed on detached: autograd then computes gradients for the
masks alone, which spares a third of the work of training.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.ensembles.masks import LayerMasks
from dubito.errors import ModelError


class Masked(TorchFunctionMode):
    """While active, the chosen layers are masked.

    Args:
        layers: The chosen ones, by name.
        masks: Of the same names, for m members; every tensor that reaches a chosen layer has its rows in m equal parts.
    """

    def __init__(self, layers: Mapping[str, nn.Linear], masks: Mapping[str, LayerMasks]) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._masks = masks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function on detached parameters, with masks if it is one of the chosen layers."""
        kwargs = kwargs or {}
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            name = self._names.get(id(given["weight"]))
            if name is not None:
                self.called[name] += 1
                return masked_linear(given["input"], given["weight"], given.get("bias"), self._masks[name], name)
        return func(*map(_detached, args), **{key: _detached(value) for key, value in kwargs.items()})


def masked_linear(
    x: Float[Tensor, "r ... i"],
    weight: Float[Tensor, "o i"],
    bias: Float[Tensor, "o"] | None,
    masks: LayerMasks,
    name: str,
) -> Float[Tensor, "r ... o"]:
    """The layer r * (W (c * x) + b), rows in m equal parts; gradients flow to the masks and to x, not to the weights.

    Masks are in the precision of what they multiply: under autocast, that is half the memory to be moved.
    """
    members = len(masks.columns)
    if x.shape[0] % members:
        raise ModelError(
            f"layer '{name}' is given {x.shape[0]} rows, which {members} members cannot share equally: the module does "
            f"not keep the images of a batch along its first axis. Leave this layer out: layers=[...]."
        )
    parts = x.reshape(members, -1, x.shape[-1]) * masks.columns[:, None].to(x.dtype)
    y = F.linear(parts.flatten(0, 1), weight.detach(), None if bias is None else bias.detach())
    if masks.rows is not None:
        y = (y.view(members, -1, y.shape[-1]) * masks.rows[:, None].to(y.dtype)).flatten(0, 1)
    return y.view(*x.shape[:-1], y.shape[-1])


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, nn.Parameter) else value
